"""``qarr tiers``: look at the running fleet, and operate on its replicas."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.table import Table

from router.cli.client import RouterApiClient, is_alone
from router.cli.common import (
    ConfigOption,
    Progress,
    check_tier,
    err,
    is_confirmed,
    output,
    plain,
    print_table,
    printable,
    with_options,
)
from router.deployment.options import make_canary
from router.settings import load_settings
from tiers.address import normalised
from tiers.errors import OperationError
from tiers.lifecycle.operations import Kind
from tiers.preparing import Preparing
from tiers.spec import TierName

tiers_app = typer.Typer(
    help="Show the running fleet; add, remove, drain, resume, restart and recycle its replicas."
)
POLL_S = 0.5
COMING = {"starting", "warming"}
NARROW = 130  # columns of a terminal
GONE: dict[str, Any] = {"state": "gone", "detail": None}
OPERATIONS: dict[Kind, str] = {
    "drain": "Give a replica no new requests; open ones finish. It keeps running and can be resumed.",
    "resume": "Give a drained replica requests again; a quarantined one is warmed up and compared first.",
    "restart": "Drain an engine, stop it and start it again; also one that has failed.",
    "recycle": "Replace an engine by a new one, started beside it so that capacity never falls.",
}
INTERRUPTING: set[Kind] = {"drain", "restart"}
TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="TIER|REPLICA", help="One replica, or all of a tier, one after another."
    ),
]
ForceOption = Annotated[
    bool,
    typer.Option(
        "--force", help="Do not ask when no replica would be left that serves."
    ),
]
EngineArgument = Annotated[
    str,
    typer.Argument(
        metavar="URL", help="Address of the engine, as http://10.0.0.5:8000."
    ),
]


@tiers_app.callback(invoke_without_command=True)
@with_options
def tiers_list(context: typer.Context, *, router: RouterApiClient) -> None:
    """Show the running fleet; add, remove, drain, resume, restart and recycle its replicas."""
    if is_alone(context):
        _print_fleet(router.ask("/tiers"))


def _operation(kind: Kind) -> Callable[..., None]:
    def operate(target: TargetArgument, *, router: RouterApiClient) -> None:
        for replica in _replicas(router.ask("/tiers"), target):
            _follow(router, kind, replica)

    def operate_on_serving(
        target: TargetArgument, *, force: ForceOption = False, router: RouterApiClient
    ) -> None:
        fleet = router.ask("/tiers")
        replicas = _replicas(fleet, target)
        if not force:
            _confirm_outage(fleet, kind, replicas)
        for replica in replicas:
            _follow(router, kind, replica)

    return with_options(operate_on_serving if kind in INTERRUPTING else operate)


for _kind, _help in OPERATIONS.items():
    tiers_app.command(_kind, help=_help)(_operation(_kind))
TierArgument = Annotated[TierName, typer.Argument(parser=TierName, metavar="TIER")]


@tiers_app.command("add")
@with_options
def tiers_add(
    tier: TierArgument, engine: EngineArgument, *, router: RouterApiClient
) -> None:
    """Add an engine that runs elsewhere to a tier. It is warmed up and compared before it gets requests.

    A restart of the router forgets it: name it in `tiers.<name>.urls` or in `discovery.file` to keep it.
    """
    replica = router.ask("/admin/replicas", "POST", {"tier": tier, "url": engine})["id"]
    progress = Progress()
    while (now := _find(router.ask("/tiers"), replica))["state"] in COMING:
        progress(f"{replica}: is {now['state']}")
        time.sleep(POLL_S)
    if now["state"] != "ready":
        raise OperationError(
            f"{replica} is added, but is {now['state']}: {_detail(now['detail'], {})}; it gets requests when it is ready, "
            f"'qarr tiers remove {replica}' takes it out"
        )
    typer.echo(f"{replica}: added, is ready")


@tiers_app.command("remove")
@with_options
def tiers_remove(
    replica: Annotated[
        str,
        typer.Argument(
            metavar="REPLICA", help="The replica's id, or its engine's URL."
        ),
    ],
    now: Annotated[
        bool, typer.Option("--now", help="Do not wait for open requests.")
    ] = False,
    *,
    force: ForceOption = False,
    router: RouterApiClient,
) -> None:
    """Drain an engine that runs elsewhere, and forget it. The engine itself goes on running.

    A restart of the router adds it again if `tiers.<name>.urls` has it.
    """
    fleet = router.ask("/tiers")
    replica_id = _named(fleet, replica)
    if not force:
        _confirm_outage(fleet, "remove", [replica_id])
    _follow(router, "remove", replica_id, {"now": now})


@tiers_app.command("record")
def tiers_record(tier: TierArgument, config: ConfigOption = None) -> None:
    """Accept what a tier's engines compute, and record it as the reference for later starts.

    For an hour, starts and resumes of its engines are recorded and not compared.
    """
    settings = load_settings(config)
    check_tier(tier, settings)
    canary = make_canary(settings)
    count = canary.accept(tier)
    deleted = f"{count} records deleted in {canary.path}; " if count else ""
    typer.echo(
        f"{tier}: {deleted}starts and resumes of the next hour are accepted and recorded"
    )


def _confirm_outage(fleet: dict[str, Any], kind: Kind, replicas: list[str]) -> None:
    """Ask before an operation that would leave no replica of any tier that serves; ``OperationError``: it is not to be."""
    ready = {
        replica["id"]
        for tier in fleet["tiers"]
        for replica in tier["replicas"]
        if replica["state"] == "ready"
    }
    # A tier's replicas are restarted one after another, so others serve meanwhile if there are any.
    stopping = (
        [{replica} for replica in replicas] if kind == "restart" else [set(replicas)]
    )
    if not ready or not any(ready <= stopped for stopped in stopping):
        return
    names = ", ".join(sorted(ready))
    err.print(
        plain(
            f"no other replica of any tier is ready: after {kind} of {names} every request gets 503"
        )
    )
    if not is_confirmed(f"{kind.capitalize()} {names} all the same?"):
        raise OperationError(
            f"{kind} was not begun; where nobody can be asked, --force begins it"
        )


def _follow(
    router: RouterApiClient,
    kind: Kind,
    replica: str,
    body: dict[str, Any] | None = None,
) -> None:
    operation = router.ask(f"/admin/replicas/{replica}/{kind}", "POST", body)
    progress = Progress()
    while True:
        successor, detail = operation["successor"], operation["detail"]
        found = _find(router.ask("/tiers"), successor or replica)
        state = (
            "gone"
            if found is GONE
            else f"{found['state']}, {found['in_flight']} in flight"
        )
        progress(
            f"{replica}: {detail} ({state})"
            if successor
            else f"{replica}: {detail} (is {state})"
        )
        if operation["state"] != "running":
            break
        time.sleep(POLL_S)
        operation = router.ask(f"/admin/operations/{operation['id']}")
    if operation["state"] == "failed":
        raise OperationError(f"{kind} of {replica} failed: {detail}")
    typer.echo(f"{replica}: {kind} done, {detail}")


def _named(fleet: dict[str, Any], replica: str) -> str:
    known = [r for tier in fleet["tiers"] for r in tier["replicas"]]
    for each in known:
        if replica == each["id"] or (
            each["url"] and normalised(replica) == normalised(each["url"])
        ):
            return str(each["id"])
    raise OperationError(
        f"there is no replica {replica!r}: {', '.join(r['id'] for r in known)}"
    )


def _replicas(fleet: dict[str, Any], target: str) -> list[str]:
    by_tier = {
        tier["tier"]: [r["id"] for r in tier["replicas"]] for tier in fleet["tiers"]
    }
    if by_tier.get(target):
        return list(by_tier[target])
    known = [replica for replicas in by_tier.values() for replica in replicas]
    if target not in known:
        raise OperationError(
            f"there is no tier or replica {target!r}: {', '.join([*by_tier, *known])}"
        )
    return [target]


def _find(fleet: dict[str, Any], replica_id: str) -> dict[str, Any]:
    found = (
        r for tier in fleet["tiers"] for r in tier["replicas"] if r["id"] == replica_id
    )
    return next(found, GONE)


def _print_fleet(fleet: dict[str, Any]) -> None:
    typer.echo(f"{fleet['model']} on {fleet['machine']}")
    if fleet.get("scope") == "own":
        typer.echo(
            "only operators' keys see where engines are, and why one is not ready"
        )
    loads = ("in flight", "served", "failed", "KV cache", "ms/token")
    columns = ("tier", "replica", "state", "precision", *loads, "pid", "url")
    # ids are worth more than addresses, which are cut first
    narrow = output(200).width < NARROW
    table, details = Table(*(columns[:-2] if narrow else columns), box=None), {}
    for tier in fleet["tiers"]:
        for replica in tier["replicas"]:
            table.add_row(
                tier["tier"], *(_row(replica)[:-2] if narrow else _row(replica))
            )
            accepted = replica.get("draft_acceptance")
            drafts = (
                "" if accepted is None else f"{accepted:.0%} of drafted tokens accepted"
            )
            details[replica["id"]] = "; ".join(
                filter(None, (_detail(replica["detail"], tier), drafts))
            )
        if not tier["replicas"]:
            table.add_row(
                tier["tier"], "-", tier["state"], *"-" * (len(table.columns) - 3)
            )
            details[tier["tier"]] = _detail(tier.get("detail"), tier)
    print_table(table, 200)
    for name, detail in details.items():  # whole, whatever the terminal's width
        if detail:
            typer.echo(f"detail of {name}: {detail}")


def _detail(said: str | None, tier: dict[str, Any]) -> str:
    """Return why something is not ready, or what its tier needs before it serves for the first time."""
    text = said or (
        Preparing(**tier["preparing"]).text if tier.get("preparing") else ""
    )
    return printable(text.partition("\n")[0].partition(". Last lines of")[0])


def _row(replica: dict[str, Any]) -> list[str]:
    usage, pace = replica["kv_cache_usage"], replica["tpot_ms"]
    return [
        replica["id"],
        replica["state"],
        replica.get("precision", "-"),
        str(replica["in_flight"]),
        str(replica["served"]),
        str(replica["failed"]),
        "-" if usage is None else f"{usage:.0%}",
        "-" if pace is None else f"{pace:.1f}",
        str(replica["pid"] or "-"),
        replica["url"] or "-",
    ]
