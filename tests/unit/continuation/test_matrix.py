"""Wherever an engine breaks off, its answer is whole, or ends with an error: never wrong, never doubled, never cut in silence."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.unit.continuation.expected import (
    ENGINES,
    RANK,
    RESUMING,
    Break,
    breaks_of,
    read_expected,
    second_breaks_of,
)
from tests.unit.continuation.matrix import NEVER, Outcome, running_matrix
from tests.unit.continuation.recording import load
from tests.unit.continuation.requests import ENDPOINTS, requests


async def _breaks(tmp_path: Path, endpoint: str, *, resumes: bool) -> list[Break]:
    """Break every stream of an endpoint at each event's end, and within each event."""
    async with running_matrix(tmp_path, load(), resumes=resumes) as matrix:
        return [
            tried
            for request in requests()
            if request.endpoint == endpoint
            async for tried in breaks_of(matrix, request)
        ]


@pytest.mark.parametrize("engines", ENGINES)
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_no_cell_gets_worse(tmp_path: Path, endpoint: str, engines: str) -> None:
    """Each cell is at least as good as docs/continuation.md says, and no answer is wrong, doubled or silently cut."""
    expected = read_expected()[engines]
    tries = asyncio.run(_breaks(tmp_path, endpoint, resumes=ENGINES[engines]))
    worse = []
    seen: dict[str, set[str]] = {}
    for tried in tries:
        row = expected[tried.request.name]
        seen.setdefault(tried.request.name, set()).add(tried.moment)
        wanted = Outcome(row[tried.moment])
        outcome = tried.verdict.outcome
        if outcome in NEVER or RANK[outcome] > RANK[wanted]:
            worse.append(tried)
    assert not worse, "\n".join(map(str, worse[:5]))
    of_endpoint = {
        request.name for request in requests() if request.endpoint == endpoint
    }
    assert seen == {name: set(expected[name]) for name in of_endpoint}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_what_continues_an_answer_may_break_too(tmp_path: Path, endpoint: str) -> None:
    """A second break is as harmless as the first one."""

    async def second_breaks() -> list[Break]:
        async with running_matrix(tmp_path, load(), resumes=True) as matrix:
            return [
                tried
                for request in requests()
                if request.endpoint == endpoint
                async for tried in second_breaks_of(matrix, request)
            ]

    expected = read_expected()[RESUMING]
    tries = asyncio.run(second_breaks())
    assert tries
    worse = [
        tried
        for tried in tries
        if RANK[tried.verdict.outcome]
        > RANK[Outcome(expected[tried.request.name][tried.moment])]
    ]
    assert not worse, "\n".join(map(str, worse[:5]))


def test_what_is_recorded_has_every_cell() -> None:
    """Each request of the matrix was recorded, and each way of resuming it."""
    recordings = load()
    assert {request.name for request in requests()} == set(recordings.answers)
    for name, answer in recordings.answers.items():
        row = read_expected()[RESUMING][name]
        assert row, name
        for streams in answer.streams.values():
            assert 0 in streams or 1 in streams, name
