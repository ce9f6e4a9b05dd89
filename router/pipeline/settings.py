"""Who gets the next free slot, and how long others wait."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from router.section import AllBut, Section


class WaitSettings(Section, reloads=AllBut()):
    """Longest waits in the queue, by priority."""

    interactive: NonNegativeFloat = Field(
        10, description="Longest wait for a slot, in seconds."
    )
    standard: NonNegativeFloat = Field(
        30, description="Longest wait for a slot, in seconds."
    )
    batch: NonNegativeFloat = Field(
        120, description="Longest wait for a slot, in seconds."
    )


class AdmissionSettings(Section, reloads=AllBut()):
    """Who gets the next free slot."""

    # what replicas hold in their prefix caches counts in choices and predictions
    affinity: ClassVar[bool] = True

    max_waiting: NonNegativeInt = Field(
        256,
        description="Most requests that wait for a slot; beyond, the least urgent is refused. 0: none waits.",
    )
    max_wait_s: WaitSettings = WaitSettings()
