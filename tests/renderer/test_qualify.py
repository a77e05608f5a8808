"""The qualification command on real and on awkward templates."""

import json
from pathlib import Path

import pytest
from vllm_forest_renderer.qualify.command import main

from tests.support.templates import CHATML, DOUBLING, PLAIN
from tests.support.vision import PICTURES


def outcomes(capsysbinary: pytest.CaptureFixture[bytes]) -> dict[str, str]:
    report = json.loads(capsysbinary.readouterr().out)
    return {rule["rule"]: rule["outcome"] for rule in report["rules"]}


@pytest.mark.requirement("A14", "A15", "K10")
def test_qwen3_is_continued_exactly(
    qwen3_dir: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main([str(qwen3_dir), "--json"]) == 0
    assert set(outcomes(capsysbinary).values()) == {"spliced"}
    assert main([str(qwen3_dir)]) == 0
    text = capsysbinary.readouterr().out.decode()
    assert "exact  reasoning: an answer with reasoning" in text
    assert text.rstrip().endswith("continued exactly")


@pytest.mark.requirement("A15")
@pytest.mark.parametrize(
    ("template", "spliced", "roots"),
    [
        (CHATML, {"answer", "tool_call", "null_equals_empty"}, set()),
        (PLAIN, {"answer"}, {"tool_call"}),
        (DOUBLING, set(), {"answer", "tool_call"}),
    ],
    ids=["chatml", "plain", "doubling"],
)
def test_templates_that_fall_back_to_roots(
    qwen3_dir: Path,
    tmp_path: Path,
    capsysbinary: pytest.CaptureFixture[bytes],
    template: str,
    spliced: set[str],
    roots: set[str],
) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(template)
    status = main([str(qwen3_dir), "--chat-template", str(path), "--json"])
    found = outcomes(capsysbinary)
    assert {name for name in spliced | roots if found[name] == "spliced"} == spliced
    assert {name for name in spliced | roots if found[name] == "root"} == roots
    assert status == (1 if roots else 0)


@pytest.mark.requirement("XM2", "K10")
def test_a_vision_model_is_tried_with_images(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    # Its template has no tool calls: those rules give roots.
    assert main([str(PICTURES), "--json"]) == 1
    found = outcomes(capsysbinary)
    images = {name: found[name] for name in ("image", "images", "image_later")}
    assert set(images.values()) == {"spliced"}


def test_a_processor_without_a_remapper_is_reported(
    capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_forest_renderer.media.family.MEDIA_REMAPPERS", "no.such_group")
    assert main([str(PICTURES)]) == 1
    text = capsysbinary.readouterr().out.decode()
    assert "never  image: " in text
    assert "Qwen2_5_VLMultiModalProcessor" in text
    assert "3 of 18 kinds of calls are refused" in text


def test_directory_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "no config.json" in capsys.readouterr().err
