"""The house rules that a machine can check: imports and rooms; sizes, which only go down, and names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from router.settings import Settings, leaves
from tests.imports import PACKAGES, ROOT, circles_and_floors, imports, modules, rank, room_of

sys.path.insert(0, str(ROOT / "scripts"))
from structure import lines, request_figures, words

FORBIDDEN = {
    "classifier": {"tiers", "router", "starlette", "httpx", "opentelemetry"},
    "tiers": {"router", "starlette", "opentelemetry", "uvicorn"},
    "router": set(),
    "tiers.simulated": {"router", "opentelemetry"},  # it serves HTTP, in processes of its own
}
LONGEST_FUNCTION = 60
# They only go down: who adds lines, words or a setting takes others away.
CEILINGS = {"router": 22_983, "tests": 40_351, "words": 26_030, "settings": 108}
# Of a streamed request, as scripts/structure.py counts it.
PATH = {
    "modules a streamed request passes": 33,
    "own functions a streamed request passes": 145,
    "calls of own functions in a request of 20 chunks": 298,
    "own functions for each chunk": 6,
    "calls of own functions for each chunk": 6,
    "deepest stack of own functions": 12,
    "deepest stack for a chunk": 4,
}
ADDRESSES = re.compile(r"https?://[\w.-]*(?:pypi\.org|pythonhosted|download\.pytorch|registry\.npmjs)")


def test_imports_go_one_way_and_in_no_circle() -> None:
    """Packages, ranks of rooms, circles; annotations and imports inside functions count."""
    known, offenders = modules(), []
    for name, path in known.items():
        used = {
            node
            for node in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        tops = {(a.name if isinstance(n, ast.Import) else n.module or "").split(".")[0] for n in used for a in n.names}
        package = "tiers.simulated" if name.startswith("tiers.simulated") else name.split(".")[0]
        offenders += [f"{name} imports {top}" for top in tops & FORBIDDEN[package]]
        if not name.startswith("router."):
            continue
        if rank(name) is None:
            offenders.append(f"{name} is in no room")
        for other in imports(name, known):
            own, theirs = rank(name), rank(other)
            if own is not None and theirs is not None and theirs >= own and room_of(other) != room_of(name):
                offenders.append(f"{name} imports {other}")
    circles, _ = circles_and_floors({name: imports(name, known) for name in known})
    assert (offenders, circles) == ([], [])


@pytest.mark.anyio
async def test_the_path_of_a_request_grows_no_longer() -> None:
    figures = await request_figures()
    assert {name: figure for name, figure in figures.items() if figure > PATH[name]} == {}


def test_the_house_stays_small_and_its_documents_true() -> None:
    """Ceilings; no function over 60 lines; ARCHITECTURE.md names what is there; no package index's address is committed."""
    settings = sum(1 for _ in leaves(Settings))
    found = {"router": lines("router"), "tests": lines("tests"), "words": words(), "settings": settings}
    assert {name: size for name, size in found.items() if size > CEILINGS[name]} == {}
    long = [
        f"{node.name} in {path.name}"
        for path in (p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= LONGEST_FUNCTION
        and node.name not in {"int4_kernel", "fp8_kernel"}  # they only hold a class for the plugin
    ]
    assert long == []
    named = re.findall(r"`((?:classifier|tiers|router)/[\w/]+(?:\.py|/))`", (ROOT / "ARCHITECTURE.md").read_text())
    assert len(named) > 15
    assert [name for name in named if not (ROOT / name).exists()] == []
    methods = re.findall(r"`([A-Z]\w+)\.(\w+)`", (ROOT / "ARCHITECTURE.md").read_text())
    code = [path.read_text("utf-8") for path in (ROOT / "router").rglob("*.py")]
    assert [m for m in methods if not any(f"class {m[0]}" in text and f"def {m[1]}(" in text for text in code)] == []
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    files = [ROOT / name for name in tracked if name.endswith((".txt", ".in", ".toml", ".md", ".py", "Makefile"))]
    there = [f for f in files if f.exists() and f.name != "test_structure.py"]
    assert [f.name for f in there if ADDRESSES.search(f.read_text("utf-8"))] == []
