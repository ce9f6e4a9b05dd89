"""The table of exceptions that callers see, as problems (RFC 9457) and as OpenAI's and Anthropic's error objects."""

from __future__ import annotations

import logging
import math
import secrets
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response

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

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.types import Scope

log = logging.getLogger(f"qarr.{__name__}")
MEDIA_TYPE = "application/problem+json"
ISSUER_RETRY_S = 10  # between two fetches of its keys
BUSY_RETRY_S = 1  # the next request that finishes frees a slot
LONGEST_RETRY_S = 3600


class UnknownModelError(Exception):
    """A model name that is not known."""

    def __init__(self, model: str, known: tuple[str, ...]) -> None:
        super().__init__(f"there is no model {model[:100]!r} here: {', '.join(known)}")


class NoEmbeddingsError(Exception):
    """No engine serves embeddings."""


class NotStoredError(Exception):
    """A response is asked for by its id."""

    def __init__(self, response: str) -> None:
        super().__init__(f"responses are not stored here, so {response[:100]!r} cannot be read: keep the answer itself")


class NotAdminError(Exception):
    """The caller may not operate on replicas."""


class DrainingError(Exception):
    """The router shuts down: it takes no new requests, or ends an open one at its deadline."""

    def __init__(self, detail: str = "this router is shutting down and takes no new requests: try again") -> None:
        super().__init__(detail)


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as the caller sees it.

    Attributes:
        kind: The last part of the problem's type and, with underscores, OpenAI's code.
        openai: Status and code under ``/v1``, if OpenAI's differ; Anthropic's status is the same.
        headers: Additional headers.
    """

    status: int
    kind: str
    title: str
    detail: str
    errors: tuple[FieldProblem, ...] = ()
    retry_after_s: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    openai: tuple[int, str] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

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
            "type": _openai_type(status),
            "param": self.errors[0].field if self.errors else None,
            "code": code,
        }
        return {"error": error}

    def anthropic_body(self, ids: Mapping[str, str]) -> dict[str, Any]:
        status = self.openai[0] if self.openai else self.status
        error = {"type": _anthropic_type(status), "message": self._message()}
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
        """Return the problem as a response in some form."""
        headers = {**context.headers, **self.headers}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        if self.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            headers["connection"] = "close"  # the rest of the body stays unread
        if form is ErrorForm.PROBLEM:
            return Response(to_json(self.body(context.ids)), self.status, headers, MEDIA_TYPE)
        body = self.anthropic_body(context.ids) if form is ErrorForm.ANTHROPIC else self.openai_body()
        return json_response(body, self.openai[0] if self.openai else self.status, headers)


def _openai_type(status: int) -> str:
    names = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    return names.get(status, "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error")


def _anthropic_type(status: int) -> str:
    names = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        408: "timeout_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
    return names.get(status, "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error")


_REFUSALS: dict[Refusal, tuple[HTTPStatus, str]] = {
    Refusal.TOO_LONG: (HTTPStatus.UNPROCESSABLE_ENTITY, "The request fits no tier's context"),
    Refusal.NOT_READY: (HTTPStatus.SERVICE_UNAVAILABLE, "No tier that could serve this is ready"),
    Refusal.AT_CAPACITY: (HTTPStatus.SERVICE_UNAVAILABLE, "Every tier that could serve this is full"),
    Refusal.SLA_UNMET: (HTTPStatus.SERVICE_UNAVAILABLE, "No tier can meet the required SLA now"),
    Refusal.UNSUPPORTED: (HTTPStatus.UNPROCESSABLE_ENTITY, "No tier that could serve this supports its parameters"),
    Refusal.NO_ADAPTER: (HTTPStatus.UNPROCESSABLE_ENTITY, "No tier that could serve this offers the adapter"),
    Refusal.EXCLUDED: (HTTPStatus.BAD_REQUEST, "The request excludes every tier that could serve it"),
    Refusal.NOT_ALLOWED: (HTTPStatus.FORBIDDEN, "The key does not allow a tier that could serve this"),
}


def describe(error: Exception) -> Problem:
    """Return the problem for an exception. An unknown one becomes a 500 without its text, which may quote internals."""
    for kind in type(error).__mro__:
        if kind in PROBLEMS:
            return PROBLEMS[kind](error)
    return Problem(500, "internal-error", "Internal error", "see the router's log for the request id")


def is_known(error: Exception) -> bool:
    """Tell whether an exception is one that the router means to raise."""
    return isinstance(error, (ClientGoneError, *PROBLEMS))


def refusal(error: Exception, path: str) -> Response:
    """Return the answer to a request that was not read: it has ids of its own."""
    context = RequestContext(secrets.token_hex(16), secrets.token_hex(16))
    log.info("request %s: refused: %s", context.request_id, error)
    return describe(error).response(context, error_form(path))


def response_to(error: Exception, scope: Scope) -> Response:
    """Return the response to a request that has ended with an exception."""
    if isinstance(error, ClientGoneError):
        return Response(status_code=CLIENT_GONE)
    form, context = error_form(scope["path"]), context_of(scope)
    if form is not ErrorForm.PROBLEM and isinstance(error, EngineRefusedError) and error.body:
        if form is not ErrorForm.ANTHROPIC:  # the engine's own, in OpenAI's form
            return Response(error.body, error.status, context.headers, "application/json")
        # vLLM has two forms for it, and types of errors that are not Anthropic's.
        return Problem(error.status, "engine-refused", "", error.detail).response(context, form)
    return describe(error).response(context, form)


def _plain(
    status: int, kind: str, title: str, *, retry_after_s: int | None = None, headers: Mapping[str, str] | None = None
) -> Callable[[Exception], Problem]:
    return lambda error: Problem(status, kind, title, str(error), retry_after_s=retry_after_s, headers=headers or {})


def _invalid_body(error: InvalidBodyError) -> Problem:
    return Problem(400, "invalid-request", "The request body is not valid", str(error), error.problems)


def _unauthorized(error: UnauthorizedError) -> Problem:
    code, challenge = (401, "invalid_api_key"), {"www-authenticate": "Bearer"}
    return Problem(401, "unauthorized", "A valid key is needed", str(error), openai=code, headers=challenge)


def _beyond_key(error: BeyondKeyError) -> Problem:
    beyond = FieldProblem(error.field, f"{error.asked} is beyond this key", error.allowed)
    return Problem(403, "beyond-key", "The key does not allow this", str(error), (beyond,))


def _body_too_large(error: BodyTooLargeError) -> Problem:
    allowed = FieldProblem("body", str(error), f"at most {error.limit} bytes")
    return Problem(413, "body-too-large", "The request body is too large", str(error), (allowed,))


def _engine_refused(error: EngineRefusedError) -> Problem:
    wrong = FieldProblem("prompt", error.detail, "what the engine accepts")
    return Problem(422, "engine-refused", "The engine refused the request", error.detail, (wrong,))


def _no_slot(error: NoSlotError) -> Problem:
    status, title = _REFUSALS[Refusal.AT_CAPACITY]
    return Problem(int(status), "at-capacity", title, str(error), retry_after_s=BUSY_RETRY_S)


def _no_engine_answered(error: NoEngineAnsweredError) -> Problem:
    after_s = math.ceil(min(max(error.retry_after_s or 0, BUSY_RETRY_S), LONGEST_RETRY_S))
    return Problem(503, "no-engine-answered", "No engine answered", str(error), retry_after_s=after_s)


def _over_quota(error: OverQuotaError) -> Problem:
    if error.retry_after_s is None:
        larger = FieldProblem("max_tokens", str(error), f"prompt and output of at most {error.limit} tokens")
        return Problem(400, "over-token-quota", "The request is larger than the key's quota", str(error), (larger,))
    after_s, openai = max(math.ceil(error.retry_after_s), 1), (429, "rate_limit_exceeded")
    return Problem(429, "over-quota", "The key's quota is used up", str(error), retry_after_s=after_s, openai=openai)


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
    after_s, title = max(error.retry_after_s, 1), "A budget is used up"
    openai = (429, "insufficient_quota")
    return Problem(429, "over-budget", title, str(error), (), after_s, {"budget": budget}, openai)


def _refused(decision: Decision) -> Problem:
    assert decision.refusal is not None
    status, title = _REFUSALS[decision.refusal]
    after_s = decision.retry_after_s
    retry = None if after_s is None else min(max(math.ceil(after_s), 1), LONGEST_RETRY_S)
    errors: tuple[FieldProblem, ...] = ()
    openai = None
    if decision.refusal is Refusal.TOO_LONG:
        tokens, output = decision.query.prompt_tokens, decision.query.max_tokens
        text = f"{tokens} tokens, and the answer may have {output}"
        errors = (FieldProblem("prompt", text, f"prompt and output within one tier's context: {decision.reason}"),)
        openai = (400, "context_length_exceeded")
    if decision.refusal is Refusal.UNSUPPORTED:
        openai = (400, "unsupported_parameter")
    if decision.refusal is Refusal.NO_ADAPTER:
        openai = (404, "model_not_found")
    kind = decision.refusal.value.replace("_", "-")
    tiers = render_estimates(decision)
    return Problem(int(status), kind, title, decision.reason, errors, retry, {"tiers": tiers}, openai)


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
    InvalidBodyError: _invalid_body,
    BodyTooLargeError: _body_too_large,
    UnknownCodingError: _plain(
        415, "unknown-coding", "The request body cannot be decoded", headers={"accept-encoding": ", ".join(CODINGS)}
    ),
    UnauthorizedError: _unauthorized,
    IssuerUnreachableError: _plain(503, "issuer-away", "The token cannot be checked now", retry_after_s=ISSUER_RETRY_S),
    BudgetUnknownError: _plain(503, "budget-unknown", "The budget's use is not known now", retry_after_s=BUSY_RETRY_S),
    BeyondKeyError: _beyond_key,
    OverQuotaError: _over_quota,
    OverBudgetError: _over_budget,
    NoPriceError: _plain(503, "no-price", "The key's budget needs a price"),
    RequestRefusedError: lambda error: _refused(error.decision),
    EngineRefusedError: _engine_refused,
    NoSlotError: _no_slot,
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
}
