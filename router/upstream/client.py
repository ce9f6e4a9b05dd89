"""Send a request to a replica and take its answer: attempts, timeouts, retries before the first byte."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import count
from secrets import token_hex
from typing import Any, Literal, cast
from weakref import WeakValueDictionary

import httpx

from router.policy.decision import Decision, Query
from router.policy.table import PolicyStore
from router.telemetry.record import Hop, error_name
from router.telemetry.tracing import Telemetry
from router.upstream.engine_request import MESSAGES, EngineRequest
from router.upstream.engine_stream import Attempt, BufferedAnswer, EngineAnswer, EngineStream, OverflowHold, end_hop
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
from router.upstream.transport import Body, EngineTransport, Origin, body_of, json_post
from tiers.choice import Candidate
from tiers.fleet import Fleet, Lease
from tiers.replica import Replica
from tiers.spec import TierName

PASSED_AT_ONCE = 16  # small requests without a lease, of one pool at one engine
MAX_ERROR_BYTES = 65536  # of an engine's error that are read; more of it helps nobody
LARGE_BYTES = 1 << 18  # of an answer to a small request, which takes some milliseconds to read
log = logging.getLogger(f"qarr.{__name__}")
# Statuses of an engine that blame the router or the moment, not the request.
_NOT_THE_REQUEST = {401, 403, 408, 425, 429}
NOT_IMPLEMENTED = 501  # vLLM's word for an option that it does not have
# Who sends a small request without a lease: the router itself, or a caller of one of these endpoints.
Pool = Literal["own", "tokens", "embeddings"]


class RetryBudget:
    """Bounds what retries add to the load of engines that fail already: each request earns a share of one.

    As Finagle's RetryBudget, and for its reason: a fixed number of attempts multiplies the load when all fail.
    """

    def __init__(self, share: float, reserve: int) -> None:
        self._share, self._reserve, self._left = share, float(reserve), float(reserve)
        self.requests = 0  # since the last retry

    def spend(self) -> bool:
        self._left, self.requests = min(self._left + self._share * self.requests, self._reserve), 0
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Upstream:
    def __init__(
        self,
        fleet: Fleet,
        transport: EngineTransport,
        options: UpstreamSettings,
        telemetry: Telemetry,
        policy: PolicyStore,
    ) -> None:
        self._fleet, self._transport, self._telemetry = fleet, transport, telemetry
        # Small requests have connections of their own, bounded by their pools: those that hang take none from others.
        self._passing_transport = transport.alike()
        self._passing: WeakValueDictionary[tuple[Pool, str], asyncio.Semaphore] = WeakValueDictionary()
        self._policy, self._id, self._numbers = policy, token_hex(4), count()
        self.retries: Counter[TierName] = Counter()  # before the first byte, by the tier that they went to
        self.use(options)

    def use(self, options: UpstreamSettings) -> None:
        self._options = options
        self._retries = RetryBudget(options.retry_share, options.retry_reserve)
        limits = {"connect": options.connect_timeout_s, "pool": options.connect_timeout_s}
        self._streamed = {**limits, "read": options.first_token_timeout_s}
        self._whole = {**limits, "read": options.answer_timeout_s}

    def fit(self) -> None:
        """Allow what the fleet's replicas may have at once: each twice its slots, for a failed attempt ends late."""
        self._transport.allow(2 * sum(replica.spec.max_in_flight for replica in self._fleet.replicas))

    async def open(
        self,
        decision: Decision,
        request: EngineRequest,
        sent_at: float | None = None,
        *,
        lease: Lease | None = None,
        exclude: Collection[str] = (),
        over_limit: bool = False,
        elsewhere: bool = True,
    ) -> EngineAnswer:
        """Try the chosen tier, then those that the policy would take instead by now, until an answer has begun.

        ``sent_at`` is when the request was first sent, by the monotonic clock; None: now. ``lease``: a slot on the chosen
        tier; None: one is taken here, with ``over_limit`` beyond what replicas are to have. Others may be tried
        ``elsewhere``.

        Raises:
            EngineRefusedError: An engine says that the request is wrong.
            EngineTooSlowError: An engine did not finish an answer that is not streamed.
            NoSlotError: No replica had a slot any more.
            NoEngineAnsweredError: All attempts failed.
        """
        assert decision.tier is not None
        tried, told, taken = dict[str, UpstreamError](), list[str](), set[str]()
        sent_at = sent_at or time.monotonic()
        self._retries.requests += 1
        targets = [decision.tier]
        for tier in targets:
            while len(tried) < self._options.attempts:
                lease = lease or lease_for(
                    self._fleet, tier, decision.query, {*taken, *exclude}, over_limit=over_limit or bool(tried)
                )
                if lease is None:
                    break
                taken.add(lease.replica.id)
                if tried and not self._retries.spend():
                    lease.release()
                    raise no_answer(tried.values(), *told, "no retry, because too many requests fail")
                self.retries[tier] += bool(tried)
                try:
                    return await self._attempt(tier, lease, request, len(tried), sent_at)
                except (EngineUnreachableError, EngineFailedError, EngineBrokeError) as error:
                    tried[lease.replica.id] = error
                    told.append(f"{lease.replica.id}: {error}")
                    self._telemetry.record_failed_attempt(lease.replica.id, error)
                    lease = None
            if elsewhere and len(targets) == 1:  # as things stand now, not when the request was admitted
                targets += self._policy.successors(tier, decision.query)
        if not tried:
            raise NoSlotError(f"every slot on {', '.join(targets)} is taken")
        raise no_answer(tried.values(), *told)

    async def pass_on(
        self, url: str, api_key: str, path: str, body: bytes, pool: Pool = "own", *, request_id: str = ""
    ) -> tuple[int, str, bytes]:
        """Pass a small request on to an engine, without a lease, and return status, media type and body.

        An engine has at most ``PASSED_AT_ONCE`` requests of a pool; further ones wait for those, not for others'.

        Raises:
            NoSlotError: The engine has as many of the pool as it may have, and none ended in time.
            EngineUnreachableError: There was no whole answer in time.
            EngineFailedError: The answer is an error of the engine's own.
        """
        headers = [*self._telemetry.context_headers()]
        if api_key:
            headers.append((b"authorization", b"Bearer " + api_key.encode("ascii")))
        if request_id:
            headers.append((b"x-request-id", request_id.encode("ascii")))
        places = self._passing.setdefault((pool, url), asyncio.Semaphore(PASSED_AT_ONCE))
        limit_s, sent = self._options.first_token_timeout_s, False
        try:
            async with asyncio.timeout(limit_s), places:
                sent = True
                answer = await self._passing_transport.send(*json_post(url + path, headers, body), self._streamed)
                content = await body_of(answer)
        except (TimeoutError, httpx.HTTPError) as error:
            if not sent:
                raise NoSlotError(f"{PASSED_AT_ONCE} such requests had no answer within {limit_s:g} s") from error
            log.warning("%s%s: no answer (%s)", url, path, type(error).__name__)
            raise EngineUnreachableError(f"no answer ({type(error).__name__})") from error
        if answer.status != httpx.codes.OK:
            failure = status_error(answer.status, content, answer.header(b"retry-after"))
            if not isinstance(failure, EngineRefusedError):
                log.warning("%s%s: %s", url, path, failure)
                raise failure
        elif not _holds_object(content):
            log.warning("%s%s: an answer that is no JSON object", url, path)
            raise EngineFailedError("an answer that is no JSON object")
        return answer.status, answer.header(b"content-type") or "application/json", content

    def passes_at_once(self, url: str, pool: Pool) -> bool:
        """Tell whether an engine takes one more small request of a pool without a wait."""
        places = self._passing.get((pool, url))
        return places is None or not places.locked()

    async def aclose(self) -> None:
        await self._transport.aclose()
        await self._passing_transport.aclose()

    async def _attempt(
        self, tier: TierName, lease: Lease, request: EngineRequest, number: int, sent_at: float
    ) -> EngineAnswer:
        """Make one attempt. The lease, the connection and the span end with it unless an answer is returned."""
        replica = lease.replica
        hop = Hop(
            request.operation,
            request.adapter or replica.model,
            replica.url,
            time.monotonic(),
            tier=tier,
            replica=replica.id,
            precision=replica.spec.precision,
            checkpoint=replica.spec.checkpoint_id or "",
            number=number,
            streamed=request.streamed,
        )
        self._telemetry.start(hop, request.parameters)
        body: Body | None = None
        times = self._streamed if request.streamed else self._whole
        try:
            body = await self._transport.send(*self._post(replica, request, hop), times)
            if body.status != httpx.codes.OK:
                content, later = await body_of(body, MAX_ERROR_BYTES), body.header(b"retry-after")
                raise status_error(body.status, content, later)  # noqa: TRY301  one place ends the attempt
            begun = Attempt(
                tier=tier, lease=lease, body=body, hop=hop, sent_at=sent_at,
                token_timeout_s=self._options.token_timeout_s, silence_timeout_s=self._options.answer_timeout_s,
            )  # fmt: skip
            answer = EngineStream(begun, request) if request.streamed else BufferedAnswer(begun, request.answers)
            answer.ignored = request.ignored_by(replica)
            await answer.begin()
            return answer  # noqa: TRY300  an else block would be far from here
        except BaseException as error:
            await give_up(error, lease, hop, body, times["read"], streamed=request.streamed)
            raise

    def _post(self, replica: Replica, request: EngineRequest, hop: Hop) -> tuple[Origin, bytes]:
        # Callers repeat their ids, several routers share engines, and an engine may still hold an attempt that was given up:
        # it mixes up requests of one id.
        number = f"{request.request_id}-{self._id}-{next(self._numbers):x}"
        headers = [(b"x-request-id", number.encode("ascii"))]
        if replica.api_key:
            headers.append((b"authorization", b"Bearer " + replica.api_key.encode("ascii")))
        if request.path == MESSAGES and request.priority and replica.takes_priority:  # its body cannot say it
            headers.append((b"x-vllm-priority", b"%d" % request.priority))
        headers += hop.headers
        return json_post(replica.url + request.path, headers, request.body(replica))


def lease_for(
    fleet: Fleet, tier: TierName, query: Query, exclude: Collection[str], *, over_limit: bool = False,
    found: Candidate | None = None,
) -> Lease | None:  # fmt: skip
    """Return a slot for a request on a tier, apart from replicas to exclude; None: there is none."""
    if query.precisions is not None:
        exclude = [*exclude, *(r.id for r in fleet.replicas if not query.takes(r.spec))]
    return fleet.lease(
        tier,
        prompt_tokens=query.tokens_to_read,
        max_tokens=query.max_tokens,
        sequences=query.sequences,
        exclude=exclude,
        over_limit=over_limit,
        prefix=query.prefix,
        found=found,
    )


def no_answer(errors: Iterable[UpstreamError], *told: str) -> NoEngineAnsweredError:
    """Return the error for attempts that all failed: it says what is ``told``, and when to ask again."""
    waits = [getattr(error, "retry_after_s", None) or 0.0 for error in errors]
    return NoEngineAnsweredError("; ".join(told), min(waits, default=0.0) or None)


def _holds_object(content: bytes) -> bool:
    """Tell whether an answer holds a JSON object; a large one is looked at from outside only, for the sake of others."""
    if len(content) > LARGE_BYTES:
        return content.lstrip()[:1] == b"{" and content.rstrip()[-1:] == b"}"
    try:
        return isinstance(read_json(content), dict)
    except ValueError:
        return False


async def give_up(
    error: BaseException, lease: Lease | OverflowHold, hop: Hop, body: Body | None, limit_s: float, *,
    streamed: bool,
) -> None:  # fmt: skip
    """End an attempt that failed before its answer began; raise why, where that is another error."""
    failure = _translated(error, limit_s, streamed=streamed)
    try:
        if isinstance(failure, UpstreamError) and not isinstance(failure, EngineRefusedError):
            lease.failed(error_name(failure))
        lease.release()
        end_hop(hop, failure)
        if body is not None:
            await body.aclose()
        if failure is not error:
            raise failure from without_trace(error)
    finally:
        del failure  # its trace leads here


def _translated(error: BaseException, limit_s: float, *, streamed: bool) -> BaseException:
    """Return the error for what went wrong before an answer began, where it is one of the connection."""
    if isinstance(error, httpx.ReadTimeout | EngineStalledError):
        if streamed:
            return EngineUnreachableError(f"no first token within {limit_s:g} s")
        return EngineTooSlowError(f"no whole answer within {limit_s:g} s; a streamed one may take longer")
    if isinstance(error, httpx.HTTPError):
        return EngineUnreachableError(f"no answer: {error}")
    return error


def status_error(status: int, body: bytes | None, retry_after: str | None = None) -> UpstreamError:
    """Return the error for an answer that is not 200: the request's fault if the engine says so in vLLM's form.

    What has another form is of a proxy in front of it, or of no vLLM; ``body`` None: it is not looked at. ``retry_after``:
    that header.
    """
    blamed = (400 <= status < 500 and status not in _NOT_THE_REQUEST) or status == NOT_IMPLEMENTED  # noqa: PLR2004
    if not blamed:
        return EngineFailedError(f"HTTP {status}", _retry_after(retry_after))
    if body is None:
        return refusal(status, b"")
    if (said := _said(body)) is None:
        return EngineFailedError(f"HTTP {status}, and not in vLLM's form")
    if status == httpx.codes.NOT_FOUND and said.get("param") == "model":  # the router has named it, not the caller
        return EngineFailedError("it serves another model than before")
    return refusal(status, body)


def _said(body: bytes) -> dict[str, Any] | None:
    try:
        found = read_json(body)
    except ValueError:
        return None
    if isinstance(found, dict) and isinstance(found.get("error"), dict):
        return cast("dict[str, Any]", found["error"])
    old = isinstance(found, dict) and (found.get("object") == "error" or isinstance(found.get("detail"), list))
    return found if old else None


def _retry_after(header: str | None) -> float | None:
    given = (header or "").strip()
    if given.isdecimal():
        return float(given[:9])
    try:
        return max((parsedate_to_datetime(given) - datetime.now(UTC)).total_seconds(), 0.0)
    except (TypeError, ValueError):
        return None


def refusal(status: int, body: bytes) -> EngineRefusedError:
    try:
        message = read_json(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = ""
    return EngineRefusedError(str(message)[:300] or f"HTTP {status}", status, body)
