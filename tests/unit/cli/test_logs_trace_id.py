"""``qarr logs --trace``: what can be no trace id is an error."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.unit.cli.stub_router import qarr
from tiers.errors import OperationError

TRACE = "ab" * 16


@pytest.fixture(autouse=True)
def _log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a router's log of one line."""
    monkeypatch.setenv("QARR_ENGINE__LOG_DIR", str(tmp_path))
    line = {"at": time.time(), "level": "error", "message": "x", "trace_id": TRACE}
    (tmp_path / "router-8080.log").write_text(json.dumps(line) + "\n")


@pytest.mark.parametrize("trace", [TRACE + "a", "abcdefgh", f"00-{TRACE}-01"])
def test_what_is_no_trace_id_is_refused(trace: str) -> None:
    refused = qarr("logs", "--trace", trace).exception
    assert isinstance(refused, OperationError)
    assert "a trace id has 32 hexadecimal digits" in str(refused)


def test_a_whole_trace_id_finds_its_lines() -> None:
    assert TRACE in qarr("logs", "--trace", TRACE, NO_COLOR="1").stdout
