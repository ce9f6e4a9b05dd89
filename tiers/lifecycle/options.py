"""How engines are watched and stopped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tiers.lifecycle.discovery import DiscoveryOptions
from tiers.lifecycle.gate import GateMode
from tiers.lifecycle.operations import OperationOptions
from tiers.lifecycle.warmup import WarmupPlan
from tiers.lifecycle.watchdog import WatchdogOptions

if TYPE_CHECKING:
    from pathlib import Path

    from tiers.lifecycle.canary import Canary


@dataclass(frozen=True, slots=True)
class SupervisorOptions:
    """How engines are watched and stopped.

    Attributes:
        log_dir: Folder of the engines' logs: one file per replica, and one of the previous start.
        start_timeout_s: From process start to ``/health``.
        stop_grace_s: From SIGTERM to SIGKILL.
        external_api_key: Key for engines given by URL.
        warmup: What an engine must answer before it is ready.
        watchdog: When an engine is restarted.
        operations: How engines are drained and recycled.
        canary: Compares what engines compute with their references; None: no comparison.
        gate: What happens to engines that are not verified, or are found to differ.
        discovery: Where engines that come and go are named.
    """

    log_dir: Path
    start_timeout_s: float = 600.0
    stop_grace_s: float = 10.0
    external_api_key: str = ""
    warmup: WarmupPlan = field(default_factory=WarmupPlan)
    watchdog: WatchdogOptions = field(default_factory=WatchdogOptions)
    operations: OperationOptions = field(default_factory=OperationOptions)
    canary: Canary | None = None
    gate: GateMode = GateMode.WARN
    discovery: DiscoveryOptions = field(default_factory=DiscoveryOptions)

    def log_path(self, replica_id: str) -> Path:
        """Return the path of the log of a replica's engine."""
        return self.log_dir / f"{replica_id}.log"
