"""The rules of the code base that a test can check: imports, rooms, circles, and what ARCHITECTURE.md names."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

from tests.imports import ROOT, circles_and_floors, imports, modules, rank, room_of

FORBIDDEN = {
    "classifier": {"tiers", "router", "starlette", "httpx", "opentelemetry"},
    "tiers": {"router", "starlette", "opentelemetry", "uvicorn"},
    "router": set(),
    # Simulated engines serve HTTP in processes of their own.
    "tiers.simulated": {"router", "opentelemetry"},
}
ADDRESSES = re.compile(
    r"https?://[\w.-]*(?:pypi\.org|pythonhosted|download\.pytorch|registry\.npmjs)"
)


def top_level_imports(path: Path) -> set[str]:
    """Return the packages that a module imports, wherever in it an import stands."""
    packages = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            packages |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            packages.add((node.module or "").split(".")[0])
    return packages


def test_imports_go_one_way_and_in_no_circle() -> None:
    """No import breaks the order of packages and rooms; those of annotations and inside functions count too."""
    known = modules()
    offenders = []
    for name, path in known.items():
        package = name.split(".")[0]
        if name.startswith("tiers.simulated"):
            package = "tiers.simulated"
        offenders += [
            f"{name} imports {top}"
            for top in top_level_imports(path) & FORBIDDEN[package]
        ]
        if not name.startswith("router."):
            continue
        if rank(name) is None:
            offenders.append(f"{name} is in no room")
        for imported in imports(name, known):
            own = rank(name)
            its_rank = rank(imported)
            if own is None or its_rank is None or its_rank < own:
                continue
            if room_of(imported) != room_of(name):
                offenders.append(f"{name} imports {imported}")
    circles, _ = circles_and_floors({name: imports(name, known) for name in known})
    assert offenders == []
    assert circles == []


def test_architecture_names_what_is_there() -> None:
    """The files, folders, classes and methods that ARCHITECTURE.md names exist."""
    named = re.findall(
        r"`((?:classifier|tiers|router)/[\w/]+(?:\.py|/))`",
        (ROOT / "ARCHITECTURE.md").read_text(),
    )
    assert len(named) > 15
    assert [name for name in named if not (ROOT / name).exists()] == []
    methods = re.findall(r"`([A-Z]\w+)\.(\w+)`", (ROOT / "ARCHITECTURE.md").read_text())
    code = [path.read_text("utf-8") for path in (ROOT / "router").rglob("*.py")]
    for owner, method in methods:
        assert any(
            f"class {owner}" in text and f"def {method}(" in text for text in code
        ), f"{owner}.{method}"


def test_no_address_of_a_package_index_is_committed() -> None:
    listed = subprocess.run(
        ["git", "ls-files"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    tracked = listed.stdout.split()
    files = [
        ROOT / name
        for name in tracked
        if name.endswith((".txt", ".in", ".toml", ".md", ".py", "Makefile"))
    ]
    for file in files:
        if file.exists() and file.name != "test_structure.py":
            assert not ADDRESSES.search(file.read_text("utf-8")), file
