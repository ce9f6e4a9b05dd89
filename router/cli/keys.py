"""``qarr keys``: make, list and revoke the keys that requests carry, with their teams and budgets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from router.auth.api_keys import (
    KeyRecord,
    KeysError,
    add_key,
    read_content,
    read_key_file,
    read_keys,
    revoke_key,
    set_team,
    switch_keys,
)
from router.auth.network import is_loopback
from router.cli.client import UrlOption
from router.cli.common import (
    ConfigOption,
    JsonOption,
    check_tier,
    err,
    is_confirmed,
    plain,
    plural,
    print_table,
    printable,
    tiers_option,
)
from router.cli.key_followers import KeyFollowers, SeenRouter
from router.cli.keys_usage import keys_usage
from router.settings import Settings, load_settings
from tiers.spec import TierName

_DURATION = re.compile(r"([1-9]\d{0,5})([dh])")
LIST_COLUMNS = (
    "id",
    "name",
    "made",
    "state",
    "tiers",
    "priority",
    "requests/min",
    "tokens/min",
    "at once",
    "team",
    "admin",
)
keys_app = typer.Typer(
    help="Make, list and revoke the keys that requests carry; switch keys off and on.",
    no_args_is_help=True,
)
keys_app.command("usage")(keys_usage)

KeyNameArgument = Annotated[
    str, typer.Argument(help="Name of the key, shown in lists and logs.")
]
TeamNameArgument = Annotated[str, typer.Argument(help="Of the team.")]
IdOrNameArgument = Annotated[
    str, typer.Argument(metavar="ID|NAME", help="As 'qarr keys list' shows it.")
]


def _budget_option(name: str) -> Any:
    return typer.Option(
        name, metavar="AMOUNT", help="Budget of a UTC day or month; by default none."
    )


EngineSecondsDayOption = Annotated[float | None, _budget_option("--engine-seconds-day")]
EngineSecondsMonthOption = Annotated[
    float | None, _budget_option("--engine-seconds-month")
]
MoneyDayOption = Annotated[float | None, _budget_option("--money-day")]
MoneyMonthOption = Annotated[float | None, _budget_option("--money-month")]
TiersOption = Annotated[
    list[TierName] | None,
    tiers_option("A tier that the key may use (repeat for more); by default all."),
]
OverOption = Annotated[
    str,
    typer.Option(
        help="A hint or priority beyond the key is lowered (clamp) or refused (refuse)."
    ),
]
MaxPriorityOption = Annotated[
    str, typer.Option(help="Highest priority: interactive, standard or batch.")
]
LimitOption = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="By default no limit.")
]
AdminOption = Annotated[
    bool,
    typer.Option(
        "--admin",
        help="Allow the key to operate on replicas and to see everybody's requests.",
    ),
]
OverBudgetOption = Annotated[
    str,
    typer.Option(
        help="Over budget: refuse, or serve up to twice the budget on the cheapest tier (cheapest)."
    ),
]
ExpiresOption = Annotated[
    str | None,
    typer.Option(
        metavar="DATE|DURATION",
        help="Valid until: 2027-01-31 (its end, UTC), or 30d, 12h.",
    ),
]
TeamOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Team whose budgets it shares ('qarr keys team')."
    ),
]
OverflowOption = Annotated[
    bool,
    typer.Option(
        "--overflow",
        help="Allow its prompts to be sent to overflow.url when all tiers are full.",
    ),
]
YesOption = Annotated[
    bool, typer.Option("--yes", help="Make the first key without asking.")
]


@keys_app.command("add")
def keys_add(
    name: KeyNameArgument,
    engine_seconds_per_day: EngineSecondsDayOption = None,
    engine_seconds_per_month: EngineSecondsMonthOption = None,
    money_per_day: MoneyDayOption = None,
    money_per_month: MoneyMonthOption = None,
    tiers: TiersOption = None,
    over: OverOption = "clamp",
    max_priority: MaxPriorityOption = "interactive",
    requests_per_minute: LimitOption = None,
    tokens_per_minute: LimitOption = None,
    concurrent_requests: LimitOption = None,
    admin: AdminOption = False,
    over_budget: OverBudgetOption = "refuse",
    expires: ExpiresOption = None,
    team: TeamOption = None,
    overflow: OverflowOption = False,
    yes: YesOption = False,
    url: UrlOption = "",
    config: ConfigOption = None,
) -> None:
    """Make a key and print it. It is shown only this once: the file has its hash, not the key.

    With the first key, requests without one get 401 within a second. Where a router serves without keys, it asks before.
    """
    settings = load_settings(config)
    keys_path = settings.auth.keys_file
    for tier in tiers or ():
        check_tier(tier, settings)
    _check_budget_of_money(settings, money_per_day, money_per_month)
    expires_at: datetime | None = None
    if expires is not None:
        expires_at = expiry(expires, datetime.now(UTC))
    rights = {
        "engine_seconds_per_day": engine_seconds_per_day,
        "engine_seconds_per_month": engine_seconds_per_month,
        "money_per_day": money_per_day,
        "money_per_month": money_per_month,
        "tiers": tiers or None,
        "over": over,
        "max_priority": max_priority,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent_requests": concurrent_requests,
        "admin": admin,
        "over_budget": over_budget,
        "expires": expires_at,
        "team": team,
        "overflow": overflow or None,
    }
    is_first = read_content(keys_path) is None
    followers = KeyFollowers(settings, url)
    keyless_routers = [router for router in followers.look() if not router.needs_keys]
    if is_first and keyless_routers and not yes:
        _confirm_first(keyless_routers, keys_path)
    key, key_record = add_key(keys_path, name, **rights)
    typer.echo(key)
    err.print(
        plain(
            f"key {key_record.id} for {name}, in {keys_path}; this is the only time that it is shown"
        )
    )
    if read_key_file(keys_path).is_off:
        err.print("keys are off: requests need none until 'qarr keys on'")
    elif is_first:
        err.print(
            "it is the first one: from now on every request needs a key ('qarr keys off' ends that)"
        )
    followers.follow()


def _check_budget_of_money(settings: Settings, *amounts: float | None) -> None:
    """Raise ``KeysError`` if a budget of money is given and the settings have no price."""
    is_given = any(amount is not None for amount in amounts)
    if is_given and settings.budgets.replica_hour is None:
        raise KeysError(
            "a budget of money needs a price: set budgets.replica_hour, that of an hour of one replica"
        )


def _confirm_first(keyless_routers: list[SeenRouter], keys_path: Path) -> None:
    """Ask whether the first key may be made, which locks out all clients that have none."""
    addresses = ", ".join(router.url for router in keyless_routers)
    err.print(
        plain(
            f"{addresses} serves everyone without a key now. With the first key, every router that reads {keys_path} "
            f"answers requests without a key with 401 within a second, also those of its page. To hand out keys before they "
            f"are needed: 'qarr keys off', 'qarr keys add NAME' for each client, and at the end 'qarr keys on'."
        )
    )
    if not is_confirmed("Make the first key now?"):
        raise KeysError("no key was made; where nobody can be asked, --yes makes it")


@keys_app.command("off")
def keys_off(url: UrlOption = "", config: ConfigOption = None) -> None:
    """Serve everyone without a key again, from within a second on. The keys stay, for 'qarr keys on'.

    Also where the key file was deleted, or the last key revoked.
    """
    settings = load_settings(config)
    if settings.jwt.issuer:
        raise KeysError(
            "jwt.issuer is set, so requests need a token or a key: take it out first"
        )
    if not settings.auth.allow_keyless and not is_loopback(settings.server.host):
        raise KeysError(
            f"server.host is {settings.server.host}, which others can reach: set auth.allow_keyless = true first, to "
            f"serve everyone"
        )
    followers = KeyFollowers(settings, url)
    followers.look()
    key_file = switch_keys(settings.auth.keys_file, on=False)
    typer.echo(
        f"requests need no key; {_in_force(key_file.keys)} stay in {settings.auth.keys_file} for 'qarr keys on'"
    )
    followers.follow()


@keys_app.command("on")
def keys_on(url: UrlOption = "", config: ConfigOption = None) -> None:
    """Need keys again after 'qarr keys off'. Requests without one get 401 within a second."""
    settings = load_settings(config)
    followers = KeyFollowers(settings, url)
    followers.look()
    key_file = switch_keys(settings.auth.keys_file, on=True)
    typer.echo(
        f"requests need a key: {_in_force(key_file.keys)} in {settings.auth.keys_file}"
    )
    followers.follow()


def _in_force(keys: Sequence[KeyRecord]) -> str:
    count = sum(key.revoked is None for key in keys)
    return f"{plural(count, 'key')} in force"


@keys_app.command("list")
def keys_list(as_json: JsonOption = False, config: ConfigOption = None) -> None:
    """List all keys by id and name, revoked ones too. The keys themselves are not kept."""
    key_file = read_key_file(load_settings(config).auth.keys_file)
    if as_json:
        records = [key.model_dump_json(exclude={"sha256"}) for key in key_file.keys]
        typer.echo("[" + ",\n".join(records) + "]")
        return
    if not key_file.keys:
        typer.echo("no keys: make one with 'qarr keys add NAME'")
        return
    table = Table(*LIST_COLUMNS, box=None)
    for key in key_file.keys:
        table.add_row(*_row(key))
    print_table(table, 160)
    if key_file.is_off:
        typer.echo("keys are off: requests need none until 'qarr keys on'")


@keys_app.command("team")
def keys_team(
    name: TeamNameArgument,
    engine_seconds_per_day: EngineSecondsDayOption = None,
    engine_seconds_per_month: EngineSecondsMonthOption = None,
    money_per_day: MoneyDayOption = None,
    money_per_month: MoneyMonthOption = None,
    url: UrlOption = "",
    config: ConfigOption = None,
) -> None:
    """Make a team, or replace its budgets, which its keys share. Running routers follow within a second."""
    settings = load_settings(config)
    keys_path = settings.auth.keys_file
    if not read_keys(keys_path):
        raise KeysError(
            f"there is no key file {keys_path}: make a key first with 'qarr keys add NAME'"
        )
    _check_budget_of_money(settings, money_per_day, money_per_month)
    followers = KeyFollowers(settings, url)
    followers.look()
    team_record = set_team(
        keys_path,
        name,
        engine_seconds_per_day=engine_seconds_per_day,
        engine_seconds_per_month=engine_seconds_per_month,
        money_per_day=money_per_day,
        money_per_month=money_per_month,
    )
    budgets = [limit.text(settings.budgets.currency) for limit in team_record.limits()]
    typer.echo(f"team {name}: {', '.join(budgets) or 'no budget'}")
    followers.follow()


@keys_app.command("revoke")
def keys_revoke(
    id_or_name: IdOrNameArgument,
    url: UrlOption = "",
    config: ConfigOption = None,
) -> None:
    """Revoke a key. Running routers refuse it within a second; requests in progress finish."""
    settings = load_settings(config)
    keys_path = settings.auth.keys_file
    followers = KeyFollowers(settings, url)
    followers.look()
    revoked_key = revoke_key(keys_path, id_or_name)
    typer.echo(f"revoked key {revoked_key.id} of {printable(revoked_key.name)}")
    key_file = read_key_file(keys_path)
    has_key_in_force = any(key.revoked is None for key in key_file.keys)
    if not key_file.is_off and not has_key_in_force:
        err.print(
            "no key is in force, so nobody is served: 'qarr keys add NAME' makes one, 'qarr keys off' needs none"
        )
    followers.follow()


def expiry(text: str, now: datetime) -> datetime:
    """Return when a key ends to be valid: the end of a day in UTC, or some days or hours from now.

    Raises:
        KeysError: The text is neither, or names a moment that is past.
    """
    try:
        ends_at = _moment_in(text, now)
    except (ValueError, OverflowError):
        ends_at = now
    if ends_at <= now:
        raise KeysError(
            f"--expires {text[:40]}: a day to come as in 2027-01-31, or a duration as in 30d or 12h, is needed"
        )
    return ends_at


def _moment_in(text: str, now: datetime) -> datetime:
    duration = _DURATION.fullmatch(text)
    if duration is None:
        first_moment = datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
        return first_moment + timedelta(days=1)
    amount = int(duration[1])
    if duration[2] == "d":
        return now + timedelta(days=amount)
    return now + timedelta(hours=amount)


def _row(key: KeyRecord) -> list[str]:
    rate_limits = (
        key.requests_per_minute,
        key.tokens_per_minute,
        key.concurrent_requests,
    )
    tier_names = "all" if key.tiers is None else " ".join(key.tiers)
    is_admin = "yes" if key.admin else "-"
    return [
        key.id,
        printable(key.name),
        f"{key.created:%Y-%m-%d}",
        _state(key),
        tier_names,
        f"{key.max_priority} ({key.over})",
        *map(_limit_text, rate_limits),
        key.team or "-",
        is_admin,
    ]


def _limit_text(limit: int | None) -> str:
    if limit is None:
        return "-"
    return str(limit)


def _state(key: KeyRecord) -> str:
    """Return for people whether a key is in force."""
    if key.revoked:
        return f"revoked {key.revoked:%Y-%m-%d}"
    if key.expires is None:
        return "in force"
    is_expired = key.expires <= datetime.now(UTC)
    state_word = "expired" if is_expired else "until"
    return f"{state_word} {key.expires:%Y-%m-%d %H:%M}"
