"""The table of exceptions that callers see, as problems (RFC 9457) and as OpenAI's and Anthropic's error objects."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from typing import Any

from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from router.accounting.budgets import BudgetUnknownError, NoPriceError, OverBudgetError
from router.api.asgi import CODINGS, ClientGoneError, ForeignHostError, ForeignPageError, UnknownCodingError, context_of
from router.api.bodies import FieldProblem, InvalidBodyError, json_response
from router.api.paths import ErrorForm, error_form
from router.api.resumable import ResumedElsewhereError, StreamGoneError, UnknownStreamError
from router.auth.api_keys import MICRO, BeyondKeyError, IssuerUnreachableError, UnauthorizedError
from router.auth.quota import OverQuotaError
from router.pipeline.request import RequestContext
from router.policy.decision import Decision, Refusal, RequestRefusedError
from router.policy.render import render_estimates
from router.reload import ReloadError
from router.server.errors import (
    BodyTooLargeError,
    HeadTooLargeError,
    NotHttpError,
    RequestTooSlowError,
    TooManyConnectionsError,
)
from router.server.responder import CLIENT_GONE
from router.telemetry.request_trace import UnknownTraceError
from router.upstream.errors import (
    EngineBrokeError,
    EngineRefusedError,
    EngineTooSlowError,
    NoEngineAnsweredError,
    NoSlotError,
    UpstreamError,
)
from tiers.errors import NotPossibleError, UnknownReplicaError

log = logging.getLogger(f"qarr.{__name__}")
MEDIA_TYPE = "application/problem+json"
ISSUER_RETRY_S = 10  # between two fetches of its keys
BUSY_RETRY_S = 1  # the next request that finishes frees a slot
LONGEST_RETRY_S = 3600


class UnknownModelError(Exception):
    def __init__(self, model: str, known: tuple[str, ...]) -> None:
        super().__init__(f"there is no model {model[:100]!r} here: {', '.join(known)}")


class NoEmbeddingsError(Exception):
    """No engine serves embeddings."""


class NotStoredError(Exception):
    """A response is asked for by its id."""


class NotAdminError(Exception):
    """The caller may not operate on replicas."""


class DrainingError(Exception):
    """The router shuts down: it takes no new requests, or ends an open one at its deadline."""

    def __init__(self, detail: str = "this router is shutting down and takes no new requests: try again") -> None:
        super().__init__(detail)


@dataclass(frozen=True, slots=True)
class Problem:
    status: int
    kind: str  # the last part of the problem's type and, with underscores, OpenAI's code
    title: str
    detail: str
    errors: tuple[FieldProblem, ...] = ()
    retry_after_s: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    # status and code under ``/v1``, if OpenAI's differ; Anthropic's status is the same
    openai: tuple[int, str] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)  # additional headers

    def body(self, ids: Mapping[str, str]) -> dict[str, Any]:
        return {
            "type": f"urn:qarr:problem:{self.kind}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            **({"errors": [asdict(e) for e in self.errors]} if self.errors else {}),
            **self.extra,
            **ids,
        }

    def openai_body(self) -> dict[str, Any]:
        status, code = self.openai or (self.status, self.kind.replace("-", "_"))
        error = {
            "message": self._message(),
            "type": _type(status, _TYPES, "server_error"),
            "param": self.errors[0].field if self.errors else None,
            "code": code,
        }
        return {"error": error}

    def anthropic_body(self, ids: Mapping[str, str]) -> dict[str, Any]:
        status = self.openai[0] if self.openai else self.status
        error = {"type": _type(status, _TYPES | _ANTHROPICS, "api_error"), "message": self._message()}
        return {"type": "error", "error": error, "request_id": ids["request_id"]}

    def _message(self) -> str:
        return "; ".join(f"{e.field}: {e.problem} (allowed: {e.allowed})" for e in self.errors) or self.detail

    def event(self, form: ErrorForm, ids: Mapping[str, str], number: int = 0) -> bytes:
        """Return the event that ends a stream, without the empty line after it; ``number``: where events have numbers."""
        if form is ErrorForm.OPENAI:
            return b"data: " + to_json(self.openai_body())
        if form is ErrorForm.ANTHROPIC:
            body = self.anthropic_body(ids)
        elif form is ErrorForm.RESPONSES:  # the members of its error event, and for SDKs the object that they raise
            error = self.openai_body()["error"]
            told = {name: error[name] for name in ("code", "message", "param")}
            body = {"type": "error", **told, "sequence_number": number, "error": error}
        else:
            body = self.body(ids)
        return b"event: error\ndata: " + to_json(body)

    def response(self, context: RequestContext, form: ErrorForm) -> Response:
        headers = {**context.headers, **self.headers}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        if self.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            headers["connection"] = "close"  # the rest of the body stays unread
        if form is ErrorForm.PROBLEM:
            return Response(to_json(self.body(context.ids)), self.status, headers, MEDIA_TYPE)
        body = self.anthropic_body(context.ids) if form is ErrorForm.ANTHROPIC else self.openai_body()
        return json_response(body, self.openai[0] if self.openai else self.status, headers)


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}  # OpenAI's and Anthropic's
_ANTHROPICS = {
    404: "not_found_error", 408: "timeout_error", 413: "request_too_large", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def _type(status: int, names: Mapping[int, str], of_server: str) -> str:
    return names.get(status, "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else of_server)


@dataclass(frozen=True, slots=True)
class _RefusalProblem:
    """How a refusal is told.

    Attributes:
        title: Where any tier might have served.
        title_of_required: Where the request requires one tier.
        openai: Status and code under ``/v1``, if OpenAI's differ.
    """

    status: int
    title: str
    title_of_required: str
    openai: tuple[int, str] | None = None


_REFUSALS = {
    Refusal.TOO_LONG: _RefusalProblem(
        422,
        "The request is too long for the tiers that may serve it",
        "The request is too long for the tier that it requires",
        (400, "context_length_exceeded"),
    ),
    Refusal.NOT_READY: _RefusalProblem(
        503, "No tier that could serve this is ready", "The tier that the request requires is not ready"
    ),
    Refusal.AT_CAPACITY: _RefusalProblem(
        503, "Every tier that could serve this is full", "The tier that the request requires is full"
    ),
    Refusal.SLA_UNMET: _RefusalProblem(
        503, "No tier can meet the required SLA now", "The tier that the request requires cannot meet its SLA now"
    ),
    Refusal.UNSUPPORTED: _RefusalProblem(
        422,
        "No tier that could serve this supports its parameters",
        "The tier that the request requires does not support its parameters",
        (400, "unsupported_parameter"),
    ),
    Refusal.NO_ADAPTER: _RefusalProblem(
        422,
        "No tier that could serve this offers the adapter",
        "The tier that the request requires does not offer the adapter",
        (404, "model_not_found"),
    ),
    Refusal.EXCLUDED: _RefusalProblem(
        400, "The request excludes every tier that could serve it", "The request excludes the tier that it requires"
    ),
    Refusal.NOT_ALLOWED: _RefusalProblem(
        403, "The key does not allow a tier that could serve this", "The key does not allow the tier that is required"
    ),
}


def describe(error: Exception) -> Problem:
    """Return the problem for an exception. An unknown one becomes a 500 without its text, which may quote internals."""
    for kind in type(error).__mro__:
        if kind in PROBLEMS:
            return PROBLEMS[kind](error)
    return Problem(500, "internal-error", "Internal error", "see the router's log for the request id")


def is_known(error: Exception) -> bool:
    return isinstance(error, (ClientGoneError, *PROBLEMS))


def refusal(error: Exception, path: str) -> Response:
    context = RequestContext(secrets.token_hex(16), secrets.token_hex(16))
    log.info("request %s: refused: %s", context.request_id, error)
    return describe(error).response(context, error_form(path))


def response_to(error: Exception, scope: Scope) -> Response:
    if isinstance(error, ClientGoneError):
        return Response(status_code=CLIENT_GONE)
    form, context = error_form(scope["path"]), context_of(scope)
    if form is not ErrorForm.PROBLEM and isinstance(error, EngineRefusedError) and error.body:
        if form is not ErrorForm.ANTHROPIC:  # the engine's own, in OpenAI's form
            return Response(error.body, error.status, context.headers, "application/json")
        # vLLM has two forms for it, and types of errors that are not Anthropic's.
        return Problem(error.status, "engine-refused", "", error.detail).response(context, form)
    return describe(error).response(context, form)


def _plain(status: int, kind: str, title: str, **more: Any) -> Callable[[Exception], Problem]:
    return lambda error: Problem(status, kind, title, str(error), **more)


def _at(status: int, kind: str, title: str, wrong: Callable[[Any], FieldProblem]) -> Callable[[Exception], Problem]:
    return lambda error: Problem(status, kind, title, str(error), (wrong(error),))


def _no_engine_answered(error: NoEngineAnsweredError) -> Problem:
    after_s = math.ceil(min(max(error.retry_after_s or 0, BUSY_RETRY_S), LONGEST_RETRY_S))
    return Problem(503, "no-engine-answered", "No engine answered", str(error), retry_after_s=after_s)


def _over_quota(error: OverQuotaError) -> Problem:
    if error.retry_after_s is None:
        larger = FieldProblem("max_tokens", str(error), f"prompt and output of at most {error.limit} tokens")
        return Problem(400, "over-token-quota", "The request is larger than the key's quota", str(error), (larger,))
    after_s, openai = max(math.ceil(error.retry_after_s), 1), (429, "rate_limit_exceeded")
    title = "The key's quota has too little left" if error.resource == "tokens" else "The key's quota is used up"
    return Problem(429, "over-quota", title, str(error), retry_after_s=after_s, openai=openai)


def _over_budget(error: OverBudgetError) -> Problem:
    if error.retry_after_s is None:
        allowed = f"less than {error.text} altogether"
        larger = FieldProblem("max_tokens", str(error), allowed)
        return Problem(400, "larger-than-budget", "The request is larger than the budget", str(error), (larger,))
    budget = {
        "of": error.account.title,
        "name": error.limit.name,
        "limit": error.limit.amount / MICRO,
        "used": error.used / MICRO,
        "renews": f"{error.renews:%Y-%m-%dT%H:%M:%SZ}",
    }
    after_s = max(error.retry_after_s, 1)
    title = "A budget has too little left" if error.left else "A budget is used up"
    openai = (429, "insufficient_quota")
    return Problem(429, "over-budget", title, str(error), (), after_s, {"budget": budget}, openai)


def _refused(decision: Decision) -> Problem:
    assert decision.refusal is not None
    query = decision.query
    told = _REFUSALS[decision.refusal]
    title = told.title_of_required if query.require and query.hint is not None else told.title
    status, openai = told.status, told.openai
    after_s = decision.retry_after_s
    retry = None if after_s is None else min(max(math.ceil(after_s), 1), LONGEST_RETRY_S)
    errors: tuple[FieldProblem, ...] = ()
    if decision.refusal is Refusal.TOO_LONG:
        errors = (_too_long(decision),)
    elif decision.requires_impossible_bounds:
        status, openai = 422, (400, "sla_unmet")
        title = title.removesuffix(" now")
        errors = (FieldProblem("sla", decision.reason, "looser bounds, or tier_policy 'prefer'"),)
    elif decision.requires_absent_tier:
        status, openai = 422, (400, "tier_absent")
        title = "This router does not serve the tier that the request requires"
        errors = (FieldProblem("tier", decision.reason, "a tier that this router serves: see GET /tiers"),)
    kind = decision.refusal.value.replace("_", "-")
    return Problem(status, kind, title, decision.reason, errors, retry, {"tiers": render_estimates(decision)}, openai)


def _too_long(decision: Decision) -> FieldProblem:
    query, left = decision.query, decision.longest - decision.query.prompt_tokens
    if left > 0:
        text = f"{query.max_tokens} tokens after a prompt of {query.prompt_tokens}: {decision.reason}"
        return FieldProblem("max_tokens", text, f"at most {left}, or a shorter prompt")
    allowed = f"less than {decision.longest} tokens; 'truncate' removes the oldest or the middle"
    return FieldProblem("prompt", f"{query.prompt_tokens} tokens: {decision.reason}", allowed)


def _http(error: HTTPException) -> Problem:
    status = HTTPStatus(error.status_code)
    details = {
        404: "nothing is served at this path: try POST /generate or POST /v1/chat/completions; /openapi.json lists all",
        405: f"allowed: {(error.headers or {}).get('Allow', '')}",
    }
    kind = status.phrase.lower().replace(" ", "-")
    detail = details.get(int(status), str(error.detail))
    return Problem(int(status), kind, status.phrase, detail, headers=error.headers or {})


# A subclass without a row of its own has its parent's.
PROBLEMS: dict[type[BaseException], Callable[[Any], Problem]] = {
    InvalidBodyError: lambda error: Problem(
        400, "invalid-request", "The request body is not valid", str(error), error.problems
    ),
    BodyTooLargeError: _at(
        413, "body-too-large", "The request body is too large",
        lambda error: FieldProblem("body", str(error), f"at most {error.limit} bytes"),
    ),
    UnknownCodingError: _plain(
        415, "unknown-coding", "The request body cannot be decoded", headers={"accept-encoding": ", ".join(CODINGS)}
    ),
    UnauthorizedError: _plain(
        401, "unauthorized", "A valid key is needed",
        openai=(401, "invalid_api_key"), headers={"www-authenticate": "Bearer"},
    ),
    IssuerUnreachableError: _plain(503, "issuer-away", "The token cannot be checked now", retry_after_s=ISSUER_RETRY_S),
    BudgetUnknownError: _plain(503, "budget-unknown", "The budget's use is not known now", retry_after_s=BUSY_RETRY_S),
    BeyondKeyError: _at(
        403, "beyond-key", "The key does not allow this",
        lambda error: FieldProblem(error.field, f"{error.asked} is beyond this key", error.allowed),
    ),
    OverQuotaError: _over_quota,
    OverBudgetError: _over_budget,
    NoPriceError: _plain(503, "no-price", "The key's budget needs a price"),
    RequestRefusedError: lambda error: _refused(error.decision),
    EngineRefusedError: _at(
        422, "engine-refused", "The engine refused the request",
        lambda error: FieldProblem("prompt", error.detail, "what the engine accepts"),
    ),
    NoSlotError: _plain(503, "at-capacity", _REFUSALS[Refusal.AT_CAPACITY].title, retry_after_s=BUSY_RETRY_S),
    HTTPException: _http,
    NotAdminError: _plain(403, "not-admin", "This needs an operator's key"),
    UnknownReplicaError: _plain(404, "replica-not-found", "There is no such replica or operation"),
    ReloadError: _plain(409, "not-reloaded", "The settings were not reloaded"),
    NotPossibleError: _plain(409, "not-possible", "This cannot be done now"),
    DrainingError: _plain(
        503, "draining", "The router is shutting down", retry_after_s=BUSY_RETRY_S, headers={"connection": "close"}
    ),
    UnknownModelError: _plain(404, "model-not-found", "There is no such model"),
    NoEmbeddingsError: _plain(404, "embeddings-not-served", "No engine here serves embeddings"),
    NotStoredError: _plain(404, "response-not-stored", "Responses are not stored"),
    NotHttpError: _plain(400, "not-http", "The request is not valid HTTP"),
    ForeignHostError: _plain(421, "foreign-host", "The host name is not one of this router's"),
    ForeignPageError: _plain(403, "foreign-page", "A web page of another origin sent this"),
    HeadTooLargeError: _plain(431, "head-too-large", "The request's path and headers are too large"),
    RequestTooSlowError: _plain(408, "too-slow", "The request was not received in time"),
    TooManyConnectionsError: _plain(
        503, "too-many-connections", "Too many connections are open", retry_after_s=BUSY_RETRY_S
    ),
    UnknownStreamError: _plain(404, "stream-not-found", "There is no such stream"),
    UnknownTraceError: _plain(404, "trace-not-found", "This trace is not kept here"),
    StreamGoneError: _plain(410, "stream-gone", "The rest of the stream is no longer kept"),
    ResumedElsewhereError: _plain(409, "resumed-elsewhere", "Another connection resumed this stream"),
    EngineTooSlowError: _plain(504, "engine-too-slow", "The engine did not finish in time"),
    NoEngineAnsweredError: _no_engine_answered,
    EngineBrokeError: _plain(502, "stream-broken", "The answer is incomplete: its engine failed"),
    UpstreamError: _plain(502, "upstream-error", "The engine failed"),
}  # fmt: skip
