"""Settings, commands and options that are gone say what to use."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from router import removed
from router.removed import Removed, removed_argument
from router.section import SettingsError
from router.settings import load_settings

SETTINGS = {"server.fans": Removed("use nginx", refused=True), "copies": Removed("use Envoy", refused=False)}
SETTINGS["tiers.*.fans"] = SETTINGS["copies"]


@pytest.fixture(autouse=True)
def gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let some settings, a command and an option be gone."""
    monkeypatch.setattr(removed, "SETTINGS", SETTINGS)
    monkeypatch.setattr(removed, "COMMANDS", {"copy": "use cp"})
    monkeypatch.setattr(removed, "OPTIONS", {"--fans": "use nginx"})


def test_a_refused_setting_of_the_file_says_what_to_use(tmp_path: Path) -> None:
    (tmp_path / "qarr.toml").write_text("[server]\nfans = 2\n")
    with pytest.raises(SettingsError, match=r"server.fans: this setting is gone: use nginx"):
        load_settings(tmp_path / "qarr.toml")


def test_a_refused_variable_says_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QARR_SERVER__FANS", "2")
    with pytest.raises(SettingsError, match=r"QARR_SERVER__FANS: this setting is gone: use nginx"):
        load_settings()


@pytest.mark.parametrize("by", ["file", "variable"])
def test_an_ignored_setting_is_warned_of_once(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "qarr.toml").write_text(
        "[copies]\nurl = 'http://x'\n[tiers.int8]\nreplicas = 0\nfans = 2\n[server]\nport = 1\n" if by == "file" else ""
    )
    if by == "variable":
        monkeypatch.setenv("QARR_COPIES__URL", "http://x")
        monkeypatch.setenv("QARR_TIERS__FAST__FANS", "2")
        monkeypatch.setenv("QARR_SERVER__PORT", "1")
    with caplog.at_level(logging.WARNING):
        assert load_settings(tmp_path / "qarr.toml").server.port == 1
    names = {"copies", "tiers.int8.fans"} if by == "file" else {"QARR_COPIES__URL", "QARR_TIERS__FAST__FANS"}
    assert set(caplog.messages) == {f"{name} is ignored, the setting is gone: use Envoy" for name in names}


def test_commands_and_options_say_what_to_use() -> None:
    assert removed_argument(["copy", "x"]) == "qarr copy is gone: use cp"
    assert removed_argument(["serve", "--fans=3"]) == "--fans is gone: use nginx"
    assert removed_argument(["serve", "--port", "80"]) is None
