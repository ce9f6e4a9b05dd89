"""How a tier is chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import (
    Field,
    PositiveFloat,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
)

from classifier import PromptClass
from router.section import AllBut, Section, Share, cache_dir
from tiers.spec import TierName


class LikeTier(Section):
    """A loss budget by comparison."""

    like: TierName = Field(
        TierName.BALANCED, description="No more answers than this tier loses."
    )

    @field_validator("like")
    @classmethod
    def _loses_something(cls, like: TierName) -> TierName:
        if like is TierName.PRECISE:
            raise ValueError("precise loses nothing")
        return like


class PolicySettings(Section, reloads=AllBut({"profiles", "second_look"})):
    """How a tier is chosen."""

    objective: Literal["best", "cheapest"] = Field(
        "best",
        description="`best`: of the tiers that lose next to nothing, the one that should finish soonest; as the slots of "
        "the highest precision fill, also lossier ones, up to the loss budget. `cheapest`: least engine time times price "
        "within the loss budget, at any load.",
    )
    loss_budget: Share | LikeTier = Field(
        LikeTier(),
        description="Largest share of answers that may get worse than the highest precision's, for a kind of prompt. A "
        'number, or `{ like = "balanced" }`: that tier may answer every prompt, lower tiers those on which they lose no '
        "more than it does on average. 0: only tiers that lose next to nothing replace the highest precision.",
    )
    negligible_loss: Share = Field(
        0.005,
        description="Share of answers; a tier that loses no more counts as good as the highest precision.",
    )
    max_loss: dict[PromptClass, Share] = Field(
        {},
        description="Cap of the quality loss by class, as a share of answers: a tier that may lose more is not used. "
        "Classes without a cap have only the budget.",
    )
    sla_confidence: float = Field(
        0.9,
        ge=0.5,
        lt=1,
        description="Probability with which a tier must meet a request's bounds on times, if the request gives none.",
    )
    give_up: Literal["quality", "latency"] = Field(
        "latency",
        description="The bound that is given up first if no tier meets all bounds of a request.",
    )
    prices: dict[TierName, PositiveFloat] = Field(
        {}, description="Weight of an engine-second of each tier; 1 if not given."
    )
    model_parameters: PositiveFloat | None = Field(
        None,
        description="Number of the model's parameters, such as `8e9`: smaller models lose more. Unset: from the checkpoint, "
        "else from the model's name.",
    )
    profiles: Path = Field(
        default_factory=lambda: cache_dir() / "profiles",
        description="Folder of the results of `qarr profile`. The served checkpoints' profile is used.",
    )
    max_slowdown: float = Field(
        4.0,
        gt=1,
        description="While speed under load is not measured, a tier this many times slower per token than a higher "
        "precision is not used.",
    )
    second_look: bool = Field(
        default=True,
        description="Whether a small transformer reads a prompt again where fastText is not sure that it has code and the "
        "tier depends on it. `false` saves its memory; docs/classifier.md says what both cost.",
    )

    @field_validator("loss_budget", mode="wrap")
    @classmethod
    def _one_message(cls, value: object, check: ValidatorFunctionWrapHandler) -> object:
        try:
            return check(value)
        except ValidationError:
            text = 'a number from 0 to 1, { like = "fast" } or { like = "balanced" } is needed'
            raise ValueError(text) from None
