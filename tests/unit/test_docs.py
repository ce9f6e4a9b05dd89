"""Generated documentation is up to date, and every problem has a place in the table."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from router.cli.main import make_app
from router.settings import Settings, load_settings

ROOT = Path(__file__).resolve().parents[2]
GENERATED = [
    "settings.md",
    "settings.schema.json",
    "cli.md",
    "continuation.md",
    "planning.md",
    "../deploy/prometheus/consoles/runbooks.html",
]
DECISIONS = sorted((ROOT / "docs/decisions").glob("0*.md"))
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").rglob("*.md"),
        *(ROOT / "deploy").rglob("*.md"),
    ]
)


def _generated() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("docs", ROOT / "scripts/docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rendered: dict[str, str] = module.render()
    return rendered


@pytest.mark.parametrize("name", GENERATED)
def test_generated_docs_are_current(name: str) -> None:
    """docs/ is what scripts/docs.py writes now."""
    assert (ROOT / "docs" / name).read_text("utf-8") == _generated()[name], (
        "run .venv/bin/python scripts/docs.py"
    )


def test_every_setting_is_described() -> None:
    """Every setting has a sentence on what it means."""

    def walk(model: type, path: str) -> None:
        for name, field in model.model_fields.items():  # type: ignore[attr-defined]
            inner = field.annotation
            if isinstance(inner, type) and hasattr(inner, "model_fields"):
                walk(inner, f"{path}{name}.")
            else:
                assert field.description, f"{path}{name}"

    walk(Settings, "")


def test_the_commands_for_operators_are_there() -> None:
    """Every command that docs/operations.md shows exists, with the options that it is shown with."""
    text = (ROOT / "docs/operations.md").read_text("utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    commands = [
        line.partition("#")[0].split()
        for block in blocks
        for line in block.splitlines()
    ]
    assert len(commands) >= 8
    for program, *arguments in commands:
        assert program == "qarr"
        result = CliRunner().invoke(make_app(), [*arguments, "--help"])
        assert result.exit_code == 0, f"{arguments}: {result.output}"


@pytest.mark.parametrize(
    "document",
    [
        "install.md",
        "limits.md",
        "observing.md",
        "routing.md",
        "runbooks.md",
        "scaling.md",
        "security.md",
        "troubleshooting.md",
    ],
)
def test_commands_beside_others_are_there(document: str) -> None:
    """Every ``qarr`` command among a document's other commands, or in its text, exists."""
    text = (ROOT / "docs" / document).read_text("utf-8")
    named = set(re.findall(r"(?:^|`)qarr ((?:[a-z]+ ?)+)", text, re.MULTILINE))
    known = {
        name
        for name in named
        if CliRunner().invoke(make_app(), [*name.split(), "--help"]).exit_code == 0
    }
    assert named
    assert known == named


def test_the_variables_for_more_machines_are_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every QARR_ variable that docs/scaling.md sets is a setting, and takes the value."""
    text = (ROOT / "docs/scaling.md").read_text("utf-8")
    variables = re.findall(r"(QARR_\w+)=(\S+) ", text)
    assert len(variables) > 3
    for name, value in variables:
        monkeypatch.setenv(name, value)
    settings = load_settings()
    assert settings.tiers.fast.replicas == 3


def test_what_the_documents_call_tested_is_tested() -> None:
    """Every test that docs/openai.md names exists."""
    named = set(
        re.findall(r"`(test_\w+)`", (ROOT / "docs/openai.md").read_text("utf-8"))
    )
    assert len(named) > 10
    tests = "".join(
        path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")
    )
    assert {name for name in named if f"def {name}(" not in tests} == set()


def _prose(document: Path) -> str:
    return re.sub(
        r"^```.*?^```", "", document.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL
    )


def _anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", _prose(document), re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    """Every link to a file of this project finds it, and its heading where one is named."""
    for link in re.findall(r"\]\(([^)\s]+)\)", _prose(document)):
        if not link.startswith("http"):
            name, _, heading = link.partition("#")
            target = (document.parent / name).resolve() if name else document
            assert target.exists(), link
            assert not heading or heading in _anchors(target), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_prose_is_narrow(document: Path) -> None:
    """No line of prose has over 120 characters; rows of tables may."""
    assert [
        line
        for line in _prose(document).splitlines()
        if len(line) > 120 and not line.startswith("|")
    ] == []


def test_decisions_have_their_form_and_are_listed() -> None:
    """Each record has its number, its three parts unless it is superseded, and a line in the index."""
    index = (ROOT / "docs/decisions/README.md").read_text("utf-8")
    assert len(DECISIONS) > 20
    for record in DECISIONS:
        text = record.read_text("utf-8")
        parts = (
            [] if "\nSuperseded: " in text else ["Context", "Decision", "Consequence"]
        )
        assert re.findall(r"^\*\*(\w+)\.\*\* ", text, re.MULTILINE) == parts, (
            record.name
        )
        assert text.startswith(f"# {int(record.name[:4])}. ")
        assert f"({record.name})" in index
