"""When the router measures itself."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from router.section import Section


class ProfileSettings(Section):
    """When the router measures itself."""

    # Approximate time of work for the speed of all tiers.
    latency_s: ClassVar[float] = 150.0
    # How long there must be no requests. It doubles with each measurement that a request cancels, up to a minute.
    idle_s: ClassVar[float] = 5.0

    auto: bool = Field(
        True,
        description="Measure the speed and the loss of tiers without a profile in `policy.profiles`, as `qarr profile` "
        "does, while there are no requests. Only if this router started every engine: engines that others use too are "
        "left to `qarr profile`.",
    )
    think_tokens: int | None = Field(
        None,
        ge=0,
        description="Tokens for the thoughts of a model that thinks, on top of each task's own limit. By default half of "
        "the shortest context of the tiers, and at most 8,192. Answers that are cut while thinking are not measured; with a "
        "higher limit they are asked for again.",
    )
