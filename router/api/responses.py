"""Models of responses, for the OpenAPI document. Responses may have more fields than these."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, create_model

from classifier import PromptClass
from router.policy.decision import Basis, Degraded, ExpectedLoss, Priority
from router.profiling.auto_profile import State, What
from router.telemetry.record import KeptFor, Outcome
from tiers.lifecycle.operations import Kind
from tiers.quantization import Quantization
from tiers.spec import ReplicaState, TierName


def _model(name: str, doc: str | None = None, /, **fields: Any) -> type[BaseModel]:
    """Return a model of required fields; a string names a model of this module."""
    kinds: dict[str, Any] = {field: (kind, ...) for field, kind in fields.items()}
    return create_model(name, __doc__=doc, __module__=__name__, **kinds)


SCOPE = "all: everything; own: the key's own requests, figures of all, and nothing about where engines are"
Scope = Annotated[Literal["all", "own"], Field(description=SCOPE)]
ForOperators = Annotated[str | None, Field(description="For operators; null to other keys")]

Cut = Annotated[str | None, Field(description="What was cut of the prompt, as in x-qarr-truncated; null: nothing")]

Usage = create_model("Usage", prompt_tokens=(int, 0), completion_tokens=(int, 0), total_tokens=(int, 0))
Answer = _model(
    "Answer",
    text=str,
    usage=Annotated["Usage | None", Field(description="null: the overflow has not told")],
    finish_reason=str | None,
    tier=Annotated[TierName | None, Field(description="null: the overflow answers, which a member of that name names")],
    continued_on=list[TierName],
)
Verdict = _model(
    "Verdict",
    tier=TierName,
    state=ReplicaState,
    predicted_ttft_ms=float | None,
    predicted_tpot_ms=float | None,
    expected_loss=float | None,
    expected_loss_interval=tuple[float, float] | None,
    cost=float | None,
    cached_prompt_tokens=Annotated[int | None, Field(description="Likely to be in the prefix cache; null: unknown")],
    verdict=str,
)
Decision = _model(
    "Decision",
    tier=TierName | None,
    precision=str | None,
    reason=str,
    confidence=float,
    prompt_tokens=int,
    degraded=list[Degraded],
    truncated=Cut,
    retry_after_s=float | None,
    tiers="list[Verdict]",
    **{"class": PromptClass},
)
RequestRecord = _model(
    "RequestRecord",
    at=float,
    request_id=str,
    trace_id=str,
    route=str,
    priority=Priority,
    tier=TierName | None,
    served_by=TierName | None,
    overflow=Annotated[str | None, Field(description="The server outside of the fleet that answered; null: none")],
    overflow_failure=Annotated[
        str | None, Field(description="Why it did not: full, paused, unsupported, failed, cancelled; or null")
    ],
    reason=str,
    basis=Basis,
    truncated=Cut,
    outcome=Outcome,
    error=str | None,
    prompt_tokens=int,
    cached_prompt_tokens=Annotated[int | None, Field(description="As the engine reports; null: it does not")],
    predicted_cached_tokens=Annotated[int | None, Field(description="As expected; null: unknown")],
    output_tokens=int,
    queue_ms=float,
    ttft_ms=float | None,
    tpot_ms=float | None,
    duration_ms=float,
    sla_met=bool | None,
    tiers="list[Verdict]",
    **{"class": PromptClass},
)
RequestList = _model("RequestList", scope=Scope, requests="list[RequestRecord]")
ListedTrace = _model("ListedTrace", trace_id=str, name=str, at=float, duration_ms=float, spans=int, kept_for=KeptFor)
TraceList = _model("TraceList", scope=Scope, traces="list[ListedTrace]")
Trace = _model("Trace", trace_id=str, at=float, duration_ms=float, spans=list[dict[str, Any]])
BudgetLike = _model("BudgetLike", "As much as if this tier served everything", like=TierName)
LossBudget = _model(
    "LossBudget",
    "The loss budget now; what is not known yet is null",
    rule=Annotated["float | BudgetLike", Field(description="policy.loss_budget")],
    price=Annotated[float | None, Field(description="Price of loss, in engine-seconds a differing token")],
    mean=Annotated[float | None, Field(description="Running mean loss, 0 to 1")],
    budget=Annotated[float | None, Field(description="What the rule allows of the same answers, 0 to 1")],
    half_life_s=Annotated[float, Field(description="Of the running mean, in seconds")],
)
Policy = _model(
    "Policy",
    class_floor=dict[PromptClass, TierName],
    max_loss=Annotated[dict[PromptClass, float], Field(description="Caps of single requests; of some classes or none")],
    loss_budget="LossBudget",
    losses=dict[TierName, dict[PromptClass, ExpectedLoss]],
)
Operation = _model(
    "Operation",
    id=str,
    operation=Kind,
    replica=str,
    state=Literal["running", "done", "failed"],
    detail=str,
    successor=str | None,
    began=float,
    ended=float | None,
)
OperationList = _model("OperationList", operations="list[Operation]")
Preparing = _model(
    "Preparing",
    what=Annotated[str, Field(description="The present step, or the one that the tier waits for")],
    done=int,
    total=Annotated[int, Field(description="Parts of the step; 0 if they cannot be counted")],
    remaining_s=Annotated[
        float | None, Field(description="Estimated seconds until the tier is ready; null if unknown")
    ],
)
PreparingTier = create_model("PreparingTier", __base__=Preparing, tier=(TierName, ...))
Readiness = _model("Readiness", ready=bool, tiers=dict[TierName, ReplicaState], preparing="list[PreparingTier]")
Health = _model(
    "Health",
    "``degraded``: requests are answered, but a tier is not ready, or an engine failed or is slowed down",
    status=Literal["healthy", "degraded", "unhealthy"],
    reasons=list[str],
)
Shown = Annotated[str, Field(description="fp8, or fp8 (stated), or unknown; of replicas that differ, all")]
SOURCE = "Who names it: settings, command, file, dns, or several of them; null: the router has started it"
Named = Annotated[str | None, Field(description=SOURCE)]
Replica = _model("Replica", id=str, url=ForOperators, state=ReplicaState, precision=Shown, in_flight=int, source=Named)
AddedReplica = _model("AddedReplica", id=str, tier=TierName, url=str, state=ReplicaState, source=Named)
Tier = _model(
    "Tier",
    tier=TierName,
    precision=Shown,
    state=ReplicaState,
    preparing="Preparing | None",
    detail=str,
    checkpoint_digest=str | None,
    identity=ForOperators,
    max_num_seqs=int,
    max_model_len=int,
    max_in_flight=int,
    adapters=Annotated[list[str], Field(description="LoRA adapters that all its ready engines offer")],
    replicas="list[Replica]",
)
Measured = _model("Measured", latency=list[TierName], quality=list[TierName])
Profiling = _model(
    "Profiling",
    "Progress of the router's own measurements, and the tiers whose speed and loss are measured",
    state=State,
    what=What | None,
    done=int,
    total=int,
    since=float,
    detail=str,
    measured="Measured",
)
Fleet = _model(
    "Fleet",
    model=str,
    machine=str,
    scope=Scope,
    tiers="list[Tier]",
    profiling="Profiling",
    loss_budget="LossBudget",
)
AdapterResult = _model("AdapterResult", replica=str, done=bool, detail=str)
AdapterResults = _model(
    "AdapterResults", "What became of an adapter at each replica", adapter=str, replicas="list[AdapterResult]"
)
UsedBudget = _model(
    "UsedBudget",
    "One budget of a key, or of a team, which has no key",
    key=str | None,
    name=str | None,
    team=str | None,
    budget=str,
    limit=float,
    used=float,
    renews=str,
)
UsageRow = _model(
    "UsageRow",
    "What a key used on a UTC day; engine-seconds are of a replica of the highest tier",
    day=str,
    key=str,
    name=str,
    team=str,
    tier=str,
    requests=int,
    prompt_tokens=int,
    cached_tokens=int,
    output_tokens=int,
    engine_seconds=float,
    highest_engine_seconds=float,
    money=float | None,
    highest_money=float | None,
)
UsageReport = _model("UsageReport", scope=Scope, budgets="list[UsedBudget]", usage="list[UsageRow]")
ChangedSetting = _model("ChangedSetting", setting=str, before=str, after=str)
ReloadAnswer = _model("ReloadAnswer", "What a reload has changed; secrets are masked", changed="list[ChangedSetting]")
ServedBy = _model(
    "ServedBy",
    "A tier behind a model's name",
    tier=TierName,
    precision=Shown,
    quantization=Annotated[Quantization, Field(description="The same by OpenRouter's names")],
    context_length=int,
    adapters=list[str],
    state=ReplicaState,
)
Model = _model(
    "Model",
    id=str,
    object=Literal["model"],
    owned_by=str,
    max_model_len=int,
    context_length=int,
    tiers=list[TierName],
    served_by="list[ServedBy]",
)
ModelEndpoint = _model(
    "ModelEndpoint",
    "A tier as OpenRouter shows an endpoint, and its load; null: not known here",
    name=str,
    model_name=str,
    provider_name=str,
    tag=str,
    tier=TierName,
    precision=Shown,
    quantization=Quantization,
    context_length=int,
    max_completion_tokens=int | None,
    max_prompt_tokens=int | None,
    pricing=dict[str, str] | None,
    supported_parameters=list[str],
    status=Annotated[int, Field(description="0: it serves; below: it does not")],
    uptime_last_30m=float | None,
    adapters=list[str],
    state=ReplicaState,
    replicas=int,
    replicas_ready=int,
    in_flight=Annotated[int, Field(description="Requests that its engines compute")],
    max_in_flight=int,
    queue=Annotated[int, Field(description="Requests that wait in the router and may go to it")],
)
NamedEndpoints = _model("NamedEndpoints", id=str, name=str, created=int, endpoints="list[ModelEndpoint]")
ModelEndpoints = _model("ModelEndpoints", data="NamedEndpoints")
ModelList = _model("ModelList", object=Literal["list"], data="list[Model]")
Problem = _model(
    "Problem",
    "RFC 9457; errors names each field, what is wrong and what is allowed",
    type=str,
    title=str,
    status=int,
    detail=str,
    request_id=str,
    trace_id=str,
)
OpenAIFault = _model("OpenAIFault", message=str, type=str, param=str | None, code=str | int | None)
OpenAIError = _model("OpenAIError", error="OpenAIFault")
AnthropicFault = _model("AnthropicFault", type=str, message=str)
AnthropicError = _model("AnthropicError", type=Literal["error"], error="AnthropicFault", request_id=str)
MODELS = [each for each in vars().values() if isinstance(each, type) and BaseModel in each.__bases__]
