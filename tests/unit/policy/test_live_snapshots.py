"""Snapshots by reference: whatever happens to a fleet, they are what copying every replica would give, and stay so."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs
from pydantic import TypeAdapter

from classifier import PromptClass, PromptFeatures
from classifier.kinds import Complexity
from router.policy.decide import decide, successors
from router.policy.decision import (
    Decision,
    PolicyParameters,
    RoutingQuery,
    Sla,
    TierEstimate,
)
from router.policy.decision_log import LoggedFleet, _fleet_line
from router.policy.losses import ExpectedLoss
from tiers.choice import Demand, choose_replica
from tiers.fleet import Fleet, Lease
from tiers.prefix_memory import Part, Prefix
from tiers.replica import FleetOptions, PeerLoad, Replica, SlotShare
from tiers.snapshot import FleetSnapshot, Gauges
from tiers.spec import STANDARD_TIERS, ReplicaStatus, TierName, TierSpec
from tiers.speed import (
    ALWAYS_MS,
    IDLE,
    MAX_BESIDE,
    PREFILL_MEMORY_MS,
    ReplicaLoad,
    SpeedModel,
)

if TYPE_CHECKING:
    from collections.abc import Collection

STEPS = 120
ADAPTER: TypeAdapter[FleetSnapshot] = TypeAdapter(LoggedFleet)
LOSS = {
    kind: dict.fromkeys(Complexity, ExpectedLoss(0.03, 0.02, 0.05))
    for kind in PromptClass
}
TABLE = PolicyParameters({TierName.FAST: LOSS, TierName.BALANCED: LOSS})


def alone(replica: Replica, now: float) -> ReplicaLoad:
    others = replica.others
    speed = replica.state.speed
    state = replica.state
    peers = others.peers if now < others.peers_until else PeerLoad()
    prompts = state.prompt_tokens + peers.prompt_tokens
    if prompts and speed is not None:
        prompts = max(
            prompts - int((now - state.prompts_at) * 1000 / speed.prefill_ms_per_token),
            0,
        )
    return ReplicaLoad(
        state.slots + peers.slots + others.foreign,
        prompts,
        replica.output_tokens + peers.output_tokens,
    )


def copied(
    replica: Replica, fleet: Fleet, now: float, *, reserved: bool
) -> dict[str, Any]:
    """Return a replica's line in the log, from what requests and others were counted; only the busy ones are the fleet's."""
    peers = replica.others.peers if now < replica.others.peers_until else PeerLoad()
    beside = [r for r in fleet.replicas if r is not replica]
    busy = [r for r in beside if alone(r, now).sequences > 0]
    left_ms = ALWAYS_MS
    usually = 0.0
    contended = any(
        r.state.speed is not None and r.state.speed.contention for r in fleet.replicas
    )
    if contended and len(fleet.replicas) <= MAX_BESIDE:
        usually = min(fleet._totals.busy_lately(now) / len(fleet.replicas), 1.0)
        left = [
            s.left_ms(alone(r, now), r.spec.max_num_seqs, fleet.output_share)
            if (s := r.state.speed) is not None
            else 0.0
            for r in busy
        ]
        left_ms = sum(left) / len(left) if left else ALWAYS_MS
    state = replica.state
    limit = replica.whole_limit
    breaker = replica.breaker
    share = replica.others.share
    if share is not None:
        limit = min(limit, max(share.slots if now < share.until else 0, 1))
    fading = 2.718281828459045 ** ((state.prefill_at - now) * 1000 / PREFILL_MEMORY_MS)
    load = structs.replace(
        alone(replica, now),
        neighbours=len(busy) / max(len(beside), 1),
        prefill_rate=pytest.approx(state.load.prefill_rate * fading),
        neighbours_left_ms=pytest.approx(left_ms),
        neighbours_usually=pytest.approx(usually),
    )
    return {
        "limit": min(limit, state.slots) if reserved else limit,
        "load": structs.asdict(load),
        "breaker": breaker.state(now).value,
        "admits": breaker.admits(now),
        "admits_in_s": breaker.admits_in_s(now),
        "kv_tokens_held": sum(lease._kv_tokens for lease in open_leases(fleet, replica))
        + peers.kv_tokens,
        "places": sum(lease.sequences for lease in open_leases(fleet, replica)),
        "in_flight": len(open_leases(fleet, replica)),
        "prompt_tokens_outstanding": sum(
            lease._prompt_tokens for lease in open_leases(fleet, replica)
        ),
        "output_tokens_outstanding": sum(
            lease._output_tokens for lease in open_leases(fleet, replica)
        ),
        "state": state.status.value,
        "detail": state.detail,
        "pid": state.pid,
        "precision": replica.spec.precision,
    }


LEASES: list[Lease] = []


def open_leases(fleet: Fleet, replica: Replica) -> list[Lease]:
    return [
        lease
        for lease in LEASES
        if lease.replica is replica and lease._fleet is fleet and not lease._released
    ]


def homes(
    members: list[Replica], prefix: Prefix | None
) -> list[tuple[int | None, bool]]:
    """Return what a tier's replicas hold of a prompt, and which is the session's own where they hold the same."""
    if prefix is None:
        return [(None, False)] * len(members)
    cached = [r.cached_tokens(prefix) for r in members]
    home = None
    open_ones = [r.id for r in members if r.state.open]
    if prefix.session and len(set(cached)) == 1 and len(members) > 1 and open_ones:
        home = open_ones[prefix.home(open_ones)]
    return [(tokens, r.id == home) for tokens, r in zip(cached, members, strict=True)]


class World:
    """A fleet under a clock of its own, to which random things happen."""

    def __init__(self, seed: int, clock: SimpleNamespace) -> None:
        self.random = random.Random(seed)
        self.clock = clock
        self.specs = [
            TierSpec(
                name,
                self.pick(512, 8192),
                max_num_seqs=self.pick(4, 16),
                max_in_flight=self.pick(3, 8),
            )
            for name in STANDARD_TIERS
        ]
        options = FleetOptions(
            adaptive_limit=self.pick(True, False),
            long_prompt_tokens=self.pick(100, 512),
        )
        self.fleet = Fleet(tuple(self.specs), options=options)
        self.fleet.preparations.clock = lambda: clock.now
        self.leases = LEASES
        self.leases.clear()
        for _ in range(self.pick(1, 3, 8)):
            self.add()

    def pick(self, *values: Any) -> Any:
        return self.random.choice(values)

    def add(self) -> None:
        spec = self.pick(*self.specs)
        number = self.random.getrandbits(40)
        self.fleet.add(Replica(f"{spec.name}-{number}", spec, "u", "", "m")).mark(
            ReplicaStatus.READY
        )

    def speed(self) -> SpeedModel:
        return SpeedModel(
            self.pick(5, 100),
            0.5,
            step_base_ms=self.pick(3, 30),
            step_ms_per_sequence=0.5,
            ttft_steps=1.0,
            contention=self.pick(0, 0.5),
            profiled=self.pick(True, False),
        )

    def query(self) -> RoutingQuery:
        kind = self.pick(*PromptClass)
        confidence = self.pick(0.5, 0.9)
        return RoutingQuery(
            PromptFeatures(
                2,
                1,
                tokens=1,
                tokens_exact=True,
                contains_code=False,
                asks_for_code=False,
                language=None,
                prompt_class=kind,
                confidence=confidence,
                signals=(),
            ),
            self.pick(10, 300),
            self.pick(1, 400),
            hint=self.pick(None, None, *STANDARD_TIERS),
            require=self.pick(True, False, False),
            sla=Sla(
                self.pick(None, 300.0),
                self.pick(None, 20.0),
                max_quality_loss=self.pick(None, 0.04),
                confidence=self.pick(None, 0.99),
            ),
            sequences=self.pick(1, 1, 3, 20),
            prefix=self.prefix(),
        )

    def prefix(self) -> Prefix | None:
        """Return one of a few chats at some length, so that replicas come to hold parts of them."""
        if self.pick(True, False, False):
            return None
        turns = [
            Part(f"{self.pick('a', 'b')}" * 300, self.pick(70, 90))
            for _ in range(self.pick(1, 2, 4))
        ]
        return Prefix.of([Part("s" * 300, 80), *turns], session=self.pick("", "x", "y"))

    def happen(self) -> None:
        self.clock.now += self.pick(0, 0, 0.001, 0.3, 2.0, 30.0) * self.random.random()
        events = (
            [self.lease] * 6
            + [self.use_lease] * 8
            + [self.change_replica] * 6
            + [self.change_fleet]
        )
        self.pick(*events)()

    def lease(self) -> None:
        query = self.query()
        replicas = [r.id for r in self.fleet.replicas]
        lease = self.fleet.lease(
            self.pick(*STANDARD_TIERS),
            prompt_tokens=query.prompt_tokens,
            max_tokens=query.max_tokens,
            sequences=query.sequences,
            exclude=self.pick((), {self.pick(*replicas)}),
            over_limit=self.pick(True, False, False),
            prefix=query.prefix,
        )
        self.leases += [lease] if lease is not None else []

    def use_lease(self) -> None:
        if not self.leases:
            return
        lease = self.pick(*self.leases)
        uses = {
            "first token": lambda: lease.first_token(self.pick(None, 40.0, 4000.0)),
            "token": lambda: lease.produced(self.pick(1, 5, 500)),
            "finished": lambda: lease.finished(
                self.pick(None, 20.0, 90.0), self.pick(0, 30), self.pick(None, 0, 60)
            ),
            "failed": lambda: lease.failed("x"),
            "release": lease.release,
        }
        uses[
            self.pick("first token", "token", "token", "finished", "failed", "release")
        ]()

    def change_replica(self) -> None:
        replica = self.pick(*self.fleet.replicas)
        now = self.clock.now
        until = now + self.pick(0.05, 3.0)
        changes = [
            lambda: replica.note_gauges(
                Gauges(
                    self.pick(0, 9),
                    1,
                    kv_cache_usage=self.pick(0.1, 0.85, 0.95),
                    kv_cache_tokens=self.pick(None, 3000),
                )
            ),
            lambda: replica.note_share(
                self.pick(None, SlotShare(self.pick(0, 2, 9), until))
            ),
            lambda: replica.note_peers(
                PeerLoad(self.pick(0, 2), 300, output_tokens=400, kv_tokens=500), until
            ),
            lambda: replica.mark(
                self.pick(ReplicaStatus.READY, ReplicaStatus.READY, *ReplicaStatus),
                "why",
            ),
            lambda: replica.measured(self.speed()),
            lambda: replica.update(speed=None),
            lambda: replica.update(pid=self.pick(None, 7)),
            lambda: replica.breaker.adopt(now, 1.0),
            lambda: replica.breaker.failed(now, probe=0),
            replica.breaker.reset,
        ]
        self.pick(*changes)()

    def change_fleet(self) -> None:
        change = self.pick("add", "remove", "configure")
        if change == "add":
            self.add()
        elif change == "configure":
            self.fleet.configure(
                replace(self.pick(*self.specs), max_in_flight=self.pick(2, 5))
            )
        elif len(self.fleet.replicas) > 1:
            self.fleet.remove(self.pick(*self.fleet.replicas))

    def expected(
        self, reserved: Collection[str], prefix: Prefix | None
    ) -> list[dict[str, Any]]:
        found = []
        for spec in self.fleet.specs:
            members = [r for r in self.fleet.replicas if r.spec.name is spec.name]
            for replica, (tokens, home) in zip(
                members, homes(members, prefix), strict=True
            ):
                line = copied(
                    replica, self.fleet, self.clock.now, reserved=replica.id in reserved
                )
                found.append(
                    {**line, "id": replica.id, "cached_tokens": tokens, "home": home}
                )
        return found


def lines(snapshot: FleetSnapshot) -> list[dict[str, Any]]:
    """Return all replicas of a snapshot, as the log has them."""
    return [
        line for tier in _fleet_line(snapshot)["tiers"] for line in tier["replicas"]
    ]


def shown_estimate(estimate: TierEstimate) -> TierEstimate:
    """Return an estimate without its replica's load: a logged one is not spread over its parts."""
    candidate = structs.replace(
        estimate.candidate, replica=None, load=IDLE, snapshot_at=None
    )
    return structs.replace(estimate, candidate=candidate)


def shown(decision: Decision) -> dict[str, Any]:
    estimates = tuple(map(shown_estimate, decision.comparison.estimates))
    chosen = decision.chosen and shown_estimate(decision.chosen)
    return structs.asdict(decision) | {
        "comparison": structs.replace(
            decision.comparison, estimates=estimates, chosen=chosen
        )
    }


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    for module in ("tiers.fleet", "tiers.replica"):
        monkeypatch.setattr(f"{module}.monotonic", lambda: clock.now)
    return clock


@pytest.mark.parametrize("seed", range(25))
def test_a_snapshot_is_what_copying_every_replica_gives(
    seed: int, clock: SimpleNamespace
) -> None:
    """Field by field at random times; also if it is read only after the fleet has changed again."""
    world = World(seed, clock)
    kept = []
    for _ in range(STEPS):
        world.happen()
        reserved = world.pick((), (), {world.pick(*world.fleet.replicas).id})
        prefix = world.prefix()
        snapshot = world.fleet.snapshot(reserved, prefix)
        kept.append((snapshot, world.expected(reserved, prefix)))
        if world.pick(True, False, False):
            kept.append(kept.pop(world.random.randrange(len(kept))))
            snapshot, expected = kept.pop()
            assert [
                line | more
                for line, more in zip(lines(snapshot), expected, strict=True)
            ] == lines(snapshot)
    for snapshot, expected in kept:
        assert [
            line | more for line, more in zip(lines(snapshot), expected, strict=True)
        ] == lines(snapshot)


@pytest.mark.parametrize("seed", range(25))
def test_a_decision_from_the_log_is_the_one_that_was_made(
    seed: int, clock: SimpleNamespace
) -> None:
    """The same tier, texts, predictions and successors, and the same replicas that would serve."""
    world = World(seed, clock)
    for _ in range(STEPS):
        world.happen()
        query = world.query()
        snapshot = world.fleet.snapshot(prefix=query.prefix)
        logged = ADAPTER.validate_json(ADAPTER.dump_json(snapshot))
        assert shown(decide(query, logged, TABLE)) == shown(
            decide(query, snapshot, TABLE)
        )
        assert successors(TierName.FAST, query, logged, table=TABLE) == successors(
            TierName.FAST, query, snapshot, table=TABLE
        )
        assert [tier.status for tier in logged.tiers] == [
            tier.status for tier in snapshot.tiers
        ]
        request = Demand(query.tokens_to_read, query.max_tokens, query.sequences)
        for there, again in zip(snapshot.tiers, logged.tiers, strict=True):
            assert choose_replica(again, request, None) == choose_replica(
                there, request, snapshot.load
            )
