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
from typing import TYPE_CHECKING, Self

from msgspec import Struct, structs

from tiers.choice import (
    NONE_READY,
    Candidate,
    Demand,
    best_candidate,
    candidate_at,
    expected_demand,
    takes,
    tell_apart,
)
from tiers.preparing import Preparations
from tiers.ranking import rising
from tiers.replica import FleetOptions, Replica, SentPrompt, SlotShare, Totals, WorkMark
from tiers.snapshot import (
    FleetLoad,
    FleetSnapshot,
    TierSnapshot,
    Trends,
    prompt_tokens_left,
)
from tiers.spec import (
    EngineBuild,
    ReplicaStatus,
    TemplateTokens,
    TierName,
    TierSpec,
)
from tiers.speed import (
    MAX_BESIDE,
    AnswerSample,
    PredictedTimes,
    ReplicaLoad,
    SpeedModel,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from tiers.prefix_memory import Prefix
    from tiers.snapshot import ReplicaState

STATE = attrgetter("state")
OUTSTANDING_TOKENS = attrgetter("outstanding_tokens")
FRESH_S = 0.01  # up to this age of a decision the rest of the fleet counts as unchanged
# weight of the past in ``Fleet.output_share``: about the last twenty answers
OUTPUT_MEMORY = 0.95


class Lease(Struct, eq=False):
    """One request's hold on one replica. Use it as a context manager, or call ``release`` where the request ends.

    Attributes:
        predicted: Times that the speed model predicted at the start; None: the speed was unknown.
        sequences: Answers of the request, each of which takes a slot.
        sent: What the replica held of its prompt when it was sent; None: not known.
    """

    replica: Replica
    predicted: PredictedTimes | None
    sequences: int
    sent: SentPrompt | None
    _fleet: Fleet
    _prompt_tokens: int  # not computed yet
    _output_tokens: int  # may still come
    _max_output_tokens: int
    _kv_tokens: int
    _slots_taken: int  # on the replica, by all routers, when the request was sent
    # predicted TTFT if the engine does not queue the request; None: the speed was unknown
    _unqueued_ms: float | None
    _probe: int  # the breaker's number of this request; 0: it is no probe
    _load: ReplicaLoad  # the replica's load without the request, when it was sent
    # made with the first token, if the speed is learned from answers
    _sample: AnswerSample | None = None
    _begun: WorkMark | None = None  # the replica's work at the first token
    _judged: bool = False  # the breaker knows whether the replica works
    _released: bool = False
    _generated: int = 0

    def first_token(self, ttft_ms: float | None = None) -> None:
        """Note that the prompt is computed: its tokens are no longer outstanding.

        Args:
            ttft_ms: Time to the first token, to learn from; None: nothing is learned. Nothing is learned from a request
                of several sequences either: its first token is the first of any.
        """
        replica = self.replica
        now = monotonic()
        prompt_tokens = self._prompt_tokens
        trends = replica.state.trends
        speed = replica.state.speed
        replica.prompt_computed(prompt_tokens, now)
        self._prompt_tokens = 0
        self._note_success()
        if ttft_ms is None or self.sequences > 1:
            return
        if replica.learns:
            self._begin_sample(prompt_tokens, ttft_ms, now)
        if self._unqueued_ms is not None:
            expected_ms = self._unqueued_ms * math.exp(max(trends.ttft.mean, 0.0))
            replica.limiter.sample(expected_ms, ttft_ms, in_flight=self._slots_taken)
        if self.predicted is not None and speed is not None:
            ttft_trend = trends.ttft.after(
                self.predicted.ttft_ms, ttft_ms, now=now, spread=speed.ttft_spread
            )
            replica.update(trends=Trends(ttft_trend, trends.tpot))

    def _note_success(self) -> None:
        """Tell the breaker that the replica works, unless the attempt was judged before."""
        if not self._judged:
            self._judged = True
            self.replica.breaker.succeeded(probe=self._probe)

    def _begin_sample(self, prompt_tokens: int, ttft_ms: float, now: float) -> None:
        """Note the first token's time with the load that it was seen under, to learn the replica's speed from."""
        load = self._load
        self._begun = self.replica.work_at(now)
        self._sample = AnswerSample(
            prompt_tokens=prompt_tokens,
            sequences=load.sequences,
            waiting_tokens=load.prompt_tokens,
            neighbours=load.neighbours,
            ttft_ms=ttft_ms,
        )

    def produced(self, tokens: int = 1) -> None:
        """Count output tokens that have arrived.

        It runs once per token, so it changes the replica's counters itself instead of calling its methods.
        """
        if self._released:
            return
        replica = self.replica
        work = replica.work
        work.silence_s = 0.0
        work.silent_from = monotonic()
        work.generated += tokens
        self._generated += tokens
        # an engine may send more than was asked for
        counted_tokens = min(tokens, self._output_tokens)
        replica.outstanding_tokens -= counted_tokens
        self._output_tokens -= counted_tokens

    def finished(
        self,
        tpot_ms: float | None,
        output_tokens: int = 0,
        cached_tokens: int | None = None,
    ) -> None:
        """Note a complete answer.

        Args:
            tpot_ms: Mean time between tokens; None for fewer than two tokens and for answers that were not streamed.
                Ignored for several sequences, which end at different times.
            output_tokens: Tokens of the answer; 0: the engine did not report them.
            cached_tokens: Prompt tokens found in the prefix cache; None: the engine did not report them.
        """
        replica = self.replica
        now = monotonic()
        state = replica.state
        trends = state.trends
        speed = state.speed
        # An answer that was not streamed has not counted any of its tokens before.
        replica.work.generated += max(output_tokens - self._generated, 0)
        replica.progressed(now)
        self._note_success()
        if (
            tpot_ms is not None
            and self.sequences == 1
            and self.predicted is not None
            and speed is not None
        ):
            tpot_trend = trends.tpot.after(
                self.predicted.tpot_ms, tpot_ms, now=now, spread=speed.tpot_spread
            )
            trends = Trends(trends.ttft, tpot_trend)
        replica.state = structs.replace(
            replica.state, served=state.served + 1, trends=trends
        )
        if cached_tokens is not None:
            self._correct_cached(cached_tokens)
        if replica.learns:
            self._end_sample(now, tpot_ms, output_tokens)
        if output_tokens and self._max_output_tokens:
            used_share = min(output_tokens / self._max_output_tokens, 1.0)
            self._fleet.output_share += (1 - OUTPUT_MEMORY) * (
                used_share - self._fleet.output_share
            )
            self._fleet.note_answer(output_tokens / self.sequences)

    def _correct_cached(self, cached_tokens: int) -> None:
        """Use the cached tokens that the engine reports instead of those expected, and forget blocks that it has evicted."""
        sample = self._sample
        sent = self.sent
        if sample is not None:
            expected_cached = 0 if sent is None else sent.cached
            prompt_tokens = sample.prompt_tokens + expected_cached
            self._sample = sample._replace(
                prompt_tokens=max(prompt_tokens - cached_tokens, 0)
            )
        if sent is not None:
            sent.correct(self.replica.prefixes, cached_tokens)

    def _end_sample(
        self, now: float, tpot_ms: float | None, output_tokens: int
    ) -> None:
        """Add the answer's times, and the replica's work meanwhile, to the answers that its speed is learned from."""
        replica = self.replica
        sample = self._sample
        begun = self._begun
        # a request of several sequences has no sample
        if sample is None or begun is None:
            return
        if tpot_ms is not None and tpot_ms > 0 and now > begun.at:
            ended = replica.work_at(now)
            sample = sample._replace(
                batch=max(
                    (ended.sequence_s - begun.sequence_s) / (now - begun.at), 1.0
                ),
                prefilled=(ended.prompt_tokens - begun.prompt_tokens)
                / max(output_tokens - 1, 1),
                tpot_ms=tpot_ms,
            )
        replica.answers.last.append(sample)
        replica.answers.noted += 1

    def may_be_silent_until(
        self, now: float, limit_s: float, *, is_expected: bool
    ) -> float:
        """Return until when a silent answer is waited for; see ``Replica.may_be_silent_until``."""
        return self.replica.may_be_silent_until(now, limit_s, is_expected=is_expected)

    def failed(self, error: str, *, is_judged: bool = True) -> None:
        """Count a failed attempt, by its kind of error.

        With ``is_judged`` it speaks against the replica. Without it the request itself may be at fault: the replica gets
        no fewer requests, unless ``blame`` is called.
        """
        replica = self.replica
        self._fleet.failures[replica.spec.name, error] += 1
        if self.sent is not None:
            self.sent.take_back(replica.prefixes)
        if is_judged:
            self._count_against_replica()
        replica.update(failed=replica.state.failed + 1)

    def blame(self) -> None:
        """Let a failed attempt speak against the replica, if it does not yet."""
        if not self._judged:
            self._count_against_replica()

    def _count_against_replica(self) -> None:
        """Give the replica fewer requests, or none for a while."""
        replica = self.replica
        replica.limiter.failed()
        self._judged = True
        replica.breaker.failed(monotonic(), probe=self._probe)
        replica.update()

    def release(self) -> None:
        """Free the slots. Only the first call counts."""
        if self._released:
            return
        self._released = True
        replica = self.replica
        replica.end(
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            kv_tokens=self._kv_tokens,
            sequences=self.sequences,
            now=monotonic(),
        )
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
        answer_tokens: Mean output tokens of recent answers; None: there was none.
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
    answer_tokens: float | None = None
    speeds: Mapping[TierName, SpeedModel] = field(default_factory=dict)
    losses: Mapping[TierName, float] = field(default_factory=dict)
    machine: str = ""
    options: FleetOptions = field(default_factory=FleetOptions)
    on_capacity: Callable[[], None] = field(default=lambda: None)
    on_members: Callable[[], None] = field(default=lambda: None)
    notes: dict[str, str] = field(default_factory=dict)
    failures: Counter[tuple[TierName, str]] = field(default_factory=Counter)
    restarts: Counter[TierName] = field(default_factory=Counter)
    first_share: SlotShare | None = None
    measuring: asyncio.Lock = field(default_factory=asyncio.Lock)
    preempt: Callable[[], None] | None = None
    preparations: Preparations = field(default_factory=Preparations)
    # the replicas, by tier
    _members: dict[TierName, list[Replica]] = field(default_factory=dict)
    _totals: Totals = field(default_factory=Totals)

    def __post_init__(self) -> None:
        first_replicas = self.replicas
        self.replicas = []
        self.specs = rising(self.specs, self.losses)
        for replica in first_replicas:
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
        specs = [spec if known.name is spec.name else known for known in self.specs]
        self.specs = rising(specs, self.losses)

    def hold_tiers(self, held: Collection[TierName]) -> None:
        """Let some tiers serve only requests that require them by name, and all others any request."""
        for spec in self.specs:
            if spec.held != (spec.name in held):
                self.configure(replace(spec, held=spec.name in held))
        self.on_capacity()

    def note_precision(self, replica: Replica, precision: str) -> bool:
        """Note the precision that a replica serves; return whether the known replicas of its tier differ in it."""
        replica.spec = replace(replica.spec, precision=precision)
        replica.update()
        return self._show_precision(replica.spec.name) > 1

    def builds(self, tier: TierName) -> tuple[EngineBuild, ...]:
        """Return what a tier's engines compute with, each build once; empty: no engine was asked yet."""
        states = [replica.state for replica in self._members.get(tier, ())]
        known = [state.build for state in states if state.build is not None]
        return tuple(dict.fromkeys(known))

    def _show_precision(self, tier: TierName) -> int:
        """Let a tier show what its replicas serve; return the number of their precisions."""
        # A replica without a model was never asked what it serves.
        known = [
            replica.spec.precision for replica in self._members[tier] if replica.model
        ]
        precisions = dict.fromkeys(known)
        specs = list(self.specs)
        if precisions:
            shown = ", ".join(precisions)
            specs = [
                replace(spec, precision=shown) if spec.name is tier else spec
                for spec in specs
            ]
        self.specs = rising(specs, self.losses)
        return len(precisions)

    def shorten(self, replica: Replica, max_model_len: int) -> None:
        """Note that a replica has a shorter context than configured; its tier promises the shortest of its replicas."""
        replica.spec = replace(replica.spec, max_model_len=max_model_len)
        replica.update()
        tier = self.spec(replica.spec.name)
        self.configure(
            replace(tier, max_model_len=min(tier.max_model_len, max_model_len))
        )

    def note_adapters(self, replica: Replica, adapters: Sequence[str]) -> bool:
        """Note the adapters that a replica offers; its tier offers those that all its ready replicas have.

        Return whether the replica's have changed.
        """
        has_changed = replica.spec.adapters != tuple(adapters)
        if has_changed:
            replica.spec = replace(replica.spec, adapters=tuple(adapters))
            replica.update()
        common = set(adapters)
        for member in self._members[replica.spec.name]:
            if member.state.status in {ReplicaStatus.READY, ReplicaStatus.DRAINING}:
                common &= set(member.spec.adapters)
        tier = self.spec(replica.spec.name)
        offered = tuple(sorted(common))
        if tier.adapters != offered:
            self.configure(replace(tier, adapters=offered))
        return has_changed

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
        candidate: Candidate | None = None,
    ) -> Lease | None:
        """Take a request's slots on the ready replica of a tier that suits it best; return None if no replica has them.

        For ``prompt_tokens``, ``max_tokens`` and ``sequences`` see ``demand``; replicas in ``exclude`` (ids) were tried
        already. With ``over_limit`` replicas' limits do not count: the request was admitted before, on another replica.
        ``prefix`` is its prompt's; None: not known. ``candidate`` is the replica that a decision was made for, which takes
        the request if nothing has changed there, and the decision is fresh; None: any.
        """
        now = monotonic()
        demand = self.demand(prompt_tokens, max_tokens, sequences)
        members = self._members_except(tier, exclude)
        if candidate is None or over_limit or not _is_current(candidate, members, now):
            candidate = self._find_candidate(
                members, demand, prefix, now=now, over_limit=over_limit
            )
        if not candidate.is_free or candidate.position is None:
            return None
        replica = members[candidate.position]
        sent = None
        uncached_tokens = prompt_tokens
        if prefix is not None:
            sent = SentPrompt.to(replica, prefix)
            uncached_tokens = max(prompt_tokens - sent.cached, 0)
        unqueued_ms = self._predict_unqueued_ms(replica, candidate, uncached_tokens)
        probe = replica.breaker.begin(now)
        output_tokens = max_tokens * sequences
        replica.begin(
            prompt_tokens=uncached_tokens,
            output_tokens=output_tokens,
            kv_tokens=demand.kv_tokens,
            sequences=sequences,
            now=now,
        )
        return Lease(
            replica=replica,
            predicted=candidate.uncorrected_times,
            sequences=sequences,
            sent=sent,
            _fleet=self,
            _prompt_tokens=uncached_tokens,
            _output_tokens=output_tokens,
            _max_output_tokens=output_tokens,
            _kv_tokens=demand.kv_tokens,
            _slots_taken=replica.state.slots + replica.others.counted.slots,
            _unqueued_ms=unqueued_ms,
            _probe=probe,
            _load=candidate.load,
        )

    def _members_except(
        self, tier: TierName, exclude: Collection[str]
    ) -> Sequence[Replica]:
        """Return a tier's replicas without those whose ids are excluded."""
        members = self._members.get(tier, [])
        if not exclude:
            return members
        return [replica for replica in members if replica.id not in exclude]

    def _find_candidate(
        self,
        members: Sequence[Replica],
        demand: Demand,
        prefix: Prefix | None,
        *,
        now: float,
        over_limit: bool,
    ) -> Candidate:
        """Return what some replicas of a tier have for a request; ``over_limit``: whatever their limits."""
        if not members:
            return NONE_READY
        load = self._load(now)
        tier = self._tier_snapshot(members[0].spec, members, prefix)
        if not over_limit:
            return best_candidate(tier, demand, load)
        position = _least_loaded_open(members)
        if position is None:
            return NONE_READY
        return candidate_at(tier, position, demand, fleet=load)

    def demand(self, prompt_tokens: int, max_tokens: int, sequences: int = 1) -> Demand:
        """Return what a request needs, with the output that recent requests let one expect.

        Args:
            prompt_tokens: Tokens of all its prompts, with the chat template.
            max_tokens: Most output tokens of each sequence.
            sequences: Answers computed at the same time.
        """
        return expected_demand(
            prompt_tokens,
            max_tokens,
            sequences,
            output_share=self.output_share,
            long_prompt_tokens=self.options.long_prompt_tokens,
            answer_tokens=self.answer_tokens,
        )

    def note_answer(self, output_tokens: float) -> None:
        """Note how long an answer was."""
        if self.answer_tokens is None:
            self.answer_tokens = output_tokens
        self.answer_tokens += (1 - OUTPUT_MEMORY) * (output_tokens - self.answer_tokens)

    def _predict_unqueued_ms(
        self, replica: Replica, chosen: Candidate, uncached_tokens: int
    ) -> float | None:
        """Predict the TTFT of a request that the engine does not queue; None: the replica's speed is not known."""
        speed = replica.state.speed
        max_num_seqs = replica.spec.max_num_seqs
        if speed is not None and chosen.load.sequences >= max_num_seqs:
            load_with_room = structs.replace(chosen.load, sequences=max_num_seqs - 1)
            return speed.times(
                uncached_tokens,
                load_with_room,
                max_num_seqs,
                output_share=self.output_share,
            ).ttft_ms
        if chosen.uncorrected_times is None:
            return None
        return chosen.uncorrected_times.ttft_ms

    def _tier_snapshot(
        self, spec: TierSpec, members: Sequence[Replica], prefix: Prefix | None
    ) -> TierSnapshot:
        """Return some replicas of a tier as they are, and what they hold of a prompt."""
        states = tuple(map(STATE, members))
        outstanding_tokens = tuple(map(OUTSTANDING_TOKENS, members))
        preparing = None
        if spec.name in self.preparations.lacking:
            preparing = self.preparations.of(spec.name)
        if prefix is None:
            return TierSnapshot(spec, states, outstanding_tokens, preparing=preparing)
        cached = tuple([replica.cached_tokens(prefix) for replica in members])
        home = -1
        if len(members) > 1 and prefix.session and _is_home_needed(prefix, cached):
            home = _home_of(prefix, members)
        return TierSnapshot(
            spec,
            states,
            outstanding_tokens,
            preparing=preparing,
            cached=cached,
            home=home,
            conversation_tokens=prefix.turn_tokens,
        )

    def refresh(self, now: float) -> None:
        """Replace those states of replicas that time has changed."""
        self._totals.state_expires_at = math.inf
        for replica in self.replicas:
            if replica.state_expires_at <= now:
                replica.update()
            self._totals.state_expires_at = min(
                self._totals.state_expires_at, replica.state_expires_at
            )

    def _load(self, now: float) -> FleetLoad:
        """Return how busy the fleet is, with all states up to date."""
        if self._totals.state_expires_at <= now:
            self.refresh(now)
        totals = self._totals
        replica_count = len(self.replicas)
        others = max(replica_count - 1, 1)
        if not totals.contended or replica_count > MAX_BESIDE:
            return FleetLoad(now, totals.busy, others=others)
        left_ms = self._left_ms(now)
        return FleetLoad(
            now,
            totals.busy,
            others=others,
            left_ms=left_ms,
            left_ms_sum=sum(left_ms.values()),
            usually=min(totals.busy_lately(now) / replica_count, 1.0),
        )

    def _left_ms(self, now: float) -> dict[str, float]:
        """Predict the time until each busy replica of known speed is idle, by its id."""
        left_ms = {}
        for replica in self.replicas:
            state = replica.state
            load = state.load
            if load.sequences and state.speed is not None:
                load_left = ReplicaLoad(
                    load.sequences,
                    prompt_tokens_left(state, now),
                    output_tokens=replica.output_tokens + load.output_tokens,
                )
                left_ms[replica.id] = state.speed.left_ms(
                    load_left, replica.spec.max_num_seqs, self.output_share
                )
        return left_ms

    def has_capacity(
        self, tiers: Collection[TierName], demand: Demand, exclude: Collection[str] = ()
    ) -> bool:
        """Tell whether a request could be leased on one of several tiers, apart from the excluded replicas."""
        self.refresh(monotonic())
        for tier in tiers:
            for replica in self._members_except(tier, exclude):
                if takes(replica.state, demand, replica.spec.max_in_flight):
                    return True
        return False

    def is_ready(self, tier: TierName) -> bool:
        """Tell whether a tier has a ready replica."""
        members = self._members.get(tier, ())
        return any(replica.state.status is ReplicaStatus.READY for replica in members)

    def nearest(
        self, tiers: Collection[TierName], demand: Demand, exclude: Collection[str] = ()
    ) -> str | None:
        """Return the id of the replica with free slots that lacks least of what a request needs; None: no replica."""
        self.refresh(monotonic())

        def lacking(state: ReplicaState) -> tuple[int, int]:
            lacking_slots = max(state.slots + demand.sequences - state.limit, 0)
            return lacking_slots, state.kv.held + demand.kv_tokens - state.kv.size

        nearly_able = []
        for replica in self.replicas:
            state = replica.state
            is_candidate = (
                replica.spec.name in tiers and state.open and replica.id not in exclude
            )
            if (
                is_candidate
                and state.slots < state.limit
                and not (demand.is_long and state.kv.pressure)
            ):
                nearly_able.append(state)
        if not nearly_able:
            return None
        return min(nearly_able, key=lacking).id

    def freed_per_s(self, tier: TierName) -> float:
        """Predict a tier's slots that become free per second; 0 if no replica takes requests."""
        now = monotonic()
        load = self._load(now)
        members = self._members.get(tier, ())
        return sum(
            replica.freed_per_s(load, self.output_share)
            for replica in members
            if replica.state.open
        )

    def note_template(self, template: TemplateTokens) -> None:
        """Note what an engine's chat template adds to prompts; the larger of each figure counts."""
        self.template = TemplateTokens(
            *map(max, astuple(self.template), astuple(template))
        )

    def snapshot(
        self, reserved: Collection[str] = (), prefix: Prefix | None = None
    ) -> FleetSnapshot:
        """Return the fleet as it is, frozen.

        Args:
            reserved: Ids of replicas that have no free slots in it.
            prefix: The prompt that a decision is made for: the replicas show what they hold of it.
        """
        load = self._load(monotonic())
        tiers = []
        for spec in self.specs:
            tier = self._tier_snapshot(spec, self._members.get(spec.name, ()), prefix)
            if reserved:
                tier = _without_free_slots(tier, reserved)
            tiers.append(tier)
        return FleetSnapshot(
            tuple(tiers),
            self.template,
            output_share=self.output_share,
            long_prompt_tokens=self.options.long_prompt_tokens,
            load=load,
            answer_tokens=self.answer_tokens,
        )


def _is_current(chosen: Candidate, members: Sequence[Replica], now: float) -> bool:
    """Tell whether a candidate still holds: it is fresh, and the state of its replica has not been replaced since."""
    if not chosen.is_free or chosen.position is None or chosen.snapshot_at is None:
        return False
    if now - chosen.snapshot_at > FRESH_S or chosen.position >= len(members):
        return False
    return members[chosen.position].state is chosen.replica


def _is_home_needed(prefix: Prefix, cached: Sequence[int]) -> bool:
    """Tell whether the session decides between replicas: they hold as much of the prompt, or none holds the conversation.

    The second is so where replicas have evicted it. What is left there is a system prompt that conversations share. If that
    decided, all of them would go to one replica, and drive each other out of its cache again and again.
    """
    return not tell_apart(cached) or max(cached) < prefix.turn_tokens


def _home_of(prefix: Prefix, members: Sequence[Replica]) -> int:
    """Return the position of a session's own replica among those that get requests; -1: none does."""
    open_positions = [
        position for position, replica in enumerate(members) if replica.state.open
    ]
    if not open_positions:
        return -1
    return open_positions[
        prefix.home([members[position].id for position in open_positions])
    ]


def _without_free_slots(tier: TierSnapshot, reserved: Collection[str]) -> TierSnapshot:
    """Return a tier in which the replicas with some ids have no free slots."""
    states = []
    for state in tier.replicas:
        if state.id in reserved:
            states.append(structs.replace(state, limit=min(state.limit, state.slots)))
        else:
            states.append(state)
    return structs.replace(tier, replicas=tuple(states))


def _least_loaded_open(members: Sequence[Replica]) -> int | None:
    """Return the position of the least loaded replica that gets requests, whatever its limits; None: none does."""
    loads = []
    for position, replica in enumerate(members):
        state = replica.state
        if state.open:
            loads.append((replica.outstanding_tokens, state.load.sequences, position))
    if not loads:
        return None
    return min(loads)[-1]
