"""Settings of the capture server.

Guarantees: one typed, immutable struct; values come from `--additional-config
'{"forest": {...}}'` first, then from `FOREST_<NAME>` environment variables, then from the
defaults; an unknown key or a wrong type is refused with the nearest known name, before the server
answers anything.
"""

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

ENVIRONMENT_PREFIX = "FOREST_"


class ConfigError(ValueError):
    """A setting that is unknown or has the wrong type."""


class ForestConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings, all optional."""

    state_dir: str = "~/.local/state/forest"
    """Folder of the ledger and the control token, on a local file system. The API-server
    processes of one host share it."""
    store_dir: str | None = None
    """Location given to the delta sink; None: `store` inside `state_dir`."""
    control_token: str | None = None
    """Bearer token of the control routes; None: a generated one in `state_dir`."""
    prefix_resolver: str = "source_history"
    """Name of a `vllm_forest_renderer.prefix_resolvers` entry point."""
    delta_sink: str = "safetensors"
    """Name of a `vllm_forest_renderer.delta_sinks` entry point."""
    allow_unreproducible_sampling: bool = False
    """Capture calls whose sampled distribution the trainer cannot rebuild; their records are
    marked and the trainer masks them."""
    reproducible_logits_processors: tuple[str, ...] = ()
    """`--logits-processors` values (and `module:Class` of installed `vllm.logits_processors` entry
    points) that leave the sampled distribution as the sampling parameters say; every other custom
    logits processor makes a call unreproducible."""
    chat_stream: Literal["incremental", "buffered"] = "incremental"
    """How `stream=true` is served on Chat: tokens as they are generated, or the captured answer's
    events. Responses streams are always buffered."""
    keep_alive_s: float = 15.0
    """Pause between two comments on a buffered stream that has no answer yet."""
    hot_prefix_tokens: int = 8_000_000
    """Tokens of captured histories kept in memory for splicing (about 36 bytes each)."""
    hot_media_bytes: int = 1 << 30
    """Bytes of captured media tensors kept in memory for the comparison with retained images."""
    max_body_bytes: int = 64 << 20
    """Largest request body."""

    @property
    def state_path(self) -> Path:
        """`state_dir` with `~` expanded, absolute."""
        return Path(self.state_dir).expanduser().absolute()

    @property
    def store_location(self) -> str:
        """What the delta sink is opened with."""
        return self.store_dir or str(self.state_path / "store")


_FIELDS = {field.name: field for field in msgspec.structs.fields(ForestConfig)}


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name, _FIELDS, n=1, cutoff=0.0)
    return close[0]


def load_config(
    additional_config: Mapping[str, Any] | None, environment: Mapping[str, str] = os.environ
) -> ForestConfig:
    """Settings from vLLM's `additional_config` and the environment. Raises `ConfigError`."""
    given = additional_config or {}
    misspelt = difflib.get_close_matches("forest", given, n=1, cutoff=0.82)
    if misspelt and "forest" not in given:
        raise ConfigError(f"additional_config.{misspelt[0]} is not a setting; did you mean forest?")
    section = given.get("forest", {})
    if not isinstance(section, Mapping):
        raise ConfigError("additional_config.forest must be an object of settings")
    for name in section:
        if name not in _FIELDS:
            raise ConfigError(
                f"additional_config.forest.{name} is not a setting; did you mean {_nearest(name)}?"
            )
    values: dict[str, Any] = {}
    for name in _FIELDS:
        text = environment.get(ENVIRONMENT_PREFIX + name.upper())
        if text is not None:
            values[name] = _from_text(name, text)
    values.update(section)
    try:
        return msgspec.convert(values, ForestConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"forest settings: {error}") from error


def unknown_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """`NAME (did you mean ...)` for each environment variable that looks like a misspelt one."""
    found = []
    for variable in environment:
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if name not in _FIELDS and difflib.get_close_matches(name, _FIELDS, n=1, cutoff=0.75):
            found.append(f"{variable} (did you mean {ENVIRONMENT_PREFIX}{_nearest(name).upper()}?)")
    return found


def _from_text(name: str, text: str) -> Any:
    if _FIELDS[name].type == tuple[str, ...]:
        return [part for part in text.split(",") if part]
    if _FIELDS[name].type is bool:
        try:
            return json.loads(text.lower())
        except ValueError:
            raise ConfigError(
                f"{ENVIRONMENT_PREFIX}{name.upper()}={text!r} must be true or false"
            ) from None
    return text
