"""A recurrent toy model with Megatron's forward signature."""

import torch
from megatron.core.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.trainer.megatron.support import VOCAB, Oracle, oracle_of


class Recurrent(MegatronModule):
    """h = tanh(A h + embedding); logits = C h. Every logit depends on every token before it."""

    def __init__(self) -> None:
        super().__init__(
            TransformerConfig(
                num_layers=1,
                hidden_size=12,
                num_attention_heads=1,
                calculate_per_token_loss=True,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                use_cpu_initialization=True,
            )
        )
        self.model_type = ModelType.encoder_or_decoder
        generator = torch.Generator().manual_seed(3)
        self.embedding, self.mix, self.head = (
            torch.nn.Parameter(0.5 * torch.randn(shape, generator=generator))
            for shape in ((VOCAB, 12), (12, 12), (12, VOCAB))
        )

    def set_input_tensor(self, input_tensor) -> None:
        """Nothing comes from an earlier pipeline stage."""

    def forward(
        self,
        input_ids,
        position_ids,
        attention_mask,
        decoder_input=None,
        labels=None,
        packed_seq_params=None,
        padding_mask=None,
    ):
        """Logits `[b, s, V]`; the state restarts at every line and packed segment."""
        lines, tokens = input_ids.shape
        starts = {0}
        if packed_seq_params is not None:
            starts |= set(packed_seq_params.cu_seqlens_q.tolist())
        state, states = None, []
        for t in range(tokens):
            if t in starts:
                state = torch.zeros(lines, 12)
            state = torch.tanh(state @ self.mix + self.embedding[input_ids[:, t]])
            states.append(state)
        return torch.stack(states, dim=1) @ self.head


def recurrent_oracle(rollouts, advantages, previous_shift: float) -> Oracle:
    """Each call by itself on its own context."""
    model = Recurrent()
    return oracle_of(
        model,
        lambda ids: model(ids[None], None, None)[0],
        rollouts,
        advantages,
        previous_shift=previous_shift,
    )
