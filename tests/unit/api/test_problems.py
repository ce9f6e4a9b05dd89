"""What callers see of errors: one table, complete, and never more than they are to see."""

from __future__ import annotations

import inspect
import json

import pytest

from router.api import asgi, problems, resumable
from router.api.paths import ErrorForm
from router.api.problems import PROBLEMS, describe
from router.auth.quota import OverQuotaError
from router.pipeline.request import RequestContext
from router.upstream import errors as upstream_errors
from router.upstream.errors import EngineRefusedError, UpstreamError

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
    assert describe(EngineRefusedError("why")).status == 422


@pytest.mark.parametrize("module", [asgi, problems, resumable])
def test_every_error_of_the_endpoints_has_a_problem(module: object) -> None:
    """An error that an endpoint defines is one that callers are told of; that a client has gone is told to nobody."""
    own = [e for _, e in inspect.getmembers(module, inspect.isclass) if e.__module__ == getattr(module, "__name__", "")]
    errors = [e for e in own if issubclass(e, Exception) and e is not asgi.ClientGoneError]
    assert errors
    assert set(errors) <= PROBLEMS.keys()


def test_unforeseen_errors_tell_nothing() -> None:
    """An error that nobody thought of is a 500 without its text."""
    problem = describe(RuntimeError("secret path /etc/shadow"))
    assert problem.status == 500
    assert "secret" not in str(problem.body({}))
    assert problems.MEDIA_TYPE == "application/problem+json"


def test_a_used_up_quota_says_when_to_come_back() -> None:
    """Rounded up, at least a second; a request that no quota could ever hold is wrong, not early."""
    response = describe(OverQuotaError("tokens", 100, 40, 12.2)).response(RequestContext("r", "t"), ErrorForm.OPENAI)
    assert (response.status_code, response.headers["retry-after"]) == (429, "13")
    assert json.loads(bytes(response.body))["error"]["code"] == "rate_limit_exceeded"
    assert describe(OverQuotaError("requests", 1, 1, 0.01)).retry_after_s == 1
    larger = describe(OverQuotaError("tokens", 100, 400, None))
    assert (larger.status, larger.retry_after_s, larger.errors[0].field) == (400, None, "max_tokens")


def test_a_refused_body_closes_the_connection() -> None:
    """The rest of it is not going to be read."""
    response = describe(asgi.BodyTooLargeError(10)).response(RequestContext("r", "t"), ErrorForm.PROBLEM)
    assert (response.status_code, response.headers["connection"]) == (413, "close")
