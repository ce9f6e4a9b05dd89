"""The fleet: all replicas, and the leases that requests hold on them.

One event loop owns a fleet. Nothing here awaits, so every change is atomic. A lease is released exactly once, however its
request ends. Its counters are the router's own view of load: exact, while the engines' gauges lag by seconds.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import astuple, dataclass, field, replace
from operator import attrgetter
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, Self

from msgspec import Struct, structs

from tiers.choice import NONE_READY, Candidate, Request, candidate, expected, takes, tell_apart
from tiers.preparing import Preparations
from tiers.ranking import rising
from tiers.replica import FleetOptions, Replica, SentPrompt, Share, Totals
from tiers.snapshot import FleetLoad, FleetSnapshot, TierSnapshot, Trends, load_of
from tiers.spec import ReplicaStatus, TemplateTokens, TierName, TierSpec
from tiers.speed import MOST_BESIDE, AnswerSample, Load, SpeedModel, Times

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from tiers.prefix_memory import Prefix
    from tiers.snapshot import ReplicaState

STATE, OUTPUT_TOKENS = attrgetter("state"), attrgetter("output_tokens")
FRESH_S = 0.01  # age of a decision up to which the rest of the fleet counts as unchanged
OUTPUT_MEMORY = 0.95  # weight of the past in ``Fleet.output_share``: about the last twenty answers


class Demand(NamedTuple):
    """What a request needs of a replica.

    Attributes:
        prompt_tokens: Of all its prompts, with the chat template.
        max_tokens: Most output tokens of each sequence.
        sequences: Answers computed at the same time: prompts times choices. Choices share their prompt.
    """

    prompt_tokens: int
    max_tokens: int
    sequences: int = 1


class Lease(Struct, eq=False):
    """One request's hold on one replica. Use it as a context manager, or call ``release`` where the request ends.

    Attributes:
        predicted: Times that the speed model predicted at the start; None: the speed was unknown.
        sequences: Of the request: the slots that it takes.
        sent: What the replica held of its prompt when it was sent; None: not known.
    """

    replica: Replica
    predicted: Times | None
    sequences: int
    sent: SentPrompt | None
    _fleet: Fleet
    _prompt_tokens: int  # that are not computed yet
    _output_tokens: int
    _asked_tokens: int
    _kv_tokens: int
    _slots_taken: int  # on the replica, by all routers
    _unqueued_ms: float | None
    _probe: int
    _load: Load  # of the replica, without the request
    _seen: AnswerSample | None = None
    _begun: tuple[float, float, int] | None = None  # time of the first token, and the replica's work then
    _judged: bool = False
    _released: bool = False
    _generated: int = 0

    def first_token(self, ttft_ms: float | None = None) -> None:
        """Note that the prompt is computed: its tokens are no longer outstanding.

        Args:
            ttft_ms: Time to the first token, to learn from; None: nothing is learned. Nothing is learned from a request
                of several sequences either: its first token is the first of any.
        """
        replica, now, prompt_tokens = self.replica, monotonic(), self._prompt_tokens
        trends, speed = replica.state.trends, replica.state.speed
        replica.prompt_computed(prompt_tokens, now)
        self._prompt_tokens = 0
        if not self._judged:
            self._judged = True
            replica.breaker.succeeded(probe=self._probe)
        if ttft_ms is None or self.sequences > 1:
            return
        if speed is None or not speed.profiled:
            load, self._begun = self._load, (now, *replica.work_at(now))
            self._seen = AnswerSample(prompt_tokens, load.sequences, load.prompt_tokens, load.neighbours, ttft_ms)
        if self._unqueued_ms is not None:
            expected_ms = self._unqueued_ms * math.exp(max(trends.ttft.mean, 0.0))
            replica.limiter.sample(expected_ms, ttft_ms, self._slots_taken)
        if self.predicted is not None and speed is not None:
            ttft = trends.ttft.after(self.predicted.ttft_ms, ttft_ms, now, speed.ttft_spread)
            replica.update(trends=Trends(ttft, trends.tpot))

    def produced(self, tokens: int = 1) -> None:
        """Count output tokens that have arrived."""
        if self._released:
            return
        replica, left = self.replica, self._output_tokens  # once per token, so without a call
        work = replica.work
        work.silence_s, work.silent_from = 0.0, monotonic()
        work.generated += tokens
        self._generated += tokens
        tokens = min(tokens, left)
        replica.output_tokens -= tokens
        self._output_tokens = left - tokens

    def finished(self, tpot_ms: float | None, output_tokens: int = 0, cached_tokens: int | None = None) -> None:
        """Note a complete answer.

        Args:
            tpot_ms: Mean time between tokens; None for fewer than two tokens and for answers that were not streamed.
                Ignored for several sequences, which end at different times.
            output_tokens: Of the answer; 0: the engine did not report them.
            cached_tokens: Of the prompt, found in the prefix cache; None: the engine did not report them.
        """
        replica, now = self.replica, monotonic()
        state, work = replica.state, replica.work
        trends, speed = state.trends, state.speed
        work.generated += max(output_tokens - self._generated, 0)  # of an answer that was not streamed
        work.silence_s, work.silent_from = 0.0, now
        if not self._judged:
            self._judged = True
            replica.breaker.succeeded(probe=self._probe)
        if tpot_ms is not None and self.sequences == 1 and self.predicted is not None and speed is not None:
            tpot = trends.tpot.after(self.predicted.tpot_ms, tpot_ms, now, speed.tpot_spread)
            trends = Trends(trends.ttft, tpot)
        replica.state = structs.replace(replica.state, served=state.served + 1, trends=trends)
        if cached_tokens is not None:
            self._correct(cached_tokens)
        if speed is None or not speed.profiled:
            self._note(now, tpot_ms, output_tokens)
        if output_tokens and self._asked_tokens:
            share = min(output_tokens / self._asked_tokens, 1.0)
            self._fleet.output_share += (1 - OUTPUT_MEMORY) * (share - self._fleet.output_share)

    def _correct(self, cached_tokens: int) -> None:
        """Take over what the engine found in its cache: learn from the rest, and forget what it must have evicted."""
        seen, sent = self._seen, self.sent
        if seen is not None:
            prompt_tokens = seen.prompt_tokens + (sent.cached if sent is not None else 0)
            self._seen = seen._replace(prompt_tokens=max(prompt_tokens - cached_tokens, 0))
        if sent is not None:
            sent.correct(self.replica.prefixes, cached_tokens)

    def _note(self, now: float, tpot_ms: float | None, output_tokens: int) -> None:
        """Note the answer's times and the replica's work meanwhile, to learn its speed from."""
        replica = self.replica
        seen, begun = self._seen, self._begun
        if seen is None or begun is None:  # several sequences never begin
            return
        began, sequence_s, prompts = begun
        if tpot_ms is not None and tpot_ms > 0 and now > began:
            batch, prefilled = replica.work_at(now)
            seen = seen._replace(
                batch=max((batch - sequence_s) / (now - began), 1.0),
                prefilled=(prefilled - prompts) / max(output_tokens - 1, 1),
                tpot_ms=tpot_ms,
            )
        replica.answers.last.append(seen)
        replica.answers.noted += 1

    def may_be_silent_until(self, now: float, limit_s: float, *, is_expected: bool) -> float:
        """Return until when a silent answer is waited for; see ``Replica.may_be_silent_until``."""
        return self.replica.may_be_silent_until(now, limit_s, is_expected=is_expected)

    def failed(self, error: str) -> None:
        """Count a failed attempt, by its kind of error."""
        replica = self.replica
        self._fleet.failures[replica.spec.name, error] += 1
        if self.sent is not None:
            self.sent.take_back(replica.prefixes)
        replica.limiter.failed()
        self._judged = True
        replica.breaker.failed(monotonic(), probe=self._probe)
        replica.update(failed=replica.state.failed + 1)

    def release(self) -> None:
        """Free the slots. Only the first call counts."""
        if self._released:
            return
        self._released = True
        replica = self.replica
        replica.end(self._prompt_tokens, self._output_tokens, self._kv_tokens, self.sequences, monotonic())
        self._prompt_tokens = 0  # a late first token must not count down again
        if not self._judged:
            replica.breaker.given_up(probe=self._probe)
        self._fleet.on_capacity()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.release()


@dataclass(slots=True)
class Fleet:
    """All replicas of all tiers.

    Attributes:
        specs: The tiers, by rising precision: by measured loss where it is known, else by the bits of a weight.
        output_share: Recent output tokens over those that requests allowed, 0..1.
        speeds: By tier, where they were profiled under load.
        losses: Mean loss of each measured tier, 0..1.
        machine: Name of the machine that the router, and engines started by it, run on.
        options: When replicas get fewer requests, or none.
        on_capacity: Called when slots may have become free.
        on_members: Called when a replica was added or removed.
        notes: What is wrong with where engines are named, by setting.
        failures: Failed attempts, by tier and kind of error.
        restarts: Automatic restarts of engines, by tier.
        first_share: This router's share of a replica that is added; None: all of it.
        measuring: Lock for speed measurements: two at a time would measure each other.
        preempt: Frees the slots that the router's own measurements hold; None: they hold none.
        preparations: What tiers need before they serve for the first time.
    """

    specs: tuple[TierSpec, ...]
    replicas: list[Replica] = field(default_factory=list)
    template: TemplateTokens = field(default_factory=TemplateTokens)
    output_share: float = 1.0
    speeds: Mapping[TierName, SpeedModel] = field(default_factory=dict)
    losses: Mapping[TierName, float] = field(default_factory=dict)
    machine: str = ""
    options: FleetOptions = field(default_factory=FleetOptions)
    on_capacity: Callable[[], None] = field(default=lambda: None)
    on_members: Callable[[], None] = field(default=lambda: None)
    notes: dict[str, str] = field(default_factory=dict)
    failures: Counter[tuple[TierName, str]] = field(default_factory=Counter)
    restarts: Counter[TierName] = field(default_factory=Counter)
    first_share: Share | None = None
    measuring: asyncio.Lock = field(default_factory=asyncio.Lock)
    preempt: Callable[[], None] | None = None
    preparations: Preparations = field(default_factory=Preparations)
    _members: dict[TierName, list[Replica]] = field(default_factory=dict)  # the replicas, by tier
    _totals: Totals = field(default_factory=Totals)

    def __post_init__(self) -> None:
        given, self.replicas = self.replicas, []
        self.specs = rising(self.specs, self.losses)
        for replica in given:
            self._enter(replica)

    def add(self, replica: Replica) -> Replica:
        """Add a replica. It gets requests once it is marked ready."""
        replica.others.share = self.first_share
        replica.adopt(self.options)
        self._enter(replica)
        return replica

    def _enter(self, replica: Replica) -> None:
        self.replicas.append(replica)
        self._members.setdefault(replica.spec.name, []).append(replica)
        replica.totals = self._totals
        self._totals.count(replica, 1)
        self.on_members()

    def remove(self, replica: Replica) -> None:
        """Remove a replica. Its leases end as usual."""
        self.replicas.remove(replica)
        self._members[replica.spec.name].remove(replica)
        self._totals.count(replica, -1)
        replica.totals = Totals()
        self._show_precision(replica.spec.name)
        self.on_members()

    @property
    def sources(self) -> dict[str, str | None]:
        """Return who names each replica, by id."""
        return {replica.id: replica.source for replica in self.replicas}

    def use(self, options: FleetOptions) -> None:
        """Take new options; circuit breakers and limits keep what they have learned."""
        self.options = options
        for replica in self.replicas:
            replica.use(options)
        self.on_capacity()

    def configure(self, spec: TierSpec) -> None:
        """Replace a tier's configuration, for example when its checkpoint is finished."""
        specs = [spec if each.name is spec.name else each for each in self.specs]
        self.specs = rising(specs, self.losses)

    def note_precision(self, replica: Replica, precision: str) -> bool:
        """Note what a replica given by URL serves; return whether the known replicas of its tier differ in it."""
        replica.spec = replace(replica.spec, precision=precision)
        replica.update()
        return self._show_precision(replica.spec.name) > 1

    def _show_precision(self, tier: TierName) -> int:
        """Let a tier show what its replicas serve; return the number of their precisions."""
        known = [r.spec.precision for r in self._members[tier] if r.model]  # the others were never asked
        found = dict.fromkeys(known)
        shown = ", ".join(found)
        specs = [replace(s, precision=shown) if s.name is tier and found else s for s in self.specs]
        self.specs = rising(specs, self.losses)
        return len(found)

    def shorten(self, replica: Replica, max_model_len: int) -> None:
        """Note that a replica has a shorter context than configured; its tier promises the shortest of its replicas."""
        replica.spec = replace(replica.spec, max_model_len=max_model_len)
        replica.update()
        tier = self.spec(replica.spec.name)
        self.configure(replace(tier, max_model_len=min(tier.max_model_len, max_model_len)))

    def note_adapters(self, replica: Replica, adapters: Sequence[str]) -> bool:
        """Note the adapters that a replica offers; its tier offers those that all its ready replicas have.

        Return whether the replica's have changed.
        """
        changed = replica.spec.adapters != tuple(adapters)
        if changed:
            replica.spec = replace(replica.spec, adapters=tuple(adapters))
            replica.update()
        offered = set(adapters)
        for other in self._members[replica.spec.name]:
            if other.state.status in {ReplicaStatus.READY, ReplicaStatus.DRAINING}:
                offered &= set(other.spec.adapters)
        tier = self.spec(replica.spec.name)
        if tier.adapters != (names := tuple(sorted(offered))):
            self.configure(replace(tier, adapters=names))
        return changed

    def rank_by_loss(self, losses: Mapping[TierName, float]) -> None:
        """Put the tiers into the order of their measured losses; see ``tiers.ranking``.

        Args:
            losses: Mean loss of each measured tier, 0..1.
        """
        self.losses = losses
        self.specs = rising(self.specs, losses)

    def rank(self, tier: TierName) -> int:
        """Return a tier's rank by precision: 0 is the lowest.

        Raises:
            ValueError: The fleet has no such tier.
        """
        return [spec.name for spec in self.specs].index(tier)

    def spec(self, tier: TierName) -> TierSpec:
        """Return one tier's configuration.

        Raises:
            KeyError: The fleet has no such tier.
        """
        for spec in self.specs:
            if spec.name is tier:
                return spec
        raise KeyError(tier)

    def lease(
        self,
        tier: TierName,
        *,
        prompt_tokens: int,
        max_tokens: int,
        sequences: int = 1,
        exclude: Collection[str] = (),
        over_limit: bool = False,
        prefix: Prefix | None = None,
        found: Candidate | None = None,
    ) -> Lease | None:
        """Take a request's slots on the ready replica of a tier that suits it best; return None if no replica has them.

        For ``prompt_tokens``, ``max_tokens`` and ``sequences`` see ``Demand``; replicas in ``exclude`` (ids) were tried
        already. With ``over_limit`` replicas' limits do not count: the request was admitted before, on another replica.
        ``prefix`` is its prompt's; None: not known. ``found`` is the replica that a decision was made for, which takes
        the request if nothing has changed there, and the decision is fresh; None: any.
        """
        now, output_tokens = monotonic(), max_tokens * sequences
        kv_tokens = prompt_tokens + math.ceil(self.output_share * output_tokens)
        members = self._members.get(tier, [])
        if exclude:
            members = [replica for replica in members if replica.id not in exclude]
        at = -1 if found is None or not found.free or over_limit or now - found.at > FRESH_S else found.position
        if found is None or not 0 <= at < len(members) or members[at].state is not found.replica:
            long = prompt_tokens > self.options.long_prompt_tokens
            request = Request(prompt_tokens, kv_tokens - prompt_tokens, sequences, long, self.output_share)
            found = self._found(members, request, prefix, now, over_limit=over_limit)
            if not found.free:
                return None
        replica = members[found.position]
        sent, to_read = None, prompt_tokens
        if prefix is not None:
            sent = SentPrompt.to(replica, prefix)
            to_read = max(prompt_tokens - sent.cached, 0)
        predicted, load, speed, most = found.uncorrected, found.load, replica.state.speed, replica.spec.max_num_seqs
        unqueued_ms = None if predicted is None else predicted.ttft_ms
        if speed is not None and load.sequences >= most:
            room = structs.replace(load, sequences=most - 1)
            unqueued_ms = speed.times(to_read, room, most, self.output_share).ttft_ms
        probe = 0 if replica.breaker.open_until is None else replica.breaker.begin(now)
        replica.begin(to_read, output_tokens, kv_tokens, sequences, now)
        return Lease(
            replica,
            predicted,
            sequences,
            sent,
            _fleet=self,
            _prompt_tokens=to_read,
            _output_tokens=output_tokens,
            _asked_tokens=output_tokens,
            _kv_tokens=kv_tokens,
            _slots_taken=replica.state.slots + replica.others.counted.slots,
            _unqueued_ms=unqueued_ms,
            _probe=probe,
            _load=load,
        )

    def _found(
        self, members: Sequence[Replica], request: Request, prefix: Prefix | None, now: float, *, over_limit: bool
    ) -> Candidate:
        """Return what some replicas of a tier have for a request; ``over_limit``: whatever their limits."""
        if not members:
            return NONE_READY
        load, tier = self._load(now), self._tier_snapshot(members[0].spec, members, prefix)
        if not over_limit:
            return candidate(tier, request, load)
        position = _least_loaded_open(members)
        return NONE_READY if position < 0 else expected(tier, position, request, load)

    def _tier_snapshot(self, spec: TierSpec, members: Sequence[Replica], prefix: Prefix | None) -> TierSnapshot:
        """Return some replicas of a tier as they are, and what they hold of a prompt."""
        states, outputs = tuple(map(STATE, members)), tuple(map(OUTPUT_TOKENS, members))
        preparing = self.preparations.of(spec.name) if spec.name in self.preparations.lacking else None
        if prefix is None:
            return TierSnapshot(spec, states, outputs, preparing)
        cached, home = tuple([r.cached_tokens(prefix) for r in members]), -1
        if len(members) > 1 and prefix.session and not tell_apart(cached):
            open_ones = [n for n, state in enumerate(states) if state.open]
            if open_ones:
                home = open_ones[prefix.home([members[n].id for n in open_ones])]
        return TierSnapshot(spec, states, outputs, preparing, cached, home)

    def refresh(self, now: float) -> None:
        """Replace those states of replicas that time has changed."""
        self._totals.until = math.inf
        for replica in self.replicas:
            if replica.expires_at <= now:
                replica.update()
            self._totals.until = min(self._totals.until, replica.expires_at)

    def _load(self, now: float) -> FleetLoad:
        """Return how busy the fleet is, with all states up to date."""
        if self._totals.until <= now:
            self.refresh(now)
        totals, count = self._totals, len(self.replicas)
        others = count - 1 or 1
        load = FleetLoad(now, totals.busy, others)
        if not totals.contended or count > MOST_BESIDE:
            return load
        left_ms = {
            r.id: speed.left_ms(load_of(r.state, r.output_tokens, load), r.spec.max_num_seqs, self.output_share)
            for r in self.replicas
            if r.state.load.sequences and (speed := r.state.speed) is not None
        }
        usually = min(totals.busy_lately(now) / count, 1.0)
        return FleetLoad(now, totals.busy, others, left_ms, sum(left_ms.values()), usually)

    def has_capacity(self, tiers: Collection[TierName], demand: Demand, exclude: Collection[str] = ()) -> bool:
        """Tell whether a request could be leased on one of several tiers, apart from the excluded replicas."""
        self.refresh(monotonic())
        prompt_tokens, long = demand.prompt_tokens, demand.prompt_tokens > self.options.long_prompt_tokens
        request = Request(prompt_tokens, self._kv_tokens(demand) - prompt_tokens, demand.sequences, long)
        return any(
            takes(replica.state, request, replica.spec.max_in_flight)
            for tier in tiers
            for replica in self._members.get(tier, ())
            if replica.id not in exclude
        )

    def is_ready(self, tier: TierName) -> bool:
        """Tell whether a tier has a ready replica."""
        return any(r.state.status is ReplicaStatus.READY for r in self._members.get(tier, ()))

    def nearest(self, tiers: Collection[TierName], demand: Demand, exclude: Collection[str] = ()) -> str | None:
        """Return the id of the replica with free slots that lacks least of what a request needs; None: no replica."""
        tokens, long = self._kv_tokens(demand), demand.prompt_tokens > self.options.long_prompt_tokens
        self.refresh(monotonic())

        def lacking(state: ReplicaState) -> tuple[int, int]:
            return max(state.slots + demand.sequences - state.limit, 0), state.kv.held + tokens - state.kv.size

        able = [r.state for r in self.replicas if r.spec.name in tiers and r.state.open and r.id not in exclude]
        partly = [state for state in able if state.slots < state.limit and not (long and state.kv.pressure)]
        return min(partly, key=lacking).id if partly else None

    def _kv_tokens(self, demand: Demand) -> int:
        return demand.prompt_tokens + math.ceil(self.output_share * demand.max_tokens * demand.sequences)

    def freed_per_s(self, tier: TierName) -> float:
        """Predict a tier's slots that become free per second; 0 if no replica takes requests."""
        now = monotonic()
        load = self._load(now)
        return sum(r.freed_per_s(load, self.output_share) for r in self._members.get(tier, ()) if r.state.open)

    def note_template(self, template: TemplateTokens) -> None:
        """Note what an engine's chat template adds to prompts; the larger of each figure counts."""
        self.template = TemplateTokens(*map(max, astuple(self.template), astuple(template)))

    def snapshot(self, reserved: Collection[str] = (), prefix: Prefix | None = None) -> FleetSnapshot:
        """Return the fleet as it is, frozen.

        Args:
            reserved: Ids of replicas that have no free slots in it.
            prefix: Of the prompt that a decision is made for: the replicas show what they hold of it.
        """
        load, tiers = self._load(monotonic()), []
        for spec in self.specs:
            tier = self._tier_snapshot(spec, self._members.get(spec.name, ()), prefix)
            if reserved:
                full = [
                    structs.replace(r, limit=min(r.limit, r.slots)) if r.id in reserved else r for r in tier.replicas
                ]
                tier = structs.replace(tier, replicas=tuple(full))
            tiers.append(tier)
        long = self.options.long_prompt_tokens
        return FleetSnapshot(tuple(tiers), self.template, self.output_share, long, load)


def _least_loaded_open(members: Sequence[Replica]) -> int:
    """Return the position of the least loaded replica that gets requests, whatever its limits; -1: none does."""
    loads = [
        (r.state.prompt_tokens + r.output_tokens, r.state.load.sequences, n)
        for n, r in enumerate(members)
        if r.state.open
    ]
    return min(loads)[2] if loads else -1
