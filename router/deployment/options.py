"""How the fleet is supervised, from the settings."""

from __future__ import annotations

from router.settings import Settings
from tiers.lifecycle.canary import Canary
from tiers.lifecycle.discovery import DiscoveryOptions
from tiers.lifecycle.operations import OperationOptions
from tiers.lifecycle.options import SupervisorOptions
from tiers.lifecycle.watchdog import WatchdogOptions
from tiers.replica import FleetOptions

CANARY_FILE = "canary.json"
# How many times as long a token may take as in the latency profile, of an engine alone on the machine.
MAX_SLOWDOWN = 8.0


def fleet_options(settings: Settings) -> FleetOptions:
    return FleetOptions(
        breaker=settings.upstream.breaker, affinity=settings.admission.affinity
    )


def supervisor_options(settings: Settings) -> SupervisorOptions:
    engine = settings.engine
    dns_names = {name: settings.tiers.of(name).dns for name in settings.tiers.names}
    return SupervisorOptions(
        log_dir=engine.log_dir,
        start_timeout_s=engine.start_timeout_s,
        external_api_key=engine.api_key,
        watchdog=WatchdogOptions(
            max_restarts=engine.max_restarts, hang_s=engine.hang_s
        ),
        operations=OperationOptions(
            drain_s=engine.drain_s, recycle_every_s=engine.recycle_every_s
        ),
        canary=make_canary(settings),
        gate=settings.quality.gate,
        discovery=DiscoveryOptions(
            file=settings.discovery.file,
            names={tier: dns for tier, dns in dns_names.items() if dns},
            interval_s=settings.discovery.interval_s,
        ),
    )


def make_canary(settings: Settings) -> Canary:
    return Canary(
        path=settings.policy.profiles / CANARY_FILE,
        tolerance=settings.engine.check_tolerance,
        max_slowdown=MAX_SLOWDOWN,
    )
