"""The console's line of one optimizer step.

Guarantees: what an engineer watches, in one fixed order and in the style of Megatron-LM's training
log, short enough for one line of a log; every figure of the record is in the record writers.
"""

from megatron_forest_trainer.logging_.records import StepRecord

_COLUMNS = (
    ("reward: {:.3f}", "reward/mean"),
    ("loss: {:.2e}", "loss"),
    ("kl: {:.1e}", "kl"),
    ("gen KL: {:.1e}", "gen_kl_error"),
    ("TMPE: {:.5f}", "token_mult_prob_error"),
    ("tokens: {:.0f}", "retained_tokens"),
    ("time: {:.1f} s", "step_seconds"),
    ("masked: {:.0f}", "finalize/masked_rollouts"),
    ("dropped: {:.0f}", "dropped_prompt_groups"),
)
"""Text of a figure, name in the record."""


def step_line(record: StepRecord, last: int) -> str:
    """The line of `record` in a run of `last` steps, without figures that the step has not.

    `kl` is left out while it is 0, as it is without a reference model.
    """
    shown = [
        text.format(value)
        for text, name in _COLUMNS
        if (value := record.get(name)) is not None and (name != "kl" or value)
    ]
    return " | ".join([f"step {record['step']}/{last}", *shown])
