"""``GET /v1/models``, and the tiers that model names stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from router.api.asgi import context_of
from router.api.bodies import FieldProblem, InvalidBody, json_response
from router.api.problems import UnknownModel
from router.upstream.json_object import JsonObject, NotJson

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from router.settings import OpenAISettings
    from router.telemetry.tracing import Telemetry
    from tiers.fleet import Fleet

ModelChoice = Literal["auto", "fast", "balanced", "precise"]
MODELS: dict[str, ModelChoice] = {
    "auto": "auto",
    "qarr": "auto",
    "fast": "fast",
    "balanced": "balanced",
    "precise": "precise",
}


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
        names = model_names(self.settings)
        if wanted is not None and wanted not in names:
            raise UnknownModel(wanted, tuple(names))
        cards = [self._card(name, choice) for name, choice in names.items() if wanted in {None, name}]
        body = cards[0] if wanted is not None else {"object": "list", "data": cards}
        await json_response(body, headers=context_of(scope).headers)(scope, receive, send)

    def _card(self, name: str, choice: ModelChoice) -> dict[str, Any]:
        lengths = [spec.max_model_len for spec in self.fleet.specs if choice in {"auto", spec.name.value}]
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "qarr",
            "root": self.model,
            "parent": None if name == choice else choice,
            "max_model_len": max(lengths, default=0),
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


def model_names(settings: OpenAISettings) -> dict[str, ModelChoice]:
    """Return every known model name, with the choice that it stands for."""
    return {**MODELS, **settings.aliases}


def resolve(document: JsonObject, settings: OpenAISettings) -> ModelChoice:
    """Return the choice that a body's model name stands for; ``auto`` if it names none, as vLLM allows.

    Raises:
        UnknownModel: The name is not known.
    """
    name = document.get("model")
    if name is None:
        return "auto"
    if isinstance(name, str) and name in MODELS and name not in settings.aliases:
        return MODELS[name]
    names = model_names(settings)
    if not isinstance(name, str) or name not in names:
        raise UnknownModel(str(name), tuple(names))
    return names[name]
