"""The two sides agree on what a model directory is."""

import json
from pathlib import Path

import pytest
from forest_schema.model_files import model_digests


def write_model(directory: Path, **config: object) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"hidden_size": 8, **config}))
    (directory / "tokenizer.json").write_text('{"model": {}}')
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ x }}"}))
    return directory


@pytest.mark.requirement("K13")
def test_new_weights_of_a_model_keep_its_digests(tmp_path: Path) -> None:
    first = write_model(tmp_path / "a", transformers_version="5.0")
    second = write_model(tmp_path / "b", transformers_version="5.1")
    (second / "model.safetensors").write_bytes(b"other weights")
    assert model_digests(first) == model_digests(second)


@pytest.mark.requirement("K13")
@pytest.mark.parametrize(
    ("name", "text", "field"),
    [
        ("config.json", '{"hidden_size": 16}', "model"),
        ("tokenizer.json", '{"model": {"a": 1}}', "tokenizer"),
        ("chat_template.jinja", "{{ y }}", "template"),
        ("preprocessor_config.json", "{}", "processor"),
    ],
)
def test_each_file_changes_its_own_digest(tmp_path: Path, name: str, text: str, field: str) -> None:
    first = model_digests(write_model(tmp_path / "a"))
    changed = write_model(tmp_path / "b")
    (changed / name).write_text(text)
    second = model_digests(changed)
    differing = {f for f in first.__struct_fields__ if getattr(first, f) != getattr(second, f)}
    assert differing == {field}


def test_the_template_file_equals_the_same_template_in_the_tokenizer_config(
    tmp_path: Path,
) -> None:
    inline = model_digests(write_model(tmp_path / "a"))
    file = write_model(tmp_path / "b")
    (file / "chat_template.jinja").write_text("{{ x }}")
    assert model_digests(file) == inline
    assert model_digests(tmp_path / "a", chat_template="other").template != inline.template


@pytest.mark.requirement("K13")
def test_a_tokenizer_of_its_own_directory_counts(tmp_path: Path) -> None:
    model = write_model(tmp_path / "a")
    other = write_model(tmp_path / "b")
    (other / "tokenizer.json").write_text('{"model": {"b": 1}}')
    mixed = model_digests(model, tokenizer=other)
    assert mixed.model == model_digests(model).model
    assert mixed.tokenizer == model_digests(other).tokenizer


def test_a_directory_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        model_digests(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        model_digests(tmp_path)
