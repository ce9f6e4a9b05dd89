"""The ``provider`` object of a body, as OpenRouter has it: which precisions may serve a request, and what counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from router.policy.decision import Sort  # noqa: TC001  pydantic reads it
from tiers.quantization import QUANTIZATIONS, Quantization

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import ValidationInfo

    from tiers.spec import TierName

# Of OpenRouter's object, what means nothing here, or cannot be promised.
NOT_HERE = (
    "zdr", "enforce_distillable_text", "max_price", "preferred_min_throughput", "preferred_max_latency",
)  # fmt: skip


class ProviderBody(BaseModel):
    """Preferences among what may serve a request; the providers are the tiers.

    ``require_parameters`` and ``data_collection`` are taken with OpenRouter's own default only, which asks for nothing.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    quantizations: list[Quantization] | None = Field(None, min_length=1, max_length=20)
    sort: Sort | None = None
    order: list[str] | None = Field(None, min_length=1, max_length=1)
    only: list[str] | None = Field(None, min_length=1, max_length=100)
    ignore: list[str] | None = Field(None, max_length=100)
    allow_fallbacks: bool | None = None
    require_parameters: Literal[False] | None = None
    data_collection: Literal["allow"] | None = None

    @field_validator("order", "only", "ignore")
    @classmethod
    def _known_tiers(cls, names: list[str] | None, info: ValidationInfo) -> list[str] | None:
        """Check that there are such tiers, where the ``Rules`` are known."""
        known: Sequence[TierName] | None = getattr(info.context, "tiers", None)
        for name in names or ():
            if known is not None and name not in known:
                raise ValueError(f"there is no tier {name[:40]!r}")
        return names


def provider_allowed(tiers: Sequence[TierName]) -> dict[str, str]:
    """Return the allowed values of each field."""
    names = ", ".join(tiers)
    return {
        "provider": f"null or an object with any of {', '.join(ProviderBody.model_fields)}",
        "provider.quantizations": f"a list of {', '.join(QUANTIZATIONS)}",
        "provider.sort": "price, throughput or latency",
        "provider.order": f"a list of one of {names}",
        "provider.only": f"a list of {names}",
        "provider.ignore": f"a list of {names}",
        "provider.allow_fallbacks": "true or false",
        "provider.require_parameters": "false: what vLLM makes of parameters is not known here",
        "provider.data_collection": "allow: what engines keep is not known here",
    }


def not_here(location: Sequence[Any]) -> bool:
    """Tell whether a field that there is not here is one of OpenRouter's."""
    return len(location) > 1 and location[0] == "provider" and location[1] in NOT_HERE
