"""``qarr classify``: what the classifier finds in a prompt."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic_core import to_json

from classifier import PromptFeatures, TokenCounter, explain, extract, load_second_look
from router.cli.client import KeyOption, RouterApiClient, UrlOption
from router.cli.common import ConfigOption, err, fail
from router.deployment.layout import (
    make_counter,
    named_counter,
    prepare_options,
    tier_spec,
)
from router.policy.decide import decide
from router.policy.decision import RoutingQuery
from router.policy.model_size import parameters_of
from router.policy.render import render_features
from router.policy.table import policy_table
from router.section import SettingsError
from router.settings import Settings, load_settings
from tiers.checkpoints.prepare import finished
from tiers.errors import OperationError
from tiers.snapshot import FleetSnapshot, ReplicaState, TierSnapshot
from tiers.spec import ReplicaStatus, TemplateTokens


def classify(
    text: Annotated[
        str | None,
        typer.Argument(help="The prompt; without it, standard input is read."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    jsonl: Annotated[
        bool,
        typer.Option(
            "--jsonl", help='Read {"text": ...} lines, write one JSON object a line.'
        ),
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Model folder with tokenizer.json.", metavar="DIR"),
    ] = None,
    url: UrlOption = "",
    key: KeyOption = "",
    config: ConfigOption = None,
) -> None:
    """Show what the classifier finds in a prompt and why, and the tier that the running router would serve it with.

    If no router answers: the tier that an idle fleet without measurements would use.
    """
    settings = load_settings(config)
    made = finished(prepare_options(settings)) if tokenizer is None else ()
    counter = (
        make_counter(made[0].path if made else None)
        if tokenizer is None
        else named_counter(tokenizer)
    )
    if not counter.exact:
        err.print(
            "no tokenizer yet ('qarr model prepare' makes one): tokens are estimated"
        )
    router: RouterApiClient | None = None
    try:
        router = RouterApiClient(url, key, config)
        router.ask("/tiers")
    except (OperationError, SettingsError) as error:
        router = None
        err.print(f"{error}", markup=False)
    fleet = idle_fleet(settings)
    specs = [tier.spec for tier in fleet.tiers]
    parameters = parameters_of(
        specs, settings.model.name, settings.policy.model_parameters
    )
    policy = policy_table(settings.policy, specs, parameters)

    def classified(prompt: str) -> dict[str, Any]:
        features = looked_at_again(prompt, extract(prompt, counter), counter)
        tier, reason = decided(prompt, features)
        why = {
            output: [(piece, round(weight, 2)) for piece, weight in all_]
            for output, all_ in explain(prompt).items()
        }
        return {**render_features(features), "tier": tier, "reason": reason, "why": why}

    def decided(prompt: str, features: PromptFeatures) -> tuple[Any, str]:
        if router is None:
            decision = decide(
                RoutingQuery(
                    features, features.tokens, settings.limits.default_max_tokens
                ),
                fleet,
                policy,
            )
            return (
                decision.tier,
                f"an idle fleet without measurements: {decision.reason}",
            )
        try:
            found = router.ask("/route", "POST", {"prompt": prompt})
        except OperationError as error:
            return None, str(error)
        return found["tier"], found["reason"]

    if jsonl:
        for prompt in _jsonl_prompts(sys.stdin.buffer):
            typer.echo(to_json(classified(prompt)))
        return
    if text is None and sys.stdin.isatty():
        err.print("type the prompt, then Ctrl-D")
    found = classified(text if text is not None else sys.stdin.read())
    typer.echo(
        json.dumps(found, indent=2, ensure_ascii=False)
        if as_json
        else _for_people(found)
    )


def idle_fleet(settings: Settings) -> FleetSnapshot:
    """Return a fleet with one idle, ready replica in each tier and no measurements."""
    replicas = (ReplicaState("", "", status=ReplicaStatus.READY),)
    specs = (
        tier_spec(name, settings.tiers.of(name), {}) for name in settings.tiers.names
    )
    return FleetSnapshot(
        tuple(TierSnapshot(spec, replicas, (0,)) for spec in specs), TemplateTokens()
    )


def looked_at_again(
    prompt: str, features: PromptFeatures, counter: TokenCounter
) -> PromptFeatures:
    second = load_second_look() if features.doubtful else None
    return (
        features
        if second is None
        else extract(prompt, counter, second=second.read(prompt))
    )


def _for_people(found: dict[str, Any]) -> str:
    """Return one line for each finding: with what weighed most for it, where the model tells."""
    ways = {"holds": found["contains_code"], "asks for": found["asks_for_code"]}
    code = " and ".join(way for way, there in ways.items() if there)
    rows = [
        ("class", f"{found['class']}, {found['confidence']:.0%} sure"),
        (
            "code",
            f"{code or 'none'}{' ' + found['language'] if found['language'] else ''}",
        ),
        ("complexity", found["complexity"]),
        (
            "tokens",
            f"{found['tokens']}{'' if found['tokens_exact'] else ' (estimated)'}",
        ),
        ("tier", f"{found['tier'] or 'none'}: {found['reason']}"),
    ]
    rows += [("", ""), ("weighed most", "(log-odds)")]
    for output, pieces in found["why"].items():
        if pieces:
            rows.append(
                (
                    output,
                    ", ".join(f"{piece!r} {weight:+.1f}" for piece, weight in pieces),
                )
            )
    return "\n".join(f"{name:15}{told}".rstrip() for name, told in rows)


def _jsonl_prompts(stream: Any) -> Iterator[str]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            fail(
                f'line {number} of standard input: expected a JSON object with a "text" string'
            )
        yield text
