"""What must agree before the first rollout."""

import msgspec
import pytest
from forest_schema.control import Handshake
from forest_schema.model_files import ModelDigests
from megatron_forest_trainer.controller.handshake import Expectation, HandshakeError, check

DIGESTS = ModelDigests(model="m", tokenizer="t", template="c", processor=None)
EXPECTED = Expectation(digests=DIGESTS, max_row_tokens=4096, features=frozenset({"chat"}))
HANDSHAKE = Handshake(
    renderer_version="0.1.0",
    vllm_version="0.32.0",
    store="s",
    model="served",
    model_digest="m",
    tokenizer_digest="t",
    template_digest="c",
    max_model_len=4096,
    logprobs_mode="processed_logprobs",
    weight_version="step-0",
    features=("chat", "weights"),
)


@pytest.mark.requirement("K13")
def test_a_fitting_server_is_accepted() -> None:
    check(HANDSHAKE, EXPECTED)


@pytest.mark.requirement("K13", "K10")
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"normalization_version": 9}, "source normalisation: the server has version 9"),
        ({"digest_version": 9}, "digest format: the server has version 9"),
        ({"model_digest": "x"}, "model configuration: digest x"),
        ({"tokenizer_digest": "x"}, "tokenizer: digest x"),
        ({"template_digest": "x"}, "chat template: digest x"),
        ({"processor_digest": "x"}, "media processor: digest x"),
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ({"max_model_len": 8192}, "policy.max_total_sequence_length is 4096"),
        ({"features": ()}, r"lacks the feature\(s\) chat"),
    ],
)
def test_each_disagreement_is_told_with_its_cure(change: dict[str, object], told: str) -> None:
    with pytest.raises(HandshakeError, match=told):
        check(msgspec.structs.replace(HANDSHAKE, **change), EXPECTED)


@pytest.mark.requirement("K13")
def test_all_disagreements_are_told_at_once() -> None:
    wrong = msgspec.structs.replace(HANDSHAKE, tokenizer_digest="x", logprobs_mode="raw_logits")
    with pytest.raises(HandshakeError) as caught:
        check(wrong, EXPECTED)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.requirement("K13", "K10")
def test_replay_needs_a_server_that_captures_routes() -> None:
    expected = Expectation(DIGESTS, max_row_tokens=4096, features=frozenset({"chat", "routes"}))
    with pytest.raises(HandshakeError, match=r"routes; .*--enable-return-routed-experts"):
        check(HANDSHAKE, expected)
    check(msgspec.structs.replace(HANDSHAKE, features=("chat", "routes")), expected)
