"""What docs/scaling.md shows and says of the overflow, held to the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from router.auth.api_keys import read_keys
from router.cli.main import make_app
from router.pipeline.overflow import FULL
from router.policy.decision import Refusal
from router.section import PROJECT
from router.settings import load_settings
from router.upstream.overflow import _LEFT_OUT
from router.upstream.settings import OverflowSettings

TEXT = (PROJECT / "docs/scaling.md").read_text("utf-8").partition("\n## Overflow")[2]
BLOCKS = dict(re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL))


def test_the_settings_are_taken_as_shown(tmp_path: Path) -> None:
    """The snippet is a valid file, and every setting in it is one; all of the section reload, as the text says."""
    file = tmp_path / "qarr.toml"
    file.write_text(BLOCKS["toml"])
    found = load_settings(file).overflow
    assert (found.url, found.model, found.shown_name) == (
        "https://api.example.com/v1",
        "example-large",
        "example",
    )
    assert found.api_key.get_secret_value() == "sk-..."
    assert all(
        name in OverflowSettings.reloads for name in OverflowSettings.model_fields
    )


def test_the_commands_are_taken_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key that is made allows the overflow, others do not, and their records do not mention it."""
    monkeypatch.setenv("QARR_AUTH__KEYS_FILE", str(tmp_path / "keys.json"))
    making, examining = BLOCKS["bash"].splitlines()
    for command in (making, "qarr keys add plain"):
        done = CliRunner().invoke(make_app(), command.split()[1:])
        assert done.exit_code == 0, done.output
    assert [key.caller({}).overflow for key in read_keys(tmp_path / "keys.json")] == [
        True,
        False,
    ]
    assert (tmp_path / "keys.json").read_text().count("overflow") == 1
    assert (
        CliRunner().invoke(make_app(), [*examining.split()[1:], "--help"]).exit_code
        == 0
    )


def test_what_it_says_holds() -> None:
    """The reason reads as shown, and what is said to stay here is left out."""
    assert (
        f"`{FULL[Refusal.AT_CAPACITY]} (...), so the overflow example answers`" in TEXT
    )
    (listed,) = re.findall(r"nothing of ((?:`\w+`[,\s]*(?:and\s)?)+)", TEXT)
    assert len(names := re.findall(r"`(\w+)`", listed)) > 4
    assert set(names) <= _LEFT_OUT
