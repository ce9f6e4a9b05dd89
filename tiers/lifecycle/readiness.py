"""Find out whether an engine that has started may get requests: warm it up, and compare what it computes."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from tiers.checkpoints.precision import root_precision, told_precision
from tiers.errors import EngineDiedError, NoScoresError, TokenizerMismatchError
from tiers.kv_precision import with_kv_cache
from tiers.lifecycle.likelihood import score_engine
from tiers.lifecycle.process import selected_kernels
from tiers.lifecycle.warmup import check_answer, warm_up
from tiers.spec import UNKNOWN, EngineBuild, ReplicaStatus, TierName, VerificationState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiers.fleet import Fleet
    from tiers.lifecycle.adapters import AdapterLoader
    from tiers.lifecycle.canary import Canary
    from tiers.lifecycle.engine import Engine
    from tiers.lifecycle.gate import Gate
    from tiers.lifecycle.idle_speed import IdleSpeed
    from tiers.lifecycle.likelihood import EngineScores
    from tiers.lifecycle.options import SupervisorOptions
    from tiers.lifecycle.status_changes import StatusChanges
    from tiers.lifecycle.warmup import WarmupReport
    from tiers.probe import EngineProbe, ServedModel
    from tiers.replica import Replica

log = logging.getLogger(f"qarr.{__name__}")
SLOW_WARM_UP_S = 30.0  # Two cores that also make a checkpoint warm an engine in 15 s.
# A token takes so many times tier precise's. Engines that warm side by side differ by up to three.
MUCH_SLOWER = 5.0
MIN_TOKEN_MS = 0.01


class Readiness:
    """Warms engines up, and marks those ready that are sound.

    Args:
        options: How engines are warmed up and compared.
        changes: Marks replicas.
        idle_speed: Measures an engine's speed.
        adapters: Loads an engine's adapters again.
        gate: Verifies engines; None: it does not.
    """

    def __init__(
        self,
        options: SupervisorOptions,
        changes: StatusChanges,
        idle_speed: IdleSpeed,
        adapters: AdapterLoader,
        gate: Gate | None,
    ) -> None:
        self._options = options
        self._changes = changes
        self._idle_speed = idle_speed
        self._adapters = adapters
        self._gate = gate
        # By replica: the digest of its tokens, and its tier's ``prompt_identity``.
        self._tokens_digests: dict[str, tuple[str, str | None]] = {}
        # the engine of tier precise that was ready last
        self._precise: Engine | None = None

    @property
    def _fleet(self) -> Fleet:
        return self._changes.fleet

    def forget(self, replica_id: str) -> None:
        """Forget how a replica that was removed reads prompts."""
        self._tokens_digests.pop(replica_id, None)

    async def warm(self, engine: Engine, probe: EngineProbe) -> None:
        """Warm an engine up and mark it ready, or draining if it is held.

        Raises:
            TierError: It is not usable, or computes wrongly.
        """
        replica = engine.replica
        self._changes.mark(engine, ReplicaStatus.WARMING, engine.note)
        # An engine without gauges must not be ready until the first poll.
        await probe.readings()
        await self._note_model(engine, probe)
        report = await self._warm_up_and_compare(engine, probe)
        check_answer(report.answer, self._options.warmup.question)
        if replica.spec.name == TierName.PRECISE and engine.scores is not None:
            self._precise = engine
        replica.takes_thinking = report.takes_thinking
        replica.fingerprint = report.fingerprint
        self._fleet.note_template(report.template)
        ready_at = time.monotonic()
        engine.was_ready = True
        engine.ready_at = ready_at
        engine.note = None
        replica.progressed(ready_at)
        if engine.held:
            self._changes.mark(engine, ReplicaStatus.DRAINING, engine.held)
        else:
            self._changes.mark(engine, ReplicaStatus.READY, engine.remark)

    async def _note_model(self, engine: Engine, probe: EngineProbe) -> None:
        """Note which model, adapters and context length an engine serves, and what computes them.

        Raises:
            EngineDiedError: Its context is shorter than its tier promises.
        """
        replica = engine.replica
        model = await probe.model()
        replica.model = model.name
        replica.update(resumes=model.resumes)
        engine.served = served_of(model)
        if await self._adapters.restore(engine, model.adapters):
            model = await probe.model()
        self.note_adapters(replica, model.adapters)
        build = EngineBuild(
            version=await probe.version(),
            kv_cache_dtype=await probe.kv_cache_dtype(),
        )
        replica.update(build=build)
        if engine.launch is None:
            await self._note_precision(replica, model.root, build.kv_cache_dtype)
        else:
            precision = with_kv_cache(replica.spec.precision, build.kv_cache_dtype)
            self._fleet.note_precision(replica, precision)
        if model.max_model_len < replica.spec.max_model_len:
            raise EngineDiedError(
                f"{replica.url} has a context of {model.max_model_len} tokens, tier {replica.spec.name} promises "
                f"{replica.spec.max_model_len}: set tiers.{replica.spec.name}.max_model_len"
            )

    async def _warm_up_and_compare(
        self, engine: Engine, probe: EngineProbe
    ) -> WarmupReport:
        slow_warm_up = asyncio.create_task(self._announce_slow_warm_up(engine))
        try:
            report = await warm_up(probe, engine.replica.model, self._options.warmup)
            engine.replica.takes_priority = report.takes_priority
            self._check_tokens(engine.replica, report.tokens_digest)
            if self._options.canary is not None:
                await self._compare(engine, probe, self._options.canary)
        finally:
            slow_warm_up.cancel()
        return report

    async def _announce_slow_warm_up(self, engine: Engine) -> None:
        """Say why an engine is still warming, if that takes long."""
        await asyncio.sleep(SLOW_WARM_UP_S)
        kernels = await self._kernels_of(engine)
        detail = f"its warm-up takes longer than {SLOW_WARM_UP_S:g} s{kernels}"
        self._changes.mark(engine, ReplicaStatus.WARMING, detail)

    async def _compare(
        self, engine: Engine, probe: EngineProbe, canary: Canary
    ) -> None:
        """Compare an engine's scores with its reference, and its speed with the profile while nothing else computes."""
        replica = engine.replica
        if self._gate is not None:
            engine.scores = await self._score(replica, probe)
            engine.compared_with = None
            engine.slow = None
            await self._gate.check_start(engine)
            await self._compare_with_precise(engine, self._gate)
        else:
            replica.update(verification=VerificationState.OFF)
        profiled = self._fleet.speeds.get(replica.spec.name)
        if (
            profiled is not None
            and canary.max_slowdown
            and self._idle_speed.quiet(but=replica)
        ):
            speed = await self._idle_speed.measure(replica)
            if speed is not None and self._idle_speed.quiet(but=replica):
                canary.check_speed(speed, profiled, replica.spec)

    async def _score(self, replica: Replica, probe: EngineProbe) -> EngineScores | None:
        """Return an engine's scores; None: it runs elsewhere, and gives no log-probabilities.

        Raises:
            ProbeError: It does not answer, or it was started here and gives none.
        """
        try:
            return await score_engine(
                probe, replica.model, self._options.warmup.timeout_s
            )
        except NoScoresError as error:
            if not replica.spec.urls:
                raise
            log.warning(
                "%s serves without a check of what it computes: %s", replica.id, error
            )
            return None

    async def compare_with_others(self, engine: Engine) -> None:
        """Compare an engine that serves with those that became ready after it, once with each.

        Raises:
            CanaryRefusedError: It serves another model, or computes wrongly.
        """
        if self._gate is None:
            return
        was_held = engine.held
        is_news = await self._gate.check_pending(engine)
        is_news = await self._compare_with_precise(engine, self._gate) or is_news
        status = engine.replica.state.status
        if was_held and not engine.held and status is ReplicaStatus.DRAINING:
            self._changes.mark(engine, ReplicaStatus.READY, engine.remark)
        elif engine.held and status is ReplicaStatus.READY:
            self._changes.mark(engine, ReplicaStatus.DRAINING, engine.held)
        elif is_news and status is ReplicaStatus.READY:
            self._changes.mark(engine, ReplicaStatus.READY, engine.remark)

    async def _compare_with_precise(self, engine: Engine, gate: Gate) -> bool:
        """Compare an engine with the one of tier precise that was ready last; tell whether it turns out to be slow.

        Raises:
            CanaryRefusedError: It serves another model, or computes wrongly.
        """
        precise = self._precise
        scores = engine.scores
        if precise is None or scores is None or precise.scores is None:
            return False
        is_reference = engine.replica.spec.name == TierName.PRECISE
        if is_reference or precise.scores is engine.compared_with:
            return False
        engine.compared_with = precise.scores
        gate.check_against_precise(engine, precise)
        highest = precise.scores
        slowdown = scores.token_ms / max(highest.token_ms, MIN_TOKEN_MS)
        if slowdown < MUCH_SLOWER:
            return False
        slow = (
            f"{slowdown:.0f} times slower a token than tier precise ({scores.token_ms:.0f} instead of "
            f"{highest.token_ms:.0f} ms)"
        )
        engine.slow = slow + await self._kernels_of(engine)
        return True

    async def _kernels_of(self, engine: Engine) -> str:
        """Return which kernels an engine that was started here has chosen, as its log says, for a sentence's end."""
        if engine.process is None:
            return ""
        log_path = self._options.log_path(engine.replica.id)
        kernels = await asyncio.to_thread(selected_kernels, log_path)
        if not kernels:
            return ""
        return f": its layers are computed by {', '.join(kernels)}"

    def note_adapters(self, replica: Replica, adapters: Sequence[str]) -> None:
        """Note which adapters an engine offers."""
        if self._fleet.note_adapters(replica, adapters):
            offer = f"adapters {', '.join(adapters)}" if adapters else "no adapters"
            log.info("%s offers %s", replica.id, offer)
            self._changes.tell(replica)

    async def _note_precision(
        self, replica: Replica, root: str | None, kv_cache_dtype: str | None
    ) -> None:
        """Find out what an engine that runs elsewhere serves; warn if another replica of its tier serves something else."""
        tier = replica.spec.name
        stated = replica.spec.stated_precision
        precision_before = replica.spec.precision
        read_precision = await asyncio.to_thread(root_precision, replica.url, root)
        weights = told_precision(read_precision, stated)
        precision = with_kv_cache(weights, kv_cache_dtype)
        shown_before = self._fleet.spec(tier).precision
        do_replicas_differ = self._fleet.note_precision(replica, precision)
        shown = self._fleet.spec(tier).precision
        if do_replicas_differ and shown != shown_before:
            log.warning("the replicas of tier %s differ in precision: %s", tier, shown)
        if precision == precision_before:
            return
        log.info("%s serves %s: %s", replica.id, precision, root)
        if stated is not None and read_precision not in {stated, UNKNOWN}:
            log.warning(
                "%s: tiers.%s.precision is %s, but the checkpoint %s is %s",
                replica.id,
                tier,
                stated,
                root,
                read_precision,
            )

    def _check_tokens(self, replica: Replica, digest: str) -> None:
        prompt_identity = self._fleet.spec(replica.spec.name).prompt_identity
        for replica_id, (known_digest, known_identity) in self._tokens_digests.items():
            if replica_id == replica.id or known_identity != prompt_identity:
                continue
            if known_digest != digest:
                raise TokenizerMismatchError(
                    f"{replica.id} reads prompts as other tokens than {replica_id} (token digests {digest[:16]} and "
                    f"{known_digest[:16]}): every tier must serve the same model with the same tokenizer and chat template"
                )
        self._tokens_digests[replica.id] = (digest, prompt_identity)


def served_of(model: ServedModel) -> tuple[str, int, str | None]:
    """Return what tells one served model from another: name, context length and checkpoint."""
    return model.name, model.max_model_len, model.root
