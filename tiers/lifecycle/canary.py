"""Compare an engine's greedy answers and idle speed with earlier ones, before it gets requests.

A wrong checkpoint, a broken kernel or a fallback to a slow one may still answer the warm-up's question well. So the first
start that passes the warm-up records the ids of greedy tokens, per checkpoint and machine; later starts are compared.

The measure is the mean share of tokens before the first divergence, over four prompts of sixteen tokens, asked one at a
time. After a divergence two answers have different contexts, so the rest tells nothing. Batches and kernels round
differently: one near-tie may change an answer of a sound engine, and must not weigh more than that answer.

Measured with the built-in model on a CPU (vLLM 0.32): a checkpoint agrees with itself by 1.00, asked or started again.
Asked four prompts at once, AWQ gave one of two first tokens, whose log-probabilities are equal, by how the engine divided
the batch: 0.73. AWQ agrees with FP8 and with BF16 by 0.17; FP8 with BF16 by 0.78. The default of 0.5 lets two of the four
answers diverge at their first token, as with another release of vLLM or other kernels, and still refuses other weights or
noise. FP8 in the place of BF16 passes, because they are nearly equal; where kernels do not change, 0.9 tells them apart.
"""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from tiers.errors import CanaryRefusedError, CheckpointError, ProbeError
from tiers.spec import TierName  # noqa: TC001  pydantic reads it

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiers.probe import EngineProbe
    from tiers.spec import TierSpec
    from tiers.speed import SpeedModel

log = logging.getLogger(f"qarr.{__name__}")
PROMPTS = (
    "The history of the lighthouse began when",
    "def is_prime(n):\n    ",
    "To bake bread you need flour, water,",
    "Q: What is 12 + 7? A: 19. Q: What is 23 + 9? A:",
)
TOKENS = 16
ELSEWHERE = "elsewhere"  # the machine of engines given by URL
NO_IDS = "token ids"  # in the probe's error when an engine does not give them


class Golden(BaseModel):
    """The answers of one checkpoint on one machine; of an engine given by URL, the answers of that URL."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tier: TierName
    identity: str
    machine: str
    recorded: datetime
    prompts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]

    @property
    def key(self) -> tuple[TierName, str, str]:
        """Return what the answers belong to."""
        return self.tier, self.identity, self.machine

    @model_validator(mode="after")
    def _an_answer_each(self) -> Golden:
        if len(self.tokens) != len(self.prompts):
            raise ValueError("an answer for each prompt is needed")
        return self


class GoldenFile(BaseModel):
    """The file of recorded answers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    records: tuple[Golden, ...] = ()


@dataclass(frozen=True, slots=True)
class Canary:
    """How engines are compared.

    Attributes:
        path: File of recorded answers.
        machine: Name of the machine: other processors round differently.
        min_agreement: Lowest share of tokens before the first divergence, 0..1; 0: not compared.
        max_slowdown: Highest idle time of a decode step over the profiled one; 0: not compared.
    """

    path: Path
    machine: str
    min_agreement: float = 0.5
    max_slowdown: float = 0.0

    async def check_answers(self, probe: EngineProbe, model: str, spec: TierSpec, timeout_s: float) -> None:
        """Compare an engine's greedy answers with the recorded ones, or record them if there are none.

        The answers of an engine given by URL belong to its URL, not to what it says about itself, because a wrong
        checkpoint would say something else. Without token ids, as from older releases of vLLM, it is not compared.

        Raises:
            CanaryRefusedError: They differ too much.
            CheckpointError: The file cannot be read.
            ProbeError: The engine did not answer.
        """
        machine, identity = (ELSEWHERE, probe.url) if spec.urls else (self.machine, spec.identity)
        if not self.min_agreement or identity is None:
            return
        try:
            given = await probe.greedy_tokens(model, PROMPTS, TOKENS, timeout_s)
        except ProbeError as error:
            if not spec.urls or NO_IDS not in str(error):
                raise
            log.warning("%s serves without being compared with its earlier answers: %s", identity, error)
            return
        key, records = (spec.name, identity, machine), read_golden(self.path)
        known = next((r for r in records if r.key == key and r.prompts == PROMPTS), None)
        if known is None:
            record = Golden(
                tier=spec.name,
                identity=identity,
                machine=machine,
                recorded=datetime.now(UTC),
                prompts=PROMPTS,
                tokens=given,
            )
            try:
                write_golden(self.path, [*(r for r in records if r.key != key), record])
            except CheckpointError as error:
                log.warning(
                    "the answers of %s are not recorded, so later starts are not compared: %s", spec.name, error
                )
            return
        found = agreement(known.tokens, given)
        if found < self.min_agreement:
            raise CanaryRefusedError(
                f"its greedy answers are not those of {known.recorded:%Y-%m-%d %H:%M} UTC: {found:.0%} of the tokens agree "
                f"up to the first divergence, {self.min_agreement:.0%} must (engine.canary_min_agreement). The checkpoint "
                f"was changed ({spec.checkpoint or identity}), or a kernel is missing or broken. If the answers are meant "
                f"to differ, record them anew: qarr tiers record {spec.name}{_then(spec)}"
            )

    def check_speed(self, measured: SpeedModel, profiled: SpeedModel | None, spec: TierSpec) -> None:
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

    def forget_engine(self, tier: TierName, url: str) -> None:
        """Delete the record of an engine that ran elsewhere and was removed: another one may get its address."""
        try:
            records = read_golden(self.path)
            kept = [r for r in records if r.key != (tier, url, ELSEWHERE)]
            if len(kept) < len(records):
                write_golden(self.path, kept)
        except CheckpointError as error:
            log.warning("the recorded answers of %s are not deleted: %s", url, error)

    def forget(self, tier: TierName) -> int:
        """Delete the records of a tier on this machine, and of its engines given by URL; return their number.

        Raises:
            CheckpointError: The file cannot be used.
        """
        records = read_golden(self.path)
        kept = [r for r in records if r.tier is not tier or r.machine not in {self.machine, ELSEWHERE}]
        if len(kept) < len(records):
            write_golden(self.path, kept)
        return len(records) - len(kept)


def _then(spec: TierSpec) -> str:
    """Return how an engine that was started here is compared again."""
    return "" if spec.urls else f", then start it again: qarr up, or qarr tiers restart {spec.name}"


def agreement(golden: Sequence[Sequence[int]], given: Sequence[Sequence[int]]) -> float:
    """Return the mean share, 0..1, of each golden answer's tokens before the first that differs."""
    shares = []
    for known, found in zip(golden, given, strict=True):
        same = sum(1 for _ in takewhile(lambda pair: eq(*pair), zip(known, found, strict=False)))
        shares.append(same / max(len(known), 1))
    return sum(shares) / max(len(shares), 1)


def read_golden(path: Path) -> tuple[Golden, ...]:
    """Return the records; none if there is no file.

    Raises:
        CheckpointError: The file cannot be read, or does not hold records.
    """
    try:
        return GoldenFile.model_validate_json(path.read_bytes()).records
    except FileNotFoundError:
        return ()
    except (OSError, ValidationError) as error:
        raise CheckpointError(
            f"the recorded answers in {path} cannot be used ({type(error).__name__}): remove the file, and they are "
            f"recorded anew at the next start"
        ) from error


def write_golden(path: Path, records: Sequence[Golden]) -> None:
    """Replace the file atomically.

    Raises:
        CheckpointError: It cannot be written.
    """
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
            part = Path(file.name)
            file.write(GoldenFile(records=tuple(records)).model_dump_json(indent=2) + "\n")
        part.replace(path)
    except OSError as error:
        if part is not None:
            part.unlink(missing_ok=True)
        raise CheckpointError(f"the recorded answers cannot be written to {path}: {error.strerror}") from error
