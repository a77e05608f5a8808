"""The remapper of a model's processor.

Guarantees: a processor class that no installed package has a remapper for is refused by name, with
the entry-point group that would admit it.
"""

from typing import Any

from forest_schema.media import PixelNormalization
from forest_schema.reasons import Reason

from vllm_forest_renderer import compat
from vllm_forest_renderer.errors import ForestError
from vllm_forest_renderer.extensions import MEDIA_REMAPPERS, ExtensionError, load_extension
from vllm_forest_renderer.media.items import MediaFamily
from vllm_forest_renderer.media.protocol import MediaRemapper


def media_family(processor: Any, model_config: Any) -> MediaFamily:
    """The processor with its remapper. Raises `ForestError` (`unsupported_item`)."""
    name = type(processor).__name__
    try:
        remapper = load_extension(MEDIA_REMAPPERS, name)()
    except ExtensionError as error:
        raise ForestError(
            Reason.UNSUPPORTED_ITEM,
            f"messages: media of models with the processor {name} are not captured: {error}; "
            "send text, or install a package with a remapper for it",
            param="messages",
        ) from error
    if not isinstance(remapper, MediaRemapper):
        raise TypeError(f"media remapper {name!r} lacks a method; see MediaRemapper")
    try:
        normalization = compat.pixel_normalization(model_config)
    except ValueError as error:
        raise ForestError(
            Reason.UNSUPPORTED_ITEM, f"messages: {error}", param="messages"
        ) from error
    return MediaFamily(
        processor=processor,
        remapper=remapper,
        normalization=None if normalization is None else PixelNormalization(**normalization),
    )
