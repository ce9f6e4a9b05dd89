"""The decision log: everything that a decision was made from, so that it can be made again. It holds no prompts.

JSON lines of four kinds, one a class below. ``policy`` comes at the start of every file, and whenever the parameters change.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Struct, convert, structs, to_builtins
from pydantic import (
    Field,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
    ValidationError,
)

from router.line_file import LineWriter
from router.policy.decision import Decision, PolicyParameters, Refusal, RoutingQuery
from router.policy.profiles import ProfileError, first_fault
from tiers.snapshot import (
    FleetLoad,
    FleetSnapshot,
    KvCache,
    Pause,
    ReplicaState,
    TierSnapshot,
    Trends,
)
from tiers.spec import TierName

KEPT_FILES = 3


# A replica's line is flat. Some fields of ``ReplicaState`` have other names there, and a group is one name for each field.
_RENAMED = {
    "status": "state",
    "prompt_tokens": "prompt_tokens_outstanding",
    "slots": "places",
}
_GROUPS: dict[str, tuple[type[Struct], tuple[str, ...]]] = {
    "trends": (Trends, ("ttft_trend", "tpot_trend")),
    "breaker": (Pause, ("breaker", "admits", "admits_in_s")),
    "kv": (KvCache, ("kv_tokens", "kv_tokens_held", "kv_pressure")),
}


def _fleet_line(fleet: FleetSnapshot) -> dict[str, Any]:
    """Return a snapshot as the log has it: each replica with its whole load and its trends at that time."""
    tiers = []
    for tier in fleet.tiers:
        replicas = [
            _replica_line(tier, position, fleet.load)
            for position in range(len(tier.replicas))
        ]
        tiers.append(
            {
                "spec": tier.spec,
                "replicas": replicas,
                "preparing": tier.preparing,
                "conversation_tokens": tier.conversation_tokens,
            }
        )
    line = structs.asdict(fleet)
    del line["load"]
    line["tiers"] = tiers
    builtins: dict[str, Any] = to_builtins(line, enc_hook=str)
    return builtins


def _replica_line(
    tier: TierSnapshot, position: int, fleet_load: FleetLoad | None
) -> dict[str, Any]:
    state = tier.replicas[position]
    now = 0.0
    if fleet_load is not None:
        now = fleet_load.now
    load = tier.load_at(position, fleet_load)
    trends = state.trends.faded(now, state.speed)
    line = _state_line(structs.replace(state, load=load, trends=trends))
    line["output_tokens_outstanding"] = (
        tier.outstanding_tokens[position] - state.prompt_tokens
    )
    line["cached_tokens"] = None
    if tier.cached is not None:
        line["cached_tokens"] = tier.cached[position]
    line["home"] = position == tier.home
    return line


def _state_line(state: ReplicaState) -> dict[str, Any]:
    """Return a replica's state with the names that the log has for its fields; ``_read_state`` is the reverse."""
    line = structs.asdict(state)
    del line["prompts_at"], line["prefill_at"]
    for field, logged_field in _RENAMED.items():
        line[logged_field] = line.pop(field)
    for group, (_, logged_fields) in _GROUPS.items():
        values = structs.astuple(line.pop(group))
        line |= dict(zip(logged_fields, values, strict=True))
    return line


def _read_fleet(line: dict[str, Any]) -> FleetSnapshot:
    try:
        tiers = [_read_tier(tier) for tier in line["tiers"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no fleet ({error})") from None
    return convert(
        line | {"tiers": tiers}, FleetSnapshot, dec_hook=lambda kind, value: kind(value)
    )


def _read_tier(line: dict[str, Any]) -> dict[str, Any]:
    replicas = line["replicas"]
    cached_tokens: list[int | None] | None = [
        replica.get("cached_tokens") for replica in replicas
    ]
    if any(replica.get("cached_tokens") is None for replica in replicas):
        cached_tokens = None
    home_position = -1
    for position, replica in enumerate(replicas):
        if replica.get("home"):
            home_position = position
            break
    return line | {
        "replicas": [_read_state(replica) for replica in replicas],
        "outstanding_tokens": [
            replica.get("prompt_tokens_outstanding", 0)
            + replica["output_tokens_outstanding"]
            for replica in replicas
        ],
        "cached": cached_tokens,
        "home": home_position,
    }


def _read_state(line: dict[str, Any]) -> dict[str, Any]:
    """Return a replica's line with the names and groups of ``ReplicaState``."""
    state = dict(line)
    for field, logged_field in _RENAMED.items():
        if logged_field in line:
            state[field] = line[logged_field]
    for group, (kind, logged_fields) in _GROUPS.items():
        fields = zip(kind.__struct_fields__, logged_fields, strict=True)
        state[group] = {
            field: line[logged_field]
            for field, logged_field in fields
            if logged_field in line
        }
    if line.get("places") is None:  # lines of earlier releases have no slots
        state["slots"] = line["in_flight"]
    return state


def _query_line(query: RoutingQuery) -> dict[str, Any]:
    """Return a query without its prefix: what replicas hold of that is in the snapshot."""
    line: dict[str, Any] = to_builtins(
        structs.replace(query, prefix=None), enc_hook=str
    )
    del line["prefix"]
    return line


_READ_QUERY = PlainValidator(
    lambda line: convert(line, RoutingQuery, dec_hook=lambda kind, value: kind(value))
)
LoggedQuery = Annotated[RoutingQuery, _READ_QUERY, PlainSerializer(_query_line)]
LoggedFleet = Annotated[
    FleetSnapshot, PlainValidator(_read_fleet), PlainSerializer(_fleet_line)
]


@dataclass(frozen=True, slots=True)
class PolicyRecord:
    id: str
    table: PolicyParameters
    kind: Literal["policy"] = "policy"


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """One decision, with everything that it was made from."""

    at: float  # seconds since 1970
    request_id: str
    policy: str  # digest of the parameters
    query: LoggedQuery
    fleet: LoggedFleet
    tier: TierName | None  # what was decided; None: refused
    refusal: Refusal | None
    reason: str
    predicted_ttft_ms: float | None
    predicted_tpot_ms: float | None
    priority: int = 0  # in vLLM's numbers, lower first
    kind: Literal["decision"] = "decision"


@dataclass(frozen=True, slots=True)
class OutcomeRecord:
    """How a request ended. Times in milliseconds; None: not measured."""

    request_id: str
    tier: TierName  # the tier that served it, not always the one that was decided on
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float | None  # from the request's arrival, queue included
    tpot_ms: float | None
    cached_tokens: int | None = None  # of the prompt, as the engine told
    reasoning_tokens: int | None = None  # of the output; None: nobody knows
    ttfa_ms: float | None = None  # to the first token that is no reasoning
    error: str | None = None  # the kind of error that it ended with
    kind: Literal["outcome"] = "outcome"


@dataclass(frozen=True, slots=True)
class OverflowRecord:
    request_id: str
    overflow: str  # the server's name
    failure: str | None  # why it did not answer; None: it did
    output_tokens: int = 0
    error: str | None = None  # the kind of error that the request ended with
    kind: Literal["overflow"] = "overflow"


Record = PolicyRecord | DecisionRecord | OutcomeRecord | OverflowRecord
_RECORD: TypeAdapter[Record] = TypeAdapter(
    Annotated[Record, Field(discriminator="kind")]
)
_PARAMETERS = TypeAdapter(PolicyParameters)


class DecisionLog:
    """Writes records to a file that is rotated by size, in a thread."""

    def __init__(self, path: Path, max_bytes: int = 0) -> None:
        self._writer = LineWriter(
            path, "the decision log", max_bytes=max_bytes, kept=KEPT_FILES
        )
        self._table: PolicyParameters | None = None
        self._policy_id = ""
        self._head = b""

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
            self._table = table
            self._policy_id = digest_of(table)
            self._head = _RECORD.dump_json(PolicyRecord(self._policy_id, table))
        chosen = decision.chosen
        predicted_ttft_ms = None
        predicted_tpot_ms = None
        if chosen is not None:
            predicted_ttft_ms = chosen.predicted_ttft_ms
            predicted_tpot_ms = chosen.predicted_tpot_ms
        record = DecisionRecord(
            at=round(time.time(), 4),
            request_id=request_id,
            policy=self._policy_id,
            query=decision.query,
            fleet=fleet,
            tier=decision.tier,
            refusal=decision.refusal,
            reason=decision.reason,
            predicted_ttft_ms=predicted_ttft_ms,
            predicted_tpot_ms=predicted_tpot_ms,
            priority=priority,
        )
        self._writer.put(_RECORD.dump_json(record), self._head)

    def ended(self, outcome: OutcomeRecord | OverflowRecord) -> None:
        self._writer.put(_RECORD.dump_json(outcome), self._head)

    def close(self) -> None:
        self._writer.close()


def digest_of(table: PolicyParameters) -> str:
    return hashlib.sha256(_PARAMETERS.dump_json(table)).hexdigest()[:16]


def read_log(path: Path) -> Iterator[Record]:
    """Yield a log's records. Lines that are no JSON are skipped: the last one is cut off when a router is killed.

    ``ProfileError``: the file cannot be read, or a line is no record.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ProfileError(
            f"the decision log {path} cannot be read: {error.strerror}"
        ) from error
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            yield _RECORD.validate_json(line)
        except ValidationError as error:
            if error.errors()[0]["type"] != "json_invalid":
                raise ProfileError(
                    f"{path} line {number} is no record of decisions: {first_fault(error)}"
                ) from None
