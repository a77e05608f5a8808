"""A vision tower in front of Megatron-Core's GPTModel.

Guarantees: the embeddings of a microbatch's images stand exactly where its `MediaBatch` says, and
text rows beside them are computed as without a tower; the rotary angles of a token follow from its
own three positions, in grids and in packed bins, on every context-parallel rank. A tower that
trains gets the same gradient on every tensor-parallel rank.

The tower is the transformers module, whole on every rank of the first pipeline stage. Its gradient
needs no reduction over tensor-parallel ranks: what flows back from the decoder is summed over them
already. Over data- and context-parallel ranks Megatron's wrapper sums it like any other.
"""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region

from megatron_forest_trainer.data.images import MediaBatch
from megatron_forest_trainer.model.hf_config import VisionShape


class VisionLanguageModel(GPTModel):
    """Qwen2.5-VL: a GPTModel whose input embeddings come from text and from images."""

    def __init__(self, vision: VisionShape, *, freeze_vision_model: bool, **fields: Any) -> None:
        """`fields` are those of `GPTModel`. A frozen tower has no gradient."""
        super().__init__(
            position_embedding_type="mrope",
            # Images are put in while the sequence is whole.
            scatter_embedding_sequence_parallel=False,
            **fields,
        )
        # Positions arrive as this rank needs them; Megatron would slice them once more, and by
        # whole bins where the segments of a bin are sliced one by one.
        self.rotary_pos_emb.cp_group = None
        if self.pre_process:
            self.vision_model = _build_tower(vision, self.config.params_dtype)
            self.vision_model.requires_grad_(not freeze_vision_model)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        media: MediaBatch | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As `GPTModel.forward`, with `position_ids` `[3, b, s]` (time, height, width).

        With context parallelism the positions of a packed bin are those of the whole bin.
        """
        decoder_input = None
        if self.pre_process:
            decoder_input = self.embedding(input_ids=input_ids, position_ids=position_ids)
            if media is not None:
                decoder_input = self._with_images(decoder_input, media)
            if self.config.sequence_parallel:
                decoder_input = scatter_to_sequence_parallel_region(decoder_input)
        return super().forward(
            input_ids, position_ids, attention_mask, decoder_input=decoder_input, **kwargs
        )

    def _with_images(self, embedding: torch.Tensor, media: MediaBatch) -> torch.Tensor:
        """`embedding` `[s, b, h]` with the images' embeddings at their positions."""
        output = self.vision_model(media.pixels.to(embedding.dtype), grid_thw=media.grids)
        # transformers 4 returns the merged embeddings themselves.
        merged = getattr(output, "pooler_output", output)
        length, lines, _ = embedding.shape
        flat = embedding.transpose(0, 1).flatten(0, 1)
        flat = flat.index_copy(0, media.target, merged.index_select(0, media.source))
        return flat.unflatten(0, (lines, length)).transpose(0, 1).contiguous()


def _build_tower(vision: VisionShape, dtype: torch.dtype) -> torch.nn.Module:
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
        Qwen2_5_VisionTransformerPretrainedModel,
    )

    config = Qwen2_5_VLVisionConfig(**vision.tower)
    tower = Qwen2_5_VisionTransformerPretrainedModel._from_config(
        config, attn_implementation="sdpa"
    )
    # Rotary frequencies stay float32, as in the engine.
    for parameter in tower.parameters():
        parameter.data = parameter.data.to(dtype)
    return tower
