"""What the quantizer reports, apart from the libraries that do its work."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tiers.checkpoints.quantize import COMMANDS, Reporter, _Layers


@pytest.fixture
def events() -> Callable[[], list[dict[str, Any]]]:
    out = io.StringIO()
    reporter = Reporter(out)

    def read() -> list[dict[str, Any]]:
        return [json.loads(line) for line in out.getvalue().splitlines()]

    read.reporter = reporter  # type: ignore[attr-defined]
    return read


def test_events_are_lines_of_json(events: Any) -> None:
    """Whatever a message holds, an event is one line."""
    events.reporter.progress("a\nb", 1, 2)
    events.reporter.event("done", versions={"torch": "2"})
    assert events() == [
        {"event": "progress", "message": "a\nb", "done": 1, "total": 2},
        {"event": "done", "versions": {"torch": "2"}},
    ]


def test_progress_bars_become_finished_layers(
    events: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The third of 31 is being calibrated: two are done. Each is told once, and the bars are still shown."""
    with _Layers(events.reporter, "quantizing"):
        for text in (
            "(1/31): Calibrating",
            "(1/31): Propagating",
            "something else",
            "(3/31): Calibrating",
        ):
            sys.stderr.write(text)
        assert sys.stderr.isatty() is False
    sys.stderr.write("(9/31): not told any more")
    assert [(e["message"], e["done"], e["total"]) for e in events()] == [
        ("quantizing", 0, 31),
        ("quantizing", 2, 31),
    ]
    assert capsys.readouterr().err.startswith("(1/31): Calibrating(1/31): Propagating")


def test_layers_with_kept_scales_are_told_apart(events: Any) -> None:
    """Until a scale is searched: from then on layers take as long as they do."""
    with _Layers(events.reporter, "quantizing") as layers:
        layers.going_over = True
        sys.stderr.write("(1/3): Calibrating")
        sys.stderr.write("(2/3): Calibrating")
        layers.searching()
        layers.searching()
        sys.stderr.write("(3/3): Calibrating")
    over = "going over the layers that are quantized already"
    assert [(e["message"], e["done"]) for e in events()] == [
        (over, 0),
        (over, 1),
        ("quantizing", 1),
        ("quantizing", 2),
    ]


def test_an_error_gives_standard_error_back(events: Any) -> None:
    before = sys.stderr
    with pytest.raises(RuntimeError), _Layers(events.reporter, "quantizing"):
        raise RuntimeError
    assert sys.stderr is before


def test_commands_are_those_that_are_asked_for() -> None:
    assert set(COMMANDS) == {"import-gguf", "fetch-hub", "bf16", "quantize", "score"}
