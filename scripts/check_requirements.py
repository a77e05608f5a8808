"""Compare the ids of docs/requirements.md with the ids that tests cite.

Guarantees: exits 1 when a test cites an unknown id, or when an id that is not marked *(planned)*
is cited by no test; always lists the ids without a test.
"""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINE = re.compile(r"^- \*\*([A-Z]+\d+)\*\* (\*\(planned\)\* )?")


def documented() -> dict[str, bool]:
    """Id -> planned."""
    found: dict[str, bool] = {}
    for line in (ROOT / "docs" / "requirements.md").read_text().splitlines():
        if match := LINE.match(line):
            if match[1] in found:
                sys.exit(f"docs/requirements.md lists {match[1]} twice")
            found[match[1]] = match[2] is not None
    return found


def cited() -> dict[str, list[str]]:
    """Id -> places of the tests that cite it."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "requirement"
            ):
                for argument in node.args:
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                        place = f"{path.relative_to(ROOT)}:{node.lineno}"
                        places[argument.value].append(place)
    return places


def main() -> int:
    """Print the comparison and return the exit status."""
    known, tests = documented(), cited()
    unknown = {name: places for name, places in tests.items() if name not in known}
    missing = [name for name in known if name not in tests]
    failing = [name for name in missing if not known[name]]
    covered = len(known) - len(missing)
    print(f"{covered} of {len(known)} requirements are cited by tests.")
    print("Without a test, planned:", ", ".join(n for n in missing if known[n]) or "none")
    print("Without a test, not planned:", ", ".join(failing) or "none")
    for name, places in unknown.items():
        print(f"Unknown id {name}: {', '.join(places)}")
    return 1 if failing or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
