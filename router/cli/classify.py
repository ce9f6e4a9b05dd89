"""``qarr classify``: what the classifier finds in a prompt."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from pydantic_core import to_json

from classifier import PromptFeatures, TokenCounter, explain, extract, load_second_look
from router.cli.client import KeyOption, RouterApiClient, UrlOption
from router.cli.common import ConfigOption, JsonOption, err, fail
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

TextArgument = Annotated[
    str | None,
    typer.Argument(help="The prompt; without it, standard input is read."),
]
JsonLinesOption = Annotated[
    bool,
    typer.Option(
        "--jsonl", help='Read {"text": ...} lines, write one JSON object a line.'
    ),
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(help="Model folder with tokenizer.json.", metavar="DIR"),
]


def classify(
    text: TextArgument = None,
    as_json: JsonOption = False,
    jsonl: JsonLinesOption = False,
    tokenizer: TokenizerOption = None,
    url: UrlOption = "",
    key: KeyOption = "",
    config: ConfigOption = None,
) -> None:
    """Show what the classifier finds in a prompt and why, and the tier that the running router would serve it with.

    If no router answers: the tier that an idle fleet without measurements would use.
    """
    settings = load_settings(config)
    counter = _counter(settings, tokenizer)
    if not counter.exact:
        err.print(
            "no tokenizer yet ('qarr model prepare' makes one): tokens are estimated"
        )
    router = _running_router(url, key, config)
    reader = PromptReader(
        counter,
        router,
        idle_fleet=IdleFleet(settings),
        takes_second_look=settings.policy.second_look,
    )
    if jsonl:
        for prompt in _jsonl_prompts(sys.stdin.buffer):
            typer.echo(to_json(reader.describe(prompt)))
        return
    if text is None and sys.stdin.isatty():
        err.print("type the prompt, then Ctrl-D")
    prompt = sys.stdin.read() if text is None else text
    description = reader.describe(prompt)
    if as_json:
        typer.echo(json.dumps(description, indent=2, ensure_ascii=False))
    else:
        typer.echo(_for_people(description))


def _counter(settings: Settings, tokenizer: Path | None) -> TokenCounter:
    """Return what counts tokens: by the folder that is named, else by a checkpoint, else by an estimate."""
    if tokenizer is not None:
        return named_counter(tokenizer)
    checkpoints = finished(prepare_options(settings))
    if not checkpoints:
        return make_counter(None)
    return make_counter(checkpoints[0].path)


def _running_router(
    url: str, key: str, config_path: Path | None
) -> RouterApiClient | None:
    """Return the running router; None: there is none, for a reason that is printed."""
    try:
        router = RouterApiClient(url, key, config_path)
        router.ask("/tiers")
    except (OperationError, SettingsError) as error:
        err.print(str(error), markup=False)
        return None
    return router


class IdleFleet:
    """The fleet of the settings as if all tiers were ready and idle."""

    def __init__(self, settings: Settings) -> None:
        self._fleet = idle_fleet(settings)
        self._max_tokens = settings.limits.default_max_tokens
        specs = [tier.spec for tier in self._fleet.tiers]
        parameters = parameters_of(
            specs, settings.model.name, settings.policy.model_parameters
        )
        self._policy = policy_table(settings.policy, specs, parameters)

    def decide(self, features: PromptFeatures) -> tuple[str | None, str]:
        """Return the tier that would serve a prompt, and the reason."""
        query = RoutingQuery(features, features.tokens, max_tokens=self._max_tokens)
        decision = decide(query, self._fleet, self._policy)
        return (
            decision.tier,
            f"an idle fleet without measurements: {decision.reason}",
        )


def _ask_for_tier(router: RouterApiClient, prompt: str) -> tuple[str | None, str]:
    """Return the tier that the running router would serve a prompt with, and the reason."""
    try:
        answer = router.ask("/route", "POST", {"prompt": prompt})
    except OperationError as error:
        return None, str(error)
    return answer["tier"], answer["reason"]


class PromptReader(NamedTuple):
    """Finds out about prompts.

    Attributes:
        router: The running router, which decides; None: the idle fleet does.
        takes_second_look: Whether the settings have a doubtful prompt read again.
    """

    counter: TokenCounter
    router: RouterApiClient | None
    idle_fleet: IdleFleet
    takes_second_look: bool = True

    def describe(self, prompt: str) -> dict[str, Any]:
        """Return what the classifier finds in a prompt, which tier serves it, and what weighed most."""
        features = extract(prompt, self.counter)
        if self.takes_second_look:
            features = look_again(prompt, features, self.counter)
        if self.router is None:
            tier, reason = self.idle_fleet.decide(features)
        else:
            tier, reason = _ask_for_tier(self.router, prompt)
        return {
            **render_features(features),
            "tier": tier,
            "reason": reason,
            "why": _weights(prompt),
        }


def _weights(prompt: str) -> dict[str, list[tuple[str, float]]]:
    """Return the pieces of a prompt that weighed most, for each output of the classifier."""
    weights: dict[str, list[tuple[str, float]]] = {}
    for output, pieces in explain(prompt).items():
        weights[output] = [(piece, round(weight, 2)) for piece, weight in pieces]
    return weights


def idle_fleet(settings: Settings) -> FleetSnapshot:
    """Return a fleet with one idle, ready replica in each tier and no measurements."""
    replica = ReplicaState("", "", status=ReplicaStatus.READY)
    tiers: list[TierSnapshot] = []
    for name in settings.tiers.names:
        tier = settings.tiers.of(name)
        spec = tier_spec(name, tier, {}, store=settings.model.store)
        tiers.append(TierSnapshot(spec, (replica,), (0,)))
    return FleetSnapshot(tuple(tiers), TemplateTokens())


def look_again(
    prompt: str, features: PromptFeatures, counter: TokenCounter
) -> PromptFeatures:
    """Return a prompt's features by the larger model too, if the first one is in doubt and the larger one is there."""
    if not features.doubtful:
        return features
    second_look = load_second_look()
    if second_look is None:
        return features
    return extract(prompt, counter, second=second_look.read(prompt))


def _for_people(description: dict[str, Any]) -> str:
    """Return one line for each finding, and what weighed most for it where the model tells."""
    tokens = str(description["tokens"])
    if not description["tokens_exact"]:
        tokens += " (estimated)"
    rows = [
        ("class", f"{description['class']}, {description['confidence']:.0%} sure"),
        ("code", _code_words(description)),
        ("complexity", description["complexity"]),
        ("tokens", tokens),
        ("tier", f"{description['tier'] or 'none'}: {description['reason']}"),
    ]
    weight_rows = []
    for output, pieces in description["why"].items():
        if pieces:
            weights = [f"{piece!r} {weight:+.1f}" for piece, weight in pieces]
            weight_rows.append((output, ", ".join(weights)))
    if weight_rows:
        rows += [("", ""), ("weighed most", "(log-odds)"), *weight_rows]
    return "\n".join(f"{name:15}{value}".rstrip() for name, value in rows)


def _code_words(description: dict[str, Any]) -> str:
    """Return whether a prompt holds code or asks for it, and in which language."""
    ways: list[str] = []
    if description["contains_code"]:
        ways.append("holds")
    if description["asks_for_code"]:
        ways.append("asks for")
    words = " and ".join(ways) or "none"
    if description["language"]:
        words += f" {description['language']}"
    return words


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
