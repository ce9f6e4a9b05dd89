"""Compare what an engine computes, and how fast, with what its checkpoint should give, before it gets requests.

A wrong checkpoint, a broken kernel or a fallback to a slow one may still answer readable text. An engine scores fixed texts
(``tiers.checkpoints.reference``), and is compared with

1. the scores that transformers computed when its checkpoint was made, if it was made here;
2. else its own scores when it was verified against a running engine (``gate``), never those of a start that was not;
3. only its own scores when an operator accepted them (``qarr tiers record``).

It also has to give the tokens that it generates the same log-probabilities in decode as in prefill.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from tiers.checkpoints.checkpoint import Checkpoint, read_checkpoint, weights_digest
from tiers.checkpoints.reference import (
    ScoredText,
    allowed_gap,
    allowed_loss_gap,
    gap,
    texts_digest,
)
from tiers.errors import CanaryRefusedError, CheckpointError
from tiers.formats import lowest_format
from tiers.shared_file import make_folder, real_path, replace_content
from tiers.spec import TierName  # noqa: TC001  pydantic reads it

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tiers.checkpoints.reference import ReferenceScores
    from tiers.lifecycle.likelihood import EngineScores
    from tiers.spec import TierSpec
    from tiers.speed import SpeedModel

log = logging.getLogger(f"qarr.{__name__}")
# Files of these versions hold greedy tokens, or scores of first starts that were compared with nothing.
OLD_VERSIONS = {1, 2}
# Whatever engines compute is accepted for so long after ``qarr tiers record``.
ACCEPTED_FOR = timedelta(hours=1)


class EngineKey(NamedTuple):
    """What was verified, or is to be.

    Attributes:
        weights: The checkpoint's digest or folder, or the engine's URL.
        engine: What computes them: precision, release of vLLM, KV cache, kernels.
    """

    weights: str
    engine: str


class Record(BaseModel):
    """The scores of one engine that was verified or accepted: of a checkpoint that is started here, or given by URL.

    Attributes:
        identity: The checkpoint's digest or folder, or the engine's URL.
        engine: What computed the scores; see ``EngineKey``.
        is_accepted: Whether an operator accepted them in the place of any reference.
        texts_digest: Of the texts that were scored.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tier: TierName
    identity: str
    engine: str
    recorded: datetime
    is_accepted: bool = False
    texts_digest: str
    texts: tuple[ScoredText, ...]


class Acceptance(BaseModel):
    """An operator's word that whatever engines of a tier compute next is meant."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tier: TierName
    at: datetime

    def holds_for(self, tier: TierName, known: Record | None, now: datetime) -> bool:
        """Tell whether scores that an engine gives now are accepted, its former record being ``known``."""
        is_new = known is None or known.recorded < self.at
        return self.tier == tier and is_new and now < self.at + ACCEPTED_FOR


class CanaryFile(BaseModel):
    """The file of recorded scores."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[3] = 3
    records: tuple[Record, ...] = ()
    acceptances: tuple[Acceptance, ...] = ()

    def find(self, tier: TierName, key: EngineKey) -> Record | None:
        """Return an engine's record of the present texts; None: there is none."""
        current = texts_digest()
        for record in self.records:
            is_current = record.tier == tier and record.texts_digest == current
            if is_current and (record.identity, record.engine) == key:
                return record
        return None

    def with_record(self, record: Record) -> CanaryFile:
        """Return the file with a record in the place of a former one of the same weights: an older engine is gone."""
        others = [
            r
            for r in self.records
            if (r.tier, r.identity) != (record.tier, record.identity)
        ]
        return self.model_copy(update={"records": (*others, record)})

    def without(self, tier: TierName, identity: str) -> CanaryFile:
        """Return the file without an engine's records."""
        kept = tuple(
            r for r in self.records if (r.tier, r.identity) != (tier, identity)
        )
        return self.model_copy(update={"records": kept})


@dataclass(frozen=True, slots=True)
class Canary:
    """How engines are compared.

    Attributes:
        path: File of recorded scores.
        tolerance: Times the gap that sound engines may have; 0: scores are not compared.
        max_slowdown: Highest idle time of a decode step over the profiled one; 0: not compared.
    """

    path: Path
    tolerance: float = 1.0
    max_slowdown: float = 0.0

    async def check_scores(
        self, scores: EngineScores, spec: TierSpec, key: EngineKey | None
    ) -> Record | None:
        """Compare an engine's scores with its references, and return the record that holds for it; None: there is none.

        Args:
            scores: What it computes.
            spec: Its tier.
            key: What it is; None: its weights have no name, so that nothing can be kept of it.

        Raises:
            CanaryRefusedError: They differ too much.
            CheckpointError: The file cannot be read.
        """
        self._check_decode(scores, spec)
        if key is None:
            return None
        file = read_canary(self.path)
        known = file.find(spec.name, key)
        now = datetime.now(UTC)
        if any(
            acceptance.holds_for(spec.name, known, now)
            for acceptance in file.acceptances
        ):
            return self._record(scores, spec, key, is_accepted=True)
        made = made_checkpoint(spec)
        if made is not None and (known is None or not known.is_accepted):
            await self._check_made(scores, spec, made)
        elif known is not None:
            self._check_recorded(scores, spec, known)
        return known

    def check_loss(
        self,
        scores: EngineScores,
        reference: EngineScores,
        spec: TierSpec,
        *,
        precision: str,
        judge: TierName,
    ) -> None:
        """Compare an engine that has no reference of its own with a running one.

        Args:
            scores: What the engine computes.
            reference: What the running one computes.
            spec: The engine's tier.
            precision: Of the two, the one with fewer bits.
            judge: The running engine's tier.

        Raises:
            CanaryRefusedError: They differ by more than quantization explains.
        """
        allowed = allowed_loss_gap(precision) * self.tolerance
        difference = gap(reference.texts, scores.texts)
        if difference > allowed:
            raise CanaryRefusedError(
                f"its log-probabilities of fixed texts are {difference:.2f} nats a token from those of tier {judge}; at "
                f"most {allowed:.2f} is allowed for {precision} weights "
                f"({_by_text(reference.texts, scores.texts)}). It serves another model than tier {judge}, or computes "
                f"wrongly. {_if_meant(spec)}"
            )

    def record_verified(
        self, scores: EngineScores, spec: TierSpec, key: EngineKey
    ) -> None:
        """Keep the scores of an engine that was verified: later starts are compared with them."""
        self._record(scores, spec, key, is_accepted=False)

    def _check_decode(self, scores: EngineScores, spec: TierSpec) -> None:
        allowed = allowed_gap(spec.precision) * self.tolerance
        if scores.decode_gap > allowed:
            raise CanaryRefusedError(
                f"the tokens that it generates have log-probabilities {scores.decode_gap:.2f} nats a token from those that "
                f"it gives the same tokens in a prompt; at most {allowed:.2f} is allowed for {spec.precision} weights. A "
                f"kernel of its decode steps or its KV cache computes wrongly: {_kernel_advice(spec)}"
            )

    async def _check_made(
        self, scores: EngineScores, spec: TierSpec, made: Checkpoint
    ) -> None:
        """Compare with what transformers computed when the checkpoint was made."""
        reference = made.manifest.reference
        assert reference is not None
        _check_tokens(scores, reference, spec)
        allowed = _allowed_gap_from_made(spec, made) * self.tolerance
        difference = gap(reference.texts, scores.texts)
        if difference <= allowed:
            return
        if (
            await asyncio.to_thread(weights_digest, made.path)
            == made.manifest.weights_digest
        ):
            cause = f"Its weight files are as they were made, so a kernel computes wrongly: {_kernel_advice(spec)}"
        else:
            cause = (
                f"Its weight files are not those that were made. Make them again: remove {made.path}, then qarr model "
                f"prepare. {_if_meant(spec)}"
            )
        raise CanaryRefusedError(
            f"its log-probabilities of fixed texts are {difference:.2f} nats a token from those that transformers computes "
            f"with this checkpoint; at most {allowed:.2f} is allowed for {spec.precision} weights "
            f"({_by_text(reference.texts, scores.texts)}). {cause}"
        )

    def _check_recorded(
        self, scores: EngineScores, spec: TierSpec, known: Record
    ) -> None:
        """Compare with what it computed when it was verified or accepted."""
        allowed = allowed_gap(spec.precision) * self.tolerance
        difference = gap(known.texts, scores.texts)
        if difference > allowed:
            raise CanaryRefusedError(
                f"its log-probabilities of fixed texts are {difference:.2f} nats a token from those of "
                f"{known.recorded:%Y-%m-%d %H:%M} UTC; at most {allowed:.2f} is allowed for {spec.precision} weights "
                f"({_by_text(known.texts, scores.texts)}). Its checkpoint was replaced, or a kernel is missing or broken. "
                f"{_if_meant(spec)}"
            )

    def _record(
        self,
        scores: EngineScores,
        spec: TierSpec,
        key: EngineKey,
        *,
        is_accepted: bool,
    ) -> Record:
        record = Record(
            tier=spec.name,
            identity=key.weights,
            engine=key.engine,
            recorded=datetime.now(UTC),
            is_accepted=is_accepted,
            texts_digest=texts_digest(),
            texts=scores.texts,
        )
        try:
            file = read_canary(self.path)
            write_canary(self.path, file.with_record(record))
        except CheckpointError as error:
            log.warning(
                "the scores of %s are not recorded, so its next start is verified again: %s",
                spec.name,
                error,
            )
        return record

    def check_speed(
        self, measured: SpeedModel, profiled: SpeedModel | None, spec: TierSpec
    ) -> None:
        """Compare an idle engine's speed with the latency profile's.

        Raises:
            CanaryRefusedError: It is too slow.
        """
        if not self.max_slowdown or profiled is None:
            return
        ratio = measured.step_ms(1) / max(profiled.step_ms(1), 1e-6)
        if ratio > self.max_slowdown:
            raise CanaryRefusedError(
                f"it takes {measured.step_ms(1):.1f} ms for a token while idle, {ratio:.1f} times the profile's "
                f"{profiled.step_ms(1):.1f} ms; {self.max_slowdown:g} times are allowed: a "
                f"kernel is missing, or something else uses the machine. If tier {spec.name} is meant to be so slow, "
                f"measure it again: qarr profile latency"
            )

    def forget_engine(self, tier: TierName, identity: str) -> None:
        """Delete an engine's record: it was wrong, or another engine may get the address."""
        try:
            file = read_canary(self.path)
            if any(
                (record.tier, record.identity) == (tier, identity)
                for record in file.records
            ):
                write_canary(self.path, file.without(tier, identity))
        except CheckpointError as error:
            log.warning(
                "the recorded scores of %s are not deleted: %s", identity, error
            )

    def accept(self, tier: TierName) -> int:
        """Accept what engines of a tier compute at their next starts, within an hour; return how many records go.

        Raises:
            CheckpointError: The file cannot be used.
        """
        file = read_canary(self.path)
        kept = tuple(record for record in file.records if record.tier != tier)
        others = tuple(
            acceptance for acceptance in file.acceptances if acceptance.tier != tier
        )
        acceptance = Acceptance(tier=tier, at=datetime.now(UTC))
        write_canary(
            self.path, CanaryFile(records=kept, acceptances=(*others, acceptance))
        )
        return len(file.records) - len(kept)


def made_checkpoint(spec: TierSpec) -> Checkpoint | None:
    """Return the checkpoint that engines are started from, if it has scores of the present texts; else None."""
    if spec.urls or spec.checkpoint is None:
        return None
    checkpoint = read_checkpoint(spec.name, spec.checkpoint)
    if (
        checkpoint is None
        or checkpoint.manifest.reference is None
        or not checkpoint.manifest.reference.is_current
    ):
        return None
    return checkpoint


def _allowed_gap_from_made(spec: TierSpec, made: Checkpoint) -> float:
    """Return how far an engine's log-probabilities may be from those of its checkpoint, in nats."""
    if _is_quantized_while_loading(spec, made):
        # The reference is the 16-bit checkpoint, so the gap holds what the quantization changes, too.
        return allowed_loss_gap(spec.precision)
    return allowed_gap(spec.precision)


def _is_quantized_while_loading(spec: TierSpec, checkpoint: Checkpoint) -> bool:
    """Tell whether a tier serves a format of fewer bits than its checkpoint has."""
    served = lowest_format(spec.precision)
    made = lowest_format(checkpoint.manifest.precision)
    return (
        served is not None
        and made is not None
        and served.weight_bits < made.weight_bits
    )


def _check_tokens(
    scores: EngineScores, reference: ReferenceScores, spec: TierSpec
) -> None:
    """Check that the engine reads the fixed texts as the same tokens, but for a date in its chat template."""
    measured = {text.name: text.token_ids for text in scores.texts}
    for text in reference.texts:
        is_dated = text.name == "chat" and reference.chat_is_dated
        if measured[text.name] == text.token_ids or is_dated:
            continue
        part = "chat template" if text.name == "chat" else "tokenizer"
        raise CanaryRefusedError(
            f"its {part} is not the one that its checkpoint was made with: of the fixed text {text.name!r} it makes "
            f"{len(measured[text.name])} tokens, {len(text.token_ids)} are expected. Make the checkpoint again (remove "
            f"{spec.checkpoint}, then qarr model prepare), or take --chat-template and --tokenizer out of "
            f"engine.extra_args and tiers.{spec.name}.engine_args. {_if_meant(spec)}"
        )


def _by_text(reference: Sequence[ScoredText], measured: Sequence[ScoredText]) -> str:
    """Return the gap of each text, for people."""
    by_name = {text.name: text for text in measured}
    gaps = [
        f"{text.name} {gap([text], [by_name[text.name]]):.2f}"
        for text in reference
        if text.name in by_name
    ]
    return ", ".join(gaps)


def _kernel_advice(spec: TierSpec) -> str:
    """Return what to do about an engine that computes wrongly."""
    if spec.urls:
        return "look at the versions and arguments with which it was started"
    return (
        f"look for arguments and variables that choose kernels or compile the model (engine.extra_args, "
        f"tiers.{spec.name}.engine_args, VLLM_...); 'qarr doctor' names the kernels of this machine. {_if_meant(spec)}"
    )


def _if_meant(spec: TierSpec) -> str:
    """Return how an engine is accepted as it is."""
    then = (
        "resume it"
        if spec.urls
        else f"start it again: qarr up, or qarr tiers restart {spec.name}"
    )
    return f"If it is meant to be so: qarr tiers record {spec.name}, then {then}"


def read_canary(path: Path) -> CanaryFile:
    """Return the recorded scores; none if there is no file, or one of an earlier version.

    Raises:
        CheckpointError: The file cannot be read, or does not hold records.
    """
    try:
        content = path.read_bytes()
        document: Any = from_json(content)
        if isinstance(document, dict) and document.get("version") in OLD_VERSIONS:
            return CanaryFile()
        return CanaryFile.model_validate_json(content)
    except FileNotFoundError:
        return CanaryFile()
    except (OSError, ValueError, ValidationError) as error:
        raise CheckpointError(
            f"the recorded scores in {path} cannot be used ({type(error).__name__}): remove the file, and they are "
            f"recorded anew at the next start"
        ) from error


def write_canary(path: Path, file: CanaryFile) -> None:
    """Replace the file atomically; owner and mode stay: ``qarr tiers record`` may run as another user than the router.

    Raises:
        CheckpointError: It cannot be written.
    """
    real = real_path(path)
    try:
        make_folder(real.parent, mode=0o777)
        replace_content(real, (file.model_dump_json(indent=2) + "\n").encode())
    except OSError as error:
        raise CheckpointError(
            f"the recorded scores cannot be written to {path}: {error.strerror}"
        ) from error
