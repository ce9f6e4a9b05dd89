"""Verify an engine against a reference before it gets requests: the same model, and as likely the same texts.

The reference is never the engine's own first start, which may be broken. It is

1. what transformers computed when the checkpoint was made, if it was made here (``canary``);
2. a running engine that was verified itself, or one of the highest precision. Where two engines agree that nothing else
   vouches for, both are taken to be sound: two broken ones would hardly find the same tokens as likely.

What was verified is kept in the canary's file. At later starts, an engine with the same weights, release of vLLM, precision
of weights and KV cache, and kernels is only compared with that file.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from tiers.errors import CanaryRefusedError, ProbeError
from tiers.lifecycle.canary import EngineKey, made_checkpoint
from tiers.lifecycle.engine import Observation
from tiers.lifecycle.process import selected_kernels
from tiers.spec import ReplicaStatus, VerificationState
from tiers.together import run_both
from tiers.verification.engine import ComparedEngine
from tiers.verification.findings import EngineIdentity
from tiers.verification.likelihood import (
    LikelihoodRecord,
    compare_likelihood,
    score_texts,
    write_texts,
)
from tiers.verification.model_facts import Extent, observe_facts
from tiers.verification.same_model import compare_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from tiers.fleet import Fleet
    from tiers.lifecycle.canary import Canary
    from tiers.lifecycle.engine import Engine
    from tiers.probe import EngineProbe
    from tiers.replica import Replica
    from tiers.verification.findings import Difference, SameModelFinding
    from tiers.verification.likelihood import TextScores, WrittenText
    from tiers.verification.model_facts import ModelFacts

log = logging.getLogger(f"qarr.{__name__}")
# The differences that a fleet allows for: each tier promises a context of its own.
ALLOWED_DIFFERENCES = frozenset({"context"})
# A reference serves while it is asked: requests of callers, whose numbers are lower, go first.
PRIORITY = 10
VOUCHED_FOR = {VerificationState.VERIFIED, VerificationState.ACCEPTED}


class GateMode(StrEnum):
    """What happens to an engine that is not verified, or is found to differ.

    Attributes:
        OFF: Nothing is verified.
        WARN: It gets requests, and a warning says why it should not. What computes wrongly gets none.
        HOLD: It gets no requests.
    """

    OFF = "off"
    WARN = "warn"
    HOLD = "hold"


class Gate:
    """Verifies engines.

    Args:
        mode: What happens to those that are not verified.
        canary: Compares likelihoods of fixed texts, and keeps what was verified.
        fleet: Ranks tiers.
        engines: Returns all engines.
        probe_of: Returns what asks a replica's engine.
        log_path: Returns the path of an engine's log by its replica's id.
    """

    def __init__(
        self,
        mode: GateMode,
        canary: Canary,
        *,
        fleet: Fleet,
        engines: Callable[[], Iterable[Engine]],
        probe_of: Callable[[Replica], EngineProbe],
        log_path: Callable[[str], Path],
    ) -> None:
        self._mode = mode
        self._canary = canary
        self._fleet = fleet
        self._engines = engines
        self._probe_of = probe_of
        self._log_path = log_path
        # One at a time: a reference serves meanwhile, and many engines may start together.
        self._scoring = asyncio.Lock()

    async def check_start(self, engine: Engine) -> None:
        """Compare an engine that has started, and has scored the fixed texts, with its reference.

        Raises:
            CanaryRefusedError: It computes wrongly.
            CheckpointError: The file of verified engines cannot be used.
        """
        engine.observation = Observation()
        engine.difference = None
        # An operator who resumed it meant the engine that served before.
        self._hold(engine, None)
        engine.replica.update(verification=None, verification_detail="")
        scores = engine.scores
        if scores is None:
            text = "it gives no log-probabilities, so nothing could be compared"
            self._note(engine, VerificationState.CANNOT_TELL, text)
            return
        engine.key = await self._key_of(engine)
        record = await self._canary.check_scores(
            scores, engine.replica.spec, engine.key
        )
        if record is None:
            await self._verify(engine)
        elif record.is_accepted:
            text = f"an operator accepted it on {record.recorded:%Y-%m-%d}"
            self._note(engine, VerificationState.ACCEPTED, text)
        else:
            text = f"it computes as on {record.recorded:%Y-%m-%d}, when it was verified"
            self._note(engine, VerificationState.VERIFIED, text)

    async def check_pending(self, engine: Engine) -> bool:
        """Compare an engine that serves before there was a reference, once there is one; tell whether that was done.

        Raises:
            CanaryRefusedError: It computes wrongly.
        """
        if engine.replica.state.verification is not VerificationState.PENDING:
            return False
        if self._find_reference(engine) is None:
            return False
        await self._verify(engine)
        return True

    async def _key_of(self, engine: Engine) -> EngineKey | None:
        """Return what identifies an engine; None: its weights have no name.

        One given by URL is known by its URL, not by what it says of its weights: wrong ones would say something else.
        """
        replica = engine.replica
        weights = replica.url if replica.spec.urls else replica.spec.identity
        if weights is None:
            return None
        kernels: tuple[str, ...] = ()
        if engine.process is not None:
            log_path = self._log_path(replica.id)
            kernels = await asyncio.to_thread(selected_kernels, log_path)
        parts = [replica.spec.precision, str(replica.state.build), *sorted(kernels)]
        return EngineKey(weights=weights, engine=", ".join(parts))

    async def _verify(self, engine: Engine) -> None:
        """Compare an engine with a running reference, if there is one, and keep it if nothing is wrong."""
        reference = self._find_reference(engine)
        is_made = made_checkpoint(engine.replica.spec) is not None
        if reference is not None:
            await self._compare(engine, reference, is_made=is_made)
        elif not self._is_highest(engine):
            text = "no engine is ready that it could be compared with"
            self._note(engine, VerificationState.PENDING, text)
        elif is_made:
            text = "it computes what transformers computed when its checkpoint was made"
            self._note_verified(engine, text)
        else:
            text = (
                "others are compared with it, and nothing is there to compare it with"
            )
            self._note(engine, VerificationState.REFERENCE, text)

    def check_against_precise(self, engine: Engine, precise: Engine) -> None:
        """Compare an engine with one of tier precise that became ready later, by their scores of the fixed texts.

        Raises:
            CanaryRefusedError: They differ too much, and tier precise is likelier to be right.
        """
        is_vouched_for = engine.replica.state.verification in VOUCHED_FOR
        is_judge_vouched_for = precise.replica.state.verification in VOUCHED_FOR
        if engine.replica.state.verification is VerificationState.ACCEPTED:
            return
        if is_judge_vouched_for or not is_vouched_for:
            self._check_loss(engine, precise)

    def _check_loss(self, engine: Engine, judge: Engine) -> None:
        """Compare the scores of two engines; by how much they may differ is for the one of fewer bits to say."""
        assert engine.scores is not None
        assert judge.scores is not None
        if made_checkpoint(engine.replica.spec) is not None:
            return
        lossier = min(engine, judge, key=self._rank)
        self._canary.check_loss(
            engine.scores,
            judge.scores,
            engine.replica.spec,
            precision=lossier.replica.spec.precision,
            judge=judge.replica.spec.name,
        )

    def _find_reference(self, engine: Engine) -> Engine | None:
        """Return the best running engine that this one may be compared with; None: there is none."""
        candidates = [
            other
            for other in self._engines()
            if other is not engine
            and other.replica.state.status is ReplicaStatus.READY
            and other.scores is not None
            and self._may_judge(other, engine)
        ]
        return max(candidates, key=self._rank, default=None)

    def _may_judge(self, judge: Engine, engine: Engine) -> bool:
        """Tell whether an engine was verified itself, or is of the highest precision and the other is not."""
        if judge.replica.state.verification in VOUCHED_FOR:
            return True
        return self._is_highest(judge) and not self._is_highest(engine)

    def _rank(self, engine: Engine) -> int:
        return self._fleet.rank(engine.replica.spec.name)

    def _is_highest(self, engine: Engine) -> bool:
        """Tell whether no tier of a higher precision has engines, here or elsewhere, now or later."""
        configured = [spec.name for spec in self._fleet.specs if not spec.absent]
        return not configured or engine.replica.spec.name is configured[-1]

    async def _compare(
        self, engine: Engine, reference: Engine, *, is_made: bool
    ) -> None:
        """Compare an engine with a running reference.

        What transformers computed for a checkpoint made here says more of its likelihoods than another precision could.
        """
        judge = reference.replica
        began_at = time.monotonic()
        self._check_loss(engine, reference)
        faults: tuple[str, ...] = ()
        try:
            if is_made:
                difference = await self._find_difference(engine, reference)
            else:
                difference, faults = await self._find_faults(engine, reference)
        except ProbeError as error:
            text = f"it could not be compared with {judge.id}: {error}"
            self._note(engine, VerificationState.CANNOT_TELL, text)
            log.warning("%s is not verified: %s", engine.replica.id, text)
            return
        if faults:
            raise CanaryRefusedError(
                f"it computes otherwise than {judge.id}: {'; '.join(faults)}. It serves another model, or computes wrongly. "
                f"If it is meant to be so: qarr tiers record {engine.replica.spec.name}"
            )
        if difference is not None:
            self._note_difference(engine, reference, difference)
            return
        took_s = time.monotonic() - began_at
        log.info("%s was verified in %.1f s", engine.replica.id, took_s)
        self._note_verified(engine, f"it was compared with {judge.id}")
        if judge.state.verification is VerificationState.REFERENCE and not is_made:
            self._note_verified(reference, f"{engine.replica.id} agrees with it")

    async def _find_difference(
        self, engine: Engine, reference: Engine
    ) -> Difference | None:
        """Return the first thing in which two engines treat requests differently, without letting them write.

        Of a checkpoint made here, sampling defaults and tool parser come from the checkpoint and this router's settings.
        """
        ours, theirs = await run_both(
            self._facts_of(engine, Extent.NOTHING),
            self._facts_of(reference, Extent.NOTHING),
        )
        return _first_fault(compare_facts(theirs, ours, took_s=0.0))

    async def _find_faults(
        self, engine: Engine, reference: Engine
    ) -> tuple[Difference | None, tuple[str, ...]]:
        """Return the first thing in which two engines treat requests differently, and what is wrong with their texts."""
        context = min(
            engine.replica.spec.max_model_len, reference.replica.spec.max_model_len
        )
        ours, theirs = await run_both(
            self._observe(engine, context), self._observe(reference, context)
        )
        difference = _first_fault(compare_facts(theirs.facts, ours.facts, took_s=0.0))
        async with self._scoring:
            by_engine, by_reference = await run_both(
                self._score(engine, theirs.record.texts),
                self._score(reference, ours.record.texts),
            )
        finding = compare_likelihood(
            theirs.record,
            ours.record,
            scores_by_candidate=by_engine,
            scores_by_reference=by_reference,
            took_s=0.0,
        )
        return difference, finding.faults

    async def _score(
        self, engine: Engine, texts: Sequence[WrittenText]
    ) -> tuple[TextScores, ...]:
        return await score_texts(self._verified_engine(engine), texts, _report_nothing)

    async def _observe(self, engine: Engine, context: int) -> _ObservedEngine:
        """Return what an engine tells of its model, and what it writes: both at once, in one batch of the engine."""
        observation = engine.observation
        async with observation.asking:
            facts, record = await run_both(
                self._tell_facts(engine, observation, Extent.LITTLE),
                self._write(engine, observation, context),
            )
        return _ObservedEngine(facts, record)

    async def _facts_of(self, engine: Engine, extent: Extent) -> ModelFacts:
        observation = engine.observation
        async with observation.asking:
            return await self._tell_facts(engine, observation, extent)

    async def _tell_facts(
        self, engine: Engine, observation: Observation, extent: Extent
    ) -> ModelFacts:
        """Return what an engine tells of its model, with as much writing as ``extent`` or more."""
        facts = observation.facts
        if facts is None or not observation.extent.includes(extent):
            facts = await observe_facts(self._verified_engine(engine), extent)
            observation.facts = facts
            observation.extent = extent
        return facts

    async def _write(
        self, engine: Engine, observation: Observation, context: int
    ) -> LikelihoodRecord:
        """Return an engine's few texts, with its own scores of them."""
        if observation.record is None:
            texts = await write_texts(
                self._verified_engine(engine),
                context=context,
                quick=True,
                report=_report_nothing,
            )
            own_scores = await self._score(engine, texts)
            observation.record = LikelihoodRecord(texts=texts, own_scores=own_scores)
        return observation.record

    def _verified_engine(self, engine: Engine) -> ComparedEngine:
        replica = engine.replica
        build = replica.state.build
        identity = EngineIdentity(
            name=replica.id,
            model=replica.model,
            max_model_len=replica.spec.max_model_len,
            version=None if build is None else build.version,
            kv_cache_dtype=None if build is None else build.kv_cache_dtype,
        )
        probe = self._probe_of(replica)
        if replica.takes_priority:
            probe = replace(probe, priority=PRIORITY)
        return ComparedEngine(probe, identity)

    def _note_verified(self, engine: Engine, text: str) -> None:
        assert engine.scores is not None
        if engine.key is not None:
            self._canary.record_verified(engine.scores, engine.replica.spec, engine.key)
        self._note(engine, VerificationState.VERIFIED, text)

    def _note_difference(
        self, engine: Engine, reference: Engine, difference: Difference
    ) -> None:
        text = (
            f"its {difference.subject} differs from that of {reference.replica.id} ({difference.candidate} instead of "
            f"{difference.reference})"
        )
        engine.difference = text
        self._note(engine, VerificationState.DIFFERS, text)
        log.warning(
            "%s answers otherwise: %s. %s",
            engine.replica.id,
            text,
            difference.explanation,
        )

    def _note(self, engine: Engine, verification: VerificationState, text: str) -> None:
        engine.replica.update(verification=verification, verification_detail=text)
        hold = None
        if self._mode is GateMode.HOLD:
            hold = _why_held(engine.replica, verification, text)
        # an operator may have resumed it since it was held
        if hold is None or engine.held == engine.gate_hold:
            self._hold(engine, hold)

    def _hold(self, engine: Engine, why: str | None) -> None:
        """Keep requests from an engine, or no longer; what an operator holds stays held."""
        if engine.held == engine.gate_hold:
            engine.held = why
        engine.gate_hold = why


def _why_held(
    replica: Replica, verification: VerificationState, text: str
) -> str | None:
    """Return why a gate that holds keeps requests from an engine, and what to do; None: it does not."""
    if verification is VerificationState.PENDING:
        remedy = (
            "It is compared as soon as an engine of the highest precision, or one that was verified, is ready. 'qarr tiers "
            f"resume {replica.id}' sends it requests all the same"
        )
    elif verification is VerificationState.DIFFERS:
        remedy = (
            "Start it as its reference is started. If it is meant to be so: qarr tiers record "
            f"{replica.spec.name}, then start it again; 'qarr tiers resume {replica.id}' sends it requests until then"
        )
    else:
        return None
    return f"gets no requests (quality.gate = hold): {text}. {remedy}"


class _ObservedEngine(NamedTuple):
    """What an engine told and wrote."""

    facts: ModelFacts
    record: LikelihoodRecord


def _first_fault(finding: SameModelFinding) -> Difference | None:
    """Return the first difference that a fleet does not allow for; None: there is none."""
    for difference in finding.differences:
        if difference.is_fault and difference.subject not in ALLOWED_DIFFERENCES:
            return difference
    return None


def _report_nothing(_finished: int, _total: int) -> None:
    """Take no notice of progress."""
