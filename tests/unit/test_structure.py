"""The house rules that a machine can check."""

from __future__ import annotations

import ast
import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.imports import PACKAGES, ROOT, circles_and_floors, imports, modules, rank, room_of

if TYPE_CHECKING:
    from pathlib import Path

FORBIDDEN = {
    "classifier": {"tiers", "router", "starlette", "httpx", "opentelemetry"},
    "tiers": {"router", "starlette", "opentelemetry", "uvicorn"},
    "router": set(),
}
LONGEST_FUNCTION = 60
SOURCES = [p for name in PACKAGES for p in sorted((ROOT / name).rglob("*.py"))]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    """The classifier knows neither tiers nor router nor HTTP; tiers know nothing of the router."""
    package = path.relative_to(ROOT).parts[0]
    imported = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.split(".")[0])
    assert not imported & FORBIDDEN[package]


def test_modules_import_by_rank() -> None:
    """A module of router/ imports only from lower ranks and from its own room, annotations and late imports included."""
    known = modules()
    offenders = []
    for name in known:
        if not name.startswith("router."):
            continue
        for other in imports(name, known):
            own, theirs = rank(name), rank(other)
            if own is not None and theirs is not None and theirs >= own and room_of(other) != room_of(name):
                offenders.append(f"{name} imports {other}")
    assert not offenders


def test_every_module_is_in_a_room() -> None:
    """Every module of router/ stands in a package that has a rank."""
    assert not {name for name in modules() if name.startswith("router.") and rank(name) is None}


def test_no_modules_import_one_another() -> None:
    """There is no circle of imports, annotations and late imports included."""
    known = modules()
    circles, _ = circles_and_floors({name: imports(name, known) for name in known})
    assert not circles


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_functions_are_short(path: Path) -> None:
    """No function is longer than 60 lines; those that only hold a class for the plugin do not count."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in {"int4_kernel", "fp8_kernel"}:
            assert (node.end_lineno or 0) - node.lineno < LONGEST_FUNCTION, f"{node.name} in {path.name}"


def test_architecture_names_every_module_it_lists() -> None:
    """ARCHITECTURE.md names no module that is not there."""
    named = re.findall(r"`((?:classifier|tiers|router)/[\w/]+(?:\.py|/))`", (ROOT / "ARCHITECTURE.md").read_text())
    assert len(named) > 15
    assert not [name for name in named if not (ROOT / name).exists()]


def test_no_registry_address_is_committed() -> None:
    """Pinned lists and documents hold no package index's address."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    files = [ROOT / name for name in tracked if name.endswith((".txt", ".in", ".toml", ".md", ".py", "Makefile"))]
    assert files or not (ROOT / ".git").exists()
    addresses = re.compile(r"https?://[\w.-]*(?:pypi\.org|pythonhosted|download\.pytorch|registry\.npmjs)")
    assert not [
        f.name for f in files if f.exists() and f.name != "test_structure.py" and addresses.search(f.read_text("utf-8"))
    ]
