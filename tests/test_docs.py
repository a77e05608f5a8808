"""The documentation: links resolve, promised limits are stated."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("packages/*/README.md"),
    *ROOT.glob("shared-schema/README.md"),
    *ROOT.glob("examples/*/README.md"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page):
    for target in re.findall(r"\]\(([^)#][^)]*)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target.split("#")[0]).exists(), f"{page}: {target}"


@pytest.mark.requirement("L5", "L7", "E32", "I17", "G22")
@pytest.mark.parametrize(
    "statement",
    [
        "8 to 17 rows per step",
        "1.02362",
        "0.001031",
        "One capture owner per rollout",
        "Live multi-agent",
        "wholly omitted independent chain cannot be told",
        "hold storage until then",
        "length penalty would have to count all generated tokens",
        "not been run on a GPU",
    ],
)
def test_limits_are_stated(statement):
    assert statement in " ".join((ROOT / "docs" / "limits.md").read_text().split())
