"""``qarr keys``: make, list and revoke the keys that requests carry, with their teams and budgets."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer
from rich.table import Table

from router.auth.api_keys import KeyRecord, KeysError, add_key, read_keys, revoke_key, set_team
from router.cli.common import ConfigOption, check_tier, err, plain, print_table, tiers_option, with_options
from router.cli.usage import keys_usage
from router.settings import Settings, load_settings
from tiers.spec import TierName

_DURATION = re.compile(r"([1-9]\d{0,5})([dh])")
_SPANS = {"d": "days", "h": "hours"}
keys_app = typer.Typer(help="Make, list and revoke the keys that requests carry.", no_args_is_help=True)
keys_app.command("usage")(keys_usage)
TIERS_HELP = "A tier that the key may use (repeat for more); by default all."
OVER_HELP = "A hint or priority beyond the key is lowered (clamp) or refused (refuse)."
ADMIN_HELP = "Allow the key to operate on replicas and to see everybody's requests."
OVER_BUDGET_HELP = "Over budget: refuse, or serve up to twice the budget on the cheapest tier (cheapest)."
EXPIRES_HELP = "Valid until: 2027-01-31 (its end, UTC), or 30d, 12h."
TEAM_HELP = "Team whose budgets it shares ('qarr keys team')."
OVERFLOW_HELP = "Allow its prompts to be sent to overflow.url when all tiers are full."
LimitOption = Annotated[int | None, typer.Option(min=1, metavar="N", help="By default no limit.")]


def _amount(name: str) -> Any:
    return typer.Option(name, metavar="AMOUNT", help="Budget of a UTC day or month; by default none.")


@dataclass(frozen=True, slots=True)
class BudgetOptions:
    """Budgets, as the key file names them."""

    engine_seconds_per_day: Annotated[float | None, _amount("--engine-seconds-day")] = None
    engine_seconds_per_month: Annotated[float | None, _amount("--engine-seconds-month")] = None
    money_per_day: Annotated[float | None, _amount("--money-day")] = None
    money_per_month: Annotated[float | None, _amount("--money-month")] = None

    def check(self, settings: Settings) -> None:
        if settings.budgets.replica_hour is None and (self.money_per_day, self.money_per_month) != (None, None):
            raise KeysError("a budget of money needs a price: set budgets.replica_hour, that of an hour of one replica")


@dataclass(frozen=True, slots=True)
class RightsOptions(BudgetOptions):
    """Rights of a key, as the key file names them."""

    tiers: Annotated[list[TierName] | None, tiers_option(TIERS_HELP)] = None
    over: Annotated[str, typer.Option(help=OVER_HELP)] = "clamp"
    max_priority: Annotated[str, typer.Option(help="Highest priority: interactive, standard or batch.")] = "interactive"
    requests_per_minute: LimitOption = None
    tokens_per_minute: LimitOption = None
    concurrent_requests: LimitOption = None
    admin: Annotated[bool, typer.Option("--admin", help=ADMIN_HELP)] = False
    over_budget: Annotated[str, typer.Option(help=OVER_BUDGET_HELP)] = "refuse"
    expires: Annotated[str | None, typer.Option(metavar="DATE|DURATION", help=EXPIRES_HELP)] = None
    team: Annotated[str | None, typer.Option(metavar="NAME", help=TEAM_HELP)] = None
    overflow: Annotated[bool, typer.Option("--overflow", help=OVERFLOW_HELP)] = False


@keys_app.command("add")
@with_options
def keys_add(
    name: Annotated[str, typer.Argument(help="Name of the key, shown in lists and logs.")],
    options: RightsOptions,
    config: ConfigOption = None,
) -> None:
    """Make a key and print it. It is shown only this once: the file has its hash, not the key."""
    settings = load_settings(config)
    path = settings.auth.keys_file
    for tier in options.tiers or ():
        check_tier(tier, settings)
    options.check(settings)
    rights = asdict(options) | {"tiers": options.tiers or None, "overflow": options.overflow or None}
    if options.expires is not None:
        rights["expires"] = expiry(options.expires, datetime.now(UTC))
    key, record = add_key(path, name, **rights)
    typer.echo(key)
    err.print(plain(f"key {record.id} for {name}, in {path}; this is the only time that it is shown"))
    if len(read_keys(path)) == 1:
        err.print("it is the first one: from now on every request needs a key")


@keys_app.command("list")
def keys_list(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False, config: ConfigOption = None
) -> None:
    """List all keys by id and name, revoked ones too. The keys themselves are not kept."""
    keys = read_keys(load_settings(config).auth.keys_file)
    if as_json:
        typer.echo("[" + ",\n".join(k.model_dump_json(exclude={"sha256"}) for k in keys) + "]")
        return
    if not keys:
        typer.echo("no keys: make one with 'qarr keys add NAME'")
        return
    limits = ("requests/min", "tokens/min", "at once")
    table = Table("id", "name", "made", "state", "tiers", "priority", *limits, "team", "admin", box=None)
    for key in keys:
        table.add_row(*_row(key))
    print_table(table, 160)


@keys_app.command("team")
@with_options
def keys_team(
    name: Annotated[str, typer.Argument(help="Of the team.")], options: BudgetOptions, config: ConfigOption = None
) -> None:
    """Make a team, or replace its budgets, which its keys share. Running routers follow within a second."""
    settings = load_settings(config)
    path = settings.auth.keys_file
    if not read_keys(path):
        raise KeysError(f"there is no key file {path}: make a key first with 'qarr keys add NAME'")
    options.check(settings)
    team = set_team(path, name, **asdict(options))
    budgets = ", ".join(limit.text(settings.budgets.currency) for limit in team.limits())
    typer.echo(f"team {name}: {budgets or 'no budget'}")


@keys_app.command("revoke")
def keys_revoke(
    id_or_name: Annotated[str, typer.Argument(metavar="ID|NAME", help="As 'qarr keys list' shows it.")],
    config: ConfigOption = None,
) -> None:
    """Revoke a key. Running routers refuse it within a second; requests in progress finish."""
    gone = revoke_key(load_settings(config).auth.keys_file, id_or_name)
    typer.echo(f"revoked key {gone.id} of {gone.name}")


def expiry(text: str, now: datetime) -> datetime:
    """Return when a key ends to be valid: the end of a day in UTC, or some days or hours from now, or ``KeysError``."""
    found = _DURATION.fullmatch(text)
    try:
        if found is not None:
            ends = now + timedelta(**{_SPANS[found[2]]: int(found[1])})
        else:
            ends = datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC) + timedelta(days=1)
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
        key.name,
        f"{key.created:%Y-%m-%d}",
        state,
        "all" if key.tiers is None else " ".join(key.tiers),
        f"{key.max_priority} ({key.over})",
        *("-" if limit is None else str(limit) for limit in limits),
        key.team or "-",
        "yes" if key.admin else "-",
    ]
