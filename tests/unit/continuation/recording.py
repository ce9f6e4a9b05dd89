"""Streams of a real engine, recorded: the whole answer to each request, and what follows when its first tokens are known."""

from __future__ import annotations

import base64
import gzip
import json
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

RECORDINGS = Path(__file__).resolve().parents[2] / "data/continuation/streams.json.gz"
# The ways in which the router asks: with the caller's body, with token ids as well, and for the rest of a text.
AS_ASKED = "as asked"
WITH_IDS = "with token ids"
CONTINUED = "continued"


@dataclass(slots=True)
class Recording:
    """One answer of an engine, streamed in all the ways that the router may ask for it.

    Attributes:
        prompt_ids: The prompt as the engine read it.
        output_ids: All tokens of the answer.
        streams: The stream that begins when so many of the tokens are known, by the way of asking (``way``).
    """

    prompt_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    streams: dict[str, dict[int, str]] = field(default_factory=dict)


@dataclass(slots=True)
class Recordings:
    """All that was recorded.

    Attributes:
        engine: Which engine, and how it was started.
        vocabulary: The bytes of each token.
        hidden: Special tokens, which answers do not show.
        answers: What was recorded, by the request's name.
    """

    engine: dict[str, Any]
    vocabulary: dict[int, bytes]
    hidden: list[int]
    answers: dict[str, Recording]

    def save(self, path: Path = RECORDINGS) -> None:
        content = asdict(self)
        content["vocabulary"] = {
            token_id: base64.b64encode(data).decode()
            for token_id, data in sorted(self.vocabulary.items())
        }
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


@cache
def load(path: Path = RECORDINGS) -> Recordings:
    """Read what was recorded."""
    content = json.loads(gzip.decompress(path.read_bytes()))
    answers = {}
    for name, answer in content["answers"].items():
        streams = {
            way: {int(known): text for known, text in by_known.items()}
            for way, by_known in answer.pop("streams").items()
        }
        answers[name] = Recording(**answer, streams=streams)
    vocabulary = {
        int(token_id): base64.b64decode(data)
        for token_id, data in content["vocabulary"].items()
    }
    return Recordings(
        engine=content["engine"],
        vocabulary=vocabulary,
        hidden=content["hidden"],
        answers=answers,
    )
