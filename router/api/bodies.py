"""Bodies of our own endpoints: requests, validated strictly, and responses."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import ErrorDetails, from_json, to_json
from starlette.responses import Response

from router.api.settings import LimitSettings, TierPolicy
from router.pipeline.request import NO_BOUNDS, RoutingOptions, Truncate
from router.policy.decision import Priority, Sla, Sort
from router.section import AdapterName, EngineAddress
from router.settings import Settings
from tiers.formats import QUANTIZATIONS, Quantization, shown_quantization
from tiers.preparing import Preparing
from tiers.snapshot import FleetSnapshot, ReplicaState, TierSnapshot
from tiers.spec import STANDARD_TIERS, ReplicaStatus, TierName
from tiers.speed import SpeedModel

# Members of OpenRouter's object that mean nothing here, or promise what cannot be kept.
UNSUPPORTED_PREFERENCES = (
    "zdr",
    "enforce_distillable_text",
    "max_price",
    "preferred_min_throughput",
    "preferred_max_latency",
)


class ProviderBody(BaseModel):
    """Preferences among what may serve a request; the providers are the tiers.

    ``require_parameters`` and ``data_collection`` may only have OpenRouter's own default, which asks for nothing.
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
    def _known_tiers(
        cls, names: list[str] | None, info: ValidationInfo
    ) -> list[str] | None:
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
        "provider.sort": " or ".join(get_args(Sort)),
        "provider.order": f"a list of one of {names}",
        "provider.only": f"a list of {names}",
        "provider.ignore": f"a list of {names}",
        "provider.allow_fallbacks": "true or false",
        "provider.require_parameters": "false: the router does not know which parameters vLLM honours",
        "provider.data_collection": "allow: the router does not know what engines store",
    }


MAX_ERRORS = 10  # one answer lists no more
MAX_NAME_CHARS = 100  # callers may name fields as they like
MAX_RENDERED_CHARS = 50_000  # rendered errors are read so far: the first few take less
BROKEN_STATES = {
    ReplicaStatus.FAILED,
    ReplicaStatus.UNREACHABLE,
    ReplicaStatus.QUARANTINED,
}


@dataclass(frozen=True, slots=True)
class FieldProblem:
    field: str
    problem: str
    allowed: str


class InvalidBodyError(Exception):
    def __init__(self, problems: tuple[FieldProblem, ...]) -> None:
        super().__init__(
            "; ".join(f"{problem.field}: {problem.problem}" for problem in problems)
        )
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Rules:
    limits: LimitSettings = field(default_factory=LimitSettings)
    tiers: tuple[TierName, ...] = STANDARD_TIERS  # requests may name these
    # applies to a tier named as a model, unless the request has a policy
    tier_policy: TierPolicy = "require"

    @classmethod
    def of(cls, settings: Settings) -> Rules:
        return cls(
            limits=settings.limits,
            tiers=settings.tiers.names,
            tier_policy=settings.openai.tier_policy,
        )


STANDARD_RULES = Rules()


class SlaBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    ttft_ms: float | None = Field(None, gt=0, allow_inf_nan=False)
    tpot_ms: float | None = Field(None, gt=0, allow_inf_nan=False)
    max_quality_loss: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    confidence: float | None = Field(None, ge=0.5, lt=1, allow_inf_nan=False)


class RoutingFields(BaseModel):
    # Strings are cached as in json_object.read_json.
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, cache_strings="keys"
    )

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
        hint = self.tier if isinstance(self.tier, TierName) else None
        sla = NO_BOUNDS
        if self.sla.model_fields_set:
            sla = Sla(
                ttft_ms=self.sla.ttft_ms,
                tpot_ms=self.sla.tpot_ms,
                max_quality_loss=self.sla.max_quality_loss,
                confidence=self.sla.confidence,
            )
        return RoutingOptions(
            hint=hint,
            hint_field=hint_field,
            require=self.tier_policy == "require",
            sla=sla,
            priority=priority,
            truncate=self.truncate,
            overflow=self.overflow == "allow",
        )


class AdapterBody(BaseModel):
    """The body of ``POST /admin/adapters``: a LoRA adapter to be loaded into running engines."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: AdapterName
    path: str = Field(min_length=1)
    tiers: list[TierName] | None = Field(None, min_length=1)

    @field_validator("tiers")
    @classmethod
    def _known_tiers(
        cls, tiers: list[TierName] | None, info: ValidationInfo
    ) -> list[TierName] | None:
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


REPLICA_ALLOWED = {
    "tier": "a tier of this router",
    "url": "an address like http://10.0.0.5:8000",
}
REMOVE_ALLOWED = {"now": "true or false; true: open requests are not waited for"}


def parse_replica(body: bytes, tiers: Collection[TierName]) -> tuple[TierName, str]:
    """Return the tier and the address of an engine that is to be added; see ``parsed``."""
    replica = parsed(ReplicaBody, body, lambda _: REPLICA_ALLOWED)
    for tier in tiers:
        if tier == replica.tier:
            return tier, replica.url
    raise InvalidBodyError(
        (FieldProblem("tier", "there is no such tier", ", ".join(tiers)),)
    )


Body = TypeVar("Body", bound=BaseModel)


def parsed(
    model: type[Body],
    body: bytes,
    allowed_values: Callable[[Rules], Mapping[str, str]],
    rules: Rules = STANDARD_RULES,
) -> Body:
    """Parse a body; ``allowed_values`` returns the allowed values of each field.

    ``InvalidBodyError``: the body is not UTF-8, not JSON, or has wrong fields; the error lists them.
    """
    try:
        return model.model_validate_json(body, context=rules)
    except ValidationError as error:
        # pydantic's own text quotes the input
        raise InvalidBodyError(problems_of(error, allowed_values(rules))) from None


def routing_allowed(rules: Rules) -> dict[str, str]:
    tier_names = ("auto", *rules.tiers)
    return {
        "tier": f"{', '.join(tier_names[:-1])} or {tier_names[-1]}",
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


def problems_of(
    error: ValidationError, allowed_values: Mapping[str, str], *within: str
) -> tuple[FieldProblem, ...]:
    """Return the errors that pydantic found in a body, or in the object ``within`` it, with what is allowed."""
    problems = [
        _problem_of(
            (*within, *error_details["loc"]),
            error_details,
            allowed_values=allowed_values,
        )
        for error_details in first_errors(error)
    ]
    further_errors = error.error_count() - len(problems)
    if further_errors:
        problems.append(
            FieldProblem("body", f"{further_errors} more errors of this kind", "none")
        )
    return tuple(problems)


def first_errors(error: ValidationError) -> list[ErrorDetails]:
    """Return the first few errors that pydantic found: a body may have a hundred thousand, which take long to render."""
    if error.error_count() <= MAX_ERRORS:
        return error.errors(include_url=False, include_input=False)
    rendered = error.json(include_url=False, include_input=False, include_context=False)
    errors: list[ErrorDetails] = from_json(
        rendered[:MAX_RENDERED_CHARS], allow_partial=True
    )
    # the last one may be cut
    return [
        error_details for error_details in errors[:MAX_ERRORS] if "msg" in error_details
    ]


def _problem_of(
    location: tuple[int | str, ...],
    error_details: ErrorDetails,
    *,
    allowed_values: Mapping[str, str],
) -> FieldProblem:
    """Return one of pydantic's errors, with the place of its field in the whole body."""
    field_name = ".".join(str(part)[:MAX_NAME_CHARS] for part in location)
    if not field_name:
        return FieldProblem("body", message_of(error_details), "a JSON object in UTF-8")
    # without the places in lists
    allowed_name = ".".join(part for part in location if isinstance(part, str))
    if error_details["type"] == "extra_forbidden":
        member_names = _members(allowed_name.rpartition(".")[0], allowed_values)
        return FieldProblem(
            field_name, _unknown_field_text(location), ", ".join(member_names)
        )
    return FieldProblem(
        field_name, message_of(error_details), allowed_values.get(allowed_name, "")
    )


def _unknown_field_text(location: tuple[int | str, ...]) -> str:
    if location[0] == "provider" and location[-1] in UNSUPPORTED_PREFERENCES:
        return "is not supported here"
    return "there is no such field"


def _members(object_name: str, allowed_values: Mapping[str, str]) -> list[str]:
    """Return the names of the members that an object may have; the body itself has an empty name."""
    member_names = []
    for field_name in allowed_values:
        parent, _, member = field_name.rpartition(".")
        if parent == object_name:
            member_names.append(member)
    return member_names


def message_of(error_details: ErrorDetails) -> str:
    """Return what is wrong with a field, as the rest of a sentence that begins with its name."""
    if error_details["type"] == "too_short" and error_details["msg"].endswith("not 0"):
        return "is empty"
    if error_details["type"] == "json_invalid":
        return "is not JSON" + error_details["msg"].removeprefix("Invalid JSON")
    message = error_details["msg"].removeprefix("Value error, ")
    # as in "Input should be" and "String should have"
    first_word, should, expected = message.partition(" should ")
    if should and first_word.isalpha():
        return f"should {expected}"
    return message[:1].lower() + message[1:]


def render_fleet(
    fleet: FleetSnapshot,
    model: str,
    machine: str,
    sources: Mapping[str, str | None],
    *,
    inside: bool,
) -> dict[str, Any]:
    """Return the fleet as the answer of ``GET /tiers``.

    ``sources``: who names each replica, by id. ``inside``: with addresses and paths, and details that quote them.
    """
    now = 0.0
    if fleet.load is not None:
        now = fleet.load.now
    return {
        "model": model,
        "machine": machine,
        "scope": "all" if inside else "own",
        "tiers": [
            _render_tier(tier, sources, now, inside=inside) for tier in fleet.tiers
        ],
    }


def _render_tier(
    tier: TierSnapshot, sources: Mapping[str, str | None], now: float, *, inside: bool
) -> dict[str, Any]:
    spec = tier.spec
    rendered_preparing = None
    detail_text = ""
    if tier.preparing is not None:
        rendered_preparing = render_preparing(tier.preparing)
        if inside:
            detail_text = tier.preparing.failed or ""
    replicas = []
    for replica, output_tokens in zip(tier.replicas, tier.output_tokens, strict=True):
        rendered_replica = _render_replica(replica, output_tokens, now, inside=inside)
        rendered_replica["source"] = sources.get(replica.id)
        replicas.append(rendered_replica)
    return {
        "tier": spec.name,
        "precision": spec.precision,
        "quantization": shown_quantization(spec.precision),
        "state": tier.status.value,
        "preparing": rendered_preparing,
        "detail": detail_text,
        "checkpoint": str(spec.checkpoint) if spec.checkpoint and inside else None,
        "checkpoint_digest": spec.digest,
        "identity": spec.identity if inside else spec.digest,
        "max_num_seqs": spec.max_num_seqs,
        "max_model_len": spec.max_model_len,
        "adapters": list(spec.adapters),
        "max_in_flight": spec.max_in_flight,
        "replicas": replicas,
    }


def render_preparing(preparing: Preparing) -> dict[str, Any]:
    remaining_s = preparing.remaining_s
    return {
        "what": preparing.what,
        "done": preparing.done,
        "total": preparing.total,
        "remaining_s": None if remaining_s is None else round(remaining_s, 1),
    }


def json_response(
    body: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(
        to_json(body), status, headers=headers, media_type="application/json"
    )


def _render_replica(
    replica: ReplicaState, output_tokens: int, now: float, *, inside: bool
) -> dict[str, Any]:
    ttft_trend, tpot_trend = replica.trends.means(now, replica.speed)
    return {
        "id": replica.id,
        "url": replica.url if inside else None,
        "pid": replica.pid if inside else None,
        "state": replica.status.value,
        "precision": replica.precision,
        "quantization": shown_quantization(replica.precision),
        "detail": replica.detail if inside else "",
        "in_flight": replica.in_flight,
        "places_taken": replica.slots,
        "limit": replica.limit,
        "breaker": replica.breaker.state.value,
        "prompt_tokens_outstanding": replica.prompt_tokens,
        "output_tokens_outstanding": output_tokens,
        "served": replica.served,
        "failed": replica.failed,
        **_render_engine(replica, inside=inside),
        **_render_speed(replica.speed, tpot_trend),
        "ttft_trend": round(math.exp(ttft_trend), 3),
        "tpot_trend": round(math.exp(tpot_trend), 3),
    }


def _render_engine(replica: ReplicaState, *, inside: bool) -> dict[str, Any]:
    """Return what a replica's engine says of itself, and what is known of its KV cache."""
    build = replica.build
    rendered: dict[str, Any] = {
        "engine": None if build is None else asdict(build),
        "resumes": replica.resumes,
        "verification": replica.verification and replica.verification.value,
        "verification_detail": replica.verification_detail if inside else "",
        "engine_running": None,
        "engine_waiting": None,
        "kv_cache_usage": None,
        "kv_cache_tokens": replica.kv.size or None,
        "kv_cache_tokens_held": replica.kv.held,
        "kv_pressure": replica.kv.pressure,
        "prefix_cache_hit_rate": None,
        "draft_acceptance": None,
    }
    gauges = replica.gauges
    if gauges is not None:
        rendered["engine_running"] = gauges.running
        rendered["engine_waiting"] = gauges.waiting
        rendered["kv_cache_usage"] = gauges.kv_cache_usage
        rendered["prefix_cache_hit_rate"] = _rounded(gauges.hit_rate)
        rendered["draft_acceptance"] = _rounded(gauges.acceptance)
    return rendered


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 3)


_UNKNOWN_SPEED = dict.fromkeys(
    (
        "ttft_base_ms",
        "prefill_ms_per_token",
        "tpot_ms",
        "speed_profiled",
        "speed_source",
        "step_base_ms",
        "step_ms_per_sequence",
    )
)


def _render_speed(speed: SpeedModel | None, tpot_trend: float) -> Mapping[str, Any]:
    """Return how fast a replica is expected to be; its time for a token is that of a single sequence, as measured lately."""
    if speed is None:
        return _UNKNOWN_SPEED
    return {
        "ttft_base_ms": round(speed.ttft_base_ms, 1),
        "prefill_ms_per_token": round(speed.prefill_ms_per_token, 3),
        "tpot_ms": round(speed.step_ms(1) * math.exp(tpot_trend), 2),
        "speed_profiled": speed.profiled,
        "speed_source": speed.source,
        "step_base_ms": round(speed.step_base_ms, 3),
        "step_ms_per_sequence": round(speed.step_ms_per_sequence, 3),
    }


def health_of(
    fleet: FleetSnapshot,
    notes: Iterable[str] = (),
    *,
    serves: bool,
    inside: bool = True,
) -> dict[str, Any]:
    """Return whether requests are answered, and what an operator should look at; details, with addresses, if ``inside``."""
    tiers = [tier for tier in fleet.tiers if not tier.spec.absent]
    reasons = []
    if not serves:
        reasons.append("the router is shutting down")
    unready = [tier for tier in tiers if tier.status is not ReplicaStatus.READY]
    reasons += [f"tier {tier.spec.name} is {tier.status.value}" for tier in unready]
    for tier in tiers:
        reasons += _complaints_of(tier.replicas, inside=inside)
    reasons += notes
    if not serves or len(unready) == len(tiers):
        status = "unhealthy"
    elif reasons:
        status = "degraded"
    else:
        status = "healthy"
    return {"status": status, "reasons": reasons}


def _complaints_of(replicas: Sequence[ReplicaState], *, inside: bool) -> list[str]:
    """Return which replicas are broken, and which are ready but say something."""
    complaints = []
    for replica in replicas:
        if replica.status in BROKEN_STATES:
            complaints.append(f"{replica.id} is {replica.status.value}")
        elif replica.status is ReplicaStatus.READY and replica.detail:
            detail_text = replica.detail if inside else "GET /tiers says more"
            complaints.append(f"{replica.id}: {detail_text}")
    return complaints
