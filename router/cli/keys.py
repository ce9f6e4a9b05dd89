"""``qarr keys``: make, list and revoke the keys that requests carry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from router.auth.api_keys import add_key, read_keys, revoke_key
from router.cli.common import ConfigOption, check_tier, err, plain, print_table
from router.settings import load_settings
from tiers.spec import TierName

if TYPE_CHECKING:
    from router.auth.api_keys import KeyRecord

keys_app = typer.Typer(help="Make, list and revoke the keys that requests carry.", no_args_is_help=True)
LimitOption = Annotated[int | None, typer.Option(min=1, metavar="N", help="By default no limit.")]


@keys_app.command("add")
def keys_add(
    name: Annotated[str, typer.Argument(help="Whose key it is, for people and logs.")],
    tier: Annotated[
        list[TierName] | None,
        typer.Option(
            help="A tier that may serve it (repeat for more); by default all.", parser=TierName, metavar="TIER"
        ),
    ] = None,
    over: Annotated[
        str,
        typer.Option(help="What happens to a hint or priority beyond the key: lowered (clamp) or refused (refuse)."),
    ] = "clamp",
    max_priority: Annotated[str, typer.Option(help="interactive, standard or batch.")] = "interactive",
    requests_per_minute: LimitOption = None,
    tokens_per_minute: LimitOption = None,
    concurrent_requests: LimitOption = None,
    admin: Annotated[
        bool, typer.Option("--admin", help="Allow it to operate on replicas and to see everybody's requests.")
    ] = False,
    config: ConfigOption = None,
) -> None:
    """Make a key and print it. It is shown only this once: the file has its hash, not the key."""
    settings = load_settings(config)
    path = settings.auth.keys_file
    for each in tier or ():
        check_tier(each, settings)
    rights: dict[str, Any] = {
        "over": over,
        "max_priority": max_priority,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent_requests": concurrent_requests,
        "admin": admin,
    }
    if tier:
        rights["tiers"] = tuple(tier)
    first = not path.exists()
    key, record = add_key(path, name, **rights)
    typer.echo(key)
    err.print(plain(f"key {record.id} for {name}, in {path}; this is the only time that it is shown"))
    if first:
        err.print("it is the first one: from now on every request needs a key")


@keys_app.command("list")
def keys_list(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    config: ConfigOption = None,
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
    table = Table("id", "name", "made", "state", "tiers", "priority", *limits, "admin", box=None)
    for key in keys:
        table.add_row(*_row(key))
    print_table(table, 160)


@keys_app.command("revoke")
def keys_revoke(
    id_or_name: Annotated[str, typer.Argument(metavar="ID|NAME", help="As 'qarr keys list' shows it.")],
    config: ConfigOption = None,
) -> None:
    """Revoke a key. Running routers refuse it within a second; requests in progress finish."""
    gone = revoke_key(load_settings(config).auth.keys_file, id_or_name)
    typer.echo(f"revoked key {gone.id} of {gone.name}")


def _row(key: KeyRecord) -> list[str]:
    state = f"revoked {key.revoked:%Y-%m-%d}" if key.revoked else "in force"
    limits = (key.requests_per_minute, key.tokens_per_minute, key.concurrent_requests)
    return [
        key.id,
        key.name,
        f"{key.created:%Y-%m-%d}",
        state,
        "all" if key.tiers is None else " ".join(key.tiers),
        f"{key.max_priority} ({key.over})",
        *("-" if limit is None else str(limit) for limit in limits),
        "yes" if key.admin else "-",
    ]
