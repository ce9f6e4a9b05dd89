"""The recorded session of a coding agent, ``tests/data/agent_session.jsonl``, with its long texts written out.

Its first line has the system prompt and the tools, each further line what is new in one turn: the model's last answer, and
results of tools or words of the user. A result that would be long is a recipe instead: its kind, a seed and its length. The
same recipe gives the same text everywhere. All of it was written for this project; nobody's code or conversation is in it.
"""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
SESSION = ROOT / "tests/data/agent_session.jsonl"
NAMES = (
    "harbour",
    "tide",
    "gauge",
    "station",
    "forecast",
    "moon",
    "level",
    "chart",
    "datum",
    "surge",
    "quay",
    "current",
    "mooring",
    "almanac",
    "reading",
    "epoch",
    "phase",
    "offset",
    "constituent",
    "window",
)
VERBS = ("load", "fit", "merge", "check", "predict", "shift", "clip", "render", "parse")
FAULTS = (
    "the gauge was read twice in the same minute",
    "the datum of the chart is not that of the station",
    "a reading lies outside of its window",
    "the offset is in minutes where seconds were meant",
)


class AgentSession:
    """A session whose turns can be asked for one by one."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self._opening = lines[0]
        self._turns = lines[1:]

    @classmethod
    def read(cls, path: Path = SESSION) -> AgentSession:
        """Read a session from its file."""
        return cls([json.loads(line) for line in path.read_text("utf-8").splitlines()])

    def __len__(self) -> int:
        return len(self._turns)

    def bodies(self, checkout: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the body of each turn's request, as the agent sends it: all that was said before, and what is new.

        Args:
            checkout: Another number is another agent: same system prompt and tools, another task and other files.
        """
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": self._opening["system"]}
        ]
        for turn in self._turns:
            messages += [_written_out(message, checkout) for message in turn["new"]]
            yield {
                "messages": copy.deepcopy(messages),
                "tools": self._opening["tools"],
                "max_tokens": self._opening["max_tokens"],
                "stream": True,
                "stream_options": {"include_usage": True},
            }


def _written_out(message: dict[str, Any], checkout: int) -> dict[str, Any]:
    """Return a message with its long text, and with the words of another agent's task."""
    content = message.get("content")
    if isinstance(content, dict):
        seed = f"{checkout}/{content['seed']}"
        text = long_text(content["kind"], seed, content["chars"])
        return {**message, "content": text}
    if message["role"] == "user" and checkout:
        return {**message, "content": f"[checkout {checkout}] {content}"}
    return message


def long_text(kind: str, seed: str, chars: int) -> str:
    """Return a text of a kind, ``module``, ``log`` or ``listing``, of so many characters; the same for the same seed."""
    chance = random.Random(f"{kind}/{seed}")
    write = {"module": _function, "log": _test_lines, "listing": _file_line}[kind]
    pieces: list[str] = []
    length = 0
    while length < chars:
        piece = write(chance)
        pieces.append(piece)
        length += len(piece)
    return "".join(pieces)[:chars]


def _function(chance: random.Random) -> str:
    """Return a function of a Python module."""
    verb = chance.choice(VERBS)
    first, second, third = chance.sample(NAMES, 3)
    limit = chance.randint(2, 900)
    return (
        f"def {verb}_{first}({second}: list[float], {third}: float = {limit / 10}) -> list[float]:\n"
        f'    """{verb.capitalize()} each {first} within {limit} {third}s of its {second}."""\n'
        f"    kept = [{second}[{limit % 7}]]\n"
        f"    for before, value in zip({second}, {second}[1:], strict=False):\n"
        f"        if abs(value - before) > {third}:\n"
        f'            raise ValueError(f"{chance.choice(FAULTS)}: {{value}}")\n'
        f"        kept.append(before + {limit % 13} * ({third} - value))\n"
        f"    return kept\n\n\n"
    )


def _test_lines(chance: random.Random) -> str:
    """Return lines of a test run's output: some that pass, and sometimes one that fails."""
    first, second = chance.sample(NAMES, 2)
    number = chance.randint(10, 99)
    line = f"tests/test_{first}.py::test_{chance.choice(VERBS)}_{second}_{number} PASSED [{number}%]\n"
    if chance.random() < 1 / 6:
        line += (
            f"tests/test_{first}.py::test_{second} FAILED\n    assert {first}({number}) == {number / 4}\n"
            f"E   ValueError: {chance.choice(FAULTS)}\ntests/test_{first}.py:{number}: ValueError\n"
        )
    return line


def _file_line(chance: random.Random) -> str:
    """Return a line of a search's output."""
    first, second = chance.sample(NAMES, 2)
    place = f"src/tides/{first}.py:{chance.randint(1, 400)}"
    return f"{place}:    {second} = {chance.choice(VERBS)}_{first}({second}, {chance.randint(1, 60)})\n"
