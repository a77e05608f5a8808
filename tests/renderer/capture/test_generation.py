"""What is taken from the engine's outputs."""

from types import SimpleNamespace
from typing import Any

import pytest
from forest_schema import CompletionStatus, WeightSpan
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm_forest_renderer.capture.generation import CaptureFailed, Generation, completion_status
from vllm_forest_renderer.capture.sampling import sampling_record, unreproducible_parameters


def flat(*entries: dict[int, float]) -> FlatLogprobs:
    found = FlatLogprobs()
    for entry in entries:
        found.append({token: Logprob(value, 1, None) for token, value in entry.items()})
    return found


def output(tokens: list[int], logprobs: Any, **changes: Any) -> Any:
    completion = {
        "token_ids": tokens,
        "logprobs": logprobs,
        "finish_reason": None,
        "stop_reason": None,
        "weight_versions": None,
        "routed_experts": None,
        **changes,
    }
    return SimpleNamespace(
        prompt_token_ids=[1, 2],
        num_cached_tokens=None,
        outputs=[SimpleNamespace(**completion)],
        finished=completion["finish_reason"] is not None,
    )


@pytest.mark.requirement("C3", "X16")
def test_streamed_and_final_outputs_add_up_alike() -> None:
    streamed = Generation()
    streamed.add(output([5], flat({5: -0.5})))
    # A request with top_logprobs has more entries per position; the sampled one counts.
    streamed.add(output([7], flat({9: -0.1, 7: -2.0})))
    streamed.add(output([], None, finish_reason="stop", stop_reason=7))
    final = Generation()
    entries = [{5: Logprob(-0.5)}, {9: Logprob(-0.1), 7: Logprob(-2.0)}]
    final.add(output([5, 7], entries, finish_reason="stop", stop_reason=7))
    for found in (streamed, final):
        found.check([1, 2])
        assert (found.tokens, found.logprobs) == ([5, 7], [-0.5, -2.0])
        assert (found.finish_reason, found.stop_reason) == ("stop", 7)


@pytest.mark.requirement("X16")
@pytest.mark.parametrize(
    ("tokens", "logprobs", "reason"),
    [
        ([5], None, "engine_output_without_tokens"),
        ([5, 6], [{5: Logprob(-1.0)}], "engine_output_without_tokens"),
        ([5], [{6: Logprob(-1.0)}], "engine_output_without_tokens"),
        ([5], flat({6: -1.0}), "engine_output_without_tokens"),
        ([5], [None], "engine_output_without_tokens"),
        ([5], [{5: Logprob(float("nan"))}], "invalid_logprob"),
        ([5], flat({5: float("nan")}), "invalid_logprob"),
        ([5], flat({5: 0.5}), "invalid_logprob"),
        ([5], flat({5: float("inf")}), "invalid_logprob"),
    ],
)
def test_what_is_missing_is_never_filled_in(tokens: Any, logprobs: Any, reason: str) -> None:
    with pytest.raises(CaptureFailed) as failed:
        Generation().add(output(tokens, logprobs))
    assert failed.value.reason == reason


@pytest.mark.requirement("X16", "C15")
def test_unfinished_and_foreign_generations_are_refused() -> None:
    unfinished = Generation()
    unfinished.add(output([5], flat({5: -1.0})))
    with pytest.raises(CaptureFailed, match="without a finished output"):
        unfinished.check([1, 2])
    foreign = Generation()
    foreign.add(output([5], flat({5: -1.0}), finish_reason="stop"))
    with pytest.raises(CaptureFailed, match="prompt ids"):
        foreign.check([1, 3])
    empty = Generation()
    empty.add(output([], None, finish_reason="stop"))
    with pytest.raises(CaptureFailed, match="no token ids"):
        empty.check([1, 2])
    aborted = Generation()
    aborted.add(output([], None, finish_reason="abort"))
    aborted.check([1, 2])


@pytest.mark.requirement("C23")
def test_weight_spans() -> None:
    def generation(spans: Any) -> Generation:
        found = Generation()
        reported = (
            None
            if spans is None
            else [SimpleNamespace(version=v, start=s, end=e) for v, s, e in spans]
        )
        found.add(output([5, 6], flat({5: -1.0}, {6: -1.0}), finish_reason="stop",
                         weight_versions=reported))  # fmt: skip
        return found

    whole = (WeightSpan(version="w1", start=0, end=2),)
    assert generation(None).weight_spans("w1") == whole
    assert generation([("w1", 0, 2)]).weight_spans(None) == whole
    assert generation([("w0", 0, 0), ("w1", 0, 2)]).weight_spans(None) == whole
    two = generation([("w1", 0, 1), ("w2", 1, 2)]).weight_spans(None)
    assert [(s.version, s.start, s.end) for s in two] == [("w1", 0, 1), ("w2", 1, 2)]
    for broken in ([("w1", 0, 1)], [("w1", 1, 2)], [("w1", 0, 1), ("w2", 0, 2)], None):
        with pytest.raises(CaptureFailed, match="weight versions"):
            generation(broken).weight_spans(None)


@pytest.mark.requirement("C11", "C24")
def test_completion_status_of_finish_reasons() -> None:
    assert completion_status("stop") is CompletionStatus.COMPLETED
    assert completion_status("tool_calls") is CompletionStatus.COMPLETED
    assert completion_status("length") is CompletionStatus.INCOMPLETE
    assert completion_status("content_filter") is CompletionStatus.INCOMPLETE
    assert completion_status("abort") is CompletionStatus.FAILED
    assert completion_status("error") is CompletionStatus.FAILED
    assert completion_status("something") is CompletionStatus.UNKNOWN
    assert completion_status(None) is CompletionStatus.UNKNOWN


@pytest.mark.requirement("C22")
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 20, "seed": 3, "stop": ["x"]}, []),
        ({"stop_token_ids": [3], "ignore_eos": True, "max_tokens": 3}, []),
        ({"presence_penalty": 0.1}, ["presence_penalty"]),
        ({"frequency_penalty": 0.1}, ["frequency_penalty"]),
        ({"repetition_penalty": 1.1}, ["repetition_penalty"]),
        ({"min_p": 0.1}, ["min_p"]),
        ({"logit_bias": {3: 1.0}}, ["logit_bias"]),
        ({"allowed_token_ids": [3]}, ["allowed_token_ids"]),
        ({"bad_words": ["x"]}, ["bad_words"]),
        ({"min_tokens": 1}, ["min_tokens"]),
        ({"structured_outputs": StructuredOutputsParams(regex="x")}, ["structured_outputs"]),
    ],
)
def test_parameters_that_change_the_distribution(
    changes: dict[str, Any], expected: list[str]
) -> None:
    params = SamplingParams(**changes)
    assert unreproducible_parameters(params) == expected
    record = sampling_record(params, logprobs_mode="processed_logprobs", reproducible=not expected)
    for name in ("temperature", "top_p", "top_k", "seed", "presence_penalty", "min_p"):
        if name in changes:
            assert getattr(record, name) == changes[name]
    assert record.structured_output == ("structured_outputs" in changes)


def test_every_parameter_that_changes_the_distribution_is_known() -> None:
    """A parameter that vLLM adds must be looked at: it is reproducible, neutral or refused."""
    harmless = {
        "n", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos",
        "max_tokens", "logprobs", "prompt_logprobs", "logprob_token_ids", "flat_logprobs",
        "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
        "include_stop_str_in_output", "output_kind", "output_text_buffer_length", "skip_clone",
        "extra_args", "skip_reading_prefix_cache", "repetition_detection", "stream_interval",
        "routed_experts_prompt_start", "return_sampling_mask", "trace_decode_token_ids",
        "return_routed_experts", "bad_words_token_ids", "prompt_logprob_token_ids",
        "prompt_logprob_start", "watermarking",  # of the server's configuration
    }  # fmt: skip
    refused = {
        "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
        "allowed_token_ids", "bad_words", "min_tokens", "structured_outputs",
        "thinking_token_budget",
    }  # fmt: skip
    fields = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert fields - harmless - refused == set()
