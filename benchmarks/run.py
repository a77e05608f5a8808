"""Every benchmark, one table.

    python -m benchmarks.run --out DIR [--quick] [--write] [NAME ...]

Each `bench_NAME.py` runs in a process of its own, one after the other. `DIR` gets the JSON that
pytest-benchmark writes of each, `figures.json` with all figures, and the plot. A missed goal is
marked and fails nothing; a benchmark that breaks is named, and the exit status is 1.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.figures import Figure
from benchmarks.report import PLOT_FILE, ROOT, Run, plot, text_tables, write_documentation

_FIRST = ("splice", "server", "durable", "reading", "training")
"""Order of the report; the others follow by name."""


def benchmarks(names: Sequence[str]) -> list[Path]:
    """The scripts called `names`, all of them where none is named. Raises `SystemExit`."""
    found = {
        path.stem.removeprefix("bench_"): path
        for path in sorted((ROOT / "benchmarks").glob("bench_*.py"))
    }
    scripts = {name: found.pop(name) for name in _FIRST if name in found} | found
    if unknown := set(names) - scripts.keys():
        raise SystemExit(f"no benchmark {', '.join(sorted(unknown))}; there are {list(scripts)}")
    return [path for name, path in scripts.items() if not names or name in names]


def run_one(script: Path, out: Path, *, quick: bool) -> tuple[bool, Path]:
    """Run one script; whether it passed, and its JSON."""
    kept = out / f"{script.stem}.json"
    command = [
        sys.executable, "-m", "pytest", str(script), "-q", "-W", "ignore", "-p", "no:cacheprovider",
        "--benchmark-only", "--benchmark-quiet", f"--benchmark-json={kept}",
        *(["--quick"] if quick else []),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    answer = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    return answer.returncode == 0, kept


def gather(files: Sequence[Path]) -> Run:
    """One run out of the benchmarks' JSON files."""
    documents: list[dict[str, Any]] = [json.loads(path.read_text()) for path in files]
    rows = [
        msgspec.convert(row, Figure)
        for document in documents
        for benchmark in document["benchmarks"]
        for row in benchmark["extra_info"].get("figures", ())
    ]
    first = documents[0]
    info = first["machine_info"]
    packages = ", ".join(f"{name} {number}" for name, number in info["packages"].items())
    return Run(
        machine=f"{info['cpu'].get('brand_raw', info['machine'])}, {info['cpu']['count']} cores, "
        f"{info['memory_gib']} GiB (Python {info['python_version']}, {packages})",
        commit=(first["commit_info"].get("id") or "unknown")[:12],
        date=first["datetime"][:10],
        figures=tuple(rows),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, keep."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("names", nargs="*", help="benchmarks to run; all by default")
    parser.add_argument("--out", type=Path, required=True, help="where the results go")
    parser.add_argument("--quick", action="store_true", help="only: does everything still run?")
    parser.add_argument("--write", action="store_true", help="update the documentation")
    options = parser.parse_args(arguments)
    if options.write and (options.quick or options.names):
        parser.error("--write documents a whole run")
    missing = [name for name in ("matplotlib", "renderers") if find_spec(name) is None]
    if missing:
        advice = (
            f"{' and '.join(missing)} not installed: pip install -r requirements/dev.txt && "
            "pip install --no-deps -r requirements/bench-peers.txt"
        )
        if options.write:
            parser.error(advice)
        print(f"left out what they give: {advice}", file=sys.stderr)
    options.out.mkdir(parents=True, exist_ok=True)
    broken, files = [], []
    for script in benchmarks(options.names):
        print(f"== {script.stem}", flush=True)
        start = time.monotonic()
        passed, kept = run_one(script, options.out, quick=options.quick)
        print(f"== {script.stem} took {time.monotonic() - start:.0f} s", flush=True)
        if not passed:
            broken.append(script.stem)
        if kept.is_file() and kept.stat().st_size:
            files.append(kept)
    if files:
        run = gather(files)
        run.save(options.out)
        if "matplotlib" not in missing:
            plot(run.figures, options.out / PLOT_FILE)
        print(text_tables(run.figures))
        if options.write and not broken:
            write_documentation(run)
    if broken:
        print(f"broken, nothing documented: {', '.join(broken)}", file=sys.stderr)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
