"""What docs/scaling.md shows and says of the overflow is true of the code."""

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
from tests.ports import reserved_ports

TEXT = (PROJECT / "docs/scaling.md").read_text("utf-8").partition("\n## Overflow")[2]
BLOCKS = dict(re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL))


def test_the_settings_are_taken_as_shown(tmp_path: Path) -> None:
    """The snippet is a valid file, and all settings of the section reload, as the text says."""
    file = tmp_path / "qarr.toml"
    file.write_text(BLOCKS["toml"])
    overflow = load_settings(file).overflow
    assert overflow.url == "https://api.example.com/v1"
    assert overflow.model == "example-large"
    assert overflow.shown_name == "example"
    assert overflow.api_key.get_secret_value() == "sk-..."
    for name in OverflowSettings.model_fields:
        assert name in OverflowSettings.reloads


def test_the_commands_are_taken_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key that is added allows the overflow; other keys do not, and their records do not mention it."""
    monkeypatch.setenv("QARR_AUTH__KEYS_FILE", str(tmp_path / "keys.json"))
    # where a router of this machine serves without keys, at its socket or port, the first key is made after a question
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (port,) = reserved_ports()
    monkeypatch.setenv("QARR_SERVER__PORT", str(port))
    making, examining = BLOCKS["bash"].splitlines()
    for command in (making, "qarr keys add plain"):
        result = CliRunner().invoke(make_app(), command.split()[1:])
        assert result.exit_code == 0, result.output
    allowed, plain = read_keys(tmp_path / "keys.json")
    assert allowed.caller({}).overflow is True
    assert plain.caller({}).overflow is False
    assert (tmp_path / "keys.json").read_text().count("overflow") == 1
    result = CliRunner().invoke(make_app(), [*examining.split()[1:], "--help"])
    assert result.exit_code == 0


def test_what_it_says_holds() -> None:
    """The reason reads as shown, and the fields that the text lists are not sent."""
    assert (
        f"`{FULL[Refusal.AT_CAPACITY]} (...), so the overflow example answers`" in TEXT
    )
    (listed,) = re.findall(r"nothing of ((?:`\w+`[,\s]*(?:and\s)?)+)", TEXT)
    names = re.findall(r"`(\w+)`", listed)
    assert len(names) > 4
    assert set(names) <= _LEFT_OUT
