"""The table of exceptions that callers see, as problems (RFC 9457) and as OpenAI's and Anthropic's error objects."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from http import HTTPStatus
from typing import Any, NamedTuple

from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from router.accounting.budgets import BudgetUnknownError, NoPriceError, OverBudgetError
from router.api.asgi import (
    CODINGS,
    ClientGoneError,
    ForeignHostError,
    ForeignPageError,
    UnknownCodingError,
    context_of,
)
from router.api.bodies import FieldProblem, InvalidBodyError, json_response
from router.api.paths import ErrorForm, error_form
from router.api.resumable import (
    ResumedElsewhereError,
    StreamGoneError,
    UnknownStreamError,
)
from router.auth.api_keys import (
    MICRO,
    BeyondKeyError,
    IssuerUnreachableError,
    UnauthorizedError,
)
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
    TooManyBodiesError,
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
ISSUER_RETRY_S = 10  # the time between two fetches of an issuer's keys
BUSY_RETRY_S = 1  # the next request that finishes frees a slot
MAX_RETRY_S = 3600


class UnknownModelError(Exception):
    """A request names a model that is not served here."""

    def __init__(self, model: str, known: tuple[str, ...]) -> None:
        super().__init__(f"there is no model {model[:100]!r} here: {', '.join(known)}")


class NoEmbeddingsError(Exception):
    """No engine serves embeddings."""


class NotStoredError(Exception):
    """A caller asks for a response by its id, but no responses are stored."""


class NotAdminError(Exception):
    """The caller may not operate on replicas."""


class DrainingError(Exception):
    """The router shuts down: it takes no new requests, or ends an open one at its deadline."""

    def __init__(
        self,
        detail: str = "this router is shutting down and takes no new requests: try again",
    ) -> None:
        super().__init__(detail)


class OpenAIStatus(NamedTuple):
    """The status and the code of a problem under ``/v1``."""

    status: int
    code: str


@dataclass(frozen=True, slots=True)
class Problem:
    status: int
    # the last part of the problem's type and, with underscores, OpenAI's code
    kind: str
    title: str
    detail: str
    errors: tuple[FieldProblem, ...] = ()
    retry_after_s: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    # if OpenAI's status or code differ; Anthropic's status is OpenAI's
    openai: OpenAIStatus | None = None
    headers: Mapping[str, str] = field(default_factory=dict)  # additional headers

    @property
    def _openai_status(self) -> OpenAIStatus:
        return self.openai or OpenAIStatus(self.status, self.kind.replace("-", "_"))

    def body(self, ids: Mapping[str, str]) -> dict[str, Any]:
        """Return the problem as RFC 9457 has it."""
        body: dict[str, Any] = {
            "type": f"urn:qarr:problem:{self.kind}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
        }
        if self.errors:
            body["errors"] = [asdict(error) for error in self.errors]
        return {**body, **self.extra, **ids}

    def openai_body(self) -> dict[str, Any]:
        """Return the problem as OpenAI's error object."""
        status, code = self._openai_status
        error = {
            "message": self._message(),
            "type": _openai_type(status),
            "param": self.errors[0].field if self.errors else None,
            "code": code,
        }
        return {"error": error}

    def anthropic_body(self, ids: Mapping[str, str]) -> dict[str, Any]:
        """Return the problem as Anthropic's error object."""
        error = {
            "type": _anthropic_type(self._openai_status.status),
            "message": self._message(),
        }
        return {"type": "error", "error": error, "request_id": ids["request_id"]}

    def _message(self) -> str:
        if not self.errors:
            return self.detail
        return "; ".join(
            f"{error.field}: {error.problem} (allowed: {error.allowed})"
            for error in self.errors
        )

    def event(self, form: ErrorForm, ids: Mapping[str, str], number: int = 0) -> bytes:
        """Return the event that ends a stream, without the empty line after it; ``number``: where events have numbers."""
        if form is ErrorForm.OPENAI:
            return b"data: " + to_json(self.openai_body())
        if form is ErrorForm.ANTHROPIC:
            body = self.anthropic_body(ids)
        elif form is ErrorForm.RESPONSES:
            body = self._response_event(number)
        else:
            body = self.body(ids)
        return b"event: error\ndata: " + to_json(body)

    def _response_event(self, number: int) -> dict[str, Any]:
        """Return the members of the Responses API's error event, and the object that SDKs look for when they raise it."""
        error = self.openai_body()["error"]
        return {
            "type": "error",
            "code": error["code"],
            "message": error["message"],
            "param": error["param"],
            "sequence_number": number,
            "error": error,
        }

    def response(self, context: RequestContext, form: ErrorForm) -> Response:
        """Return the whole answer to a request, in the form that its caller expects."""
        headers = {**context.response_headers, **self.headers}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        if self.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            headers["connection"] = "close"  # the rest of the body stays unread
        if form is ErrorForm.PROBLEM:
            return Response(
                to_json(self.body(context.ids)),
                self.status,
                headers=headers,
                media_type=MEDIA_TYPE,
            )
        body = self.openai_body()
        if form is ErrorForm.ANTHROPIC:
            body = self.anthropic_body(context.ids)
        return json_response(body, self._openai_status.status, headers)


# Types of errors by their status: those that OpenAI and Anthropic share, and Anthropic's further ones.
_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = _OPENAI_TYPES | {
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
_CALLERS_MISTAKE = "invalid_request_error"


def _openai_type(status: int) -> str:
    usual_type = _CALLERS_MISTAKE
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        usual_type = "server_error"
    return _OPENAI_TYPES.get(status, usual_type)


def _anthropic_type(status: int) -> str:
    usual_type = _CALLERS_MISTAKE
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        usual_type = "api_error"
    return _ANTHROPIC_TYPES.get(status, usual_type)


@dataclass(frozen=True, slots=True)
class _RefusalProblem:
    """How callers see a refusal.

    Attributes:
        title: The title if several tiers might have served the request.
        title_of_required: The title if the request requires one tier.
        openai: See ``Problem``.
    """

    status: int
    title: str
    title_of_required: str
    openai: OpenAIStatus | None = None


_REFUSALS = {
    Refusal.TOO_LONG: _RefusalProblem(
        422,
        title="The request is too long for the tiers that may serve it",
        title_of_required="The request is too long for the tier that it requires",
        openai=OpenAIStatus(400, "context_length_exceeded"),
    ),
    Refusal.NOT_READY: _RefusalProblem(
        503,
        title="No tier that could serve this is ready",
        title_of_required="The tier that the request requires is not ready",
    ),
    Refusal.AT_CAPACITY: _RefusalProblem(
        503,
        title="Every tier that could serve this is full",
        title_of_required="The tier that the request requires is full",
    ),
    Refusal.SLA_UNMET: _RefusalProblem(
        503,
        title="No tier can meet the required SLA now",
        title_of_required="The tier that the request requires cannot meet its SLA now",
    ),
    Refusal.UNSUPPORTED: _RefusalProblem(
        422,
        title="No tier that could serve this supports its parameters",
        title_of_required="The tier that the request requires does not support its parameters",
        openai=OpenAIStatus(400, "unsupported_parameter"),
    ),
    Refusal.NO_ADAPTER: _RefusalProblem(
        422,
        title="No tier that could serve this offers the adapter",
        title_of_required="The tier that the request requires does not offer the adapter",
        openai=OpenAIStatus(404, "model_not_found"),
    ),
    Refusal.EXCLUDED: _RefusalProblem(
        400,
        title="The request excludes every tier that could serve it",
        title_of_required="The request excludes the tier that it requires",
    ),
    Refusal.NOT_ALLOWED: _RefusalProblem(
        403,
        title="The key does not allow a tier that could serve this",
        title_of_required="The key does not allow the tier that is required",
    ),
}


def describe(error: Exception) -> Problem:
    """Return the problem for an exception. An unknown one becomes a 500 without its text, which may quote internals."""
    for kind in type(error).__mro__:
        if kind in PROBLEMS:
            return PROBLEMS[kind](error)
    return Problem(
        500,
        "internal-error",
        title="Internal error",
        detail="see the router's log for the request id",
        headers={"connection": "close"},  # the server closes it after such an error
    )


def is_known(error: Exception) -> bool:
    return isinstance(error, (ClientGoneError, *PROBLEMS))


def refusal(error: Exception, path: str) -> Response:
    """Return the answer to a request that is refused before anything else is known of it."""
    context = RequestContext(secrets.token_hex(16), secrets.token_hex(16))
    log.info("request %s: refused: %s", context.request_id, error)
    return describe(error).response(context, error_form(path))


def response_to(error: Exception, scope: Scope) -> Response:
    """Return the answer that an exception becomes, in the form that the path's callers expect."""
    if isinstance(error, ClientGoneError):
        return Response(status_code=CLIENT_GONE)
    form = error_form(scope["path"])
    context = context_of(scope)
    if (
        form is not ErrorForm.PROBLEM
        and isinstance(error, EngineRefusedError)
        and error.body
    ):
        return _engine_refusal(error, context, form)
    return describe(error).response(context, form)


def _engine_refusal(
    error: EngineRefusedError, context: RequestContext, form: ErrorForm
) -> Response:
    """Return an engine's own refusal as it came, except to Anthropic's clients.

    vLLM has two forms of errors for these, and types of errors that Anthropic's API does not have.
    """
    if form is ErrorForm.ANTHROPIC:
        return Problem(
            error.status, "engine-refused", title="", detail=error.detail
        ).response(context, form)
    return Response(
        error.body,
        error.status,
        headers=context.response_headers,
        media_type="application/json",
    )


def _plain(
    status: int, kind: str, title: str, **more: Any
) -> Callable[[Exception], Problem]:
    """Return what makes a problem of exceptions that say it all in their text."""

    def describe_plainly(error: Exception) -> Problem:
        return Problem(status, kind, title, detail=str(error), **more)

    return describe_plainly


def _at_field(
    status: int, kind: str, title: str, field_problem: Callable[[Any], FieldProblem]
) -> Callable[[Exception], Problem]:
    """Return what makes a problem of exceptions that are about one field of the request."""

    def describe_field(error: Exception) -> Problem:
        return Problem(
            status, kind, title, detail=str(error), errors=(field_problem(error),)
        )

    return describe_field


def _retry_seconds(retry_after_s: float) -> int:
    """Return a time as ``Retry-After`` has it: in whole seconds, at least one, at most an hour."""
    return math.ceil(min(max(retry_after_s, 1), MAX_RETRY_S))


def _no_engine_answered(error: NoEngineAnsweredError) -> Problem:
    return Problem(
        503,
        "no-engine-answered",
        title="No engine answered",
        detail=str(error),
        retry_after_s=_retry_seconds(error.retry_after_s or BUSY_RETRY_S),
    )


def _over_quota(error: OverQuotaError) -> Problem:
    if error.retry_after_s is None:
        too_large = FieldProblem(
            "max_tokens",
            str(error),
            f"prompt and output of at most {error.limit} tokens",
        )
        return Problem(
            400,
            "over-token-quota",
            title="The request is larger than the key's quota",
            detail=str(error),
            errors=(too_large,),
        )
    title = "The key's quota is used up"
    if error.resource == "tokens":
        title = "The key's quota has too little left"
    return Problem(
        429,
        "over-quota",
        title=title,
        detail=str(error),
        retry_after_s=max(math.ceil(error.retry_after_s), 1),
        openai=OpenAIStatus(429, "rate_limit_exceeded"),
    )


def _over_budget(error: OverBudgetError) -> Problem:
    if error.retry_after_s is None:
        too_large = FieldProblem(
            "max_tokens", str(error), f"less than {error.text} altogether"
        )
        return Problem(
            400,
            "larger-than-budget",
            title="The request is larger than the budget",
            detail=str(error),
            errors=(too_large,),
        )
    budget = {
        "of": error.account.title,
        "name": error.limit.name,
        "limit": error.limit.amount / MICRO,
        "used": error.used / MICRO,
        "renews": f"{error.renews:%Y-%m-%dT%H:%M:%SZ}",
    }
    return Problem(
        429,
        "over-budget",
        title="A budget has too little left" if error.left else "A budget is used up",
        detail=str(error),
        retry_after_s=max(error.retry_after_s, 1),
        extra={"budget": budget},
        openai=OpenAIStatus(429, "insufficient_quota"),
    )


def _refused(error: RequestRefusedError) -> Problem:
    """Return the problem for a refusal, with what each tier would have done with the request."""
    decision = error.decision
    assert decision.refusal is not None
    query = decision.query
    refusal_problem = _REFUSALS[decision.refusal]
    title = refusal_problem.title
    if query.require and query.hint is not None:
        title = refusal_problem.title_of_required
    retry_after_s = None
    if decision.retry_after_s is not None:
        retry_after_s = _retry_seconds(decision.retry_after_s)
    problem = Problem(
        refusal_problem.status,
        kind=decision.refusal.value.replace("_", "-"),
        title=title,
        detail=decision.reason,
        retry_after_s=retry_after_s,
        extra={"tiers": render_estimates(decision)},
        openai=refusal_problem.openai,
    )
    if decision.refusal is Refusal.TOO_LONG:
        return replace(problem, errors=(_too_long(decision),))
    if decision.requires_impossible_bounds:
        looser = FieldProblem(
            "sla", decision.reason, "looser bounds, or tier_policy 'prefer'"
        )
        return _lasting(
            problem, title.removesuffix(" now"), code="sla_unmet", field_problem=looser
        )
    if decision.requires_absent_tier:
        served = FieldProblem(
            "tier", decision.reason, "a tier that this router serves: see GET /tiers"
        )
        absent_title = "This router does not serve the tier that the request requires"
        return _lasting(problem, absent_title, code="tier_absent", field_problem=served)
    return problem


def _lasting(
    problem: Problem, title: str, *, code: str, field_problem: FieldProblem
) -> Problem:
    """Return a refusal as one that the same request would always get, and that is therefore the caller's to mend."""
    return replace(
        problem,
        status=422,
        title=title,
        errors=(field_problem,),
        openai=OpenAIStatus(400, code),
    )


def _too_long(decision: Decision) -> FieldProblem:
    query = decision.query
    exceeded_context = decision.exceeded_context or 0
    room = exceeded_context - query.prompt_tokens
    if room > 0:
        problem = f"{query.max_tokens} tokens after a prompt of {query.prompt_tokens}: {decision.reason}"
        return FieldProblem(
            "max_tokens", problem, f"at most {room}, or a shorter prompt"
        )
    allowed = f"less than {exceeded_context} tokens; 'truncate' removes the oldest or the middle"
    return FieldProblem(
        "prompt", f"{query.prompt_tokens} tokens: {decision.reason}", allowed
    )


def _http(error: HTTPException) -> Problem:
    """Return the problem for one of Starlette's own exceptions, as for a path that is not served."""
    status = HTTPStatus(error.status_code)
    headers = error.headers or {}
    detail = str(error.detail)
    if status == HTTPStatus.NOT_FOUND:
        detail = "nothing is served at this path: try POST /generate or POST /v1/chat/completions; /openapi.json lists all"
    elif status == HTTPStatus.METHOD_NOT_ALLOWED:
        detail = f"allowed: {headers.get('Allow', '')}"
    kind = status.phrase.lower().replace(" ", "-")
    return Problem(
        int(status), kind, title=status.phrase, detail=detail, headers=headers
    )


def _invalid_body(error: InvalidBodyError) -> Problem:
    return Problem(
        400,
        "invalid-request",
        title="The request body is not valid",
        detail=str(error),
        errors=error.problems,
    )


# A subclass without a row of its own has its parent's.
PROBLEMS: dict[type[BaseException], Callable[[Any], Problem]] = {
    InvalidBodyError: _invalid_body,
    BodyTooLargeError: _at_field(
        413,
        "body-too-large",
        "The request body is too large",
        field_problem=lambda error: FieldProblem(
            "body", str(error), f"at most {error.limit} bytes"
        ),
    ),
    UnknownCodingError: _plain(
        415,
        "unknown-coding",
        "The request body cannot be decoded",
        headers={"accept-encoding": ", ".join(CODINGS)},
    ),
    UnauthorizedError: _plain(
        401,
        "unauthorized",
        "A valid key is needed",
        openai=OpenAIStatus(401, "invalid_api_key"),
        headers={"www-authenticate": "Bearer"},
    ),
    IssuerUnreachableError: _plain(
        503,
        "issuer-away",
        "The token cannot be checked now",
        retry_after_s=ISSUER_RETRY_S,
    ),
    BudgetUnknownError: _plain(
        503,
        "budget-unknown",
        "The budget's use is not known now",
        retry_after_s=BUSY_RETRY_S,
    ),
    BeyondKeyError: _at_field(
        403,
        "beyond-key",
        "The key does not allow this",
        field_problem=lambda error: FieldProblem(
            error.field, f"{error.requested} is beyond this key", error.allowed
        ),
    ),
    OverQuotaError: _over_quota,
    OverBudgetError: _over_budget,
    NoPriceError: _plain(503, "no-price", "The key's budget needs a price"),
    RequestRefusedError: _refused,
    EngineRefusedError: _at_field(
        422,
        "engine-refused",
        "The engine refused the request",
        field_problem=lambda error: FieldProblem(
            "prompt", error.detail, "what the engine accepts"
        ),
    ),
    NoSlotError: _plain(
        503,
        "at-capacity",
        _REFUSALS[Refusal.AT_CAPACITY].title,
        retry_after_s=BUSY_RETRY_S,
    ),
    HTTPException: _http,
    NotAdminError: _plain(403, "not-admin", "This needs an operator's key"),
    UnknownReplicaError: _plain(
        404, "replica-not-found", "There is no such replica or operation"
    ),
    ReloadError: _plain(409, "not-reloaded", "The settings were not reloaded"),
    NotPossibleError: _plain(409, "not-possible", "This cannot be done now"),
    DrainingError: _plain(
        503,
        "draining",
        "The router is shutting down",
        retry_after_s=BUSY_RETRY_S,
        headers={"connection": "close"},
    ),
    UnknownModelError: _plain(404, "model-not-found", "There is no such model"),
    NoEmbeddingsError: _plain(
        404, "embeddings-not-served", "No engine here serves embeddings"
    ),
    NotStoredError: _plain(404, "response-not-stored", "Responses are not stored"),
    NotHttpError: _plain(400, "not-http", "The request is not valid HTTP"),
    ForeignHostError: _plain(
        421, "foreign-host", "The host name is not one of this router's"
    ),
    ForeignPageError: _plain(
        403, "foreign-page", "A web page of another origin sent this"
    ),
    HeadTooLargeError: _plain(
        431, "head-too-large", "The request's path and headers are too large"
    ),
    RequestTooSlowError: _plain(
        408, "too-slow", "The request was not received in time"
    ),
    TooManyConnectionsError: _plain(
        503,
        "too-many-connections",
        "Too many connections are open",
        retry_after_s=BUSY_RETRY_S,
    ),
    TooManyBodiesError: _plain(
        503,
        "too-many-bodies",
        "Too many large requests are open",
        retry_after_s=BUSY_RETRY_S,
    ),
    UnknownStreamError: _plain(404, "stream-not-found", "There is no such stream"),
    UnknownTraceError: _plain(404, "trace-not-found", "This trace is not kept here"),
    StreamGoneError: _plain(
        410, "stream-gone", "The rest of the stream is no longer kept"
    ),
    ResumedElsewhereError: _plain(
        409, "resumed-elsewhere", "Another connection resumed this stream"
    ),
    EngineTooSlowError: _plain(
        504, "engine-too-slow", "The engine did not finish in time"
    ),
    NoEngineAnsweredError: _no_engine_answered,
    EngineBrokeError: _plain(
        502, "stream-broken", "The answer is incomplete: its engine failed"
    ),
    UpstreamError: _plain(502, "upstream-error", "The engine failed"),
}
