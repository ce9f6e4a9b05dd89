"""Every error that a caller can see: one table from exception to problem (RFC 9457)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response

from router.policy import Decision, Refusal
from router.upstream import EngineBroke, EngineRefused, NoEngineAnswered, NoPlace, UpstreamError
from router.wire import FieldProblem, InvalidBody

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

MEDIA_TYPE = "application/problem+json"
BUSY_RETRY_S = 1  # a place frees up with the next finished request
STARTING_RETRY_S = 10  # engines start and warm in tens of seconds


class BodyTooLarge(Exception):
    """A request body over the limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the request body is larger than {limit} bytes")
        self.limit = limit


class Refused(Exception):
    """The policy found no tier."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(decision.reason)
        self.decision = decision


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as the caller sees it. ``kind`` is the last part of the problem's type."""

    status: int
    kind: str
    title: str
    detail: str
    errors: tuple[FieldProblem, ...] = ()
    retry_after_s: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, ids: Mapping[str, str]) -> dict[str, Any]:
        """Return the problem object, with the request's ids."""
        rendered: dict[str, Any] = {
            "type": f"urn:qarr:problem:{self.kind}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
        }
        if self.errors:
            rendered["errors"] = [asdict(e) for e in self.errors]
        return {**rendered, **self.extra, **ids}

    def response(self, ids: Mapping[str, str], headers: Mapping[str, str]) -> Response:
        """Return the problem as a complete answer."""
        more = {"retry-after": str(self.retry_after_s)} if self.retry_after_s is not None else {}
        if self.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            more["connection"] = "close"  # the rest of the body is not going to be read
        return Response(to_json(self.body(ids)), self.status, media_type=MEDIA_TYPE, headers={**headers, **more})


_REFUSALS: dict[Refusal, tuple[HTTPStatus, str, int | None]] = {
    Refusal.TOO_LONG: (HTTPStatus.UNPROCESSABLE_ENTITY, "The request fits no tier's context", None),
    Refusal.NOT_READY: (
        HTTPStatus.SERVICE_UNAVAILABLE,
        "No tier that could serve this is ready",
        STARTING_RETRY_S,
    ),
    Refusal.AT_CAPACITY: (
        HTTPStatus.SERVICE_UNAVAILABLE,
        "Every tier that could serve this is full",
        BUSY_RETRY_S,
    ),
    Refusal.SLA_UNMET: (
        HTTPStatus.SERVICE_UNAVAILABLE,
        "No tier can meet the required SLA now",
        BUSY_RETRY_S,
    ),
}


def describe(error: Exception) -> Problem:  # noqa: PLR0911  a table, written as a match
    """Return the problem for an exception. Anything unforeseen is a 500 that tells nothing of the inside."""
    match error:
        case InvalidBody():
            return Problem(400, "invalid-request", "The request body is not valid", str(error), error.problems)
        case BodyTooLarge():
            allowed = FieldProblem("body", str(error), f"at most {error.limit} bytes")
            return Problem(413, "body-too-large", "The request body is too large", str(error), (allowed,))
        case Refused():
            return _refused(error.decision)
        case EngineRefused():
            wrong = FieldProblem("prompt", error.detail, "what the engine accepts")
            return Problem(422, "engine-refused", "The engine refused the request", error.detail, (wrong,))
        case NoPlace():
            status, title, retry = _REFUSALS[Refusal.AT_CAPACITY]
            return Problem(int(status), "at-capacity", title, str(error), retry_after_s=retry)
        case NoEngineAnswered():
            return Problem(503, "no-engine-answered", "No engine answered", str(error), retry_after_s=BUSY_RETRY_S)
        case EngineBroke():
            return Problem(502, "stream-broken", "The answer is incomplete: its engine failed", str(error))
        case UpstreamError():
            return Problem(502, "upstream-error", "The engine failed", str(error))
        case HTTPException():
            return _http(error)
        case _:
            return Problem(500, "internal-error", "Internal error", "see the router's log for the request id")


def _refused(decision: Decision) -> Problem:
    assert decision.refusal is not None
    status, title, retry = _REFUSALS[decision.refusal]
    errors: tuple[FieldProblem, ...] = ()
    if decision.refusal is Refusal.TOO_LONG:
        tokens, output = decision.query.prompt_tokens, decision.query.max_tokens
        text = f"{tokens} tokens with the chat template, and max_tokens is {output}"
        errors = (FieldProblem("prompt", text, f"prompt and output within one tier's context: {decision.reason}"),)
    kind = decision.refusal.value.replace("_", "-")
    tiers = [{"tier": v.tier, "state": v.state.value, "verdict": v.verdict} for v in decision.verdicts]
    return Problem(int(status), kind, title, decision.reason, errors, retry, {"tiers": tiers})


def _http(error: HTTPException) -> Problem:
    status = HTTPStatus(error.status_code)
    details = {
        404: "there is nothing at this path: POST /generate, POST /route, GET /tiers, GET /healthz, GET /readyz",
        405: f"allowed: {(error.headers or {}).get('Allow', '')}",
    }
    kind = status.phrase.lower().replace(" ", "-")
    return Problem(int(status), kind, status.phrase, details.get(int(status), str(error.detail)))


def ids_of(request: Request) -> dict[str, str]:
    """Return the request's ids for a problem body, as far as they are known by now."""
    ids = request.scope.get("qarr.ids")
    return dict(ids) if ids else {}
