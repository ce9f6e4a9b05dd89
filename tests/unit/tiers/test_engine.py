"""The supervisor's record of an engine."""

from __future__ import annotations

import time

import pytest

from tiers.errors import EngineDiedError
from tiers.lifecycle.engine import Engine, brief
from tiers.lifecycle.watchdog import WatchdogOptions
from tiers.replica import Replica
from tiers.spec import TierName, TierSpec


@pytest.fixture
def engine() -> Engine:
    return Engine(
        Replica(
            "fast-0",
            TierSpec(TierName.FAST, max_model_len=1, max_num_seqs=1, max_in_flight=1),
            url="u",
            api_key="",
            model="m",
        ),
        None,
        WatchdogOptions(),
    )


def test_a_start_forgets_what_was_true_of_the_process_before(engine: Engine) -> None:
    """Wear, readiness and a restart that was asked for belong to one process; that it was ready once does not."""
    wear = engine.wear
    engine.started_at = 0.0
    engine.ready_at = 5.0
    engine.recycle = "too slow"
    engine.was_ready = True
    engine.again.set()
    engine.begun()
    assert engine.ready_at is None
    assert engine.recycle is None
    assert engine.again.is_set() is False
    assert engine.was_ready is True
    assert engine.wear is not wear
    assert engine.started_at > 0.0


def test_an_end_tells_for_how_long_it_was_ready(engine: Engine) -> None:
    """Never ready is no time at all; the process id is gone with the process."""
    engine.replica.update(pid=7)
    assert engine.ended() == 0.0
    assert engine.replica.state.pid is None
    engine.ready_at = time.monotonic() - 100
    assert engine.ended() >= 100
    assert engine.ready_at is None


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            EngineDiedError("exited with status 7. Last lines of /x:\nTraceback"),
            "exited with status 7",
        ),
        (EngineDiedError("one\ntwo"), "one"),
        (ValueError(), "ValueError"),
        (ValueError("x" * 500), "x" * 200),
    ],
    ids=["without its log", "one line", "without a text", "cut"],
)
def test_a_state_shows_an_error_in_brief(error: Exception, text: str) -> None:
    assert brief(error) == text
