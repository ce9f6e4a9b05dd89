"""What a worker is started with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from router.settings import Settings
    from router.workers.state import News
    from router.workers.table import Shape


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker is started with; the descriptors are inherited.

    Attributes:
        row: Its row in the table.
        settings: Its part of bounds that are divided among workers.
        model: The served model's name.
        tokenizer: Folder of the model's tokenizer; None: none is known yet.
        machine: Name of the machine.
        listening: The socket that all workers accept on.
        table: The shared table.
        shape: Its size.
        bells: To wake each process.
        ledger: The shared quotas.
        news: The fleet's state.
    """

    row: int
    settings: Settings
    model: str
    tokenizer: Path | None
    machine: str
    listening: int
    table: int
    shape: Shape
    bells: tuple[int, ...]
    ledger: int
    news: News


def divided(settings: Settings, workers: int) -> Settings:
    """Return the settings with one worker's part of what a router has in all."""
    server, mirror, overflow = settings.server, settings.mirror, settings.overflow
    part = {
        "max_connections": -(-server.max_connections // workers),
        "resume_streams": -(-server.resume_streams // workers),
    }
    mirrored = mirror.model_copy(update={"max_in_flight": -(-mirror.max_in_flight // workers)})
    most = max(overflow.max_in_flight // workers, 1)
    return settings.model_copy(
        update={
            "server": server.model_copy(update=part),
            "mirror": mirrored,
            "overflow": overflow.model_copy(update={"max_in_flight": most}),
        }
    )
