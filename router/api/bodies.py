"""Bodies of our own endpoints: requests, validated strictly, and responses."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails, from_json, to_json
from starlette.responses import Response

from router.api.settings import LimitSettings, TierPolicy
from router.pipeline.request import NO_BOUNDS, RoutingOptions, Truncate
from router.policy.decision import Priority, Sla, Sort
from router.section import AdapterName, EngineAddress
from router.settings import Settings
from tiers.preparing import Preparing
from tiers.quantization import QUANTIZATIONS, Quantization
from tiers.snapshot import FleetSnapshot, ReplicaState
from tiers.spec import STANDARD_TIERS, ReplicaStatus, TierName

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
        known: Sequence[TierName] | None = getattr(info.context, "tiers", None)
        for name in names or ():
            if known is not None and name not in known:
                raise ValueError(f"there is no tier {name[:40]!r}")
        return names


def provider_allowed(tiers: Sequence[TierName]) -> dict[str, str]:
    names = ", ".join(tiers)
    return {
        "provider": f"null or an object with any of {', '.join(ProviderBody.model_fields)}",
        "provider.quantizations": f"a list of {', '.join(QUANTIZATIONS)}",
        "provider.sort": "price, throughput or latency",
        "provider.order": f"a list of one of {names}",
        "provider.only": f"a list of {names}",
        "provider.ignore": f"a list of {names}",
        "provider.allow_fallbacks": "true or false",
        "provider.require_parameters": "false: the router does not know which parameters vLLM honours",
        "provider.data_collection": "allow: the router does not know what engines store",
    }


MOST_ERRORS = 10  # that one answer tells of a body
MOST_NAME_CHARS = 100  # of a field that the caller has named
READ_CHARS = 50_000  # of all errors, rendered: more than the first few take
BROKEN = {ReplicaStatus.FAILED, ReplicaStatus.UNREACHABLE, ReplicaStatus.QUARANTINED}


@dataclass(frozen=True, slots=True)
class FieldProblem:
    field: str
    problem: str
    allowed: str


class InvalidBodyError(Exception):
    def __init__(self, problems: tuple[FieldProblem, ...]) -> None:
        super().__init__("; ".join(f"{p.field}: {p.problem}" for p in problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Rules:
    limits: LimitSettings = field(default_factory=LimitSettings)
    tiers: tuple[TierName, ...] = STANDARD_TIERS  # that requests may name
    tier_policy: TierPolicy = "require"  # of a tier named as a model, if the request says none

    @classmethod
    def of(cls, settings: Settings) -> Rules:
        return cls(settings.limits, settings.tiers.names, settings.openai.tier_policy)


STANDARD_RULES = Rules()


class SlaBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    ttft_ms: float | None = Field(None, gt=0, allow_inf_nan=False)
    tpot_ms: float | None = Field(None, gt=0, allow_inf_nan=False)
    max_quality_loss: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    confidence: float | None = Field(None, ge=0.5, lt=1, allow_inf_nan=False)


class RoutingFields(BaseModel):
    # Strings are cached as in json_object.read_json.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, cache_strings="keys")

    tier: str = "auto"
    tier_policy: TierPolicy = "prefer"
    sla: SlaBody = SlaBody()
    priority: Priority = "standard"
    truncate: Truncate | None = None
    overflow: Literal["allow", "never"] = "allow"

    @field_validator("tier")
    @classmethod
    def _known_tier(cls, tier: str, info: ValidationInfo) -> str:
        rules: Rules = info.context or STANDARD_RULES
        if tier == "auto":
            return tier
        for known in rules.tiers:
            if known == tier:
                return known
        raise ValueError(f"there is no tier {tier[:40]!r}")

    def options(self, priority: int, hint_field: str) -> RoutingOptions:
        """Return the options as the pipeline knows them; ``hint_field`` is the field or header that named the tier."""
        sla, hint = NO_BOUNDS, self.tier if isinstance(self.tier, TierName) else None
        if self.sla.model_fields_set:
            sla = Sla(self.sla.ttft_ms, self.sla.tpot_ms, self.sla.max_quality_loss, self.sla.confidence)
        require, may_overflow = self.tier_policy == "require", self.overflow == "allow"
        return RoutingOptions(hint, hint_field, require, sla, priority, truncate=self.truncate, overflow=may_overflow)


class AdapterBody(BaseModel):
    """The body of ``POST /admin/adapters``: a LoRA adapter to be loaded into running engines."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: AdapterName
    path: str = Field(min_length=1)
    tiers: list[TierName] | None = Field(None, min_length=1)

    @field_validator("tiers")
    @classmethod
    def _known_tiers(cls, tiers: list[TierName] | None, info: ValidationInfo) -> list[TierName] | None:
        rules: Rules = info.context or STANDARD_RULES
        for tier in tiers or ():
            if tier not in rules.tiers:
                raise ValueError(f"there is no tier {tier!r}")
        return tiers


def adapter_allowed(rules: Rules) -> dict[str, str]:
    return {
        "name": "1 to 100 letters, digits and . _ / -, beginning with a letter or digit; no tier's name",
        "path": "a folder in the form of PEFT, on the engines' machine",
        "tiers": f"a list of {', '.join(rules.tiers)}",
    }


class ReplicaBody(BaseModel):
    """The body of ``POST /admin/replicas``: an engine that runs elsewhere, to be added to a tier."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    tier: str
    url: EngineAddress


class RemoveBody(BaseModel):
    """The body of ``POST /admin/replicas/{id}/remove``; it may be left out."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    now: bool = False


REPLICA_ALLOWED = {"tier": "a tier of this router", "url": "an address like http://10.0.0.5:8000"}
REMOVE_ALLOWED = {"now": "true or false; true: open requests are not waited for"}


def parse_replica(body: bytes, tiers: Collection[TierName]) -> tuple[TierName, str]:
    """Return the tier and the address of an engine that is to be added; see ``parsed``."""
    found = parsed(ReplicaBody, body, lambda _: REPLICA_ALLOWED)
    for tier in tiers:
        if tier == found.tier:
            return tier, found.url
    raise InvalidBodyError((FieldProblem("tier", "there is no such tier", ", ".join(tiers)),))


B = TypeVar("B", bound=BaseModel)


def parsed(
    kind: type[B], body: bytes, allowed: Callable[[Rules], Mapping[str, str]], rules: Rules = STANDARD_RULES
) -> B:
    """Parse a body; ``allowed`` returns the allowed values of each field.

    ``InvalidBodyError``: it is not UTF-8, not JSON, or a field is wrong; lists every problem.
    """
    try:
        return kind.model_validate_json(body, context=rules)
    except ValidationError as error:
        raise InvalidBodyError(problems_of(error, allowed(rules))) from None  # pydantic's own text quotes the input


def routing_allowed(rules: Rules) -> dict[str, str]:
    *others, last = ("auto", *rules.tiers)
    return {
        "tier": f"{', '.join(others)} or {last}",
        "tier_policy": "prefer or require",
        "sla": "an object with any of ttft_ms, tpot_ms, max_quality_loss, confidence",
        "sla.ttft_ms": "a number of milliseconds above 0",
        "sla.tpot_ms": "a number of milliseconds above 0",
        "sla.max_quality_loss": "a number from 0 to 1",
        "sla.confidence": "a number from 0.5 to below 1",
        "priority": "interactive, standard or batch",
        "truncate": "oldest or middle",
        "overflow": "allow or never",
    }


def problems_of(error: ValidationError, allowed: Mapping[str, str], *within: str) -> tuple[FieldProblem, ...]:
    """Return the errors that pydantic found in a body, or in the object ``within`` it, with what is allowed."""
    told = tuple(_problem_of({**each, "loc": (*within, *each["loc"])}, allowed) for each in first_errors(error))
    beyond = error.error_count() - len(told)
    return (*told, FieldProblem("body", f"{beyond} more errors of this kind", "none")) if beyond else told


def first_errors(error: ValidationError) -> list[ErrorDetails]:
    """Return the first few errors that pydantic found: a body may have a hundred thousand, which take long to render."""
    if error.error_count() <= MOST_ERRORS:
        return error.errors(include_url=False, include_input=False)
    text = error.json(include_url=False, include_input=False, include_context=False)
    found: list[ErrorDetails] = from_json(text[:READ_CHARS], allow_partial=True)
    return [each for each in found[:MOST_ERRORS] if "msg" in each]  # the last one may be cut


def _problem_of(error: ErrorDetails, allowed: Mapping[str, str]) -> FieldProblem:
    field = ".".join(str(part)[:MOST_NAME_CHARS] for part in error["loc"])
    named = ".".join(part for part in error["loc"] if isinstance(part, str))  # without the places in lists
    if not field:
        return FieldProblem("body", message_of(error), "a JSON object in UTF-8")
    if error["type"] == "extra_forbidden":
        prefix = named.rpartition(".")[0]
        foreign = error["loc"][0] == "provider" and error["loc"][-1] in NOT_HERE
        problem = "is not supported here" if foreign else "there is no such field"
        names = [n.rpartition(".")[2] for n in allowed if n.rpartition(".")[0] == prefix]
        return FieldProblem(field, problem, ", ".join(names))
    return FieldProblem(field, message_of(error), allowed.get(named, ""))


def message_of(error: ErrorDetails) -> str:
    if error["type"] == "too_short" and error["msg"].endswith("not 0"):
        return "is empty"
    if error["type"] == "json_invalid":
        return "is not JSON" + error["msg"].removeprefix("Invalid JSON")
    message = error["msg"].removeprefix("Value error, ")
    kind, found, rest = message.partition(" should ")  # of "Input should be" and "String should have"
    return f"should {rest}" if found and kind.isalpha() else message[:1].lower() + message[1:]


def render_fleet(
    fleet: FleetSnapshot, model: str, machine: str, sources: Mapping[str, str | None], *, inside: bool
) -> dict[str, Any]:
    """Return the fleet as the answer of ``GET /tiers``.

    ``sources``: who names each replica, by id. ``inside``: with addresses and paths, and details that quote them.
    """
    now = fleet.load.now if fleet.load is not None else 0.0
    return {
        "model": model,
        "machine": machine,
        "scope": "all" if inside else "own",
        "tiers": [
            {
                "tier": tier.spec.name,
                "precision": tier.spec.precision,
                "state": tier.status.value,
                "preparing": render_preparing(tier.preparing) if tier.preparing is not None else None,
                "detail": tier.preparing.failed or "" if tier.preparing is not None and inside else "",
                "checkpoint": str(tier.spec.checkpoint) if tier.spec.checkpoint and inside else None,
                "checkpoint_digest": tier.spec.digest,
                "identity": tier.spec.identity if inside else tier.spec.digest,
                "max_num_seqs": tier.spec.max_num_seqs,
                "max_model_len": tier.spec.max_model_len,
                "adapters": list(tier.spec.adapters),
                "max_in_flight": tier.spec.max_in_flight,
                "replicas": [
                    {**_render_replica(replica, output_tokens, now, inside=inside), "source": sources.get(replica.id)}
                    for replica, output_tokens in zip(tier.replicas, tier.output_tokens, strict=True)
                ],
            }
            for tier in fleet.tiers
        ],
    }


def render_preparing(preparing: Preparing) -> dict[str, Any]:
    remaining_s = preparing.remaining_s
    return {
        "what": preparing.what,
        "done": preparing.done,
        "total": preparing.total,
        "remaining_s": None if remaining_s is None else round(remaining_s, 1),
    }


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(body), status, headers, "application/json")


def _render_replica(replica: ReplicaState, output_tokens: int, now: float, *, inside: bool) -> dict[str, Any]:
    gauges, speed = replica.gauges, replica.speed
    ttft_trend, tpot_trend = replica.trends.means(now, speed)
    acceptance, hit_rate = (None, None) if gauges is None else (gauges.acceptance, gauges.hit_rate)
    return {
        "id": replica.id,
        "url": replica.url if inside else None,
        "pid": replica.pid if inside else None,
        "state": replica.status.value,
        "precision": replica.precision,
        "detail": replica.detail if inside else "",
        "in_flight": replica.in_flight,
        "places_taken": replica.slots,
        "limit": replica.limit,
        "breaker": replica.breaker.state.value,
        "prompt_tokens_outstanding": replica.prompt_tokens,
        "output_tokens_outstanding": output_tokens,
        "served": replica.served,
        "failed": replica.failed,
        "engine_running": gauges.running if gauges else None,
        "engine_waiting": gauges.waiting if gauges else None,
        "kv_cache_usage": gauges.kv_cache_usage if gauges else None,
        "kv_cache_tokens": replica.kv.size or None,
        "kv_cache_tokens_held": replica.kv.held,
        "kv_pressure": replica.kv.pressure,
        "prefix_cache_hit_rate": None if hit_rate is None else round(hit_rate, 3),
        "draft_acceptance": None if acceptance is None else round(acceptance, 3),
        "ttft_base_ms": round(speed.ttft_base_ms, 1) if speed else None,
        "prefill_ms_per_token": round(speed.prefill_ms_per_token, 3) if speed else None,
        "tpot_ms": round(speed.step_ms(1) * math.exp(tpot_trend), 2) if speed else None,
        "speed_profiled": speed.profiled if speed else None,
        "speed_source": speed.source if speed else None,
        "step_base_ms": round(speed.step_base_ms, 3) if speed else None,
        "step_ms_per_sequence": round(speed.step_ms_per_sequence, 3) if speed else None,
        "ttft_trend": round(math.exp(ttft_trend), 3),
        "tpot_trend": round(math.exp(tpot_trend), 3),
    }


def health_of(fleet: FleetSnapshot, notes: Iterable[str] = (), *, serves: bool, inside: bool = True) -> dict[str, Any]:
    """Return whether requests are answered, and what an operator should look at; details, with addresses, if ``inside``."""
    tiers = [tier for tier in fleet.tiers if not tier.spec.absent]
    reasons = [f"tier {t.spec.name} is {t.status.value}" for t in tiers if t.status is not ReplicaStatus.READY]
    for replica in (replica for tier in tiers for replica in tier.replicas):
        if replica.status in BROKEN:
            reasons.append(f"{replica.id} is {replica.status.value}")
        elif replica.status is ReplicaStatus.READY and replica.detail:
            reasons.append(f"{replica.id}: {replica.detail if inside else 'GET /tiers says more'}")
    reasons += notes
    if not serves:
        reasons.insert(0, "the router is shutting down")
    ready = serves and any(tier.status is ReplicaStatus.READY for tier in tiers)
    return {"status": ("degraded" if reasons else "healthy") if ready else "unhealthy", "reasons": reasons}
