"""How lines of the router's log look: as JSON, and as text for a person."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic_core import to_json

from router.telemetry.record import Outcome, RequestRecord, render_summary

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# Times from this many milliseconds on are shown in seconds.
SHOWN_IN_SECONDS_MS = 10_000.0
# Times from this many milliseconds on are shown without a decimal.
SHOWN_WHOLE_MS = 100


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``at`` in Unix seconds, ``level``, ``logger``, ``message``, ids, and a record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        logged_at = round(record.created, 3)
        line: dict[str, Any] = {
            "at": logged_at,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.msg,
        }
        ids = getattr(record, "ids", None)
        if ids:
            line["request_id"], line["trace_id"] = ids
        fields = getattr(record, "fields", {})
        if isinstance(fields, RequestRecord):
            # It is rendered here, in the thread that writes.
            line["event"] = "request"
            line |= render_summary(fields)
            line["arrived_at"] = line["at"]
            line["at"] = logged_at
        else:
            line |= fields
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _encode(line)


def _encode(line: dict[str, Any]) -> str:
    try:
        return to_json(line, fallback=str, inf_nan_mode="constants").decode()
    except ValueError:  # a lone surrogate, which the file's own encoding escapes
        return json.dumps(line, ensure_ascii=False, default=str, separators=(",", ":"))


class TextFormatter(logging.Formatter):
    """One line for a person, with the ids at its end."""

    _COLOURS: ClassVar = {"WARNING": "33", "ERROR": "31", "CRITICAL": "1;31"}

    def __init__(self, *, colour: bool = False) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        message = str(record.msg)
        if isinstance(fields, RequestRecord):
            fields = render_summary(fields)
            message = request_line(fields)
        text = escaped(message)
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = record.levelname
        id_text = _id_text(record, fields, text)
        if self._colour:
            clock = _dimmed(clock)
            level = self._coloured(level)
            id_text = _dimmed(id_text) if id_text else ""
        line = f"{clock} {level} {text}{id_text}"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line

    def _coloured(self, level: str) -> str:
        colour = self._COLOURS.get(level)
        if colour is None:
            return level
        return f"\x1b[{colour}m{level}\x1b[0m"


def _dimmed(text: str) -> str:
    return f"\x1b[2m{text}\x1b[0m"


def _id_text(
    record: logging.LogRecord, fields: Mapping[str, Any], shown_text: str
) -> str:
    """Return what the end of a line says of its ids: nothing without a trace, and no request id that the line has."""
    ids = getattr(record, "ids", None)
    request_id, trace_id = ids or (fields.get("request_id"), fields.get("trace_id"))
    if not trace_id:
        return ""
    id_text = f" trace={trace_id}"
    if str(request_id) not in shown_text:
        id_text += f" request={request_id}"
    return id_text


def request_line(summary: Mapping[str, Any]) -> str:
    """Return a request, as ``render_summary`` gives it, in one line without its ids; unknown values are left out."""
    outcome = summary["outcome"]
    error = summary["error"]
    shown_error = f" ({error})" if error else ""
    shown_fields = [
        f"{name}={value}" for name, value in _shown_fields(summary).items() if value
    ]
    line = f"POST {summary['route']} {outcome}{shown_error} {' '.join(shown_fields)}"
    if outcome in (Outcome.REFUSED, Outcome.ERROR):
        line = f"{line} why: {summary['reason']}"
    return line


def _shown_fields(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a request's line shows, by name in the order shown; what is empty is left out of the line."""
    sla = "missed" if summary["sla_met"] is False else ""
    return {
        "class": summary["class"],
        "tier": _shown_tier(summary["served_by"], summary["tier"]),
        "overflow": summary.get("overflow"),
        "overflow_failure": summary.get("overflow_failure"),
        "queue": _shown_positive_ms(summary["queue_ms"]),
        "ttft": _shown_positive_ms(summary["ttft_ms"]),
        "ttfa": _shown_ttfa(summary),
        "tpot": _shown_positive_ms(summary["tpot_ms"]),
        "tokens": f"{summary['prompt_tokens']}+{summary['output_tokens']}",
        "reasoning": summary.get("reasoning_tokens"),
        "total": shown_ms(summary["duration_ms"]),
        "overhead": _shown_overhead(summary["overhead_ms"]),
        "sla": sla,
        "degraded": ",".join(summary["degraded"]),
        "retries": summary["attempts_failed"],
        "continued_on": ",".join(summary["continued_on"]),
        "key": summary["key"],
    }


def _shown_ttfa(summary: Mapping[str, Any]) -> str:
    """Return the time to the answer's own first token; nothing if the first token of all is one of the answer."""
    ttfa_ms = summary.get("ttfa_ms")
    if ttfa_ms == summary["ttft_ms"]:
        return ""
    return _shown_positive_ms(ttfa_ms)


def _shown_tier(served_by: str | None, decided: str | None) -> str:
    """Return the tier that served a request, with the one that was decided for it if that is another."""
    if served_by and decided not in {served_by, None}:
        return f"{served_by}(for {decided})"
    return served_by or decided or ""


def _shown_positive_ms(milliseconds: float | None) -> str:
    return shown_ms(milliseconds) if milliseconds else ""


def _shown_overhead(milliseconds: float | None) -> str:
    return "" if milliseconds is None else shown_ms(milliseconds)


def shown_ms(milliseconds: float | None) -> str:
    if milliseconds is None:
        return "-"
    if milliseconds >= SHOWN_IN_SECONDS_MS:
        return f"{milliseconds / 1000:.1f}s"
    if milliseconds >= SHOWN_WHOLE_MS:
        return f"{milliseconds:.0f}ms"
    return f"{milliseconds:.1f}ms"


def escaped(text: str) -> str:
    """Return a text with its control characters escaped: none can clear a terminal, or pretend to be another line."""
    return _CONTROL.sub(lambda control: f"\\x{ord(control[0]):02x}", text)
