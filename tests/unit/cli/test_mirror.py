"""``qarr mirror``: the table, and what it says while nothing is mirrored."""

from __future__ import annotations

from tests.unit.cli.stub_router import qarr, stub_router

NONE = {
    "same": 0, "differs": 0, "sampled": 0, "failed": 0, "dropped": 0, "same_share": None, "finish_reason_differs": 0, "tier_differs": 0,
    "common_prefix": None, "length_ratio": None, "ttft_ratio": None, "duration_ratio": None,
}  # fmt: skip
ROW = {
    **NONE, "same": 9, "differs": 1, "failed": 2, "same_share": 0.9, "common_prefix": 1.0, "length_ratio": 1.02, "ttft_ratio": 0.845,
    "duration_ratio": 1.5, "finish_reason_differs": 1,
}  # fmt: skip


def printed(answer: dict[str, object]) -> list[list[str]]:
    """Return the words of each line that the command prints."""
    with stub_router(**{"GET /mirror": (200, answer)}) as router:
        done = qarr("mirror", "--url", router.url)
    assert done.exit_code == 0, done.output
    return [line.split() for line in done.stdout.splitlines() if line.strip()]


def test_every_class_and_tier_is_a_row_and_all_the_last() -> None:
    """What is not known is a dash."""
    rows = [{"class": "code", "tier": "fast", **ROW}, {"class": "chat", "tier": "precise", **NONE, "dropped": 1}]
    found = printed({"url": "http://h/v1", "share": 0.05, "all": {**ROW, "dropped": 1}, "rows": rows})
    numbers = ["90.0%", "1", "1.02", "0.845", "1.5"]
    assert found[0] == ["mirroring:", "0.05", "of", "answers", "to", "http://h/v1"]
    assert found[2] == ["code", "fast", "9", "1", "0", "2", "0", *numbers]
    assert found[3] == ["chat", "precise", "0", "0", "0", "0", "1", *"-----"]
    assert found[4] == ["all", "all", "9", "1", "0", "2", "1", *numbers]
    assert found[5] == ["1", "ended", "otherwise,", "0", "on", "another", "tier"]


def test_a_router_that_does_not_mirror_says_how_it_would() -> None:
    """Its table is empty."""
    found = printed({"url": None, "share": 0.0, "all": NONE, "rows": []})
    assert found == [["mirroring:", "off:", "set", "mirror.url"]]
