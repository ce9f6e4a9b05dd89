"""Kept views: whatever happens to a fleet, its snapshots are what copying every replica would give, and stay so."""

from __future__ import annotations

import random
from dataclasses import asdict, fields, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import TypeAdapter

from classifier import PromptClass, PromptFeatures
from classifier.kinds import Complexity
from router.policy.decide import decide, successors
from router.policy.decision import Decision, PolicyParameters, Query, Sla
from router.policy.losses import ExpectedLoss
from tiers.fleet import Fleet, Lease
from tiers.prefix_memory import Part, Prefix
from tiers.replica import FleetOptions, PeerLoad, Replica, Share
from tiers.snapshot import FleetSnapshot, Gauges, ReplicaSnapshot, TierSnapshot
from tiers.spec import STANDARD_TIERS, ReplicaStatus, TierName, TierSpec
from tiers.speed import ALWAYS_MS, MOST_BESIDE, PREFILL_MEMORY_MS, STEADY, Load, SpeedModel

if TYPE_CHECKING:
    from collections.abc import Collection

STEPS = 120
ADAPTER = TypeAdapter(FleetSnapshot)
LOSS = {kind: dict.fromkeys(Complexity, ExpectedLoss(0.03, 0.02, 0.05)) for kind in PromptClass}
TABLE = PolicyParameters({TierName.FAST: LOSS, TierName.BALANCED: LOSS})


def alone(replica: Replica, now: float) -> Load:
    others, speed = replica._others if now < replica._others_until else PeerLoad(), replica.speed
    prompts = replica.prompt_tokens + others.prompt_tokens
    if prompts and speed is not None:
        prompts = max(prompts - int((now - replica._prompts_at) * 1000 / speed.prefill_ms_per_token), 0)
    sequences = replica.slots + others.slots + replica._foreign
    return Load(sequences, prompts, replica.output_tokens + others.output_tokens)


def copied(replica: Replica, fleet: Fleet, now: float, *, reserved: bool) -> ReplicaSnapshot:
    """Return a replica as it is, read from its own counters; nothing that it keeps is used but who was busy lately."""
    others = replica._others if now < replica._others_until else PeerLoad()
    beside = [r for r in fleet.replicas if r is not replica]
    busy = [r for r in beside if alone(r, now).sequences > 0]
    left_ms, usually = ALWAYS_MS, 0.0
    contended = any(r.speed is not None and r.speed.contention for r in fleet.replicas)
    if contended and len(fleet.replicas) <= MOST_BESIDE:
        usually = min(fleet._totals.busy_lately(now) / len(fleet.replicas), 1.0)
        left = [
            r.speed.left_ms(alone(r, now), r.spec.max_num_seqs, fleet.output_share) if r.speed is not None else 0.0
            for r in busy
        ]
        left_ms = sum(left) / len(left) if left else ALWAYS_MS
    limit, speed, breaker = replica.whole_limit, replica.speed, replica.breaker
    if replica.share is not None:
        limit = min(limit, max(replica.share.slots if now < replica.share.until else 0, 1))
    fading = 2.718281828459045 ** ((replica._prefill_at - now) * 1000 / PREFILL_MEMORY_MS)
    return ReplicaSnapshot(
        replica.id,
        replica.url,
        replica.pid,
        replica.state,
        replica.detail,
        replica.in_flight,
        replica.prompt_tokens,
        replica.output_tokens,
        replica.served,
        replica.failed,
        replica.gauges,
        replace(
            alone(replica, now),
            neighbours=len(busy) / max(len(beside), 1),
            prefill_rate=pytest.approx(replica._prefill_rate * fading),
            neighbours_left_ms=pytest.approx(left_ms),
            neighbours_usually=pytest.approx(usually),
        ),
        speed,
        replica.ttft_trend.faded(now, speed.ttft_spread) if speed else STEADY,
        replica.tpot_trend.faded(now, speed.tpot_spread) if speed else STEADY,
        breaker.state(now),
        breaker.admits(now),
        breaker.admits_in_s(now),
        min(limit, replica.slots) if reserved else limit,
        replica.kv_tokens,
        replica.kv_tokens_held + others.kv_tokens,
        replica.kv_pressure,
        replica.slots,
    )


def warmed(copies: list[ReplicaSnapshot], members: list[Replica], prefix: Prefix | None) -> tuple[ReplicaSnapshot, ...]:
    """Return a tier's replicas with what they hold of a prompt, and the session's own where they hold the same."""
    if prefix is None:
        return tuple(copies)
    cached, home = [r.cached_tokens(prefix) for r in members], None
    open_ones = [copy.id for copy in copies if copy.state is ReplicaStatus.READY and copy.admits]
    if prefix.session and len(set(cached)) == 1 and len(copies) > 1 and open_ones:
        home = open_ones[prefix.home(open_ones)]
    each = zip(copies, cached, strict=True)
    return tuple(replace(copy, cached_tokens=tokens, home=copy.id == home) for copy, tokens in each)


class World:
    """A fleet under a clock of its own, to which random things happen."""

    def __init__(self, seed: int, clock: SimpleNamespace) -> None:
        self.random, self.clock = random.Random(seed), clock
        self.specs = [
            TierSpec(name, self.pick(512, 8192), self.pick(4, 16), self.pick(3, 8)) for name in STANDARD_TIERS
        ]
        options = FleetOptions(adaptive_limit=self.pick(True, False), long_prompt_tokens=self.pick(100, 512))
        self.fleet = Fleet(tuple(self.specs), options=options)
        self.fleet.preparations.clock = lambda: clock.now
        self.leases: list[Lease] = []
        for _ in range(self.pick(1, 3, 8)):
            self.add()

    def pick(self, *values: Any) -> Any:
        return self.random.choice(values)

    def add(self) -> None:
        spec, number = self.pick(*self.specs), self.random.getrandbits(40)
        self.fleet.add(Replica(f"{spec.name}-{number}", spec, "u", "", "m")).mark(ReplicaStatus.READY)

    def speed(self) -> SpeedModel:
        return SpeedModel(
            self.pick(5, 100), 0.5, self.pick(3, 30), 0.5, 1.0, self.pick(0, 0.5), profiled=self.pick(True, False)
        )

    def query(self) -> Query:
        kind, confidence = self.pick(*PromptClass), self.pick(0.5, 0.9)
        return Query(
            PromptFeatures(2, 1, 1, True, False, False, None, kind, confidence, ()),
            self.pick(10, 300),
            self.pick(1, 400),
            hint=self.pick(None, None, *STANDARD_TIERS),
            require=self.pick(True, False, False),
            sla=Sla(self.pick(None, 300.0), self.pick(None, 20.0), self.pick(None, 0.04), self.pick(None, 0.99)),
            sequences=self.pick(1, 1, 3, 20),
            prefix=self.prefix(),
        )

    def prefix(self) -> Prefix | None:
        """Return one of a few chats at some length, so that replicas come to hold parts of them."""
        if self.pick(True, False, False):
            return None
        turns = [Part(f"{self.pick('a', 'b')}" * 300, self.pick(70, 90)) for _ in range(self.pick(1, 2, 4))]
        return Prefix.of([Part("s" * 300, 80), *turns], session=self.pick("", "x", "y"))

    def happen(self) -> None:
        self.clock.now += self.pick(0, 0, 0.001, 0.3, 2.0, 30.0) * self.random.random()
        events = [self.lease] * 6 + [self.use_lease] * 8 + [self.change_replica] * 6 + [self.change_fleet]
        self.pick(*events)()

    def lease(self) -> None:
        query, replicas = self.query(), [r.id for r in self.fleet.replicas]
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
            "finished": lambda: lease.finished(self.pick(None, 20.0, 90.0), self.pick(0, 30), self.pick(None, 0, 60)),
            "failed": lambda: lease.failed("x"),
            "release": lease.release,
        }
        uses[self.pick("first token", "token", "token", "finished", "failed", "release")]()

    def change_replica(self) -> None:
        replica, now = self.pick(*self.fleet.replicas), self.clock.now
        until = now + self.pick(0.05, 3.0)
        changes = [
            lambda: replica.note_gauges(Gauges(self.pick(0, 9), 1, self.pick(0.1, 0.85, 0.95), self.pick(None, 3000))),
            lambda: setattr(replica, "share", self.pick(None, Share(self.pick(0, 2, 9), until))),
            lambda: replica.note_others(PeerLoad(self.pick(0, 2), 300, 400, 500), until),
            lambda: replica.mark(self.pick(ReplicaStatus.READY, ReplicaStatus.READY, *ReplicaStatus), "why"),
            lambda: replica.measured(self.speed()),
            lambda: setattr(replica, "speed", None),
            lambda: setattr(replica, "pid", self.pick(None, 7)),
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
            self.fleet.configure(replace(self.pick(*self.specs), max_in_flight=self.pick(2, 5)))
        elif len(self.fleet.replicas) > 1:
            self.fleet.remove(self.pick(*self.fleet.replicas))

    def expected(self, reserved: Collection[str], prefix: Prefix | None) -> FleetSnapshot:
        fleet, tiers = self.fleet, []
        for spec in fleet.specs:
            members = [r for r in fleet.replicas if r.spec.name is spec.name]
            copies = [copied(r, fleet, self.clock.now, reserved=r.id in reserved) for r in members]
            tiers.append(TierSnapshot(spec, warmed(copies, members, prefix), fleet.preparations.of(spec.name)))
        return FleetSnapshot(tuple(tiers), fleet.template, fleet.output_share, fleet.options.long_prompt_tokens)


def whole(snapshot: FleetSnapshot) -> FleetSnapshot:
    """Return a snapshot of nothing but whole replicas, as the decision log gives it back."""
    return replace(snapshot, tiers=tuple(TierSnapshot(t.spec, t.replicas, t.preparing) for t in snapshot.tiers))


def shown(decision: Decision) -> dict[str, Any]:
    return {field.name: getattr(decision, field.name) for field in fields(decision)} | {"chosen": decision.chosen}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    for module in ("tiers.fleet", "tiers.replica"):
        monkeypatch.setattr(f"{module}.monotonic", lambda: clock.now)
    return clock


@pytest.mark.parametrize("seed", range(25))
def test_a_snapshot_is_what_copying_every_replica_gives(seed: int, clock: SimpleNamespace) -> None:
    """Field by field at random times; also if it is read only after the fleet has changed again."""
    world, kept = World(seed, clock), []
    for _ in range(STEPS):
        world.happen()
        reserved, prefix = world.pick((), (), {world.pick(*world.fleet.replicas).id}), world.prefix()
        kept.append((world.fleet.snapshot(reserved, prefix), world.expected(reserved, prefix)))
        if world.pick(True, False, False):
            snapshot, expected = kept.pop(world.random.randrange(len(kept)))
            assert asdict(whole(snapshot)) == asdict(expected)
    for snapshot, expected in kept:
        assert snapshot.sequences == expected.sequences
        assert asdict(whole(snapshot)) == asdict(expected)


@pytest.mark.parametrize("seed", range(25))
def test_a_decision_by_kept_views_is_the_one_by_whole_replicas(seed: int, clock: SimpleNamespace) -> None:
    """The same tier, texts, predictions and successors, read from the log as well."""
    world = World(seed, clock)
    for _ in range(STEPS):
        world.happen()
        query = world.query()
        snapshot = world.fleet.snapshot(prefix=query.prefix)
        decision, after = decide(query, snapshot, TABLE), successors(TierName.FAST, query, snapshot, TABLE)
        logged = ADAPTER.validate_json(ADAPTER.dump_json(snapshot))
        for same in (whole(snapshot), logged):
            assert shown(decide(query, same, TABLE)) == shown(decision)
            assert successors(TierName.FAST, query, same, TABLE) == after
        assert [tier.state for tier in logged.tiers] == [tier.state for tier in snapshot.tiers]
        asked = [t.ask(query.tokens_to_read, query.max_tokens, query.sequences, snapshot) for t in snapshot.tiers]
        found = [tier.next(ask) for tier, ask in zip(snapshot.tiers, asked, strict=True)]
        assert found == [tier.next(ask) for tier, ask in zip(whole(snapshot).tiers, asked, strict=True)]
