"""What goes into logs and traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt

from router.section import Section

# The placeholder in the address of a trace viewer.
TRACE_ID = "{trace_id}"


def _viewer_address(url: str) -> str:
    if url and not (url.startswith(("http://", "https://")) and TRACE_ID in url):
        raise ValueError(
            f"an address that begins with http:// or https:// and has {TRACE_ID} in it is allowed"
        )
    return url


class TelemetrySettings(Section, reloads=frozenset({"record_prompts", "log_level"})):
    """What goes into logs and traces. Exporters are set by the standard `OTEL_*` variables."""

    recent_requests: int = Field(
        500,
        ge=1,
        description="How many ended requests are kept in memory for the page, `GET /traces` and `GET /live`, and as many "
        "again that failed, were refused or missed their SLA.",
    )
    record_prompts: bool = Field(False, description="Record prompts on spans.")
    trace_url: Annotated[str, AfterValidator(_viewer_address)] = Field(
        "",
        description="Address of a trace in a trace viewer, with `{trace_id}` in it; answers then have `x-qarr-trace-url`.",
    )
    decision_log: Path | None = Field(
        None,
        description="File for every decision with all its inputs except the prompt; `benchmarks/replay.py` reads it.",
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="Format of the router's log on standard error."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info",
        description="Level of that log: `info` has one line for each failure, and what `request_lines` adds.",
    )
    request_lines: Literal["auto", "file", "stderr", "both"] = Field(
        "auto",
        description="Where the lines of inference requests that end well go: the log file, standard error, or both. "
        "`auto`: the file; standard error if there is none, both if `log_format` is `json`. Lines of those that fail or "
        "are refused go to both.",
    )
    log_file_mb: NonNegativeInt = Field(
        20,
        description="The same log, `info` and up, is written as JSON to `router-PORT.log` in `engine.log_dir`, which is "
        "rotated at this size. 0: no such file.",
    )

    def trace_address(self, trace_id: str) -> str | None:
        return self.trace_url.replace(TRACE_ID, trace_id) or None
