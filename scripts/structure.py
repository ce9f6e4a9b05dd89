"""Show how the packages import one another: circles, and the longest chain of imports.

    .venv/bin/python scripts/structure.py

Annotations and imports inside functions count. ``tests/unit/test_structure.py`` holds the rules; this is for looking.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.imports import circles_and_floors, imports, modules


def package_of(module: str) -> str:
    """Return the package of a module; in ``router/`` that is a room, or a module that stands alone."""
    parts = 2 if module.startswith("router.") else 1
    return ".".join(module.split(".")[:parts])


def package_graph(known: dict[str, Path]) -> dict[str, set[str]]:
    """Return which packages import which."""
    graph: dict[str, set[str]] = {package_of(module): set() for module in known}
    for module in known:
        imported = {package_of(other) for other in imports(module, known)}
        graph[package_of(module)] |= imported - {package_of(module)}
    return graph


def main() -> None:
    """Print the graph and its figures."""
    known = modules()
    circles, floors = circles_and_floors(
        {module: imports(module, known) for module in known}
    )
    packages = package_graph(known)
    for package in sorted(packages):
        print(f"{package:28}{', '.join(sorted(packages[package]))}")
    print(
        f"\nmodules: {len(known)}, circles: {len(circles)}, longest chain of imports: {max(floors.values())}"
    )
    for circle in circles:
        print("circle: " + ", ".join(circle))


if __name__ == "__main__":
    main()
