"""Clients by which tiers are measured: through a running router, or from within it. Both yield to others' requests."""

from __future__ import annotations

import asyncio
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import httpx

from router.policy.profiles import ProfileError
from router.profiling.scoring import COMPLETIONS
from tiers.spec import TierName

Sent = AbstractAsyncContextManager[httpx.Response]

SHORTEST_LOOK_S, LOOK_S = 0.05, 0.5  # between two looks whether others are served
BUSY_WAIT_S, LONGEST_WAIT_S = 1.0, 10.0  # before a refused request is sent again
# for others' requests to end, or for a slot of a full or absent tier
MAX_WAIT_S = 600.0
ANSWER_TIMEOUT_S = 900.0
TRY_LATER = {httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE}


class NoRouterError(ProfileError):
    """What answers at the router's address is no router."""


def first_of(errors: BaseExceptionGroup[ProfileError]) -> ProfileError:
    first = errors.exceptions[0]
    return first_of(first) if isinstance(first, BaseExceptionGroup) else first


class MeasuredTier(NamedTuple):
    identity: str | None  # digest or URL of what it serves
    replicas: int  # number of ready ones
    max_num_seqs: int
    max_model_len: int
    adapters: Sequence[str] = ()  # LoRA adapters that it offers


@dataclass(frozen=True, slots=True)
class FleetState:
    model: str
    machine: str
    # digest or URL of what each tier serves, ready or not
    checkpoints: Mapping[TierName, str | None]
    tiers: Mapping[TierName, MeasuredTier]  # the ready ones
    in_flight: int = 0  # requests on all replicas
    served: int = 0  # requests that all replicas have completed
    measuring: str | None = None  # what the router measures itself now; None: nothing


class Timed(NamedTuple):
    """One timed answer. Start and end by the monotonic clock in seconds."""

    prompt_tokens: int
    ttft_ms: float
    tpot_ms: float | None  # None for fewer than two tokens, or if all came at once
    started: float
    ended: float


class Client(ABC):
    """Sends a measurement's requests, greedy and with the lowest priority. One event loop owns it; close it."""

    patience_s = MAX_WAIT_S  # for others' requests to end
    slot_patience_s = MAX_WAIT_S  # of a timed request, for a slot

    def __init__(
        self, base_url: str = "", key: str = "", *, verify: ssl.SSLContext | bool = True
    ) -> None:
        self._url, self._looking = base_url, asyncio.Lock()
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=ANSWER_TIMEOUT_S,
            trust_env=False,
            limits=httpx.Limits(max_connections=None),
            verify=verify,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    @abstractmethod
    async def fleet(self) -> FleetState:
        """Return the fleet's present state; ``ProfileError``: nobody answers, or shows it with this key."""

    @abstractmethod
    async def undisturbed(
        self, step: Callable[[], Coroutine[Any, Any, None]], waiting: Callable[[], None]
    ) -> bool:
        """Run a step, made of calls of ``time``, once nobody else is served; tell whether it stayed undisturbed.

        ``waiting`` is called while others' requests are waited for.
        """

    @abstractmethod
    def _send(
        self,
        tier: TierName,
        path: str,
        body: Mapping[str, Any],
        adapter: str | None = None,
    ) -> Sent:
        """Send a request; a tier without a free slot answers 503. ``ProfileError``: nobody answers."""

    @abstractmethod
    async def _is_quiet(self) -> bool:
        """Tell whether nobody else is served, nor was a moment ago."""

    async def ask(
        self,
        path: str,
        tier: TierName,
        body: Mapping[str, Any],
        waiting: Callable[[], None] = lambda: None,
        adapter: str | None = None,
    ) -> Any:
        """Return a tier's whole answer at a path of OpenAI's API, computed while nobody else is served.

        ``waiting`` is called while others' requests are waited for. ``adapter``: the LoRA adapter that is to answer; None:
        the model itself. ``ProfileError``: the tier refuses, or has no free slot for ``MAX_WAIT_S``.
        """
        deadline = time.monotonic() + MAX_WAIT_S
        while True:
            await self.until_quiet(waiting)
            async with self._send(tier, path, body, adapter) as response:
                await response.aread()
            if response.status_code == httpx.codes.OK:
                return response.json()
            await _later(tier, response, deadline)

    async def time(
        self, tier: TierName, prompt: list[int], tokens: int, begun: Callable[[], None]
    ) -> Timed:
        """Time one answer of exactly ``tokens`` tokens to a prompt of token ids, within ``undisturbed``.

        ``begun`` is called with the first token. ``ProfileError``: the tier refuses, or breaks the answer off.
        """
        body = {
            "prompt": prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
        body["stream_options"] = {"include_usage": True}
        deadline = time.monotonic() + self.slot_patience_s
        while True:
            started = time.monotonic()
            async with self._send(tier, COMPLETIONS, body) as response:
                if response.status_code == httpx.codes.OK:
                    first, last = await _times(response, tier, begun)
                    # An answer may come all at once if the router got no processor time; it has no pace to measure.
                    tpot_ms = (
                        (last - first) * 1000 / (tokens - 1)
                        if tokens > 1 and last > first
                        else None
                    )
                    return Timed(
                        len(prompt), (first - started) * 1000, tpot_ms, started, last
                    )
                await response.aread()
            await _later(tier, response, deadline)

    async def until_quiet(self, waiting: Callable[[], None] = lambda: None) -> None:
        """Wait while others' requests are served. One look serves all waiting callers."""
        deadline, pause_s = time.monotonic() + self.patience_s, SHORTEST_LOOK_S
        async with self._looking:
            while not await self._is_quiet() and time.monotonic() < deadline:
                # not for the moment in which its own leases are released
                if pause_s >= LOOK_S:
                    waiting()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LOOK_S)


class RouterClient(Client):
    """A client of a running router, with the lowest priority."""

    _own = _served = 0  # its requests in flight, and those that were answered
    _quiet_until = 0.0

    async def fleet(self) -> FleetState:
        try:
            response = await self._http.get("/tiers")
        except httpx.HTTPError as error:
            why = type(error).__name__
            raise ProfileError(
                f"no router answers at {self._url} ({why}): 'make up' starts one"
            ) from error
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise ProfileError(
                "the router needs a key: give one in the variable QARR_KEY"
            )
        try:
            found = response.json()
            known = found["tiers"]
        except (ValueError, KeyError, TypeError):
            raise NoRouterError(
                f"{self._url}/tiers answered HTTP {response.status_code}: is this a router?"
            ) from None
        if found.get("scope") == "own" and any(t["identity"] is None for t in known):
            raise ProfileError(
                "what its engines serve is known by their addresses alone, which the router shows to operators: give a key "
                "made with --admin in the variable QARR_KEY"
            )
        replicas = [r for t in known for r in t["replicas"]]
        return FleetState(
            model=found["model"],
            machine=found["machine"],
            checkpoints={TierName(t["tier"]): t["identity"] for t in known},
            tiers={
                TierName(t["tier"]): MeasuredTier(
                    t["identity"],
                    sum(r["state"] == "ready" for r in t["replicas"]),
                    t["max_num_seqs"],
                    t["max_model_len"],
                    t["adapters"],
                )
                for t in known
                if t["state"] == "ready"
            },
            in_flight=sum(r["in_flight"] for r in replicas),
            served=sum(r["served"] for r in replicas),
            measuring=(found.get("profiling") or {}).get("what"),
        )

    async def undisturbed(
        self, step: Callable[[], Coroutine[Any, Any, None]], waiting: Callable[[], None]
    ) -> bool:
        self._quiet_until = 0.0
        await self.until_quiet(waiting)
        before, answered = (await self.fleet()).served, self._served
        await step()
        after, own = await self.fleet(), self._served - answered
        # Leases are released a moment after the last byte.
        return after.served - before <= own and after.in_flight <= own

    @asynccontextmanager
    async def _send(
        self,
        tier: TierName,
        path: str,
        body: Mapping[str, Any],
        adapter: str | None = None,
    ) -> AsyncIterator[httpx.Response]:
        options = {"tier": tier, "tier_policy": "require", "priority": "batch"}
        body = {"model": adapter or tier, "temperature": 0, "qarr": options, **body}
        self._own += 1
        try:
            async with self._http.stream("POST", path, json=body) as response:
                self._served += response.status_code == httpx.codes.OK
                yield response
        except httpx.HTTPError as error:
            raise ProfileError(
                f"{self._url} does not answer any more ({type(error).__name__})"
            ) from error
        finally:
            self._own -= 1

    async def _is_quiet(self) -> bool:
        if time.monotonic() >= self._quiet_until:
            if (await self.fleet()).in_flight > self._own:
                return False
            self._quiet_until = time.monotonic() + LOOK_S
        return True


async def _times(
    response: httpx.Response, tier: TierName, begun: Callable[[], None]
) -> tuple[float, float]:
    """Read a streamed completion; return when its first and last tokens came, by the monotonic clock in seconds."""
    first = last = 0.0
    tail = b""
    async for chunk in response.aiter_raw():
        now = time.monotonic()
        if not first:
            first = now
            begun()
        # The last chunks hold no tokens, only counts and the end.
        last = (
            now if b'"finish_reason":"' in chunk or b'"usage":{' not in chunk else last
        )
        tail = (tail + chunk)[-2000:]
    if b"[DONE]" not in tail:
        raise ProfileError(
            f"{tier} cut an answer short: {tail[-300:].decode(errors='replace')}"
        )
    return first, last


async def _later(tier: TierName, response: httpx.Response, deadline: float) -> None:
    if response.status_code not in TRY_LATER or time.monotonic() > deadline:
        raise ProfileError(
            f"{tier} answered HTTP {response.status_code}: {response.text[:300]}"
        )
    await asyncio.sleep(
        min(float(response.headers.get("retry-after", BUSY_WAIT_S)), LONGEST_WAIT_S)
    )
