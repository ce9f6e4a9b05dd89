"""``GET /v1/models``, and the tiers that model names stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from router.api.asgi import context_of
from router.api.bodies import FieldProblem, InvalidBody, json_response
from router.api.problems import UnknownModel
from router.upstream.json_object import JsonObject, NotJson
from tiers.spec import STANDARD_TIERS

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from router.settings import OpenAISettings
    from router.telemetry.tracing import Telemetry
    from tiers.fleet import Fleet

ANY_TIER = {"auto": "auto", "qarr": "auto"}


class Choice(NamedTuple):
    """What a model name asks for.

    Attributes:
        tier: A tier, or ``auto``.
        adapter: The LoRA adapter of that name; None: the name is none of an adapter.
    """

    tier: str = "auto"
    adapter: str | None = None


_CHOICES = {name: Choice(tier) for name, tier in [*ANY_TIER.items(), *zip(STANDARD_TIERS, STANDARD_TIERS, strict=True)]}


@dataclass(frozen=True, slots=True)
class Models:
    """The endpoints ``GET /v1/models`` and ``GET /v1/models/{id}``."""

    fleet: Fleet
    settings: OpenAISettings
    telemetry: Telemetry
    model: str
    created: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the list, or with one model."""
        wanted = scope["path_params"].get("id")
        self.telemetry.name_server_span(scope, "/v1/models/{id}" if wanted else "/v1/models")
        choices, adapters = model_names(self.settings, self.fleet), adapter_names(self.fleet)
        if wanted is not None and wanted not in choices and wanted not in adapters:
            raise UnknownModel(wanted, (*choices, *adapters))
        cards = [self._card(name, choice) for name, choice in choices.items() if wanted in {None, name}]
        cards += [self._adapter_card(name) for name in adapters if wanted in {None, name}]
        body = cards[0] if wanted is not None else {"object": "list", "data": cards}
        await json_response(body, headers=context_of(scope).headers)(scope, receive, send)

    def _card(self, name: str, choice: str) -> dict[str, Any]:
        lengths = [spec.max_model_len for spec in self.fleet.specs if choice in {"auto", spec.name}]
        return self._listed(name, None if name == choice else choice, max(lengths, default=0))

    def _adapter_card(self, name: str) -> dict[str, Any]:
        """Return what is told of an adapter: its parent is the model itself, and which tiers have it."""
        having = [spec for spec in self.fleet.specs if name in spec.adapters]
        card = self._listed(name, "auto", max(spec.max_model_len for spec in having))
        return {**card, "tiers": [spec.name for spec in having]}

    def _listed(self, name: str, parent: str | None, max_model_len: int) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "qarr",
            "root": self.model,
            "parent": parent,
            "max_model_len": max_model_len,
        }


def read_document(body: bytes) -> JsonObject:
    """Parse a request's body.

    Raises:
        InvalidBody: It is not a JSON object.
    """
    try:
        return JsonObject.parse(body)
    except NotJson as error:
        raise InvalidBody((FieldProblem("body", str(error), "a JSON object in UTF-8"),)) from None


def model_names(settings: OpenAISettings, fleet: Fleet) -> dict[str, str]:
    """Return every known model name, with what it stands for: a tier, or ``auto``."""
    return {**ANY_TIER, **{spec.name: spec.name for spec in fleet.specs}, **settings.aliases}


def adapter_names(fleet: Fleet) -> list[str]:
    """Return the LoRA adapters that some tier offers, sorted; one that has a model's name is reached by no request."""
    return sorted(
        {name for spec in fleet.specs for name in spec.adapters} - {*ANY_TIER, *(spec.name for spec in fleet.specs)}
    )


def resolve(document: JsonObject, settings: OpenAISettings, fleet: Fleet) -> Choice:
    """Return what a body's model name asks for; ``auto`` if it names none, as vLLM allows.

    Raises:
        UnknownModel: The name is not known.
    """
    name = document.get("model")
    if name is None:
        return _CHOICES["auto"]
    if isinstance(name, str) and name in _CHOICES and name not in settings.aliases:
        return _CHOICES[name]
    names, adapters = model_names(settings, fleet), adapter_names(fleet)
    if isinstance(name, str) and name in names:
        return Choice(names[name])
    if isinstance(name, str) and name in adapters:
        return Choice(adapter=name)
    raise UnknownModel(str(name), (*names, *adapters))
