"""``qarr keys``, in this process: what is printed, and what is not."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from router.auth.api_keys import KeysError, read_key_file, read_keys, version_of
from router.cli.keys import expiry
from tests.unit.cli.stub_router import qarr, stub_router


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the key file; no running router is looked for."""
    monkeypatch.setenv("QARR_AUTH__KEYS_FILE", str(tmp_path / "keys.json"))
    monkeypatch.setenv("QARR_SERVER__PORT", "0")
    monkeypatch.setenv("QARR_SERVER__RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "keys.json"


def test_the_key_is_on_standard_output_alone(file: Path) -> None:
    """So that a script can take it; the first key says that requests need one from now on, the next ones do not."""
    first = qarr("keys", "add", "[red]Ann")
    second = qarr("keys", "add", "Ben")
    assert first.stdout.startswith("qarr-")
    assert len(first.stdout.split()) == 1
    assert "for [red]Ann, in " in first.stderr.replace("\n", " ")
    assert "every request needs a key" in first.stderr
    assert "every request needs a key" not in second.stderr
    assert first.stdout.strip() not in file.read_text()


def test_rights_come_from_the_options(file: Path) -> None:
    """What is not given stays at its default: all tiers, no limits, no operator."""
    options = (
        "--tier fast --tier balanced --over refuse --max-priority batch --admin "
        "--requests-per-minute 7"
    )
    assert qarr("keys", "add", "a", *options.split()).exit_code == 0
    assert qarr("keys", "add", "b").exit_code == 0
    limited_key, default_key = read_keys(file)
    assert limited_key.tiers == ("fast", "balanced")
    assert limited_key.over == "refuse"
    assert limited_key.max_priority == "batch"
    assert limited_key.admin is True
    assert limited_key.requests_per_minute == 7
    assert limited_key.tokens_per_minute is None
    assert limited_key.concurrent_requests is None
    assert default_key.tiers is None
    assert default_key.over == "clamp"
    assert default_key.max_priority == "interactive"
    assert default_key.admin is False


def test_the_list_shows_rights_and_no_hash(file: Path) -> None:
    """One row a key, a revoked one with its date; names are not markup."""
    qarr("keys", "add", "[red]Ann", "--tier", "fast", "--concurrent-requests", "3")
    qarr("keys", "add", "Ben", "--admin")
    assert "revoked key" in qarr("keys", "revoke", "Ben").stdout
    shown = qarr("keys", "list").stdout
    ann, ben = shown.splitlines()[1:]
    assert ann.split()[1] == "[red]Ann"
    assert ann.split()[3:] == [
        "in",
        "force",
        "fast",
        "interactive",
        "(clamp)",
        "-",
        "-",
        "3",
        "-",
        "-",
    ]
    assert "revoked 20" in ben
    assert ben.split()[-1] == "yes"
    records = json.loads(qarr("keys", "list", "--json").stdout)
    assert [record["name"] for record in records] == ["[red]Ann", "Ben"]
    for record in read_keys(file):
        assert record.sha256 not in shown + json.dumps(records)


@pytest.mark.usefixtures("file")
def test_an_empty_list_says_how_to_make_one() -> None:
    assert "qarr keys add NAME" in qarr("keys", "list").stdout
    assert json.loads(qarr("keys", "list", "--json").stdout) == []


def test_unknown_keys_cannot_be_revoked(file: Path) -> None:
    assert isinstance(qarr("keys", "revoke", "nobody").exception, KeysError)
    assert not file.exists()


@pytest.mark.parametrize(
    "options", [["--over", "ignore"], ["--max-priority", "urgent"], ["--tier", "huge"]]
)
def test_unknown_rights_are_refused(options: list[str], file: Path) -> None:
    assert qarr("keys", "add", "a", *options).exit_code != 0
    assert not file.exists()
    assert "/no/k cannot be written" in str(
        qarr("keys", "add", "a", QARR_AUTH__KEYS_FILE="/proc/no/k").exception
    )


def test_keys_have_budgets_teams_and_an_end(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As given; a team must be there, money needs a price, and a key that ends says so in the list."""
    assert qarr("keys", "team", "blue").exit_code != 0
    assert not file.exists()
    budgeted = "--engine-seconds-day 1.5 --over-budget cheapest"
    assert qarr("keys", "add", "a", *budgeted.split()).exit_code == 0
    team = qarr("keys", "team", "blue", "--engine-seconds-month", "5")
    assert "5 engine-seconds a month" in team.stdout
    for bad in (
        "--team red",
        "--money-day 2",
        "--engine-seconds-day 0",
        "--over-budget never",
    ):
        result = qarr("keys", "add", "b", *bad.split())
        assert result.exit_code != 0, bad
        assert isinstance(result.exception, KeysError), bad
    monkeypatch.setenv("QARR_BUDGETS__REPLICA_HOUR", "4")
    in_a_team = "--team blue --money-day 2 --expires 2099-01-31"
    assert qarr("keys", "add", "b", *in_a_team.split()).exit_code == 0
    first, second = read_keys(file)
    assert first.engine_seconds_per_day == 1.5
    assert first.over_budget == "cheapest"
    assert first.expires is None
    assert second.team == "blue"
    assert second.money_per_day == 2
    assert str(second.expires) == "2099-02-01 00:00:00+00:00"
    assert "until 2099-02-01" in qarr("keys", "list").stdout


def health(
    version: str | None, *, required: bool, reasons: tuple[str, ...] = ()
) -> tuple[int, Any]:
    """Return what a router says of its keys; a router that has no tier yet says it with a 503."""
    return 503, {
        "status": "degraded",
        "reasons": reasons,
        "keys": {"required": required, "version": version},
    }


def test_the_first_key_of_a_running_router_is_asked_for(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is made: nobody who answers, and whoever says no, makes none; yes, and --yes, make it."""
    monkeypatch.setattr("router.cli.key_followers.FOLLOW_S", 0.1)
    with stub_router(**{"GET /health": health(None, required=False)}) as router:
        for answer in ("", "n\n", "\n"):
            refused = qarr("keys", "add", "a", "--url", router.url, stdin=answer)
            assert isinstance(refused.exception, KeysError)
            assert "--yes" in str(refused.exception)
            assert (
                f"{router.url} serves everyone without a key"
                in refused.stderr.replace("\n", " ")
            )
            assert "qarr keys off" in refused.stderr
            assert not file.exists()
        made = qarr("keys", "add", "a", "--url", router.url, stdin="y\n")
        assert made.exit_code == 0
        assert made.stdout.startswith("qarr-")
        assert len(made.stdout.split()) == 1
        assert "reads another file" in made.stderr.replace("\n", " ")
        # the second one locks nobody out
        assert qarr("keys", "add", "b", "--url", router.url).exit_code == 0
        file.unlink()
        assert qarr("keys", "add", "a", "--yes", "--url", router.url).exit_code == 0


def test_nobody_is_asked_where_no_keyless_router_is_seen(file: Path) -> None:
    """Not where keys are needed already, as by an issuer, nor of a server that does not say; it is told what was looked at."""
    for answer in (
        health(None, required=True),
        (200, {"status": "healthy"}),
        (200, b"<html>"),
        (404, {}),
    ):
        with stub_router(**{"GET /health": answer}) as router:
            result = qarr("keys", "add", "a", "--url", router.url)
        assert result.exit_code == 0, answer
        assert router.asked
        file.unlink()
    result = qarr("keys", "add", "a")
    assert "no running router was seen" in result.stderr


def test_a_change_waits_for_the_router(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it says that it has the file's content; one that keeps the old one is an error, with its own reasons."""
    monkeypatch.setattr("router.cli.key_followers.FOLLOW_S", 0.1)
    qarr("keys", "add", "a")
    old_version = version_of(file.read_bytes())
    reasons = ("the key file cannot be used: the keys read before stay in force",)
    with stub_router(
        **{"GET /health": health(old_version, required=True, reasons=reasons)}
    ) as router:
        result = qarr("keys", "revoke", "a", "--url", router.url)
        assert result.stdout.startswith("revoked key")
        assert isinstance(result.exception, KeysError)
        assert reasons[0] in str(result.exception)
        assert "still in force" in str(result.exception)
        assert "no key is in force" in result.stderr

    class Following(dict[str, Any]):
        """What a router says that has read the file at the third question."""

        questions = 0

        def get(self, key: str, default: Any = None) -> Any:
            del key, default
            self.questions += 1
            return health(
                version_of(file.read_bytes()) if self.questions > 2 else "before",
                required=True,
            )

    monkeypatch.setattr("router.cli.key_followers.FOLLOW_S", 30)
    with stub_router() as router:
        router.answers = Following()
        result = qarr("keys", "team", "blue", "--url", router.url)
        assert result.exit_code == 0
        assert f"the router at {router.url} has taken it over" in result.stderr.replace(
            "\n", " "
        )


def test_keys_are_switched_off_and_on(file: Path) -> None:
    """The keys stay meanwhile, and further ones can be made for clients before they are needed."""
    assert isinstance(qarr("keys", "on").exception, KeysError)
    assert "0 keys in force stay" in qarr("keys", "off").stdout
    added = qarr("keys", "add", "a")
    assert "keys are off" in added.stderr
    assert "keys are off" in qarr("keys", "list").stdout
    assert "1 key in force in" in qarr("keys", "on").stdout
    assert not read_key_file(file).is_off
    assert "keys are off" not in qarr("keys", "list").stdout
    assert "1 key in force stay" in qarr("keys", "off").stdout


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"QARR_SERVER__HOST": "0.0.0.0"}, "auth.allow_keyless = true"),
        (
            {
                "QARR_JWT__ISSUER": "https://a/",
                "QARR_JWT__AUDIENCE": "q",
                "QARR_JWT__JWKS": "/none",
            },
            "jwt.issuer is set",
        ),
    ],
)
def test_keys_are_not_switched_off_where_that_opens_nothing_or_too_much(
    settings: dict[str, str], says: str, file: Path
) -> None:
    assert says in str(qarr("keys", "off", **settings).exception)
    assert not file.exists()
    if "QARR_SERVER__HOST" in settings:
        assert (
            qarr("keys", "off", **settings, QARR_AUTH__ALLOW_KEYLESS="true").exit_code
            == 0
        )


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("30d", "2026-12-24 12:00:00"),
        ("12h", "2026-11-25 00:00:00"),
        ("2026-11-24", "2026-11-25 00:00:00"),
    ],
)
def test_when_a_key_ends(text: str, ends: str) -> None:
    """After days or hours, or at the end of a day in UTC."""
    assert (
        f"{expiry(text, datetime(2026, 11, 24, 12, tzinfo=UTC)):%Y-%m-%d %H:%M:%S}"
        == ends
    )


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-23",
        "0d",
        "30",
        "tomorrow",
        "2026-02-30",
        "9999999d",
        "2026-11-24T10:00",
    ],
)
def test_no_key_ends_in_the_past(text: str) -> None:
    """Nor at a time that is none, or beyond all calendars."""
    with pytest.raises(KeysError, match=r"--expires .*2027-01-31"):
        expiry(text, datetime(2026, 11, 24, 12, tzinfo=UTC))
