"""What the commands share."""

from __future__ import annotations

import re
import time
from io import StringIO

import pytest
from rich.console import Console
from rich.table import Table

from router.cli.common import (
    Progress,
    clock,
    fail,
    http_url,
    plain,
    print_table,
    printable,
    tier_settings,
)
from router.settings import load_settings


def test_fail_ends_with_the_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2; brackets in the text are not markup."""
    with pytest.raises(SystemExit) as caught:
        fail("limits[red] are [1, 2]")
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: limits[red] are [1, 2]\n"


@pytest.mark.parametrize("text", ["", "a [bold]b[/bold]", "[/]", "[[x]]"])
def test_plain_text_comes_out_as_it_went_in(text: str) -> None:
    out = StringIO()
    Console(file=out, width=80).print(plain(text), end="")
    assert out.getvalue() == text


def test_control_characters_become_spaces() -> None:
    """Each becomes one, so that columns keep their width; letters of other scripts stay."""
    assert printable("a\x1b[2Jb\nc\x07 \u00fc\u6a21") == "a [2Jb c  \u00fc\u6a21"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("::1", "http://[::1]:80"),
        ("h", "http://h:80"),
    ],
)
def test_urls_of_hosts(host: str, url: str) -> None:
    assert http_url(host, 80) == url


def test_tables_are_not_markup_and_have_a_width_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A name with brackets is printed whole, and a piped table is not cut to 80 columns."""
    table = Table("name", "detail", box=None)
    table.add_row("[red]x", "y" * 100)
    print_table(table, 160)
    assert "[red]x " in (shown := capsys.readouterr().out)
    assert "y" * 100 in shown


def test_clock_counts_from_the_start() -> None:
    assert re.fullmatch(r"  6[12]\.\d s", clock(time.monotonic() - 61))


def test_tiers_by_rising_precision() -> None:
    assert [tier.max_model_len for tier in tier_settings(load_settings())] == [
        2048,
        4096,
        8192,
    ]


def test_progress_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    log = Progress()
    for line in ("step [1]", "step [1]", "step [2]", "step [1]"):
        log(line)
    captured = capsys.readouterr()
    assert [line.partition(" s ")[2] for line in captured.err.splitlines()] == [
        "step [1]",
        "step [2]",
        "step [1]",
    ]
    assert captured.out == ""
