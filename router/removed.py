"""Settings, commands and options of earlier releases that are gone, and what to use instead.

A setting without which a deployment would do something else is refused; one that changes nothing that callers see is
ignored, with one warning. Entries are deleted a release later.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Removed(NamedTuple):
    """A setting, or all settings of a section, that is gone."""

    instead: str  # what to do now: the end of a sentence that begins with the setting's name
    refused: bool  # whether the router refuses to start with it; otherwise it is ignored with a warning


MIRROR = "mirror traffic with the proxy in front: Envoy's request_mirror_policies, nginx's mirror (docs/operations.md)"
SEVERAL_ROUTERS = "run several routers behind nginx or systemd's template unit, as docs/scaling.md shows"
# By "section.name", or "section" for all of it; "tiers.*.name" of every tier.
SETTINGS: dict[str, Removed] = {
    "mirror": Removed(MIRROR, refused=False),
    "engine.recycle": Removed("the old engine stops first wherever there is no memory for both", refused=False),
    "policy.budget_half_life_s": Removed("each decision keeps the loss budget, no running mean", refused=False),
    "policy.class_floor": Removed(
        "published losses decide until the model is measured; policy.max_loss bounds the loss of a class", refused=False
    ),
    "policy.min_confidence": Removed("an unsure class counts with what the others lose", refused=False),
    "policy.check_share": Removed("lower policy.loss_budget for more answers at a higher precision", refused=False),
    "policy.check_wait_s": Removed("first tokens are no longer held", refused=False),
    "server.workers": Removed(SEVERAL_ROUTERS, refused=True),
    "server.worker_timeout_s": Removed(SEVERAL_ROUTERS, refused=True),
    "telemetry.keep_failures": Removed(
        "OTEL_TRACES_SAMPLER alone decides what is exported, and the page has every failure; to export failures of "
        "unsampled requests, leave the sampler at its default and sample complete traces in a collector",
        refused=False,
    ),
    "telemetry.recent_traces": Removed(
        "each of the last ended requests has its trace, and so has each of the last that went badly", refused=False
    ),
    "tiers.*.max_num_batched_tokens": Removed("give --max-num-batched-tokens in the tier's engine_args", refused=False),
    "upstream.hedge": Removed("late first tokens are no longer asked of a second tier", refused=False),
}
# Settings that have a fixed value now, which is what their default was.
FIXED = Removed("it has a fixed value now, its former default", refused=False)
SETTINGS |= dict.fromkeys(
    (
        f"{section}.{name}"
        for section, names in {
            "admission": "adaptive_limit affinity kv_close kv_open long_prompt_tokens oldest_every",
            "budgets": "keep_days metrics_keys",
            "engine": "canary_max_slowdown min_prefix_hit_rate restart_window_s slow_factor slow_s stop_grace_s "
            "unreachable_s",
            "jwt": "keep_s leeway_s refresh_s",
            "overflow": "first_token_timeout_s",
            "policy": "negligible_loss sla_confidence",
            "profile": "idle_s latency_s live",
            "server": "body_timeout_s header_timeout_s max_header_bytes max_headers resume_bytes resume_s silence_s "
            "write_timeout_s",
            "telemetry": "decision_log_mb log_files recent_requests",
            "tiers.*": "draft_tokens",
            "upstream": "breaker_failure_share breaker_failures breaker_longest_pause_s breaker_pause_s "
            "connect_timeout_s retry_reserve retry_share",
        }.items()
        for name in names.split()
    ),
    FIXED,
)
SETTINGS |= {
    "engine.warmup_question": Removed("the question is fixed; remove engine.warmup_expected as well", refused=True),
    "limits.default_temperature": Removed("0.7, unless a request has a temperature of its own", refused=True),
    "limits.max_sequences": Removed("a request may ask for 1,024 answers", refused=True),
    **dict.fromkeys(("model.calibration_tokens", "model.group_size"), FIXED._replace(refused=True)),
}
# By the command's name: what to use.
COMMANDS: dict[str, str] = {
    "mirror": MIRROR,
    "replay": "run '.venv/bin/python benchmarks/replay.py' from a checkout of the project",
    "trace": "open the request on the router's page, or ask 'qarr logs --trace ID' or GET /traces/ID",
}
OPTIONS: dict[str, str] = {
    "--workers": SEVERAL_ROUTERS,
    "--deep": "the digests of weights are in each manifest.json",
    **dict.fromkeys(("--calibration-tokens", "--group-size"), FIXED.instead),
}  # by the option: what to use


def removed_setting(key: str) -> Removed | None:
    """Return what became of a setting or its section, such as ``server.workers``; None: it was never there."""
    section, *names = key.split(".")
    if section == "tiers" and len(names) == 2:  # noqa: PLR2004  a tier's own, and not what such a setting holds
        key = f"tiers.*.{names[1]}"
    return SETTINGS.get(key) or SETTINGS.get(section)


def without_ignored(values: dict[str, Any], prefix: str = "") -> tuple[dict[str, Any], dict[str, str]]:
    """Return nested settings without those that are ignored, and for each of these what to do instead."""
    kept: dict[str, Any] = {}
    ignored: dict[str, str] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        gone = removed_setting(key)
        if gone is not None and not gone.refused:
            ignored[key] = gone.instead
        elif isinstance(value, dict):
            kept[name], more = without_ignored(value, f"{key}.")
            ignored |= more
        else:
            kept[name] = value
    return kept, ignored


def removed_argument(arguments: list[str]) -> str | None:
    """Return why a command line (without the program's name) no longer works; None: nothing in it is gone."""
    if arguments and (instead := COMMANDS.get(arguments[0])):
        return f"qarr {arguments[0]} is gone: {instead}"
    for argument in arguments:
        if instead := OPTIONS.get(argument.partition("=")[0]):
            return f"{argument.partition('=')[0]} is gone: {instead}"
    return None
