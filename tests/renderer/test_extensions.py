"""Third-party packages and the built-ins come in through the same entry points."""

from pathlib import Path

import pytest
from forest_schema.items import normalize_chat
from vllm_forest_renderer.extensions import (
    DELTA_SINKS,
    PREFIX_RESOLVERS,
    ExtensionError,
    load_extension,
)
from vllm_forest_renderer.resolution import PrefixResolver
from vllm_forest_renderer.resolution.source_history import SourceHistoryResolver
from vllm_forest_renderer.store.safetensors_sink import SafetensorsSink

from tests.support.third_party import LOG_VARIABLE, install_resolver


def test_built_ins_are_registered() -> None:
    assert load_extension(PREFIX_RESOLVERS, "source_history") is SourceHistoryResolver
    assert load_extension(DELTA_SINKS, "safetensors") is SafetensorsSink


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ExtensionError, match="'sourcehistory'; installed: source_history"):
        load_extension(PREFIX_RESOLVERS, "sourcehistory")


def test_installed_wheel_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    install_resolver(tmp_path, site, distribution="acme-resolver", name="counting")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path / "log"))
    resolver = load_extension(PREFIX_RESOLVERS, "counting")()
    assert isinstance(resolver, PrefixResolver)
    history = normalize_chat([{"role": "user", "content": "hi"}])
    resolver.resolve(history, render_option_digest="", model="m", calls=())
    assert (tmp_path / "log").read_text() == "1 items, 0 calls\n"


def test_two_packages_with_one_name_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    install_resolver(tmp_path, site, distribution="acme-resolver", name="counting")
    install_resolver(tmp_path, site, distribution="other-resolver", name="counting")
    monkeypatch.syspath_prepend(str(site))
    with pytest.raises(ExtensionError, match=r"registered twice: acme-resolver .*other-resolver"):
        load_extension(PREFIX_RESOLVERS, "counting")
