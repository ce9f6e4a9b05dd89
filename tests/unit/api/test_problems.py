"""What callers see of errors: one table, complete, and never more than they are to see."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from functools import cache

import pytest
from msgspec import structs

from router.api import asgi, problems, resumable
from router.api.paths import ErrorForm
from router.api.problems import PROBLEMS, describe
from router.auth.quota import OverQuotaError
from router.pipeline.request import RequestContext
from router.policy.decision import Decision, Refusal, RequestRefusedError
from router.section import PROJECT
from router.upstream import errors as upstream_errors
from router.upstream.errors import EngineRefusedError, UpstreamError
from tests.unit.pipeline.registries import ended, registry_of
from tests.unit.upstream_stack import UpstreamStack, upstream_stack
from tiers.spec import STANDARD_TIERS, ReplicaStatus

IDS = {"request_id": "r", "trace_id": "t"}


def test_every_upstream_error_has_a_problem() -> None:
    """Each error of the upstream's tree maps to a 4xx or 5xx of its own, none falls through to 500."""
    errors = [
        e
        for _, e in inspect.getmembers(upstream_errors, inspect.isclass)
        if issubclass(e, UpstreamError)
    ]
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
    own = [
        e
        for _, e in inspect.getmembers(module, inspect.isclass)
        if e.__module__ == getattr(module, "__name__", "")
    ]
    errors = [
        e for e in own if issubclass(e, Exception) and e is not asgi.ClientGoneError
    ]
    assert errors
    assert set(errors) <= PROBLEMS.keys()


def test_unforeseen_errors_tell_nothing() -> None:
    """An error that nobody thought of is a 500 without its text."""
    problem = describe(RuntimeError("secret path /etc/shadow"))
    assert problem.status == 500
    assert problem.headers == {"connection": "close"}
    assert "secret" not in str(problem.body({}))
    assert problems.MEDIA_TYPE == "application/problem+json"


def test_a_used_up_quota_says_when_to_come_back() -> None:
    """Rounded up, at least a second; a request that no quota could ever hold is wrong, not early."""
    response = describe(
        OverQuotaError("tokens", 100, requested_tokens=40, retry_after_s=12.2)
    ).response(RequestContext("r", "t"), ErrorForm.OPENAI)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "13"
    assert json.loads(bytes(response.body))["error"]["code"] == "rate_limit_exceeded"
    assert (
        describe(
            OverQuotaError("requests", 1, requested_tokens=1, retry_after_s=0.01)
        ).retry_after_s
        == 1
    )
    larger = describe(
        OverQuotaError("tokens", 100, requested_tokens=400, retry_after_s=None)
    )
    assert larger.status == 400
    assert larger.retry_after_s is None
    assert larger.errors[0].field == "max_tokens"


def test_a_refused_body_closes_the_connection() -> None:
    """The rest of it is not going to be read."""
    response = describe(asgi.BodyTooLargeError(10)).response(
        RequestContext("r", "t"), ErrorForm.PROBLEM
    )
    assert response.status_code == 413
    assert response.headers["connection"] == "close"


NO_OUTCOME = "-"
# Refused before it is known what is asked for, or asked at an endpoint that generates nothing.
UNRECORDED = {
    "invalid-request", "not-http", "unauthorized", "beyond-key", "not-admin", "foreign-page", "not-found",
    "stream-not-found", "replica-not-found", "trace-not-found", "model-not-found", "embeddings-not-served",
    "response-not-stored", "method-not-allowed", "too-slow", "resumed-elsewhere", "not-possible", "not-reloaded",
    "stream-gone", "body-too-large", "unknown-coding", "foreign-host", "head-too-large", "draining",
    "too-many-connections", "too-many-bodies", "issuer-away",
}  # fmt: skip


@cache
def documented() -> dict[tuple[int, str], str]:
    """Return the outcome of each problem, by status and name, as docs/api.md has it."""
    rows = re.findall(
        r"^\| (\d{3}) \| (.+) \| (\S+) \|$",
        (PROJECT / "docs/api.md").read_text("utf-8"),
        re.MULTILINE,
    )
    found = {}
    for status, names, outcome in rows:
        for name in re.findall(
            r"`([a-z-]+-[a-z-]+|unauthorized|excluded|unsupported|draining)`", names
        ):
            found[int(status), name] = outcome.strip("`")
    return found


def refusals(stack: UpstreamStack) -> Iterator[RequestRefusedError]:
    """Yield every refusal of the policy, also those where waiting does not help, and of a tier that is not there."""
    decision = stack.decision()
    for refusal in Refusal:
        for retry_after_s in (None, 2.0):
            refused = structs.replace(
                decision, tier=None, refusal=refusal, retry_after_s=retry_after_s
            )
            yield RequestRefusedError(refused)
    yield RequestRefusedError(requiring_absent(decision))


def requiring_absent(decision: Decision) -> Decision:
    """Return the refusal of a request that requires a tier which the router does not serve."""
    choice = decision.comparison
    query = structs.replace(decision.query, hint=STANDARD_TIERS[0], require=True)
    absent = structs.replace(choice.estimates[0], state=ReplicaStatus.ABSENT)
    choice = structs.replace(
        choice, query=query, estimates=(absent, *choice.estimates[1:])
    )
    return structs.replace(
        decision, tier=None, refusal=Refusal.NOT_READY, query=query, comparison=choice
    )


@pytest.mark.anyio
async def test_outcomes_are_as_documented() -> None:
    """What the caller has to end, a 4xx, is refused and no error; what an engine or the router breaks is an error."""
    errors: list[Exception] = [
        OverQuotaError("tokens", 5, requested_tokens=9, retry_after_s=None),
        OverQuotaError("requests", 1, requested_tokens=1, retry_after_s=3.0),
    ]
    errors += [
        e("why")
        for _, e in inspect.getmembers(upstream_errors, inspect.isclass)
        if issubclass(e, UpstreamError)
    ]
    async with upstream_stack() as stack:
        for error in [*errors, *refusals(stack), RuntimeError("why")]:
            problem = describe(error)
            registry = registry_of()
            record = ended(registry, stack.decision(), error)
            assert documented()[problem.status, problem.kind] == record.outcome.value, (
                error
            )
            if 400 <= problem.status < 500:
                assert record.outcome.value == "refused"
            assert registry.totals[record.outcome.value] == 1


def test_every_problem_is_documented_with_its_outcome() -> None:
    """Those that no record is made of have none."""
    assert {
        name for (_, name), outcome in documented().items() if outcome == NO_OUTCOME
    } == UNRECORDED
    source = inspect.getsource(problems)
    named = set(re.findall(r'(?:_plain|_at|Problem)\(\s*\d{3}, "([a-z-]+)"', source))
    named |= {refusal.value.replace("_", "-") for refusal in Refusal}
    assert named - {name for _, name in documented()} == set()


@pytest.mark.anyio
@pytest.mark.parametrize("required", [True, False])
async def test_a_refusal_says_whether_one_tier_was_required(*, required: bool) -> None:
    """Other tiers could have served then: their state is not what is told; nor is a future promised that there is not."""
    async with upstream_stack() as stack:
        decision = stack.decision()
        query = structs.replace(
            decision.query, require=True, hint=STANDARD_TIERS[0] if required else None
        )
        for refusal in Refusal:
            refused = structs.replace(
                decision, tier=None, refusal=refusal, query=query, retry_after_s=None
            )
            title = describe(RequestRefusedError(refused)).title
            assert ("require" in title.replace("required SLA", "")) is required, title
            assert not title.endswith(" now")
            assert (
                "No tier" not in title and "Every tier" not in title
            ) or not required
        absent = describe(RequestRefusedError(requiring_absent(decision)))
        assert absent.status == 422
        assert absent.openai == (400, "tier_absent")
        assert (
            absent.title
            == "This router does not serve the tier that the request requires"
        )
