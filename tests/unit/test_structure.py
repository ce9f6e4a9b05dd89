"""The rules of the code base that a machine can check: imports, rooms, circles, and what ARCHITECTURE.md names."""

from __future__ import annotations

import ast
import re
import subprocess

from tests.imports import ROOT, circles_and_floors, imports, modules, rank, room_of

FORBIDDEN = {
    "classifier": {"tiers", "router", "starlette", "httpx", "opentelemetry"},
    "tiers": {"router", "starlette", "opentelemetry", "uvicorn"},
    "router": set(),
    # it serves HTTP, in processes of its own
    "tiers.simulated": {"router", "opentelemetry"},
}
ADDRESSES = re.compile(
    r"https?://[\w.-]*(?:pypi\.org|pythonhosted|download\.pytorch|registry\.npmjs)"
)


def test_imports_go_one_way_and_in_no_circle() -> None:
    """Packages, ranks of rooms, circles; annotations and imports inside functions count."""
    known, offenders = modules(), []
    for name, path in known.items():
        used = {
            node
            for node in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        tops = {
            (a.name if isinstance(n, ast.Import) else n.module or "").split(".")[0]
            for n in used
            for a in n.names
        }
        package = (
            "tiers.simulated"
            if name.startswith("tiers.simulated")
            else name.split(".")[0]
        )
        offenders += [f"{name} imports {top}" for top in tops & FORBIDDEN[package]]
        if not name.startswith("router."):
            continue
        if rank(name) is None:
            offenders.append(f"{name} is in no room")
        for other in imports(name, known):
            own, theirs = rank(name), rank(other)
            if (
                own is not None
                and theirs is not None
                and theirs >= own
                and room_of(other) != room_of(name)
            ):
                offenders.append(f"{name} imports {other}")
    circles, _ = circles_and_floors({name: imports(name, known) for name in known})
    assert (offenders, circles) == ([], [])


def test_architecture_names_what_is_there() -> None:
    """Its files, folders, classes and methods exist."""
    named = re.findall(
        r"`((?:classifier|tiers|router)/[\w/]+(?:\.py|/))`",
        (ROOT / "ARCHITECTURE.md").read_text(),
    )
    assert len(named) > 15
    assert [name for name in named if not (ROOT / name).exists()] == []
    methods = re.findall(r"`([A-Z]\w+)\.(\w+)`", (ROOT / "ARCHITECTURE.md").read_text())
    code = [path.read_text("utf-8") for path in (ROOT / "router").rglob("*.py")]
    assert [
        m
        for m in methods
        if not any(f"class {m[0]}" in text and f"def {m[1]}(" in text for text in code)
    ] == []


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
    present = [f for f in files if f.exists() and f.name != "test_structure.py"]
    assert [f.name for f in present if ADDRESSES.search(f.read_text("utf-8"))] == []
