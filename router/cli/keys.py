"""``qarr keys``: make, list and revoke the keys that requests carry, with their teams and budgets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
    check_tier,
    err,
    is_confirmed,
    plain,
    print_table,
    printable,
    tiers_option,
    with_options,
)
from router.cli.key_followers import KeyFollowers, SeenRouter
from router.cli.usage import keys_usage
from router.settings import Settings, load_settings
from tiers.spec import TierName

_DURATION = re.compile(r"([1-9]\d{0,5})([dh])")
_SPANS = {"d": "days", "h": "hours"}
keys_app = typer.Typer(
    help="Make, list and revoke the keys that requests carry; switch keys off and on.",
    no_args_is_help=True,
)
keys_app.command("usage")(keys_usage)
TIERS_HELP = "A tier that the key may use (repeat for more); by default all."
OVER_HELP = "A hint or priority beyond the key is lowered (clamp) or refused (refuse)."
ADMIN_HELP = "Allow the key to operate on replicas and to see everybody's requests."
OVER_BUDGET_HELP = "Over budget: refuse, or serve up to twice the budget on the cheapest tier (cheapest)."
EXPIRES_HELP = "Valid until: 2027-01-31 (its end, UTC), or 30d, 12h."
TEAM_HELP = "Team whose budgets it shares ('qarr keys team')."
OVERFLOW_HELP = "Allow its prompts to be sent to overflow.url when all tiers are full."
YES_HELP = "Make the first key without asking."
LimitOption = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="By default no limit.")
]


def _amount(name: str) -> Any:
    return typer.Option(
        name, metavar="AMOUNT", help="Budget of a UTC day or month; by default none."
    )


@dataclass(frozen=True, slots=True)
class BudgetOptions:
    """Budgets, as the key file names them."""

    engine_seconds_per_day: Annotated[float | None, _amount("--engine-seconds-day")] = (
        None
    )
    engine_seconds_per_month: Annotated[
        float | None, _amount("--engine-seconds-month")
    ] = None
    money_per_day: Annotated[float | None, _amount("--money-day")] = None
    money_per_month: Annotated[float | None, _amount("--money-month")] = None

    def check(self, settings: Settings) -> None:
        if settings.budgets.replica_hour is None and (
            self.money_per_day,
            self.money_per_month,
        ) != (None, None):
            raise KeysError(
                "a budget of money needs a price: set budgets.replica_hour, that of an hour of one replica"
            )


@dataclass(frozen=True, slots=True)
class RightsOptions(BudgetOptions):
    """Rights of a key, as the key file names them."""

    tiers: Annotated[list[TierName] | None, tiers_option(TIERS_HELP)] = None
    over: Annotated[str, typer.Option(help=OVER_HELP)] = "clamp"
    max_priority: Annotated[
        str, typer.Option(help="Highest priority: interactive, standard or batch.")
    ] = "interactive"
    requests_per_minute: LimitOption = None
    tokens_per_minute: LimitOption = None
    concurrent_requests: LimitOption = None
    admin: Annotated[bool, typer.Option("--admin", help=ADMIN_HELP)] = False
    over_budget: Annotated[str, typer.Option(help=OVER_BUDGET_HELP)] = "refuse"
    expires: Annotated[
        str | None, typer.Option(metavar="DATE|DURATION", help=EXPIRES_HELP)
    ] = None
    team: Annotated[str | None, typer.Option(metavar="NAME", help=TEAM_HELP)] = None
    overflow: Annotated[bool, typer.Option("--overflow", help=OVERFLOW_HELP)] = False


@keys_app.command("add")
@with_options
def keys_add(
    name: Annotated[
        str, typer.Argument(help="Name of the key, shown in lists and logs.")
    ],
    options: RightsOptions,
    yes: Annotated[bool, typer.Option("--yes", help=YES_HELP)] = False,
    url: UrlOption = "",
    config: ConfigOption = None,
) -> None:
    """Make a key and print it. It is shown only this once: the file has its hash, not the key.

    With the first key, requests without one get 401 within a second. Where a router serves without keys, it asks before.
    """
    settings = load_settings(config)
    path = settings.auth.keys_file
    for tier in options.tiers or ():
        check_tier(tier, settings)
    options.check(settings)
    rights = asdict(options) | {
        "tiers": options.tiers or None,
        "overflow": options.overflow or None,
    }
    if options.expires is not None:
        rights["expires"] = expiry(options.expires, datetime.now(UTC))
    is_first = read_content(path) is None
    followers = KeyFollowers(settings, url)
    keyless_routers = [router for router in followers.look() if not router.needs_keys]
    if is_first and keyless_routers and not yes:
        _confirm_first(keyless_routers, path)
    key, record = add_key(path, name, **rights)
    typer.echo(key)
    err.print(
        plain(
            f"key {record.id} for {name}, in {path}; this is the only time that it is shown"
        )
    )
    if read_key_file(path).is_off:
        err.print("keys are off: requests need none until 'qarr keys on'")
    elif is_first:
        err.print(
            "it is the first one: from now on every request needs a key ('qarr keys off' ends that)"
        )
    followers.follow()


def _confirm_first(keyless_routers: list[SeenRouter], path: Path) -> None:
    """Ask whether the first key may be made, which locks out all clients that have none."""
    addresses = ", ".join(router.url for router in keyless_routers)
    err.print(
        plain(
            f"{addresses} serves everyone without a key now. With the first key, every router that reads {path} answers "
            f"requests without a key with 401 within a second, also those of its page. To hand out keys before they are "
            f"needed: 'qarr keys off', 'qarr keys add NAME' for each client, and at the end 'qarr keys on'."
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
    kept = switch_keys(settings.auth.keys_file, on=False)
    typer.echo(
        f"requests need no key; {_in_force(kept.keys)} stay in {settings.auth.keys_file} for 'qarr keys on'"
    )
    followers.follow()


@keys_app.command("on")
def keys_on(url: UrlOption = "", config: ConfigOption = None) -> None:
    """Need keys again after 'qarr keys off'. Requests without one get 401 within a second."""
    settings = load_settings(config)
    followers = KeyFollowers(settings, url)
    followers.look()
    kept = switch_keys(settings.auth.keys_file, on=True)
    typer.echo(
        f"requests need a key: {_in_force(kept.keys)} in {settings.auth.keys_file}"
    )
    followers.follow()


def _in_force(keys: Sequence[KeyRecord]) -> str:
    count = sum(key.revoked is None for key in keys)
    return "1 key in force" if count == 1 else f"{count} keys in force"


@keys_app.command("list")
def keys_list(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    config: ConfigOption = None,
) -> None:
    """List all keys by id and name, revoked ones too. The keys themselves are not kept."""
    file = read_key_file(load_settings(config).auth.keys_file)
    keys = file.keys
    if as_json:
        typer.echo(
            "[" + ",\n".join(k.model_dump_json(exclude={"sha256"}) for k in keys) + "]"
        )
        return
    if not keys:
        typer.echo("no keys: make one with 'qarr keys add NAME'")
        return
    limits = ("requests/min", "tokens/min", "at once")
    table = Table(
        "id",
        "name",
        "made",
        "state",
        "tiers",
        "priority",
        *limits,
        "team",
        "admin",
        box=None,
    )
    for key in keys:
        table.add_row(*_row(key))
    print_table(table, 160)
    if file.is_off:
        typer.echo("keys are off: requests need none until 'qarr keys on'")


@keys_app.command("team")
@with_options
def keys_team(
    name: Annotated[str, typer.Argument(help="Of the team.")],
    options: BudgetOptions,
    url: UrlOption = "",
    config: ConfigOption = None,
) -> None:
    """Make a team, or replace its budgets, which its keys share. Running routers follow within a second."""
    settings = load_settings(config)
    path = settings.auth.keys_file
    if not read_keys(path):
        raise KeysError(
            f"there is no key file {path}: make a key first with 'qarr keys add NAME'"
        )
    options.check(settings)
    followers = KeyFollowers(settings, url)
    followers.look()
    team = set_team(path, name, **asdict(options))
    budgets = ", ".join(
        limit.text(settings.budgets.currency) for limit in team.limits()
    )
    typer.echo(f"team {name}: {budgets or 'no budget'}")
    followers.follow()


@keys_app.command("revoke")
def keys_revoke(
    id_or_name: Annotated[
        str, typer.Argument(metavar="ID|NAME", help="As 'qarr keys list' shows it.")
    ],
    url: UrlOption = "",
    config: ConfigOption = None,
) -> None:
    """Revoke a key. Running routers refuse it within a second; requests in progress finish."""
    settings = load_settings(config)
    path = settings.auth.keys_file
    followers = KeyFollowers(settings, url)
    followers.look()
    gone = revoke_key(path, id_or_name)
    typer.echo(f"revoked key {gone.id} of {printable(gone.name)}")
    file = read_key_file(path)
    if not file.is_off and all(key.revoked is not None for key in file.keys):
        err.print(
            "no key is in force, so nobody is served: 'qarr keys add NAME' makes one, 'qarr keys off' needs none"
        )
    followers.follow()


def expiry(text: str, now: datetime) -> datetime:
    """Return when a key ends to be valid: the end of a day in UTC, or some days or hours from now, or ``KeysError``."""
    found = _DURATION.fullmatch(text)
    try:
        if found is not None:
            ends = now + timedelta(**{_SPANS[found[2]]: int(found[1])})
        else:
            ends = datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC) + timedelta(
                days=1
            )
    except (ValueError, OverflowError):
        ends = now
    if ends <= now:
        raise KeysError(
            f"--expires {text[:40]}: a day to come as in 2027-01-31, or a duration as in 30d or 12h, is needed"
        )
    return ends


def _row(key: KeyRecord) -> list[str]:
    state = f"revoked {key.revoked:%Y-%m-%d}" if key.revoked else "in force"
    if key.expires is not None and not key.revoked:
        state = f"{'expired' if key.expires <= datetime.now(UTC) else 'until'} {key.expires:%Y-%m-%d %H:%M}"
    limits = (key.requests_per_minute, key.tokens_per_minute, key.concurrent_requests)
    return [
        key.id,
        printable(key.name),
        f"{key.created:%Y-%m-%d}",
        state,
        "all" if key.tiers is None else " ".join(key.tiers),
        f"{key.max_priority} ({key.over})",
        *("-" if limit is None else str(limit) for limit in limits),
        key.team or "-",
        "yes" if key.admin else "-",
    ]
