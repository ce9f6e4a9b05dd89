"""The checks of what runs: the router, its tiers and replicas, and what it measures."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import httpx

from router.cli.client import engine_version, why_unauthorized
from router.cli.doctor.findings import CheckContext, Finding, ok, problem, warning
from router.cli.doctor.tier_checks import judge_choice
from tiers.preparing import Preparing
from tiers.simulated.demo import simulated_precision
from tiers.spec import PRECISIONS, TierName, VerificationState
from tiers.verification.findings import Verdict

DETAIL_CHARS = 200
TRANSIENT_STATES = {"starting", "warming"}


def check_router(context: CheckContext) -> Iterator[Finding]:
    """Check whether a router answers and is ready, and what it says of its fleet."""
    router_url = context.router_url
    alive_answer = context.ask_router("/healthz")
    if alive_answer is None:
        yield _without_router(context)
        return
    if alive_answer.status_code != httpx.codes.OK:
        yield _not_a_router(context, alive_answer)
        return
    ready_answer = context.ask_router("/readyz")
    if ready_answer is None or ready_answer.status_code != httpx.codes.OK:
        yield problem(
            f"{router_url} is alive, but not ready",
            "'qarr tiers' shows why; 'qarr logs --level warning' has what happened",
        )
    else:
        yield ok(f"{router_url} is ready")
    tiers_answer = context.ask_router("/tiers")
    if tiers_answer is None:
        yield warning("not checked", "'qarr tiers' shows them", "tiers")
    elif tiers_answer.status_code == httpx.codes.UNAUTHORIZED:
        yield warning("not checked", why_unauthorized(tiers_answer), "tiers")
    else:
        yield from _judge_running(tiers_answer.json())


def _without_router(context: CheckContext) -> Finding:
    text = f"none answers at {context.router_url}"
    if context.url:
        return problem(text, "start it, or name another with --url")
    return ok(f"{text} ('make up' starts one)")


def _not_a_router(context: CheckContext, alive: httpx.Response) -> Finding:
    version = engine_version(context.ask_router)
    what = f"no router: HTTP {alive.status_code}"
    if version is not None:
        what = f"an engine (vLLM {version}), not a router"
    return problem(
        f"{context.router_url} is {what}", "give the router's address with --url"
    )


def _judge_running(fleet: dict[str, Any]) -> Iterator[Finding]:
    """Judge a fleet as ``GET /tiers`` describes it."""
    tiers_with_engines = [tier["tier"] for tier in fleet["tiers"] if tier["replicas"]]
    if tiers_with_engines:
        yield judge_choice(tiers_with_engines)
    yield from judge_fleet(fleet)
    profiling = fleet["profiling"]
    if is_demo(fleet):
        yield ok("nothing: its engines are simulated", "measuring")
    else:
        yield judge_profiling(profiling)
    for tier, why in profiling["pointless"].items():
        yield ok(why, f"tier {tier}")
    # A router of an earlier release does not tell this.
    for tier, unmeasured in profiling.get("not_measured", {}).items():
        yield warning(unmeasured["text"], unmeasured["remedy"], f"tier {tier}")
    yield from _judge_verdicts(profiling, tiers_with_engines)


def _judge_verdicts(
    profiling: dict[str, Any], tiers_with_engines: Collection[str]
) -> Iterator[Finding]:
    """Say which tiers lose more than they may, which wait for their measurement, and of which it cannot be told."""
    # A router of an earlier release has none.
    for tier, verdict in profiling.get("verdicts", {}).items():
        check = f"tier {tier}"
        if verdict["verdict"] == Verdict.WORSE:
            yield warning(
                verdict["sentence"],
                "raise policy.loss_budget if that is acceptable, else serve the tier in another precision",
                check,
            )
        elif verdict["verdict"] is not None:
            yield ok(verdict["sentence"], check)
        elif verdict.get("held") and tier in tiers_with_engines:
            yield warning(verdict["sentence"], _how_measured(profiling), check)


def _how_measured(profiling: dict[str, Any]) -> str:
    if profiling["state"] == "running":
        return "wait: the router measures it now"
    return "run 'qarr profile quality', unless the router is about to measure by itself"


def judge_fleet(fleet: dict[str, Any]) -> Iterator[Finding]:
    """Judge each replica, and each tier that has none."""
    for tier in fleet["tiers"]:
        check = f"tier {tier['tier']}"
        if not tier["replicas"]:
            yield _without_engine(tier, check)
        for replica in tier["replicas"]:
            yield _judge_replica(replica, check)


def _judge_replica(replica: dict[str, Any], check: str) -> Finding:
    replica_id = replica["id"]
    state = replica["state"]
    text = f"{replica_id} is {state}{_first_line(replica['detail'])}"
    if state == "ready":
        return _judge_ready_replica(replica, text, check)
    if state in TRANSIENT_STATES:
        return warning(text, "wait; 'qarr tiers' shows how long", check)
    if state == "draining":
        return warning(
            text, f"'qarr tiers resume {replica_id}' gives it requests again", check
        )
    return problem(text, _how_to_repair(replica), check)


def _judge_ready_replica(replica: dict[str, Any], text: str, check: str) -> Finding:
    if replica["breaker"] != "closed":
        return warning(
            f"{text}, but gets few requests or none after failures",
            f"'qarr logs {replica['id']} --level warning' has its last lines",
            check,
        )
    if replica.get("verification") == VerificationState.DIFFERS:
        return warning(
            f"{text}, but may answer wrongly",
            "start it as its reference is started; if it is meant to be so, 'qarr tiers record' its tier",
            check,
        )
    return ok(f"{text}, {replica['served']} served, {replica['failed']} failed", check)


def _how_to_repair(replica: dict[str, Any]) -> str:
    replica_id = replica["id"]
    if replica["state"] == "quarantined":
        return (
            f"repair it where it runs; 'qarr tiers resume {replica_id}' checks it again"
        )
    if replica.get("source") is not None:
        return "start it, or correct the cause, where it runs: the router tries it again every few seconds"
    return f"'qarr logs {replica_id}', correct the cause, then 'qarr tiers restart {replica_id}'"


def is_demo(fleet: dict[str, Any]) -> bool:
    """Tell whether a router is that of ``qarr demo``: no measurement says anything of simulated engines."""
    if not fleet["tiers"]:
        return False
    return all(
        _is_simulated(tier["tier"], tier.get("precision") or "")
        for tier in fleet["tiers"]
    )


def _is_simulated(tier: str, precision: str) -> bool:
    if tier not in PRECISIONS:
        return False
    return precision.startswith(simulated_precision(TierName(tier)))


def judge_profiling(profiling: dict[str, Any]) -> Finding:
    """Say what is measured of the tiers, what is being measured, and what to run where nobody measures."""
    check = "measuring"
    state = profiling["state"]
    measured_tiers = profiling["measured"]
    known_measurements = [
        f"{measurement} of {' '.join(tiers)}"
        for measurement, tiers in measured_tiers.items()
        if tiers
    ]
    text = f"measured: {', '.join(known_measurements) or 'nothing yet'}"
    detail_text = f" ({profiling['detail']})" if profiling["detail"] else ""
    if profiling["what"] is not None:
        progress = ""
        if profiling["total"]:
            progress = f", {profiling['done']} of {profiling['total']}"
        return ok(f"{profiling['what']}{progress}, {state}{detail_text}; {text}", check)
    if all(measured_tiers.values()):
        return ok(text, check)
    if state == "off":
        commands = [
            f"'qarr profile {measurement}'"
            for measurement, tiers in measured_tiers.items()
            if not tiers
        ]
        return warning(
            f"off{detail_text}; {text}", f"run {' and '.join(commands)}", check
        )
    return ok(f"{state}{detail_text}; {text}", check)


def _without_engine(tier: dict[str, Any], check: str) -> Finding:
    """Judge a tier that has no replica."""
    if tier.get("state") == "waiting":
        return warning(
            "none of its engines is known yet",
            "name them: discovery.file, or the tier's DNS name",
            check,
        )
    if not tier.get("preparing"):
        return ok("has no engine: left out", check)
    if tier["state"] == "preparing":
        progress = Preparing(**tier["preparing"]).text
        return warning(f"is being prepared: {progress}", "wait", check)
    return problem(
        f"has no checkpoint{_first_line(tier['detail'])}",
        "'qarr model prepare' makes it",
        check,
    )


def _first_line(detail: str | None) -> str:
    if not detail:
        return ""
    first_line = detail.partition("\n")[0][:DETAIL_CHARS]
    return f": {first_line}" if first_line else ""
