"""From YAML and overrides to a checked `Config`.

Guarantees: every problem of a configuration is reported in one `ConfigError`, each with its whole
key path and what to change; an unknown key names the nearest known one; numbers follow YAML 1.2
(`1e-4` is a number); a retired key says what replaced it.
"""

import difflib
import re
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin

import msgspec
import yaml

from megatron_forest_trainer.config import checks
from megatron_forest_trainer.config.schema import Config
from megatron_forest_trainer.config.section import Section

S = TypeVar("S", bound=Section)


class Problem(NamedTuple):
    """One thing that is wrong with a configuration."""

    key: str
    """Whole key path, e.g. `grpo.masked_reward_policy`."""
    message: str
    """What is wrong and what to change."""


class ConfigError(ValueError):
    """A configuration that cannot run. `problems` lists everything that is wrong with it."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  {problem.key}: {problem.message}" for problem in problems)
        super().__init__(f"the configuration has {len(problems)} problem(s):\n{lines}")


class _Loader(yaml.SafeLoader):
    """Safe YAML whose floats need no dot, and which refuses a repeated key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep=deep)
        if len(mapping) != len(node.value):
            names = [self.construct_object(key, deep=True) for key, _ in node.value]
            repeated = sorted({str(name) for name in names if names.count(name) > 1})
            raise yaml.constructor.ConstructorError(
                None, None, f"repeated key {', '.join(repeated)}", node.start_mark
            )
        return mapping


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def load_config(
    path: Path | str | None = None, overrides: Sequence[str] = (), *, for_training: bool = False
) -> Config:
    """The configuration of the YAML file at `path` with dotted `key=value` overrides.

    `for_training` also requires what a run cannot do without (model, server, harness, tasks).
    Raises `ConfigError`.
    """
    try:
        text = Path(path).read_text(encoding="utf-8") if path is not None else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(str(path), f"not readable as UTF-8 text: {error}")]) from error
    return parse_config(text, overrides, for_training=for_training, source=str(path or "<none>"))


def parse_config(
    text: str,
    overrides: Sequence[str] = (),
    *,
    for_training: bool = False,
    source: str = "<string>",
) -> Config:
    """`load_config` from YAML text; `source` names it in errors."""
    raw = _yaml(text, source)
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise ConfigError([Problem(source, "must be a mapping of sections")])
    problems = _apply_overrides(raw, overrides)
    return _build(raw, problems, for_training=for_training)


def config_from_mapping(raw: Mapping[str, Any], *, for_training: bool = False) -> Config:
    """A checked configuration from plain data. Raises `ConfigError`."""
    return _build(dict(raw), [], for_training=for_training)


def config_to_yaml(config: Config) -> str:
    """The whole configuration, defaults included, as YAML that loads to the same one."""
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False)


def _yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError([Problem(source, f"not readable as YAML: {error}")]) from error


def _apply_overrides(raw: dict[str, Any], overrides: Sequence[str]) -> list[Problem]:
    problems = []
    for override in overrides:
        key, equals, value = override.partition("=")
        key = key.strip().lstrip("+")
        if not equals or not key:
            problems.append(Problem(override, "an override has the form key.path=value"))
            continue
        target = raw
        *parents, leaf = key.split(".")
        for parent in parents:
            inner = target.get(parent)
            if not isinstance(inner, dict):
                inner = {}
                target[parent] = inner
            target = inner
        try:
            target[leaf] = yaml.load(value, Loader=_Loader)
        except yaml.YAMLError as error:
            problems.append(Problem(key, f"the override's value is not readable: {error}"))
    return problems


def _build(raw: dict[str, Any], problems: list[Problem], *, for_training: bool) -> Config:
    raw = _without_retired(raw, problems)
    problems += (Problem(key, message) for key, message in checks.required_value_problems(raw))
    refused = {problem.key for problem in problems}
    config = _section(Config, raw, "", problems, refused)
    problems += (Problem(key, message) for key, message in checks.rule_problems(config, refused))
    if for_training:
        problems += (Problem(key, text) for key, text in checks.missing_for_training(config))
    if problems:
        raise ConfigError(problems)
    return config


def _without_retired(raw: dict[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """`raw` without the retired keys, each reported with its migration message."""
    for key, message in checks.RETIRED.items():
        *parents, leaf = key.split(".")
        section: Any = raw
        for parent in parents:
            section = section.get(parent) if isinstance(section, dict) else None
        if isinstance(section, dict) and leaf in section:
            problems.append(Problem(key, message.format(value=yaml_scalar(section[leaf]))))
            raw = _without(raw, [*parents, leaf])
    return raw


def _without(raw: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    head, *rest = path
    if not rest:
        return {key: value for key, value in raw.items() if key != head}
    return {**raw, head: _without(raw[head], rest)}


def yaml_scalar(value: Any) -> str:
    """A value as it is written in YAML, on one line."""
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def _section(kind: type[S], raw: Any, path: str, problems: list[Problem], refused: set[str]) -> S:
    """`raw` as a `kind`; what is wrong with it goes to `problems` and keeps its default."""
    if raw is None:
        return kind()
    if not isinstance(raw, Mapping):
        problems.append(Problem(path, "must be a section (a mapping of keys)"))
        return kind()
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    values = {}
    for name, value in raw.items():
        key = f"{path}.{name}" if path else str(name)
        field = fields.get(name)
        if field is None:
            problems.append(Problem(key, _unknown(str(name), key, fields)))
        elif key in refused:
            continue
        elif isinstance(field.type, type) and issubclass(field.type, Section):
            values[name] = _section(field.type, value, key, problems, refused)
        else:
            try:
                values[name] = msgspec.convert(value, field.type)
            except msgspec.ValidationError:
                wrong = f"must be {describe(field.type)}, got {yaml_scalar(value)}"
                problems.append(Problem(key, wrong))
                refused.add(key)
    return kind(**values)


def _unknown(name: str, key: str, known: Mapping[str, Any]) -> str:
    elsewhere = [path for path in key_paths(Config) if path.rpartition(".")[2] == name]
    if elsewhere:
        return f"unknown key here; did you mean {elsewhere[0]}?"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"unknown key; did you mean {key.removesuffix(name)}{near[0]}?"
    return f"unknown key; known here: {', '.join(known)}"


def key_paths(kind: type[Section], prefix: str = "") -> list[str]:
    """Whole paths of all leaf keys below `kind`, in order."""
    paths = []
    for field in msgspec.structs.fields(kind):
        key = f"{prefix}{field.name}"
        if isinstance(field.type, type) and issubclass(field.type, Section):
            paths += key_paths(field.type, f"{key}.")
        else:
            paths.append(key)
    return paths


def describe(kind: Any) -> str:
    """A field's type in words, e.g. `a number above 0 or null`."""
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(describe(option) for option in get_args(kind))
    if kind is type(None):
        return "null"
    if hasattr(kind, "__metadata__"):
        limits = kind.__metadata__[0]
        words = [
            f"{word} {getattr(limits, name):.10g}"
            for name, word in (
                ("ge", "at least"),
                ("gt", "above"),
                ("le", "at most"),
                ("lt", "below"),
            )
            if getattr(limits, name) is not None
        ]
        return f"{describe(kind.__origin__)} {' and '.join(words)}"
    if get_args(kind) and all(isinstance(option, str) for option in get_args(kind)):
        return " | ".join(get_args(kind))
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    return names.get(kind, "a mapping")
