"""What a verification finds: plain values, which are printed, written as JSON, drawn as a page and kept in files."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict

Role = Literal["reference", "candidate"]


class Verdict(StrEnum):
    """What is known of the candidate beside the reference."""

    SAME = "same"
    WORSE = "worse"
    CANNOT_TELL = "cannot tell"


class FrozenFinding(BaseModel):
    """A frozen value with a strict form."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineIdentity(FrozenFinding):
    """What an engine says of itself.

    Attributes:
        name: The tier's name, or the URL without credentials.
        model: The model's name in requests.
        max_model_len: The context, in tokens.
        version: The release of vLLM; None: it is not told.
        kv_cache_dtype: Type of the KV cache as vLLM names it, such as ``auto`` or ``fp8``; None: it is not told.
    """

    name: str
    model: str
    max_model_len: int
    version: str | None = None
    kv_cache_dtype: str | None = None


class Difference(FrozenFinding):
    """Something in which two engines differ before anything is generated.

    Attributes:
        subject: What differs, such as "chat template".
        reference: The reference's value, for people.
        candidate: The candidate's value, for people.
        is_fault: Whether requests mean something else to the candidate, so that it cannot be called the same model.
        explanation: What it does to answers, and what to do about it.
    """

    subject: str
    reference: str
    candidate: str
    is_fault: bool
    explanation: str


class SameModelFinding(FrozenFinding):
    """Whether two engines serve the same model in the same way.

    Attributes:
        differences: What differs, faults first.
        not_checked: Sentences about what an engine does not tell.
        took_s: Time of the stage, in seconds.
    """

    differences: tuple[Difference, ...]
    not_checked: tuple[str, ...]
    took_s: float

    @property
    def verdict(self) -> Verdict:
        """Return "worse" if a difference is a fault."""
        has_fault = any(difference.is_fault for difference in self.differences)
        return Verdict.WORSE if has_fault else Verdict.SAME


class Gap(FrozenFinding):
    """How much less likely one engine finds the tokens that another one has chosen greedily.

    Attributes:
        writer: Who chose the tokens. The other engine scored them, or the writer itself by prefill.
        part: Which tokens: a kind of text such as "code", or positions of the output such as "65 to 256".
        tokens: Number of scored tokens.
        gap: Mean of the writer's log-probability minus the scorer's, in nats a token.
        changed: Share of the tokens that are not the scorer's first choice, 0..1.
        difference: Mean of the absolute difference of both log-probabilities, in nats a token; None: not measured.
    """

    writer: Role
    part: str
    tokens: int
    gap: float
    changed: float
    difference: float | None = None


class LikelihoodFinding(FrozenFinding):
    """How alike two engines compute.

    Attributes:
        by_kind: Gaps for each kind of text, in both directions as far as both engines are there.
        by_position: Gaps for ranges of output positions, in both directions.
        own: For each engine the gap between its decode and its own prefill of the same tokens.
        faults: Sentences, each a reason for the verdict "worse".
        not_measured: Sentences about what could not be measured.
        took_s: Time of the stage, in seconds.
    """

    by_kind: tuple[Gap, ...]
    by_position: tuple[Gap, ...]
    own: tuple[Gap, ...]
    faults: tuple[str, ...]
    not_measured: tuple[str, ...]
    took_s: float

    @property
    def verdict(self) -> Verdict:
        """Return "worse" if there is a fault."""
        return Verdict.WORSE if self.faults else Verdict.SAME
