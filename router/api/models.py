"""``GET /v1/models``, the tiers that model names stand for, and what is behind them, also in OpenRouter's form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from router.api.asgi import context_of
from router.api.bodies import FieldProblem, InvalidBodyError, json_response
from router.api.problems import UnknownModelError
from router.api.settings import OpenAISettings
from router.upstream.json_object import JsonObject, NotJsonError
from tiers.fleet import Fleet
from tiers.quantization import shown_quantization
from tiers.snapshot import TierSnapshot
from tiers.spec import STANDARD_TIERS, ReplicaStatus, TierName

ANY_TIER = {"auto": "auto", "qarr": "auto"}


class Choice(NamedTuple):
    tier: str = "auto"  # a tier, or ``auto``
    adapter: str | None = None  # the LoRA adapter of that name; None: the name is none of an adapter


_CHOICES = {name: Choice(tier) for name, tier in [*ANY_TIER.items(), *zip(STANDARD_TIERS, STANDARD_TIERS, strict=True)]}


# Of vLLM's chat completions, by OpenAI's and OpenRouter's names. Tools need an engine that is started for them.
PARAMETERS = (
    "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "min_p", "presence_penalty", "repetition_penalty",
    "response_format", "seed", "stop", "structured_outputs", "temperature", "top_k", "top_logprobs", "top_p",
)  # fmt: skip
NOT_WITH_DRAFT = {"min_p", "logit_bias"}
SERVING, NOT_SERVING = 0, -10  # OpenRouter's best and worst status


@dataclass(frozen=True, slots=True)
class Models:
    fleet: Fleet
    settings: OpenAISettings
    model: str
    created: int
    waiting: Callable[[TierName], int]  # requests in the router's queue that a tier may serve

    async def answer(self, request: Request) -> Response:
        wanted, context = request.path_params.get("id"), context_of(request.scope)
        allowed = context.caller.tiers
        body = {"object": "list", "data": self._cards(allowed)} if wanted is None else self.card(wanted, allowed)
        return json_response(body, headers=context.headers)

    async def endpoints(self, request: Request) -> Response:
        """Answer with the tiers behind one model, in OpenRouter's form. Where engines are is not told to anybody."""
        name, context = request.path_params["id"], context_of(request.scope)
        card = self.card(name, context.caller.tiers)
        tiers = [tier for tier in self.fleet.snapshot().tiers if tier.spec.name in card["tiers"]]
        data = {
            "id": name,
            "name": name,
            "created": card["created"],
            "description": f"{self.model} at {len(card['tiers'])} precisions" if card["tiers"][1:] else self.model,
            "architecture": {
                "modality": "text->text",
                "input_modalities": ["text"],
                "output_modalities": ["text"],
                "tokenizer": "Other",
                "instruct_type": None,
            },
            "endpoints": [self._endpoint(tier) for tier in tiers],
        }
        return json_response({"data": data}, headers=context.headers)

    def card(self, wanted: str, allowed: frozenset[TierName] | None) -> dict[str, Any]:
        """Return what is told of one model, to a caller who may use some tiers (None: all).

        ``UnknownModelError``: there is none of the name, or the caller may use no tier behind it.
        """
        choice = choice_of(wanted, self.settings, self.fleet)
        card = None if choice is None else self._card(wanted, choice, allowed)
        if card is None or not card["tiers"]:
            raise UnknownModelError(wanted, tuple(card["id"] for card in self._cards(allowed)))
        return card

    def _cards(self, allowed: frozenset[TierName] | None) -> list[dict[str, Any]]:
        names = model_names(self.settings, self.fleet)
        choices = {name: Choice(tier) for name, tier in names.items() if "*" not in name}
        choices |= {name: Choice(adapter=name) for name in adapter_names(self.fleet) if name not in choices}
        cards = (self._card(name, choice, allowed) for name, choice in choices.items())
        return [card for card in cards if allowed is None or card["tiers"]]

    def _card(self, name: str, choice: Choice, allowed: frozenset[TierName] | None) -> dict[str, Any]:
        specs = [
            s for s in self.fleet.specs if choice.tier in {"auto", s.name} and (allowed is None or s.name in allowed)
        ]
        tiers = [s.name for s in specs if choice.adapter is None or choice.adapter in s.adapters]
        return self._listed(name, None if name == choice.tier else choice.tier, tiers)

    def _listed(self, name: str, parent: str | None, tiers: Sequence[TierName]) -> dict[str, Any]:
        found = [behind(tier) for tier in self.fleet.snapshot().tiers if tier.spec.name in tiers]
        max_model_len = max((tier["context_length"] for tier in found), default=0)
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "qarr",
            "root": self.model,
            "parent": parent,
            "max_model_len": max_model_len,
            "context_length": max_model_len,
            "tiers": tiers,
            "served_by": found,
        }

    def _endpoint(self, tier: TierSnapshot) -> dict[str, Any]:
        spec, ready = tier.spec, tier.status is ReplicaStatus.READY
        parameters = [p for p in PARAMETERS if spec.draft is None or p not in NOT_WITH_DRAFT]
        return {
            **behind(tier),
            "name": f"QARR | {spec.name}",
            "model_name": self.model,
            "provider_name": spec.name,
            "tag": spec.name,
            "max_completion_tokens": None,
            "max_prompt_tokens": None,
            "pricing": None,
            "supported_parameters": parameters,
            "status": SERVING if ready else NOT_SERVING,
            "uptime_last_30m": None,
            "replicas": len(tier.replicas),
            "replicas_ready": len(tier.ready),
            "in_flight": sum(replica.in_flight for replica in tier.replicas),
            "max_in_flight": spec.max_in_flight * len(tier.ready),
            "queue": self.waiting(spec.name),
        }


def behind(tier: TierSnapshot) -> dict[str, Any]:
    spec = tier.spec
    return {
        "tier": spec.name,
        "precision": spec.precision,
        "quantization": shown_quantization(spec.precision),
        "context_length": spec.max_model_len,
        "adapters": list(spec.adapters),
        "state": tier.status.value,
    }


def read_document(body: bytes) -> JsonObject:
    """Parse a request's body; ``InvalidBodyError``: it is not a JSON object."""
    try:
        return JsonObject.parse(body)
    except NotJsonError as error:
        raise InvalidBodyError((FieldProblem("body", str(error), "a JSON object in UTF-8"),)) from None


def model_names(settings: OpenAISettings, fleet: Fleet) -> dict[str, str]:
    return {**ANY_TIER, **{spec.name: spec.name for spec in fleet.specs}, **settings.aliases}


def adapter_names(fleet: Fleet) -> list[str]:
    """Return the LoRA adapters that some tier offers, sorted; one that has a model's name is reached by no request."""
    return sorted(
        {name for spec in fleet.specs for name in spec.adapters} - {*ANY_TIER, *(spec.name for spec in fleet.specs)}
    )


def choice_of(name: str, settings: OpenAISettings, fleet: Fleet) -> Choice | None:
    """Return what a model name asks for; the engines' own name, which stands in answers, any tier. None: it is not known."""
    if name in _CHOICES and name not in settings.aliases:
        return _CHOICES[name]
    if (tier := model_names(settings, fleet).get(name)) is not None:
        return Choice(tier)
    if name in adapter_names(fleet):
        return Choice(adapter=name)
    patterns = ((alias, tier) for alias, tier in settings.aliases.items() if "*" in alias)
    found = next((tier for alias, tier in patterns if fnmatchcase(name, alias)), None)
    if found is None and any(replica.model == name for replica in fleet.replicas):
        found = "auto"
    return None if found is None else Choice(found)


def resolve(document: JsonObject, settings: OpenAISettings, fleet: Fleet) -> Choice:
    """Return what a body's model name asks for; ``auto`` if it names none, as vLLM allows, or ``UnknownModelError``."""
    name = document.get("model")
    if name is None or name == "":
        return _CHOICES["auto"]
    choice = choice_of(name, settings, fleet) if isinstance(name, str) else None
    if choice is None:
        raise UnknownModelError(str(name), (*model_names(settings, fleet), *adapter_names(fleet)))
    return choice
