"""The decision log: everything that a decision was made from, so that it can be made again. It holds no prompts.

JSON lines of four kinds. ``policy``: the policy's parameters, under the digest that decisions name them by; at the start
of every file, and whenever they change. ``decision``: the request as the policy saw it, the fleet's snapshot, and what was
decided. ``outcome``: how the request ended. ``overflow``: what became of it where no tier had a slot for it, and another
server was to answer.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import convert, to_builtins
from msgspec.structs import replace
from pydantic import Field, PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from router.line_file import LineWriter
from router.policy.decision import PolicyParameters, Query, Refusal
from router.policy.profiles import ProfileError, first_fault
from tiers.snapshot import FleetSnapshot, Trends, load_of
from tiers.spec import TierName  # noqa: TC001  pydantic reads it

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from router.policy.decision import Decision
    from tiers.snapshot import FleetLoad, TierSnapshot

KEPT_FILES = 3


# A replica's line is flat: its state's fields by their names there, and the groups of it.
_FIELDS = {
    **{
        name: name
        for name in ("id", "url", "pid", "detail", "in_flight", "served", "failed", "gauges", "load", "speed")
    },
    "status": "state",
    "prompt_tokens": "prompt_tokens_outstanding",
    "slots": "places",
    "limit": "limit",
    "precision": "precision",
}
_GROUPS = {
    "trends": {"ttft": "ttft_trend", "tpot": "tpot_trend"},
    "breaker": {"state": "breaker", "admits": "admits", "admits_in_s": "admits_in_s"},
    "kv": {"size": "kv_tokens", "held": "kv_tokens_held", "pressure": "kv_pressure"},
}


def _fleet_line(fleet: FleetSnapshot) -> dict[str, Any]:
    """Return a snapshot as the log has it: each replica with its whole load and its trends at that time."""
    line = {name: getattr(fleet, name) for name in ("template", "output_share", "long_prompt_tokens")}
    tiers = [
        {"spec": tier.spec, "replicas": [_replica_line(tier, n, fleet.load) for n in range(len(tier.replicas))]}
        | {"preparing": tier.preparing}
        for tier in fleet.tiers
    ]
    found: dict[str, Any] = to_builtins({"tiers": tiers, **line}, enc_hook=str)
    return found


def _replica_line(tier: TierSnapshot, position: int, fleet: FleetLoad | None) -> dict[str, Any]:
    state, output_tokens, cached = tier.replicas[position], tier.output_tokens[position], tier.cached
    now, speed, trends = fleet.now if fleet is not None else 0.0, state.speed, Trends()
    if speed is not None:
        ttft, tpot = state.trends.ttft, state.trends.tpot
        trends = Trends(ttft.faded(now, speed.ttft_spread), tpot.faded(now, speed.tpot_spread))
    state = replace(state, load=load_of(state, output_tokens, fleet), trends=trends)
    line = {logged: getattr(state, name) for name, logged in _FIELDS.items()}
    for group, names in _GROUPS.items():
        line |= {logged: getattr(getattr(state, group), name) for name, logged in names.items()}
    line |= {"cached_tokens": None if cached is None else cached[position], "home": position == tier.home}
    return line | {"output_tokens_outstanding": output_tokens}


def _read_fleet(line: dict[str, Any]) -> FleetSnapshot:
    """Return a snapshot from its line.

    Raises:
        ValueError: It is none.
    """
    if not isinstance(line, dict) or not isinstance(line.get("tiers"), list):
        raise ValueError("no fleet")  # noqa: TRY004  pydantic takes it for a fault of the line
    return convert({**line, "tiers": [_read_tier(tier) for tier in line["tiers"]]}, FleetSnapshot, dec_hook=_read_hook)


def _read_hook(kind: type, value: Any) -> Any:
    """Return a tier's name or a path."""
    return kind(value)


def _read_tier(line: dict[str, Any]) -> dict[str, Any]:
    replicas = line.get("replicas", [])
    cached = [replica.get("cached_tokens") for replica in replicas]
    return line | {
        "replicas": [_read_replica(replica) for replica in replicas],
        "output_tokens": [replica.get("output_tokens_outstanding", 0) for replica in replicas],
        "cached": None if None in cached else cached,
        "home": next((n for n, replica in enumerate(replicas) if replica.get("home")), -1),
    }


def _read_replica(line: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = {name: line[logged] for name, logged in _FIELDS.items() if line.get(logged) is not None}
    for group, names in _GROUPS.items():
        state[group] = {name: line[logged] for name, logged in names.items() if logged in line}
    return {"slots": line.get("in_flight", 0), **state}


LoggedFleet = Annotated[FleetSnapshot, PlainValidator(_read_fleet), PlainSerializer(_fleet_line)]


@dataclass(frozen=True, slots=True)
class PolicyRecord:
    """The parameters that decisions were made by, named by their digest."""

    id: str
    table: PolicyParameters
    kind: Literal["policy"] = "policy"


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """One decision, with everything that it was made from.

    Attributes:
        at: Seconds since 1970.
        policy: Digest of the parameters.
        tier: What was decided; None: refused.
        priority: In vLLM's numbers, lower first.
    """

    at: float
    request_id: str
    policy: str
    query: Query
    fleet: LoggedFleet
    tier: TierName | None
    refusal: Refusal | None
    reason: str
    predicted_ttft_ms: float | None
    predicted_tpot_ms: float | None
    priority: int = 0
    kind: Literal["decision"] = "decision"


@dataclass(frozen=True, slots=True)
class OutcomeRecord:
    """How a request ended. Times in milliseconds; None: not measured.

    Attributes:
        tier: The tier that served it, not always the one that was decided on.
        ttft_ms: From the request's arrival, queue included.
        error: The kind of error that it ended with.
    """

    request_id: str
    tier: TierName
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float | None
    tpot_ms: float | None
    error: str | None = None
    kind: Literal["outcome"] = "outcome"


@dataclass(frozen=True, slots=True)
class OverflowRecord:
    """A request that no tier had a slot for, and that another server was to answer.

    Attributes:
        overflow: The server's name.
        failure: Why it did not answer; None: it did.
        error: The kind of error that the request ended with.
    """

    request_id: str
    overflow: str
    failure: str | None
    output_tokens: int = 0
    error: str | None = None
    kind: Literal["overflow"] = "overflow"


Record = PolicyRecord | DecisionRecord | OutcomeRecord | OverflowRecord
_RECORD: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="kind")])
_PARAMETERS = TypeAdapter(PolicyParameters)


class DecisionLog:
    """Writes records to a file that is rotated by size, in a thread."""

    def __init__(self, path: Path, max_bytes: int = 0) -> None:
        self._writer = LineWriter(path, "the decision log", max_bytes, KEPT_FILES)
        self._table: PolicyParameters | None = None
        self._policy, self._head = "", b""

    def decided(
        self,
        request_id: str,
        decision: Decision,
        fleet: FleetSnapshot,
        table: PolicyParameters,
        *,
        priority: int = 0,
    ) -> None:
        if table is not self._table:
            self._table, self._policy = table, digest_of(table)
            self._head = _line(PolicyRecord(self._policy, table))
        chosen = decision.chosen
        record = DecisionRecord(
            at=round(time.time(), 4),
            request_id=request_id,
            policy=self._policy,
            query=decision.query,
            fleet=fleet,
            tier=decision.tier,
            refusal=decision.refusal,
            reason=decision.reason,
            predicted_ttft_ms=chosen.predicted_ttft_ms if chosen else None,
            predicted_tpot_ms=chosen.predicted_tpot_ms if chosen else None,
            priority=priority,
        )
        self._writer.put(_line(record), self._head)

    def ended(self, outcome: OutcomeRecord) -> None:
        self._writer.put(_line(outcome), self._head)

    def overflowed(self, record: OverflowRecord) -> None:
        """Write what became of a request that no tier had a slot for."""
        self._writer.put(_line(record), self._head)

    def close(self) -> None:
        """Write what is queued, and close the file. Waits for seconds at most."""
        self._writer.close()


def digest_of(table: PolicyParameters) -> str:
    return hashlib.sha256(_PARAMETERS.dump_json(table)).hexdigest()[:16]


def read_log(path: Path) -> Iterator[Record]:
    """Yield a log's records. Lines that are no JSON are skipped: the last one is cut off when a router is killed.

    Raises:
        ProfileError: The file cannot be read, or a line is no record.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ProfileError(f"the decision log {path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            yield _RECORD.validate_json(line)
        except ValidationError as error:
            if error.errors()[0]["type"] != "json_invalid":
                raise ProfileError(f"{path} line {number} is no record of decisions: {first_fault(error)}") from None


def _line(record: Record) -> bytes:
    return _RECORD.dump_json(record)
