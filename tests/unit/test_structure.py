"""The house rules that a machine can check."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("classifier", "tiers", "router")
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
