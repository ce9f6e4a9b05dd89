"""The graph of imports between our own modules, and the order in which packages may import one another."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("classifier", "tiers", "router")
APART = {"engine_plugin", "web"}  # These folders hold no modules of the packages.
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
    {"verification"},
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
    """Return the rank of a module by its dotted name, or None if it is in no room yet."""
    if not name.startswith("router."):
        return -1
    room = room_of(name)
    return next((number for number, rooms in enumerate(RANKS) if room in rooms), None)


def modules() -> dict[str, Path]:
    """Return the paths of all modules of the packages, by dotted name."""
    paths: list[Path] = []
    for package in PACKAGES:
        paths += (ROOT / package).rglob("*.py")
    by_name: dict[str, Path] = {}
    for path in sorted(paths):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if not APART & set(parts):
            name = ".".join(parts).removesuffix(".__init__")
            by_name[name] = path
    return by_name


def imports(name: str, known: dict[str, Path]) -> set[str]:
    """Return the own modules that one module imports, wherever in it the import stands."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(known[name].read_text("utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= inner & known.keys() or {node.module}
    return imported & known.keys() - {name}


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
        for imported in sorted(graph[name]):
            if imported not in index:
                visit(imported)
                low[name] = min(low[name], low[imported])
            elif imported in stack:
                low[name] = min(low[name], index[imported])
        if low[name] == index[name]:
            start = stack.index(name)
            group = stack[start:]
            del stack[start:]
            below = set().union(*(graph[member] for member in group)) - set(group)
            floor = 1 + max((floors[module] for module in below), default=0)
            floors.update(dict.fromkeys(group, floor))
            if len(group) > 1:
                circles.append(sorted(group))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return circles, floors
