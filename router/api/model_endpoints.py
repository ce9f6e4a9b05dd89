"""What stands behind a model's name: ``GET /v1/models/{id}/endpoints``, in OpenRouter's form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from router.api.asgi import context_of
from router.api.bodies import json_response
from router.api.models import behind
from tiers.spec import ReplicaState, TierName

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Receive, Scope, Send

    from router.api.models import Models
    from tiers.snapshot import TierSnapshot

# Of vLLM's chat completions, by OpenAI's and OpenRouter's names. Tools need an engine that is started for them.
PARAMETERS = (
    "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "min_p", "presence_penalty", "repetition_penalty",
    "response_format", "seed", "stop", "structured_outputs", "temperature", "top_k", "top_logprobs", "top_p",
)  # fmt: skip
NOT_WITH_DRAFT = {"min_p", "logit_bias"}
SERVING, NOT_SERVING = 0, -10  # OpenRouter's best and worst status


@dataclass(frozen=True, slots=True)
class ModelEndpoints:
    """The endpoint ``GET /v1/models/{id}/endpoints``.

    Attributes:
        waiting: Requests in the router's queue that a tier may serve.
    """

    models: Models
    waiting: Callable[[TierName], int]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the tiers behind one model. Where engines are is not told to anybody."""
        models, name = self.models, scope["path_params"]["id"]
        models.telemetry.name_server_span(scope, "/v1/models/{id}/endpoints")
        card = models.card(name)
        data = {
            "id": name,
            "name": name,
            "created": card["created"],
            "description": f"{models.model} at {len(card['tiers'])} precisions"
            if len(card["tiers"]) > 1
            else models.model,
            "architecture": {
                "modality": "text->text",
                "input_modalities": ["text"],
                "output_modalities": ["text"],
                "tokenizer": "Other",
                "instruct_type": None,
            },
            "endpoints": [
                self._endpoint(tier) for tier in models.fleet.snapshot().tiers if tier.spec.name in card["tiers"]
            ],
        }
        await json_response({"data": data}, headers=context_of(scope).headers)(scope, receive, send)

    def _endpoint(self, tier: TierSnapshot) -> dict[str, Any]:
        """Return one tier as OpenRouter shows an endpoint, with its load; null: not known here."""
        spec, ready = tier.spec, tier.state is ReplicaState.READY
        parameters = [p for p in PARAMETERS if spec.draft is None or p not in NOT_WITH_DRAFT]
        return {
            **behind(tier),
            "name": f"QARR | {spec.name}",
            "model_name": self.models.model,
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
