"""The configuration reference, made from the typed model.

Guarantees: every key of `config.schema` is listed with its type, default and docstring, in order;
nothing else is. `python -m megatron_forest_trainer.config.reference` prints the page, which the
project keeps as `docs/configuration.md`.
"""

import ast
import inspect
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from megatron_forest_trainer.config import checks, policy_schema, schema
from megatron_forest_trainer.config.load import describe
from megatron_forest_trainer.config.schema import Config
from megatron_forest_trainer.config.section import Section

_HEAD = """\
# Configuration

<!-- Made by `python -m megatron_forest_trainer.config.reference`; edit the docstrings instead. -->

One YAML file and any number of dotted overrides (`grpo.seed=7`), later ones winning. Every key has
a default; `forest-train grpo --print-config` prints the whole configuration. An unknown key is
refused with the nearest known one, and all problems of a configuration are reported together,
before anything starts.
"""


class Key(NamedTuple):
    """One documented key."""

    path: str
    type: str
    default: str
    text: str


def keys(kind: type[Section], prefix: str = "") -> Iterator[Key]:
    """The keys of a section and of the sections in it."""
    texts = _docstrings()[kind.__name__]
    for field in msgspec.structs.fields(kind):
        path = f"{prefix}{field.name}"
        if isinstance(field.type, type) and issubclass(field.type, Section):
            yield from keys(field.type, f"{path}.")
            continue
        yield Key(path, describe(field.type), json.dumps(_default(field)), texts[field.name])


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def _docstrings() -> dict[str, dict[str, str]]:
    """Class -> field -> the string below it, on one line; inherited fields included."""
    found: dict[str, dict[str, str]] = {}
    source = inspect.getsource(policy_schema) + inspect.getsource(schema)
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        texts: dict[str, str] = {}
        for base in node.bases:
            texts |= found.get(ast.unparse(base), {})
        for field, below in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                texts[ast.unparse(field.target)] = " ".join(str(below.value.value).split())
        found[node.name] = texts
    return found


def markdown() -> str:
    """The whole page."""
    parts = [_HEAD]
    for section in msgspec.structs.fields(Config):
        parts.append(f"## {section.name}\n\n{_docstrings()['Config'][section.name]}\n")
        parts.append("| key | values | default | meaning |\n| --- | --- | --- | --- |")
        for key in keys(section.type, f"{section.name}."):
            cells = (f"`{key.path}`", key.type, f"`{key.default}`", key.text)
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("")
    parts.append("## Keys with one legal value\n")
    parts.append(
        "They name parts of other trainers and are accepted so that an existing file moves over "
        "unchanged; any other value is refused.\n"
    )
    parts.append("| key | value | because |\n| --- | --- | --- |")
    for path, (value, why) in checks.REQUIRED_VALUES.items():
        parts.append(f"| `{path}` | `{json.dumps(value)}` | {why} |")
    parts.append("\n## Retired keys\n\n| key | what to do |\n| --- | --- |")
    for path, message in checks.RETIRED.items():
        parts.append(f"| `{path}` | {message.format(value='<its value>')} |")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
