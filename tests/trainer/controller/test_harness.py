"""Finding a harness by name."""

from pathlib import Path

import pytest
from megatron_forest_trainer.controller.harness import HarnessNotFound, resolve_harness


@pytest.mark.requirement("K10")
@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("no_such_package:run", "cannot import 'no_such_package'"),
        ("json:run", "has no attribute 'run'"),
        ("json:dumps", "is not an async function"),
        ("no_such_harness", "installed: .*simple_agent_with_compaction"),
    ],
)
def test_a_wrong_target_is_refused_by_name(target: str, told: str) -> None:
    with pytest.raises(HarnessNotFound, match=told):
        resolve_harness(target)


def test_a_module_function_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("async def run(*args, **kwargs): return {}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_harness("mine:run").__name__ == "run"  # type: ignore[attr-defined]


@pytest.mark.requirement("K10")
def test_a_name_that_two_packages_claim_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            "[megatron_forest_trainer.harnesses]\nshared = json:dumps\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(HarnessNotFound, match="claimed by several packages: first, second"):
        resolve_harness("shared")
