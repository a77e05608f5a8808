"""A package that is not ours: built as a wheel, installed by pip, found by its entry point."""

import subprocess
import sys
from pathlib import Path

LOG_VARIABLE = "COUNTING_RESOLVER_LOG"

_PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "{distribution}"
version = "1.0"
[project.entry-points."vllm_forest_renderer.prefix_resolvers"]
{name} = "{module}:CountingResolver"
[tool.hatch.build.targets.wheel]
packages = ["{module}"]
"""

_RESOLVER = f'''
import os
from vllm_forest_renderer.resolution.source_history import SourceHistoryResolver

class CountingResolver:
    """The built-in resolver, with a line in a file for each question."""

    def resolve(self, history, *, render_option_digest, model, calls):
        with open(os.environ["{LOG_VARIABLE}"], "a") as log:
            log.write(f"{{len(history.items)}} items, {{len(calls)}} calls\\n")
        return SourceHistoryResolver().resolve(
            history, render_option_digest=render_option_digest, model=model, calls=calls
        )
'''


def install_resolver(scratch: Path, target: Path, *, distribution: str, name: str) -> None:
    """Build `distribution`, which registers a prefix resolver `name`, and install it there."""
    module = distribution.replace("-", "_")
    project = scratch / distribution
    (project / module).mkdir(parents=True)
    (project / "pyproject.toml").write_text(
        _PROJECT.format(distribution=distribution, name=name, module=module)
    )
    (project / module / "__init__.py").write_text(_RESOLVER)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheels = scratch / "wheels"
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(project)],
        check=True,
    )
    (wheel,) = wheels.glob(f"{module}-*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)],
        check=True,
    )
