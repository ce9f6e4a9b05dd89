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
from tiers.formats import shown_quantization
from tiers.snapshot import TierSnapshot
from tiers.spec import STANDARD_TIERS, ReplicaStatus, TierName, TierSpec

ANY_TIER = {"auto": "auto", "qarr": "auto"}


class ModelChoice(NamedTuple):
    tier: str = "auto"  # a tier, or ``auto``
    # the LoRA adapter of that name; None: the name is none of an adapter
    adapter: str | None = None


# The names that most requests have, so that these are looked up and nothing is made for them.
_CHOICES: dict[str, ModelChoice] = {
    name: ModelChoice(tier) for name, tier in ANY_TIER.items()
}
_CHOICES.update((tier, ModelChoice(tier)) for tier in STANDARD_TIERS)


# Parameters of vLLM's chat completions, by OpenAI's and OpenRouter's names. Tools need an engine that is started for them.
PARAMETERS = (
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "max_tokens",
    "min_p",
    "presence_penalty",
    "repetition_penalty",
    "response_format",
    "seed",
    "stop",
    "structured_outputs",
    "temperature",
    "top_k",
    "top_logprobs",
    "top_p",
)
# vLLM 0.32 refuses these parameters with a draft, in its SamplingParams.
UNDRAFTABLE = ("min_p", "logit_bias")
# OpenRouter's best and worst status.
SERVING = 0
NOT_SERVING = -10


@dataclass(frozen=True, slots=True)
class Models:
    fleet: Fleet
    settings: OpenAISettings
    model: str
    created: int
    # requests in the router's queue that a tier may serve
    waiting: Callable[[TierName], int]

    async def answer(self, request: Request) -> Response:
        """Answer with one model, or with all that the caller may use."""
        model_name = request.path_params.get("id")
        context = context_of(request.scope)
        allowed_tiers = context.caller.tiers
        if model_name is None:
            return json_response(
                {"object": "list", "data": self._cards(allowed_tiers)},
                headers=context.response_headers,
            )
        return json_response(
            self.card(model_name, allowed_tiers), headers=context.response_headers
        )

    async def endpoints(self, request: Request) -> Response:
        """Answer with the tiers behind one model, in OpenRouter's form. It does not say where engines run."""
        model_name = request.path_params["id"]
        context = context_of(request.scope)
        card = self.card(model_name, context.caller.tiers)
        tier_names = card["tiers"]
        description = self.model
        if len(tier_names) > 1:
            description = f"{self.model} at {len(tier_names)} precisions"
        data = {
            "id": model_name,
            "name": model_name,
            "created": card["created"],
            "description": description,
            "architecture": {
                "modality": "text->text",
                "input_modalities": ["text"],
                "output_modalities": ["text"],
                "tokenizer": "Other",
                "instruct_type": None,
            },
            "endpoints": [
                self._endpoint(tier)
                for tier in self.fleet.snapshot().tiers
                if tier.spec.name in tier_names
            ],
        }
        return json_response({"data": data}, headers=context.response_headers)

    def card(
        self, model_name: str, allowed_tiers: frozenset[TierName] | None
    ) -> dict[str, Any]:
        """Return what a caller who may use some tiers (None: all) is told about one model.

        ``UnknownModelError``: there is no model of this name, or the caller may use no tier behind it.
        """
        model_choice = choice_of(model_name, self.settings, self.fleet)
        if model_choice is not None:
            card = self._card(model_name, model_choice, allowed_tiers)
            if card["tiers"]:
                return card
        raise UnknownModelError(
            model_name, tuple(card["id"] for card in self._cards(allowed_tiers))
        )

    def _cards(self, allowed_tiers: frozenset[TierName] | None) -> list[dict[str, Any]]:
        """Return all models that have one name each: those of tiers, aliases and adapters, without patterns."""
        model_tiers = model_names(self.settings, self.fleet)
        choices_by_name = {
            model_name: ModelChoice(tier)
            for model_name, tier in model_tiers.items()
            if "*" not in model_name
        }
        for adapter_name in adapter_names(self.fleet):
            choices_by_name.setdefault(adapter_name, ModelChoice(adapter=adapter_name))
        cards = [
            self._card(model_name, model_choice, allowed_tiers)
            for model_name, model_choice in choices_by_name.items()
        ]
        if allowed_tiers is None:
            return cards
        return [card for card in cards if card["tiers"]]

    def _card(
        self,
        model_name: str,
        model_choice: ModelChoice,
        allowed_tiers: frozenset[TierName] | None,
    ) -> dict[str, Any]:
        tier_names = [
            spec.name for spec in self._specs_behind(model_choice, allowed_tiers)
        ]
        served_by = [
            behind(tier)
            for tier in self.fleet.snapshot().tiers
            if tier.spec.name in tier_names
        ]
        max_model_len = max((tier["context_length"] for tier in served_by), default=0)
        return {
            "id": model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "qarr",
            "root": self.model,
            "parent": None if model_name == model_choice.tier else model_choice.tier,
            "max_model_len": max_model_len,
            "context_length": max_model_len,
            "tiers": tier_names,
            "served_by": served_by,
        }

    def _specs_behind(
        self, model_choice: ModelChoice, allowed_tiers: frozenset[TierName] | None
    ) -> Sequence[TierSpec]:
        """Return the tiers that may serve a model's requests, of those that a caller may use (None: all)."""
        specs: Sequence[TierSpec] = self.fleet.specs
        if model_choice.tier != "auto":
            specs = [spec for spec in specs if spec.name == model_choice.tier]
        if model_choice.adapter is not None:
            specs = [spec for spec in specs if model_choice.adapter in spec.adapters]
        if allowed_tiers is not None:
            specs = [spec for spec in specs if spec.name in allowed_tiers]
        return specs

    def _endpoint(self, tier: TierSnapshot) -> dict[str, Any]:
        """Return what OpenRouter's form says of a tier."""
        spec = tier.spec
        supported_parameters = list(PARAMETERS)
        if spec.draft is not None:
            supported_parameters = [
                name for name in PARAMETERS if name not in UNDRAFTABLE
            ]
        return {
            **behind(tier),
            "name": f"QARR | {spec.name}",
            "model_name": self.model,
            "provider_name": spec.name,
            "tag": spec.name,
            "max_completion_tokens": None,
            "max_prompt_tokens": None,
            "pricing": None,
            "supported_parameters": supported_parameters,
            "status": SERVING if tier.status is ReplicaStatus.READY else NOT_SERVING,
            "uptime_last_30m": None,
            "replicas": len(tier.replicas),
            "replicas_ready": len(tier.ready),
            "in_flight": sum(replica.in_flight for replica in tier.replicas),
            "max_in_flight": spec.max_in_flight * len(tier.ready),
            "queue": self.waiting(spec.name),
        }


def behind(tier: TierSnapshot) -> dict[str, Any]:
    """Return what a model's card says of a tier that serves it."""
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
        raise InvalidBodyError(
            (FieldProblem("body", str(error), "a JSON object in UTF-8"),)
        ) from None


def model_names(settings: OpenAISettings, fleet: Fleet) -> dict[str, str]:
    """Return the names of models with the tiers that they stand for; aliases may be patterns."""
    names = dict(ANY_TIER)
    names.update((spec.name, spec.name) for spec in fleet.specs)
    names.update(settings.aliases)
    return names


def adapter_names(fleet: Fleet) -> list[str]:
    """Return the LoRA adapters that some tier offers, sorted; one that has a model's name is reached by no request."""
    offered_names: set[str] = set()
    for spec in fleet.specs:
        offered_names.update(spec.adapters)
    return sorted(offered_names - {*ANY_TIER, *(spec.name for spec in fleet.specs)})


def choice_of(
    model_name: str, settings: OpenAISettings, fleet: Fleet
) -> ModelChoice | None:
    """Return what a model name asks for; the engines' own name, which stands in answers, any tier. None: it is not known."""
    if model_name in _CHOICES and model_name not in settings.aliases:
        return _CHOICES[model_name]
    tier_name = model_names(settings, fleet).get(model_name)
    if tier_name is not None:
        return ModelChoice(tier_name)
    if model_name in adapter_names(fleet):
        return ModelChoice(adapter=model_name)
    for alias, tier_of_alias in settings.aliases.items():
        if "*" in alias and fnmatchcase(model_name, alias):
            return ModelChoice(tier_of_alias)
    if any(replica.model == model_name for replica in fleet.replicas):
        return _CHOICES["auto"]
    return None


def resolve(
    document: JsonObject, settings: OpenAISettings, fleet: Fleet
) -> ModelChoice:
    """Return what a body's model name asks for; ``auto`` if it names none, as vLLM allows, or ``UnknownModelError``."""
    model_name = document.get("model")
    if model_name is None or model_name == "":
        return _CHOICES["auto"]
    model_choice = None
    if isinstance(model_name, str):
        model_choice = choice_of(model_name, settings, fleet)
    if model_choice is None:
        raise UnknownModelError(
            str(model_name), (*model_names(settings, fleet), *adapter_names(fleet))
        )
    return model_choice
