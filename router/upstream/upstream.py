"""Send a request to a replica and take its answer: attempts, timeouts, retries before the first byte."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import count
from secrets import token_hex
from typing import Any, Literal, TypeGuard, cast
from weakref import WeakValueDictionary

import httpx

from router.policy.decision import Decision, RoutingQuery
from router.policy.table import PolicyStore
from router.telemetry.record import Hop, error_name
from router.telemetry.tracing import Telemetry
from router.upstream.engine_request import MESSAGES, EngineRequest
from router.upstream.engine_stream import (
    Attempt,
    BufferedAnswer,
    EngineAnswer,
    EngineStream,
    OverflowHold,
    end_hop,
)
from router.upstream.errors import (
    EngineBrokeError,
    EngineFailedError,
    EngineRefusedError,
    EngineStalledError,
    EngineTooSlowError,
    EngineUnreachableError,
    NoEngineAnsweredError,
    NoSlotError,
    UpstreamError,
    without_trace,
)
from router.upstream.json_object import read_json
from router.upstream.settings import UpstreamSettings
from router.upstream.transport import (
    Body,
    EngineTransport,
    Message,
    Origin,
    body_of,
    json_post,
)
from tiers.choice import Candidate
from tiers.fleet import Fleet, Lease
from tiers.replica import Replica
from tiers.spec import TierName

# small requests without a lease that one engine is sent at once, for each pool
PASSED_AT_ONCE = 16
MAX_ERROR_BYTES = 65536  # no more of an engine's error is read: it would help nobody
# an answer to a small request that is larger takes some milliseconds to read
LARGE_BYTES = 1 << 18
log = logging.getLogger(f"qarr.{__name__}")
# Statuses of an engine that blame the router or the moment, not the request.
# The name of an error or of a field: too short, and of too few characters, to hold much of a prompt.
_NAME = re.compile(r"[A-Za-z_][\w.\[\]-]{0,59}", re.ASCII)
_NOT_THE_REQUEST = {401, 403, 408, 425, 429}
NOT_IMPLEMENTED = 501  # vLLM's status for an option that it does not have
# Who sends a small request without a lease: the router itself, or a caller of one of these endpoints.
Pool = Literal["own", "tokens", "embeddings"]


class RetryBudget:
    """Bounds the load that retries add to engines that fail already: each request earns a share of a retry.

    As Finagle's RetryBudget, and for its reason: a fixed number of attempts multiplies the load when all fail.
    """

    def __init__(self, share: float, reserve: int) -> None:
        self._share = share
        self._reserve = float(reserve)
        self._left = float(reserve)
        self.requests = 0  # since the last retry

    def spend(self) -> bool:
        """Take a retry out of the budget; False: it has none."""
        earned = self._share * self.requests
        self._left = min(self._left + earned, self._reserve)
        self.requests = 0
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Upstream:
    """Sends requests to the fleet's engines, with a lease and retries, or small ones without."""

    def __init__(
        self,
        fleet: Fleet,
        transport: EngineTransport,
        options: UpstreamSettings,
        telemetry: Telemetry,
        policy: PolicyStore,
    ) -> None:
        self._fleet = fleet
        self._transport = transport
        self._telemetry = telemetry
        self._policy = policy
        # Small requests have connections of their own, bounded by their pools: those that hang take none from others.
        self._passing_transport = transport.alike()
        self._passing: WeakValueDictionary[tuple[Pool, str], asyncio.Semaphore] = (
            WeakValueDictionary()
        )
        self._id = token_hex(4)
        self._attempt_numbers = count()
        # before the first byte, by the tier that they went to
        self.retries: Counter[TierName] = Counter()
        self.use(options)

    def use(self, options: UpstreamSettings) -> None:
        """Take over settings, for requests from now on."""
        self._options = options
        self._retries = RetryBudget(options.retry_share, options.retry_reserve)
        connect_times = {
            "connect": options.connect_timeout_s,
            "pool": options.connect_timeout_s,
        }
        self._streamed_times = {**connect_times, "read": options.first_token_timeout_s}
        self._buffered_times = {**connect_times, "read": options.answer_timeout_s}

    def fit(self) -> None:
        """Allow what the fleet's replicas may have at once: each twice its slots, for a failed attempt ends late."""
        slots = sum(replica.spec.max_in_flight for replica in self._fleet.replicas)
        self._transport.allow(2 * slots)

    async def open(
        self,
        decision: Decision,
        request: EngineRequest,
        sent_at: float | None = None,
        *,
        lease: Lease | None = None,
        exclude: Collection[str] = (),
        is_continuation: bool = False,
        elsewhere: bool = True,
    ) -> EngineAnswer:
        """Try the chosen tier, then those that the policy would take instead by now, until an answer has begun.

        ``sent_at`` is when the request was first sent, by the monotonic clock; None: now. ``lease``: a slot on the chosen
        tier; None: one is taken here. ``is_continuation``: the request was admitted and counted before, so its slot may be
        beyond what replicas are to have, and it earns no retries. ``elsewhere``: other tiers may be tried. Replicas to
        ``exclude`` are not.

        Raises:
            EngineRefusedError: An engine says that the request is wrong.
            EngineTooSlowError: An engine did not finish an answer that is not streamed.
            NoSlotError: No replica had a slot any more.
            NoEngineAnsweredError: All attempts failed.
        """
        if sent_at is None:
            sent_at = time.monotonic()
        if not is_continuation:
            self._retries.requests += 1
        errors: dict[str, UpstreamError] = {}  # why attempts failed, by replica
        failed_leases: list[Lease] = []
        tiers: list[TierName] = []
        for tier in self._tiers_to_try(decision, may_switch=elsewhere):
            tiers.append(tier)
            while len(errors) < self._options.attempts:
                lease = lease or lease_for(
                    self._fleet,
                    tier,
                    decision.query,
                    exclude={*errors, *exclude},
                    over_limit=is_continuation or bool(errors),
                )
                if lease is None:
                    break
                self._count_attempt(tier, lease, errors)
                try:
                    answer = await self._attempt(
                        tier, lease, request, number=len(errors), sent_at=sent_at
                    )
                except (
                    EngineUnreachableError,
                    EngineFailedError,
                    EngineBrokeError,
                ) as error:
                    errors[lease.replica.id] = error
                    self._telemetry.record_failed_attempt(lease.replica.id, error)
                    failed_leases.append(lease)
                    lease = None
                else:
                    _blame(failed_leases)
                    return answer
        if not errors:
            raise NoSlotError(f"every slot on {', '.join(tiers)} is taken")
        raise no_answer(errors.values(), *_reports(errors))

    def _tiers_to_try(
        self, decision: Decision, *, may_switch: bool
    ) -> Iterator[TierName]:
        """Yield the chosen tier, then its successors by the fleet's state once attempts on the first tier have failed."""
        assert decision.tier is not None
        yield decision.tier
        if may_switch:
            yield from self._policy.successors(decision.tier, decision.query)

    def _count_attempt(
        self, tier: TierName, lease: Lease, errors: Mapping[str, UpstreamError]
    ) -> None:
        """Take a retry out of the budget if attempts have failed; if it has none, give the lease back and raise."""
        is_retry = bool(errors)
        if is_retry and not self._retries.spend():
            lease.release()
            raise no_answer(
                errors.values(),
                *_reports(errors),
                "no retry, because too many requests fail",
            )
        self.retries[tier] += is_retry

    async def pass_on(
        self,
        url: str,
        api_key: str,
        path: str,
        body: bytes,
        pool: Pool = "own",
        *,
        request_id: str = "",
    ) -> tuple[int, str, bytes]:
        """Pass a small request on to an engine, without a lease, and return status, media type and body.

        An engine has at most ``PASSED_AT_ONCE`` requests of a pool; further ones wait for those, not for others'.

        Raises:
            NoSlotError: The engine has as many of the pool as it may have, and none ended in time.
            EngineUnreachableError: There was no whole answer in time.
            EngineFailedError: The answer is an error of the engine's own.
        """
        headers = self._passing_headers(api_key, request_id)
        places = self._passing.setdefault(
            (pool, url), asyncio.Semaphore(PASSED_AT_ONCE)
        )
        limit_s = self._options.first_token_timeout_s
        has_place = False
        try:
            async with asyncio.timeout(limit_s), places:
                has_place = True
                answer = await self._passing_transport.send(
                    *json_post(url + path, headers, body), self._streamed_times
                )
                content = await body_of(answer)
        except (TimeoutError, httpx.HTTPError) as error:
            if not has_place:
                raise NoSlotError(
                    f"{PASSED_AT_ONCE} such requests had no answer within {limit_s:g} s"
                ) from error
            log.warning("%s%s: no answer (%s)", url, path, type(error).__name__)
            raise EngineUnreachableError(
                f"no answer ({type(error).__name__})"
            ) from error
        failure = _failure_in(answer, content)
        if failure is not None:
            log.warning("%s%s: %s", url, path, failure)
            try:
                raise failure
            finally:
                del (
                    failure
                )  # break the reference cycle between the exception and this frame
        return (
            answer.status,
            answer.header(b"content-type") or "application/json",
            content,
        )

    def _passing_headers(
        self, api_key: str, request_id: str
    ) -> list[tuple[bytes, bytes]]:
        headers = [*self._telemetry.context_headers()]
        if api_key:
            headers.append((b"authorization", b"Bearer " + api_key.encode("ascii")))
        if request_id:
            headers.append((b"x-request-id", request_id.encode("ascii")))
        return headers

    def passes_at_once(self, url: str, pool: Pool) -> bool:
        """Tell whether an engine takes one more small request of a pool without a wait."""
        places = self._passing.get((pool, url))
        return places is None or not places.locked()

    async def aclose(self) -> None:
        await self._transport.aclose()
        await self._passing_transport.aclose()

    async def _attempt(
        self,
        tier: TierName,
        lease: Lease,
        request: EngineRequest,
        *,
        number: int,
        sent_at: float,
    ) -> EngineAnswer:
        """Make one attempt. The lease, the connection and the span end with it unless an answer is returned."""
        replica = lease.replica
        hop = Hop(
            operation=request.operation,
            model=request.adapter or replica.model,
            url=replica.url,
            began=time.monotonic(),
            tier=tier,
            replica=replica.id,
            precision=replica.spec.precision,
            checkpoint=replica.spec.checkpoint_id or "",
            number=number,
            streamed=request.is_streamed,
        )
        self._telemetry.start(hop, request.parameters)
        body: Body | None = None
        times = self._streamed_times if request.is_streamed else self._buffered_times
        try:
            body = await self._transport.send(*self._post(replica, request, hop), times)
            if body.status != httpx.codes.OK:
                content = await body_of(body, MAX_ERROR_BYTES)
                retry_after = body.header(b"retry-after")
                raise status_error(body.status, content, retry_after)  # noqa: TRY301  one place ends the attempt
            attempt = Attempt(
                tier=tier,
                lease=lease,
                body=body,
                hop=hop,
                token_timeout_s=self._options.token_timeout_s,
                silence_timeout_s=self._options.answer_timeout_s,
                sent_at=sent_at,
            )
            answer = (
                EngineStream(attempt, request)
                if request.is_streamed
                else BufferedAnswer(attempt, request.answers)
            )
            answer.ignored = request.ignored_by(replica)
            await answer.begin()
            return answer  # noqa: TRY300  an else block would be far from here
        except BaseException as error:
            await give_up(
                error,
                lease,
                hop,
                body=body,
                limit_s=times["read"],
                streamed=request.is_streamed,
            )
            raise

    def _post(
        self, replica: Replica, request: EngineRequest, hop: Hop
    ) -> tuple[Origin, Message]:
        # Each attempt has an id of its own, since an engine mixes up requests that share one. Callers repeat their ids,
        # several routers share engines, and an engine may still hold an attempt that was given up.
        attempt_id = f"{request.request_id}-{self._id}-{next(self._attempt_numbers):x}"
        headers = [(b"x-request-id", attempt_id.encode("ascii"))]
        if replica.api_key:
            headers.append(
                (b"authorization", b"Bearer " + replica.api_key.encode("ascii"))
            )
        if request.path == MESSAGES and request.priority and replica.takes_priority:
            # The body of a message has no member for it.
            headers.append((b"x-vllm-priority", b"%d" % request.priority))
        if request.resume_point is not None:
            headers.append((b"x-qarr-resume", b"1"))
        if request.wants_token_notes(replica):
            headers.append((b"x-qarr-tokens", b"1"))
        headers += hop.headers
        return json_post(replica.url + request.path, headers, request.body(replica))


def lease_for(
    fleet: Fleet,
    tier: TierName,
    query: RoutingQuery,
    exclude: Collection[str],
    *,
    over_limit: bool = False,
    candidate: Candidate | None = None,
) -> Lease | None:
    """Return a slot for a request on a tier, apart from replicas to exclude; None: there is none."""
    if query.precisions is not None:
        unfit_replicas = [
            replica.id for replica in fleet.replicas if not query.takes(replica.spec)
        ]
        exclude = [*exclude, *unfit_replicas]
    return fleet.lease(
        tier,
        prompt_tokens=query.tokens_to_read,
        max_tokens=query.max_tokens,
        sequences=query.sequences,
        exclude=exclude,
        over_limit=over_limit,
        prefix=query.prefix,
        candidate=candidate,
    )


def no_answer(errors: Iterable[UpstreamError], *texts: str) -> NoEngineAnsweredError:
    """Return the error for attempts that all failed: it says the ``texts``, and when to ask again."""
    waits_s = [getattr(error, "retry_after_s", None) or 0.0 for error in errors]
    shortest_wait_s = min(waits_s, default=0.0)
    return NoEngineAnsweredError("; ".join(texts), shortest_wait_s or None)


def _reports(errors: Mapping[str, UpstreamError]) -> list[str]:
    """Return why each attempt failed, with its replica."""
    return [f"{replica_id}: {error}" for replica_id, error in errors.items()]


def _failure_in(answer: Body, content: bytes) -> UpstreamError | None:
    """Return what is wrong with an engine's answer to a small request; None: it can be passed on, as can a refusal."""
    if answer.status != httpx.codes.OK:
        error = status_error(answer.status, content, answer.header(b"retry-after"))
        return None if isinstance(error, EngineRefusedError) else error
    if not _holds_object(content):
        return EngineFailedError("an answer that is no JSON object")
    return None


def _holds_object(content: bytes) -> bool:
    """Tell whether an answer holds a JSON object.

    Of a large one only the first and the last byte are checked: other requests would wait while it is read.
    """
    if len(content) > LARGE_BYTES:
        return content.lstrip()[:1] == b"{" and content.rstrip()[-1:] == b"}"
    try:
        return isinstance(read_json(content), dict)
    except ValueError:
        return False


async def give_up(
    error: BaseException,
    lease: Lease | OverflowHold,
    hop: Hop,
    *,
    body: Body | None,
    limit_s: float,
    streamed: bool,
) -> None:
    """End an attempt that failed before its answer began. Raise the failure where ``error`` is only how it showed."""
    failure = _translate(error, limit_s, streamed=streamed)
    try:
        if isinstance(failure, UpstreamError) and not isinstance(
            failure, EngineRefusedError
        ):
            lease.failed(
                error_name(failure),
                is_judged=not _is_requests_fault_possible(failure),
            )
        lease.release()
        end_hop(hop, failure)
        if body is not None:
            await body.aclose()
        if failure is not error:
            raise failure from without_trace(error)
    finally:
        del failure  # break the reference cycle between the exception and this frame


def _blame(failed_leases: Iterable[Lease]) -> None:
    """Let failed attempts speak against their replicas: another one answers the same request."""
    for lease in failed_leases:
        lease.blame()


def _is_requests_fault_possible(error: BaseException) -> bool:
    return isinstance(error, EngineFailedError) and error.is_requests_fault_possible


def _translate(
    error: BaseException, limit_s: float, *, streamed: bool
) -> BaseException:
    """Return our error for one of the connection before an answer began; return other errors as they are."""
    if isinstance(error, httpx.ReadTimeout | EngineStalledError):
        if streamed:
            return EngineUnreachableError(f"no first token within {limit_s:g} s")
        return EngineTooSlowError(
            f"no whole answer within {limit_s:g} s; a streamed one may take longer"
        )
    if isinstance(error, httpx.HTTPError):
        return EngineUnreachableError(f"no answer: {error}")
    return error


def status_error(
    status: int, body: bytes | None, retry_after: str | None = None
) -> UpstreamError:
    """Return the error for an answer that is not 200: the request's fault if the engine says so in vLLM's form.

    An answer in another form comes from a proxy in front of the engine, or from no vLLM. ``body`` None: the form is not
    checked. ``retry_after``: that header.
    """
    is_client_error = 400 <= status < 500 and status not in _NOT_THE_REQUEST  # noqa: PLR2004
    if not is_client_error and status != NOT_IMPLEMENTED:
        is_engines_own = status == httpx.codes.INTERNAL_SERVER_ERROR and (
            body is not None and _vllm_error_in(body) is not None
        )
        return EngineFailedError(
            f"HTTP {status}",
            _seconds_in(retry_after),
            is_requests_fault_possible=is_engines_own,
        )
    if body is None:
        return refusal(status, b"")
    vllm_error = _vllm_error_in(body)
    if vllm_error is None:
        return EngineFailedError(f"HTTP {status}, and not in vLLM's form")
    if status == httpx.codes.NOT_FOUND and vllm_error.get("param") == "model":
        return EngineFailedError(
            "it serves another model than before"
        )  # the router has named the model, not the caller
    return refusal(status, body)


def _vllm_error_in(body: bytes) -> dict[str, Any] | None:
    """Return the error that an answer holds, in vLLM's present form or in an older one; None: it holds none."""
    try:
        answer = read_json(body)
    except ValueError:
        return None
    if not isinstance(answer, dict):
        return None
    error = answer.get("error")
    if isinstance(error, dict):
        return cast("dict[str, Any]", error)
    if answer.get("object") == "error" or isinstance(answer.get("detail"), list):
        return answer
    return None


def _seconds_in(retry_after: str | None) -> float | None:
    """Return the seconds that a ``Retry-After`` header says, as a number or as a date; None: it says neither."""
    text = (retry_after or "").strip()
    if text.isdecimal():
        return float(text[:9])
    try:
        wait = parsedate_to_datetime(text) - datetime.now(UTC)
        return max(wait.total_seconds(), 0.0)
    except (TypeError, ValueError):
        return None


def refusal(status: int, body: bytes) -> EngineRefusedError:
    """Return the error for a request that an engine refuses, with the beginning of the engine's message."""
    error = _vllm_error_in(body) or {}
    message = str(error.get("message") or f"HTTP {status}")[:300]
    names = [error.get("type"), error.get("param")]
    kind = " of ".join(filter(_is_name, names))
    return EngineRefusedError(message, status, body, kind=kind)


def _is_name(value: object) -> TypeGuard[str]:
    """Tell whether what an engine says is the name of an error or of a field, and holds nothing of a prompt."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None
