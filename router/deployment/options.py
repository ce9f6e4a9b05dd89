"""How the fleet is supervised, from the settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiers.breaker import BreakerOptions
from tiers.lifecycle.canary import Canary
from tiers.lifecycle.discovery import DiscoveryOptions
from tiers.lifecycle.operations import OperationOptions
from tiers.lifecycle.supervisor import SupervisorOptions
from tiers.lifecycle.warmup import WarmupPlan
from tiers.lifecycle.watchdog import WatchdogOptions
from tiers.replica import FleetOptions
from tiers.spec import TierName

if TYPE_CHECKING:
    from router.settings import Settings

CANARY_FILE = "canary.json"


def fleet_options(settings: Settings) -> FleetOptions:
    """Return when replicas get fewer requests or none."""
    admission, upstream = settings.admission, settings.upstream
    return FleetOptions(
        breaker=BreakerOptions(
            failures=upstream.breaker_failures,
            failure_share=upstream.breaker_failure_share,
            pause_s=upstream.breaker_pause_s,
            longest_pause_s=upstream.breaker_longest_pause_s,
        ),
        adaptive_limit=admission.adaptive_limit,
        kv_open=admission.kv_open,
        kv_close=admission.kv_close,
        long_prompt_tokens=admission.long_prompt_tokens,
    )


def supervisor_options(settings: Settings, machine: str) -> SupervisorOptions:
    """Return how engines are supervised on the machine of this name."""
    engine = settings.engine
    return SupervisorOptions(
        log_dir=engine.log_dir,
        start_timeout_s=engine.start_timeout_s,
        stop_grace_s=engine.stop_grace_s,
        external_api_key=engine.api_key,
        warmup=WarmupPlan(engine.warmup_question, engine.warmup_expected),
        watchdog=WatchdogOptions(
            max_restarts=engine.max_restarts,
            restart_window_s=engine.restart_window_s,
            hang_s=engine.hang_s,
            unreachable_s=engine.unreachable_s,
            slow_factor=engine.slow_factor,
            slow_s=engine.slow_s,
            min_hit_rate=engine.min_prefix_hit_rate,
        ),
        operations=OperationOptions(
            drain_s=engine.drain_s,
            beside=engine.recycle == "beside",
            recycle_every_s=engine.recycle_every_s,
        ),
        canary=make_canary(settings, machine),
        discovery=DiscoveryOptions(
            file=settings.discovery.file, names=dns_names(settings), interval_s=settings.discovery.interval_s
        ),
        live_speed=settings.profile.live,
    )


def dns_names(settings: Settings) -> dict[TierName, str]:
    """Return the DNS names of tiers whose engines run elsewhere."""
    return {TierName(name): tier.dns for name, tier in settings.tiers if tier.dns}


def make_canary(settings: Settings, machine: str) -> Canary:
    """Return what engines started here are compared with."""
    engine, path = settings.engine, settings.policy.profiles / CANARY_FILE
    return Canary(path, machine, engine.canary_min_agreement, engine.canary_max_slowdown)
