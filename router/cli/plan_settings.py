"""Which settings enter a plan, and why others do not: what is left out must not be silent."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from router.settings import Settings, changes
from tiers.spec import STANDARD_TIERS

if TYPE_CHECKING:
    from collections.abc import Mapping

OTHER_TIERS = "only fast, balanced and precise are planned, in the formats that --formats names; not further tiers"
_VLLM_ARGUMENTS = (
    "what vLLM's arguments and variables change in memory and speed is not known"
)
_WAITING = "planned requests wait until a sequence is free, however many there are and however long it takes"
_LENGTHS = "--prompt, --output and --context say how long requests are"
_TIMEOUTS = "planned answers take as long as they take; none is broken off"
_ADAPTERS = "the memory and time that adapters take are left out"
_RAY = "what engines share on a Ray cluster is left out; each has GPUs of its own"
_ELSEWHERE = "engines that run elsewhere do not count, not even in 'as set'"
_PRICES = "--prices says what GPUs cost"

# These settings enter every plan.
ENTERS = frozenset(
    {
        "tiers.*.replicas",
        "tiers.*.tensor_parallel",
        "tiers.*.scheme",
        "model.name",
        "model.store",
        "policy.objective",
        "policy.profiles",
    }
)
IGNORED: dict[str, str] = {
    "tiers.*.max_in_flight": _WAITING,
    "tiers.*.urls": _ELSEWHERE,
    "tiers.*.dns": _ELSEWHERE,
    "discovery.file": _ELSEWHERE,
    "tiers.*.gpus": "a planned engine takes any GPUs of its kind",
    "tiers.*.pipeline_parallel": "planned engines divide each layer between their GPUs (tensor_parallel), not the layers",
    "tiers.*.across_nodes": _RAY,
    "tiers.*.ray_resources": _RAY,
    "ray.resources": _RAY,
    "tiers.*.checkpoint": "each tier is planned in the format that --formats names, whatever the folder holds",
    "tiers.*.precision": "each tier is planned in the format that --formats names",
    "tiers.*.engine_args": _VLLM_ARGUMENTS,
    "engine.extra_args": _VLLM_ARGUMENTS,
    "tiers.*.env": _VLLM_ARGUMENTS,
    "tiers.*.draft": "what speculative decoding changes in memory and speed is left out",
    "engine.recycle_every_s": "planned engines run without a break",
    "policy.loss_budget": "--loss says how many answers may be lost; a number here counts in 'as set' alone",
    "policy.negligible_loss": "--loss says how many answers may be lost; this counts in 'as set' alone",
    "policy.max_loss": "--loss bounds the answers lost in all; caps of single classes are left out",
    "policy.prices": _PRICES,
    "policy.max_slowdown": "planned speeds count as known",
    "policy.model_parameters": "the model's own size counts",
    "overflow.url": "all requests are planned for here; none goes to the overflow",
    "lora.adapters": _ADAPTERS,
    "lora.at_run_time": _ADAPTERS,
    "budgets.replica_hour": _PRICES,
    "budgets.currency": _PRICES,
    "admission.max_waiting": _WAITING,
    "admission.max_wait_s.*": _WAITING,
    "limits.*": _LENGTHS,
    "upstream.*_timeout_s": _TIMEOUTS,
}
IGNORED_ON_GPUS: dict[str, str] = {
    "tiers.*.max_model_len": "it counts in 'as set' alone; planned engines hold requests of --context tokens",
    "tiers.*.max_num_seqs": "it counts in 'as set' alone; planned engines decode up to --max-num-seqs, or 256",
    "engine.cpu_kv_cache_gib": "it is for engines on a processor",
}
IGNORED_ON_A_PROCESSOR: dict[str, str] = {
    "tiers.fast.max_num_seqs": "tiers.precise.max_num_seqs counts for all tiers, or --max-num-seqs",
    "tiers.balanced.max_num_seqs": "tiers.precise.max_num_seqs counts for all tiers, or --max-num-seqs",
}
# Settings that change nothing of what a plan says.
UNRELATED = (
    "server.*",
    "tls.*",
    "auth.*",
    "jwt.*",
    "state.*",
    "telemetry.*",
    "profile.*",
    "quality.*",
    "quantizer.*",
    "openai.*",
    "discovery.interval_s",
    "model.calibration",
    "model.calibration_samples",
    "model.allow_different",
    "engine.python",
    "engine.base_port",
    "engine.api_key",
    "engine.log_dir",
    "engine.start_timeout_s",
    "engine.max_restarts",
    "engine.hang_s",
    "engine.drain_s",
    "engine.check_tolerance",
    "ray.address",
    "ray.python",
    "policy.give_up",
    "policy.second_look",
    "policy.sla_confidence",
    "upstream.attempts",
    "overflow.api_key",
    "overflow.model",
    "overflow.name",
    "overflow.max_in_flight",
    "overflow.first_token_timeout_s",
    "lora.max_rank",
    "budgets.file",
    "budgets.while_unknown",
)
_STANDARD = re.compile(rf"tiers\.({'|'.join(STANDARD_TIERS)})\.")


@dataclass(frozen=True, slots=True)
class IgnoredSetting:
    """A setting that was changed and does not enter the plan."""

    setting: str
    why: str


def ignored_settings(settings: Settings, *, on_gpus: bool) -> list[IgnoredSetting]:
    """Return the changed settings that do not enter a plan although they might."""
    added_tiers = [
        f"tiers.{name}" for name in settings.tiers.names if name not in STANDARD_TIERS
    ]
    ignored = [IgnoredSetting(setting, OTHER_TIERS) for setting in added_tiers]
    reasons_here = IGNORED_ON_GPUS if on_gpus else IGNORED_ON_A_PROCESSOR
    reasons = IGNORED | reasons_here
    for change in changes(Settings(), settings):
        reason = _reason(change.key, reasons)
        if reason is not None and change.key not in added_tiers:
            ignored.append(IgnoredSetting(change.key, reason))
    return ignored


def _reason(key: str, reason_by_pattern: Mapping[str, str]) -> str | None:
    """Return why a setting does not enter; None: it does, or has nothing to do with a plan."""
    general_key = _STANDARD.sub("tiers.*.", key)
    for pattern, reason in reason_by_pattern.items():
        if key == pattern or fnmatchcase(general_key, pattern):
            return reason
    return None
