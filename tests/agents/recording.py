"""Recordings of agents' requests: what is kept of them, and how they are read.

A line is one request as it was sent: its method, path, headers and body. Of long texts the beginning is kept, since only
their form matters and most are the agent's own prompt. Folders and ids of the machine are replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parents[1] / "data/agents"
KEPT_CHARS = 80
DESCRIPTION_CHARS = 20
CUT_MARK = " […]"
# The connection writes these itself.
OF_THE_CONNECTION = {"host", "content-length", "connection", "transfer-encoding"}
UUID = re.compile(r"[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}")
NO_UUID = "00000000-0000-4000-8000-000000000000"


class RecordedRequest(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    body: Any

    @property
    def endpoint(self) -> str:
        """Return the path without its query."""
        return self.path.partition("?")[0]


def read_recording(name: str) -> list[RecordedRequest]:
    """Read the requests of one session."""
    lines = (FOLDER / f"{name}.jsonl").read_text("utf-8").splitlines()
    return [RecordedRequest(**json.loads(line)) for line in lines]


def write_recording(
    name: str, requests: Iterable[RecordedRequest], replaced: Mapping[str, str]
) -> None:
    """Write the requests of one session; ``replaced`` has the machine's own folders and what stands for them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps(_reduced(request._asdict(), replaced), ensure_ascii=False)
        for request in requests
    ]
    (FOLDER / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


def _reduced(value: Any, replaced: Mapping[str, str], name: str = "") -> Any:
    """Return a part of a request without what is not to be kept."""
    if isinstance(value, dict):
        if name == "headers":
            value = {
                header: text
                for header, text in value.items()
                if header not in OF_THE_CONNECTION
            }
        return {key: _reduced(part, replaced, key) for key, part in value.items()}
    if isinstance(value, list):
        return [_reduced(part, replaced, name) for part in value]
    if not isinstance(value, str):
        return value
    for own, stand_in in replaced.items():
        value = value.replace(own, stand_in)
    value = UUID.sub(NO_UUID, value)
    kept_chars = DESCRIPTION_CHARS if name == "description" else KEPT_CHARS
    # A call's arguments and a header's JSON stay whole: half of them would be none.
    if len(value) <= kept_chars or name == "arguments" or value.startswith("{"):
        return value
    return value[:kept_chars].removesuffix(CUT_MARK).rstrip() + CUT_MARK
