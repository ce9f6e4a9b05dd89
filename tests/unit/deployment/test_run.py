"""What is checked before anything slow starts: files, the address, and keys."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from router.auth.api_keys import KeysError, add_key
from router.deployment.first_start import REPORTS, Steps
from router.deployment.listening import ListenError, listen, open_keys
from router.deployment.run import check_files
from router.section import SettingsError
from router.settings import Settings, load_settings


def settings(**overrides: Any) -> Settings:
    return load_settings(None, overrides)


def test_files_that_can_be_written_are_made(tmp_path: Path) -> None:
    """With their folders, readable by their owner only."""
    log = tmp_path / "a/log"
    check_files(settings(telemetry={"decision_log": log}))
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_a_file_that_cannot_be_written_is_named_by_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        SettingsError,
        match=f"telemetry.decision_log: {tmp_path}/file/log cannot be written",
    ):
        check_files(settings(telemetry={"decision_log": tmp_path / "file/log"}))


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    check_files(settings(telemetry={"decision_log": tmp_path / "pipe"}))


def test_profiles_are_a_folder(tmp_path: Path) -> None:
    """One that is not there yet is made when it is needed."""
    check_files(settings(policy={"profiles": tmp_path / "later"}))
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"policy\.profiles: .* is not a folder"):
        check_files(settings(policy={"profiles": tmp_path / "file"}))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_socket_sends_at_once_and_is_not_inherited(host: str) -> None:
    """Nagle's algorithm would hold the first token back; engines must not keep the router's port open."""
    with listen(settings(server={"host": host, "port": 0})) as sock:
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert not sock.get_inheritable()
        assert sock.getsockname()[1] > 0
        with socket.create_connection(sock.getsockname()[:2], 5):
            pass


def test_an_address_that_cannot_be_had_is_named() -> None:
    """One that another program has, and one that is not this machine's."""
    with listen(settings(server={"port": 0})) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(
            ListenError,
            match=rf"cannot listen on 127\.0\.0\.1:{port} \(Address already in use\)",
        ):
            listen(settings(server={"port": port}))
    with pytest.raises(ListenError, match=r"cannot listen on 192\.0\.2\.1:0"):
        listen(settings(server={"host": "192.0.2.1", "port": 0}))


def test_an_inherited_sockets_address_counts(tmp_path: Path) -> None:
    """A socket that was taken over may be open to others although the settings say loopback."""
    given = settings(auth={"keys_file": tmp_path / "keys.json"})
    assert not open_keys(given).required
    with pytest.raises(ListenError, match="qarr keys add NAME"):
        open_keys(given, "0.0.0.0")
    assert not open_keys(
        settings(auth={"keys_file": tmp_path / "keys.json", "allow_keyless": True}),
        "0.0.0.0",
    ).required
    add_key(tmp_path / "keys.json", "a")
    assert open_keys(given, "0.0.0.0").required


def test_a_broken_key_file_ends_the_start(tmp_path: Path) -> None:
    """Also on loopback: keys that cannot be read are not no keys."""
    (tmp_path / "keys.json").write_text("{")
    with pytest.raises(KeysError):
        open_keys(settings(auth={"keys_file": tmp_path / "keys.json"}))


def test_a_step_is_told_in_a_few_lines() -> None:
    """Its beginning and each quarter of its parts; a step without parts once, and again when it comes again."""
    told: list[str] = []
    steps = Steps(told.append)
    for done in range(101):
        steps("layers", done, 100, "; soon")
    assert told == [f"layers ({done} of 100); soon" for done in (0, 25, 50, 75, 100)]
    assert len(told) == REPORTS + 1
    for _ in range(3):
        steps("writing", 0, 0)
    steps("layers", 0, 100)
    assert told[-2:] == ["writing", "layers (0 of 100)"]
