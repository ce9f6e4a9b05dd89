"""The graph of imports between our own modules, and the order in which packages may import one another."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("classifier", "tiers", "router")
APART = {"engine_plugin", "web"}  # no modules of these packages
# A package or a module directly in router/ imports only from lower ranks, and from its own package. ``classifier`` and
# ``tiers`` rank below them all.
RANKS = (
    {"section"},
    {"settings", "lifecycle", "aio", "line_file", "redis_link"},
    {"policy", "reload", "server"},
    {"auth", "telemetry"},
    {"upstream"},
    {"accounting"},
    {"pipeline", "profiling"},
    {"api"},
    {"monitoring", "middleware"},
    {"app"},
    {"deployment"},
    {"cli"},
)


def room_of(name: str) -> str:
    """Return the package in ``router``, or the module directly in it; sections of settings belong to ``settings``."""
    parts = name.split(".")
    return "settings" if parts[-1] == "settings" else ([*parts, ""])[1]


def rank(name: str) -> int | None:
    """Return the rank of a module by its dotted name; None where it is in no room yet."""
    if not name.startswith("router."):
        return -1
    room = room_of(name)
    return next((number for number, rooms in enumerate(RANKS) if room in rooms), None)


def modules() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in sorted(
        p for package in PACKAGES for p in (ROOT / package).rglob("*.py")
    ):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if not APART & set(parts):
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, known: dict[str, Path]) -> set[str]:
    """Return the own modules that one module imports, wherever in it the import stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(known[name].read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & known.keys() or {node.module}
    return found & known.keys() - {name}


def circles_and_floors(
    graph: dict[str, set[str]],
) -> tuple[list[list[str]], dict[str, int]]:
    """Return the circles of an import graph, and each module's floor; the modules of a circle share one (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []
    floors: dict[str, int] = {}

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            start = stack.index(name)
            group = stack[start:]
            del stack[start:]
            below = {other for member in group for other in graph[member]} - set(group)
            floors.update(
                dict.fromkeys(
                    group, 1 + max((floors[other] for other in below), default=0)
                )
            )
            if len(group) > 1:
                circles.append(sorted(group))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return circles, floors
