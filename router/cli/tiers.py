"""``qarr tiers``: look at the running fleet, and operate on its replicas."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.table import Table

from router.cli.client import KeyOption, RouterApiClient, UrlOption, is_alone
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
COMING_STATES = {"starting", "warming"}
PIPED_WIDTH = 200
NARROW = 130  # columns of a terminal
GONE: dict[str, Any] = {"state": "gone", "detail": None}
COLUMNS = (
    "tier",
    "replica",
    "state",
    "precision",
    "in flight",
    "served",
    "failed",
    "KV cache",
    "ms/token",
    "pid",
    "url",
)
# Ids are worth more than addresses and process ids, which are left out on a narrow terminal.
NARROW_COLUMNS = COLUMNS[:-2]
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


TierArgument = Annotated[TierName, typer.Argument(parser=TierName, metavar="TIER")]
ReplicaArgument = Annotated[
    str,
    typer.Argument(metavar="REPLICA", help="The replica's id, or its engine's URL."),
]
NowOption = Annotated[
    bool, typer.Option("--now", help="Do not wait for open requests.")
]


@tiers_app.callback(invoke_without_command=True)
def tiers_list(
    context: typer.Context,
    url: UrlOption = "",
    key: KeyOption = "",
    config: ConfigOption = None,
) -> None:
    """Show the running fleet; add, remove, drain, resume, restart and recycle its replicas."""
    if is_alone(context):
        router = RouterApiClient(url, key, config)
        _print_fleet(router.ask("/tiers"))


@tiers_app.command("drain")
def tiers_drain(
    target: TargetArgument,
    force: ForceOption = False,
    url: UrlOption = "",
    key: KeyOption = "",
    config: ConfigOption = None,
) -> None:
    """Give a replica no new requests; open ones finish. It keeps running and can be resumed."""
    router = RouterApiClient(url, key, config)
    _operate(router, "drain", target, may_end_service=force)


@tiers_app.command("resume")
def tiers_resume(
    target: TargetArgument,
    url: UrlOption = "",
    key: KeyOption = "",
    config: ConfigOption = None,
) -> None:
    """Give a drained replica requests again; a quarantined one is warmed up and compared first."""
    router = RouterApiClient(url, key, config)
    _operate(router, "resume", target, may_end_service=True)


@tiers_app.command("restart")
def tiers_restart(
    target: TargetArgument,
    force: ForceOption = False,
    url: UrlOption = "",
    key: KeyOption = "",
    config: ConfigOption = None,
) -> None:
    """Drain an engine, stop it and start it again; also one that has failed."""
    router = RouterApiClient(url, key, config)
    _operate(router, "restart", target, may_end_service=force)


@tiers_app.command("recycle")
def tiers_recycle(
    target: TargetArgument,
    url: UrlOption = "",
    key: KeyOption = "",
    config: ConfigOption = None,
) -> None:
    """Replace an engine by a new one, started beside it so that capacity never falls."""
    router = RouterApiClient(url, key, config)
    _operate(router, "recycle", target, may_end_service=True)


@tiers_app.command("add")
def tiers_add(
    tier: TierArgument,
    engine: EngineArgument,
    url: UrlOption = "",
    key: KeyOption = "",
    config: ConfigOption = None,
) -> None:
    """Add an engine that runs elsewhere to a tier. It is warmed up and compared before it gets requests.

    A restart of the router forgets it: name it in `tiers.<name>.urls` or in `discovery.file` to keep it.
    """
    router = RouterApiClient(url, key, config)
    added = router.ask("/admin/replicas", "POST", {"tier": tier, "url": engine})
    replica_id = added["id"]
    progress = Progress()
    replica = _find(router.ask("/tiers"), replica_id)
    while replica["state"] in COMING_STATES:
        progress(f"{replica_id}: is {replica['state']}")
        time.sleep(POLL_S)
        replica = _find(router.ask("/tiers"), replica_id)
    if replica["state"] != "ready":
        detail = _detail(replica["detail"], preparing=None)
        raise OperationError(
            f"{replica_id} is added, but is {replica['state']}: {detail}; it gets requests when it is ready, "
            f"'qarr tiers remove {replica_id}' takes it out"
        )
    typer.echo(f"{replica_id}: added, is ready")


@tiers_app.command("remove")
def tiers_remove(
    replica: ReplicaArgument,
    now: NowOption = False,
    force: ForceOption = False,
    url: UrlOption = "",
    key: KeyOption = "",
    config: ConfigOption = None,
) -> None:
    """Drain an engine that runs elsewhere, and forget it. The engine itself goes on running.

    A restart of the router adds it again if `tiers.<name>.urls` has it.
    """
    router = RouterApiClient(url, key, config)
    fleet = router.ask("/tiers")
    replica_id = _named_replica(fleet, replica)
    if not force:
        _confirm_outage(fleet, "remove", [replica_id])
    _run_operation(router, "remove", replica_id, body={"now": now})


@tiers_app.command("record")
def tiers_record(tier: TierArgument, config: ConfigOption = None) -> None:
    """Accept what a tier's engines compute, and record it as the reference for later starts.

    For an hour, starts and resumes of its engines are recorded and not compared.
    """
    settings = load_settings(config)
    check_tier(tier, settings)
    canary = make_canary(settings)
    deleted_count = canary.accept(tier)
    deleted = ""
    if deleted_count:
        deleted = f"{deleted_count} records deleted in {canary.path}; "
    typer.echo(
        f"{tier}: {deleted}starts and resumes of the next hour are accepted and recorded"
    )


def _operate(
    router: RouterApiClient, kind: Kind, tier_or_replica: str, *, may_end_service: bool
) -> None:
    """Do an operation on a replica, or on each replica of a tier, one after another.

    The operator is asked first if no replica would be left that serves, unless ``may_end_service``.
    """
    fleet = router.ask("/tiers")
    replica_ids = _targeted_replicas(fleet, tier_or_replica)
    if not may_end_service:
        _confirm_outage(fleet, kind, replica_ids)
    for replica_id in replica_ids:
        _run_operation(router, kind, replica_id)


def _confirm_outage(fleet: dict[str, Any], kind: Kind, replica_ids: list[str]) -> None:
    """Ask before an operation that would leave no replica of any tier that serves.

    Raises:
        OperationError: The answer is no.
    """
    ready_ids = {
        replica["id"] for replica in _replicas_of(fleet) if replica["state"] == "ready"
    }
    if not _stops_all(ready_ids, kind, replica_ids):
        return
    names = ", ".join(sorted(ready_ids))
    err.print(
        plain(
            f"no other replica of any tier is ready: after {kind} of {names} every request gets 503"
        )
    )
    if not is_confirmed(f"{kind.capitalize()} {names} all the same?"):
        raise OperationError(
            f"{kind} was not begun; where nobody can be asked, --force begins it"
        )


def _stops_all(ready_ids: set[str], kind: Kind, replica_ids: list[str]) -> bool:
    """Tell whether an operation stops all ready replicas at once, if there are any."""
    if not ready_ids:
        return False
    if kind == "restart":
        # A tier's replicas are restarted one after another, so that the others serve meanwhile.
        return any(ready_ids == {replica_id} for replica_id in replica_ids)
    return ready_ids <= set(replica_ids)


def _run_operation(
    router: RouterApiClient,
    kind: Kind,
    replica_id: str,
    *,
    body: dict[str, Any] | None = None,
) -> None:
    """Begin an operation on a replica, and show its progress until it ends.

    Raises:
        OperationError: The operation failed.
    """
    operation = router.ask(f"/admin/replicas/{replica_id}/{kind}", "POST", body)
    progress = Progress()
    progress(_progress_line(router, replica_id, operation))
    while operation["state"] == "running":
        time.sleep(POLL_S)
        operation = router.ask(f"/admin/operations/{operation['id']}")
        progress(_progress_line(router, replica_id, operation))
    detail = operation["detail"]
    if operation["state"] == "failed":
        raise OperationError(f"{kind} of {replica_id} failed: {detail}")
    typer.echo(f"{replica_id}: {kind} done, {detail}")


def _progress_line(
    router: RouterApiClient, replica_id: str, operation: dict[str, Any]
) -> str:
    """Return how far an operation is, with the state of the replica or of its successor."""
    successor_id = operation["successor"]
    replica = _find(router.ask("/tiers"), successor_id or replica_id)
    state = replica["state"]
    if replica is not GONE:
        state = f"{state}, {replica['in_flight']} in flight"
    if successor_id:
        return f"{replica_id}: {operation['detail']} ({state})"
    return f"{replica_id}: {operation['detail']} (is {state})"


def _replicas_of(fleet: dict[str, Any]) -> list[dict[str, Any]]:
    return [replica for tier in fleet["tiers"] for replica in tier["replicas"]]


def _named_replica(fleet: dict[str, Any], id_or_url: str) -> str:
    """Return the id of a replica that is named by its id or by its engine's URL."""
    replicas = _replicas_of(fleet)
    for replica in replicas:
        if id_or_url == replica["id"] or _is_at(replica, id_or_url):
            return str(replica["id"])
    known_ids = ", ".join(replica["id"] for replica in replicas)
    raise OperationError(f"there is no replica {id_or_url!r}: {known_ids}")


def _is_at(replica: dict[str, Any], url: str) -> bool:
    """Tell whether a replica's engine has an address, however this is written."""
    if not replica["url"]:
        return False
    return normalised(url) == normalised(replica["url"])


def _targeted_replicas(fleet: dict[str, Any], tier_or_replica: str) -> list[str]:
    """Return the ids of a tier's replicas, or the id of the replica that is named."""
    for tier in fleet["tiers"]:
        if tier["tier"] == tier_or_replica and tier["replicas"]:
            return [replica["id"] for replica in tier["replicas"]]
    known_ids = [replica["id"] for replica in _replicas_of(fleet)]
    if tier_or_replica in known_ids:
        return [tier_or_replica]
    tier_names = [tier["tier"] for tier in fleet["tiers"]]
    raise OperationError(
        f"there is no tier or replica {tier_or_replica!r}: {', '.join([*tier_names, *known_ids])}"
    )


def _find(fleet: dict[str, Any], replica_id: str) -> dict[str, Any]:
    """Return a replica of the fleet; ``GONE``: the fleet has none with this id."""
    for replica in _replicas_of(fleet):
        if replica["id"] == replica_id:
            return replica
    return GONE


def _print_fleet(fleet: dict[str, Any]) -> None:
    typer.echo(f"{fleet['model']} on {fleet['machine']}")
    if fleet.get("scope") == "own":
        typer.echo(
            "only operators' keys see where engines are, and why one is not ready"
        )
    is_narrow = output(PIPED_WIDTH).width < NARROW
    columns = NARROW_COLUMNS if is_narrow else COLUMNS
    table = Table(*columns, box=None)
    details: dict[str, str] = {}
    for tier in fleet["tiers"]:
        tier_name = tier["tier"]
        for replica in tier["replicas"]:
            row_cells = [tier_name, *_cells(replica)]
            table.add_row(*row_cells[: len(columns)])
            details[replica["id"]] = _replica_detail(replica, tier.get("preparing"))
        if not tier["replicas"]:
            dashes = "-" * (len(columns) - 3)
            table.add_row(tier_name, "-", tier["state"], *dashes)
            details[tier_name] = _detail(tier.get("detail"), tier.get("preparing"))
    print_table(table, PIPED_WIDTH)
    # Details have lines of their own, so that they are never cut.
    for tier_name, detail in details.items():
        if detail:
            typer.echo(f"detail of {tier_name}: {detail}")


def _replica_detail(replica: dict[str, Any], preparing: dict[str, Any] | None) -> str:
    """Return what is to be said of a replica besides its figures."""
    parts = [_detail(replica["detail"], preparing)]
    draft_acceptance = replica.get("draft_acceptance")
    if draft_acceptance is not None:
        parts.append(f"{draft_acceptance:.0%} of drafted tokens accepted")
    return "; ".join(filter(None, parts))


def _detail(detail: str | None, preparing: dict[str, Any] | None) -> str:
    """Return why something is not ready, or what its tier needs before it serves for the first time."""
    detail_text = detail or ""
    if not detail_text and preparing:
        detail_text = Preparing(**preparing).text
    first_line = detail_text.partition("\n")[0]
    return printable(first_line.partition(". Last lines of")[0])


def _cells(replica: dict[str, Any]) -> list[str]:
    """Return the columns of a replica but for its tier."""
    kv_cache_usage = replica["kv_cache_usage"]
    kv_cache = "-" if kv_cache_usage is None else f"{kv_cache_usage:.0%}"
    tpot_ms = replica["tpot_ms"]
    tpot = "-" if tpot_ms is None else f"{tpot_ms:.1f}"
    return [
        replica["id"],
        replica["state"],
        replica.get("precision", "-"),
        str(replica["in_flight"]),
        str(replica["served"]),
        str(replica["failed"]),
        kv_cache,
        tpot,
        str(replica["pid"] or "-"),
        replica["url"] or "-",
    ]
