"""What callers see of errors: one table, complete, and never more than they are to see."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace

import pytest
from starlette.exceptions import HTTPException

from router.api import asgi, problems, resumable
from router.api.bodies import FieldProblem, InvalidBody
from router.api.paths import ErrorForm
from router.api.problems import PROBLEMS, describe
from router.auth.quota import OverQuota
from router.pipeline.request import RequestContext
from router.upstream import errors as upstream_errors
from router.upstream.errors import EngineRefused, EngineStalled, NoSlot, UpstreamError

IDS = {"request_id": "r", "trace_id": "t"}


def test_every_upstream_error_has_a_problem() -> None:
    """Each error of the upstream's tree maps to a 4xx or 5xx of its own, none falls through to 500."""
    errors = [e for _, e in inspect.getmembers(upstream_errors, inspect.isclass) if issubclass(e, UpstreamError)]
    assert len(errors) >= 6
    for error in errors:
        problem = describe(error("why"))
        assert problem.status in {422, 502, 503, 504}
        assert problem.kind != "internal-error"
        assert problem.openai_body()["error"]["code"] != "internal_error"
    assert describe(EngineRefused("why")).status == 422


@pytest.mark.parametrize("module", [asgi, problems, resumable])
def test_every_error_of_the_endpoints_has_a_problem(module: object) -> None:
    """An error that an endpoint defines is one that callers are told of; that a client has gone is told to nobody."""
    own = [e for _, e in inspect.getmembers(module, inspect.isclass) if e.__module__ == getattr(module, "__name__", "")]
    errors = [e for e in own if issubclass(e, Exception) and e is not asgi.ClientGone]
    assert errors
    assert set(errors) <= PROBLEMS.keys()


def test_a_subclass_has_its_parents_problem() -> None:
    assert describe(EngineStalled("no token for 30 s")).kind == "stream-broken"


def test_unforeseen_errors_tell_nothing() -> None:
    """An error that nobody thought of is a 500 without its text."""
    problem = describe(RuntimeError("secret path /etc/shadow"))
    assert problem.status == 500
    assert "secret" not in str(problem.body({}))
    assert problems.MEDIA_TYPE == "application/problem+json"


def test_a_wrong_field_is_named_in_both_forms() -> None:
    problem = describe(InvalidBody((FieldProblem("max_tokens", "is 0", "an integer from 1 to 9"),)))
    assert problem.body(IDS) == {
        "type": "urn:qarr:problem:invalid-request",
        "title": "The request body is not valid",
        "status": 400,
        "detail": "max_tokens: is 0",
        "errors": [{"field": "max_tokens", "problem": "is 0", "allowed": "an integer from 1 to 9"}],
        **IDS,
    }
    error = problem.openai_body()["error"]
    assert (error["param"], error["type"], error["code"]) == ("max_tokens", "invalid_request_error", "invalid_request")
    assert error["message"] == "max_tokens: is 0 (allowed: an integer from 1 to 9)"


def test_a_wrong_field_is_named_in_anthropics_form() -> None:
    problem = describe(InvalidBody((FieldProblem("max_tokens", "is 0", "an integer from 1 to 9"),)))
    assert problem.anthropic_body(IDS) == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "max_tokens: is 0 (allowed: an integer from 1 to 9)"},
        "request_id": "r",
    }


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (408, "timeout_error"),
        (409, "invalid_request_error"),
        (413, "request_too_large"),
        (421, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_anthropics_type_of_error_goes_by_the_status(status: int, kind: str) -> None:
    """Its clients know these types; status and message are as in OpenAI's form, Retry-After too."""
    problem, context = describe(NoSlot("why")), RequestContext("r", "t")
    problem = replace(problem, status=status)
    ours, openais = (problem.response(context, form) for form in (ErrorForm.ANTHROPIC, ErrorForm.OPENAI))
    assert json.loads(bytes(ours.body))["error"] == {"type": kind, "message": "why"}
    assert ours.status_code == openais.status_code == status
    assert ours.headers["retry-after"] == openais.headers["retry-after"]


def test_a_status_of_openais_is_anthropics_as_well() -> None:
    """A prompt that fits nowhere is 422 on our own endpoints, and 400 on those of others."""
    problem = replace(describe(NoSlot("why")), status=422, openai=(400, "context_length_exceeded"))
    answer = problem.response(RequestContext("r", "t"), ErrorForm.ANTHROPIC)
    assert (answer.status_code, json.loads(bytes(answer.body))["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("form", "event"),
    [
        (ErrorForm.PROBLEM, 'event: error\ndata: {"type":"urn:qarr:problem:stream-broken",'),
        (ErrorForm.OPENAI, 'data: {"error":{"message":"no token",'),
        (ErrorForm.RESPONSES, 'event: error\ndata: {"type":"error","code":"stream_broken","message":"no token",'),
        (ErrorForm.ANTHROPIC, 'event: error\ndata: {"type":"error","error":{"type":"api_error","message":'),
    ],
)
def test_a_stream_ends_with_an_error_of_its_api(form: ErrorForm, event: str) -> None:
    """As its clients know them; a numbered one has its number."""
    ended = describe(EngineStalled("no token")).event(form, IDS, 9).decode()
    assert ended.startswith(event)
    assert ('"sequence_number":9' in ended) is (form is ErrorForm.RESPONSES)


def test_a_used_up_quota_says_when_to_come_back() -> None:
    """Rounded up, at least a second; a request that no quota could ever hold is wrong, not early."""
    response = describe(OverQuota("tokens", 100, 40, 12.2)).response(RequestContext("r", "t"), ErrorForm.OPENAI)
    assert (response.status_code, response.headers["retry-after"]) == (429, "13")
    assert json.loads(bytes(response.body))["error"]["code"] == "rate_limit_exceeded"
    assert describe(OverQuota("requests", 1, 1, 0.01)).retry_after_s == 1
    larger = describe(OverQuota("tokens", 100, 400, None))
    assert (larger.status, larger.retry_after_s, larger.errors[0].field) == (400, None, "max_tokens")


def test_a_refused_body_closes_the_connection() -> None:
    """The rest of it is not going to be read."""
    response = describe(asgi.BodyTooLarge(10)).response(RequestContext("r", "t"), ErrorForm.PROBLEM)
    assert (response.status_code, response.headers["connection"]) == (413, "close")


@pytest.mark.parametrize(("status", "kind"), [(404, "not-found"), (405, "method-not-allowed"), (418, "i'm-a-teapot")])
def test_starlettes_errors_are_problems_too(status: int, kind: str) -> None:
    assert describe(HTTPException(status, headers={"Allow": "POST"})).kind == kind
