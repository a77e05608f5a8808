"""The media of one rendered prompt, as descriptors and arrays.

Guarantees: items come in prompt order across modalities; a descriptor is made from what vLLM's
processor gave (placeholder range, embedding mask, tensors) and nothing else; ranges that overlap
or embedding positions with several token ids are refused.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgspec
from forest_schema.media import MediaOccurrence, PixelNormalization, blob_digest, tensor_name
from forest_schema.reasons import Reason
from numpy.typing import NDArray

from vllm_forest_renderer.errors import ForestError
from vllm_forest_renderer.media.protocol import MediaRemapper
from vllm_forest_renderer.media.tensors import to_array


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One item of a prompt."""

    index: int
    """Its number among the items of its modality."""
    described: MediaOccurrence
    """`offset` counts in the prompt that the item was read from; `blob` is empty until
    `identified`.
    """
    arrays: Mapping[str, NDArray[Any]]

    def moved(self, shift: int) -> "MediaItem":
        """The same item `shift` tokens later."""
        offset = self.described.offset + shift
        return dataclasses.replace(
            self, described=msgspec.structs.replace(self.described, offset=offset)
        )


@dataclass(frozen=True, slots=True)
class MediaFamily:
    """A model's processor with its remapper."""

    processor: Any
    """vLLM's multi-modal processor."""
    remapper: MediaRemapper
    normalization: PixelNormalization | None
    """What the engine does to the pixels first; None where the processor does it."""

    def stand_ins(self, modalities: Sequence[str]) -> list[int]:
        """Unexpanded placeholders of items of these modalities, in this order."""
        return [
            token
            for modality in modalities
            for token in self.remapper.placeholder(self.processor, modality)
        ]

    def check_placeholders(self, text: str, count: int) -> None:
        """Refuse rendered text that has not one placeholder for each of `count` media parts: vLLM
        would take literal text for the place of an image. Raises `ForestError`.
        """
        decode = self.processor.info.get_tokenizer().decode
        literals = [
            decode(list(self.remapper.placeholder(self.processor, modality)))
            for modality in self.remapper.modalities
        ]
        found = sum(map(text.count, literals))
        if found != count:
            raise ForestError(
                Reason.MEDIA_MISMATCH,
                f"messages: {found} placeholders ({', '.join(literals)}) are rendered for {count} "
                "media parts; "
                + (
                    "take the literal placeholder out of the text"
                    if found > count
                    else "the chat template leaves media of such a message out"
                ),
                param="messages",
            )

    def read(self, engine_input: Mapping[str, Any], identities: Sequence[str]) -> list[MediaItem]:
        """Items of a processed prompt. `identities` are the media of the request in order.

        Raises `ForestError`.
        """
        tokens: Sequence[int] = engine_input["prompt_token_ids"]
        placeholders: Mapping[str, Sequence[Any]] = engine_input["mm_placeholders"]
        self._check_modalities(placeholders)
        count = sum(map(len, placeholders.values()))
        if count != len(identities):
            raise ForestError(
                Reason.MEDIA_MISMATCH,
                f"messages: {len(identities)} media parts became {count} items of the prompt",
                param="messages",
            )
        found = [
            self._item(modality, index, place, engine_input["mm_kwargs"][modality][index], tokens)
            for modality, places in placeholders.items()
            for index, place in enumerate(places)
        ]
        found.sort(key=lambda item: item.described.offset)
        end = 0
        for item in found:
            if item.described.offset < end:
                raise self._unexpected("placeholders overlap")
            end = item.described.end
        return [
            dataclasses.replace(
                item, described=msgspec.structs.replace(item.described, identity=identity)
            )
            for item, identity in zip(found, identities, strict=True)
        ]

    def _check_modalities(self, placeholders: Mapping[str, Any]) -> None:
        for modality in placeholders:
            if modality not in self.remapper.modalities:
                raise ForestError(
                    Reason.UNSUPPORTED_ITEM,
                    f"messages: {modality} items of {type(self.processor).__name__} are not "
                    f"captured, only {', '.join(self.remapper.modalities)}",
                    param="messages",
                )

    def _item(
        self, modality: str, index: int, place: Any, outputs: Any, tokens: Sequence[int]
    ) -> MediaItem:
        spans = embed_spans(place)
        ids = {
            token
            for start, end in spans
            for token in tokens[place.offset + start : place.offset + end]
        }
        if len(ids) != 1:
            raise self._unexpected(f"{len(ids)} token ids where embeddings go")
        try:
            pairs = [to_array(name, outputs[name].data) for name in sorted(outputs)]
            arrays = {tensor.name: array for tensor, array in pairs}
            geometry = self.remapper.geometry(self.processor, modality, arrays)
        except ValueError as error:
            raise self._unexpected(str(error)) from error
        described = MediaOccurrence(
            modality=modality,
            identity="",
            offset=place.offset,
            length=place.length,
            embed_spans=spans,
            placeholder_token_id=ids.pop(),
            grid=geometry.grid,
            height=geometry.height,
            width=geometry.width,
            frames=geometry.frames,
            blob="",
            tensors=tuple(tensor for tensor, _ in pairs),
            normalization=self.normalization,
        )
        return MediaItem(index, described, arrays)

    def _unexpected(self, what: str) -> ForestError:
        return ForestError(
            Reason.UNSUPPORTED_ITEM,
            f"messages: {type(self.processor).__name__} gave an item of another form than "
            f"{type(self.remapper).__name__} knows: {what}",
            param="messages",
        )


def embed_spans(place: Any) -> tuple[tuple[int, int], ...]:
    """Ordered `[start, end)` of the embedding positions of vLLM's `PlaceholderRange`."""
    if place.is_embed is None:
        return ((0, place.length),)
    spans = []
    position = 0
    for embeds, run in groupby(place.is_embed.tolist()):
        length = sum(1 for _ in run)
        if embeds:
            spans.append((position, position + length))
        position += length
    return tuple(spans)


def identified(items: Sequence[MediaItem]) -> list[MediaItem]:
    """The items with the digests of their contents, which reads all of them."""
    found = []
    for item in items:
        blob = blob_digest(item.described.tensors, item.arrays)
        described = msgspec.structs.replace(item.described, blob=blob)
        found.append(dataclasses.replace(item, described=described))
    return found


def media_tensors(items: Sequence[MediaItem]) -> dict[str, NDArray[Any]]:
    """Tensors of identified items by their names in a delta: equal content is there once."""
    return {
        tensor_name(item.described.blob, name): array
        for item in items
        for name, array in item.arrays.items()
    }
