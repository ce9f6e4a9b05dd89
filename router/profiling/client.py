"""The interface of clients that measure tiers, and one that measures through a running router.

Measurements yield to everybody else's requests.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import httpx

from router.policy.profiles import ProfileError
from tiers.spec import TierName

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence

BUSY_WAIT_S = 1.0
SHORTEST_WAIT_S = 0.05
LOOK_S = 0.5  # for which one check for others' requests holds
MAX_WAIT_S = 600.0  # for others' requests to end, or for a slot of a full or absent tier
ANSWER_TIMEOUT_S = 900.0
TRY_LATER = {httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE}


def first_of(errors: BaseExceptionGroup[ProfileError]) -> ProfileError:
    """Return the first error of a group, which may hold groups."""
    first = errors.exceptions[0]
    return first_of(first) if isinstance(first, BaseExceptionGroup) else first


@dataclass(frozen=True, slots=True)
class FleetState:
    """The fleet as measurements need it.

    Attributes:
        identities: Digest or URL of what each ready tier serves.
        checkpoints: The same of every tier, ready or not.
        replicas: Number of ready replicas of each ready tier.
        max_num_seqs: Of each ready tier.
        max_model_len: Of each ready tier, in tokens.
        in_flight: Requests on all replicas.
        served: Requests that all replicas have completed.
        measuring: What the router measures itself now; None: nothing.
        adapters: LoRA adapters that each ready tier offers.
    """

    model: str
    machine: str
    identities: Mapping[TierName, str | None]
    checkpoints: Mapping[TierName, str | None]
    replicas: Mapping[TierName, int]
    max_num_seqs: Mapping[TierName, int]
    max_model_len: Mapping[TierName, int]
    in_flight: int
    served: int
    measuring: str | None = None
    adapters: Mapping[TierName, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Timed:
    """One timed answer. Start and end by the monotonic clock in seconds.

    Attributes:
        tpot_ms: None for fewer than two tokens, or if all came at once.
    """

    prompt_tokens: int
    ttft_ms: float
    tpot_ms: float | None
    started: float
    ended: float


class Client(Protocol):
    """Sends a measurement's requests to the tiers: through a running router, or from within it."""

    async def fleet(self) -> FleetState:
        """Return the fleet's present state.

        Raises:
            ProfileError: The router does not answer, or does not show it with this key.
        """

    async def ask(
        self,
        path: str,
        tier: TierName,
        body: Mapping[str, Any],
        waiting: Callable[[], None],
        adapter: str | None = None,
    ) -> Any:
        """Return a tier's whole greedy answer, computed while nobody else is served.

        Args:
            path: Of OpenAI's API.
            tier: The only one that may answer.
            body: The rest of the request.
            waiting: Called while others' requests are waited for.
            adapter: The LoRA adapter that is to answer; None: the model itself.

        Raises:
            ProfileError: The tier refuses, or has no free slot for ``MAX_WAIT_S``.
        """

    async def time(self, tier: TierName, prompt: list[int], tokens: int, begun: Callable[[], None]) -> Timed:
        """Time one answer of exactly ``tokens`` tokens, within ``undisturbed``.

        Args:
            tier: The only one that may answer.
            prompt: Token ids.
            tokens: Of the answer; the model's end of sequence is ignored.
            begun: Called with the first token.

        Raises:
            ProfileError: The tier refuses.
        """

    async def undisturbed(self, step: Callable[[], Coroutine[Any, Any, None]], waiting: Callable[[], None]) -> bool:
        """Run a step, made of calls of ``time``, once nobody else is served; tell whether it stayed undisturbed.

        Args:
            step: Makes the coroutine.
            waiting: Called while others' requests are waited for.
        """


class RouterClient:
    """A ``Client`` of a running router, with the lowest priority. Use ``connect``."""

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self._client, self._url = client, url
        self._own = self._timed = 0
        self._looking = asyncio.Lock()
        self._quiet_until = 0.0

    async def fleet(self) -> FleetState:
        try:
            response = await self._client.get("/tiers")
        except httpx.HTTPError as error:
            why = type(error).__name__
            raise ProfileError(f"no router answers at {self._url} ({why}): 'make up' starts one") from error
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise ProfileError("the router needs a key: give one in the variable QARR_KEY")
        found = response.json()
        if found.get("scope") == "own" and any(t["identity"] is None for t in found["tiers"]):
            raise ProfileError(
                "what its engines serve is known by their addresses alone, which the router shows to operators: give a key "
                "made with --admin in the variable QARR_KEY"
            )
        ready = {TierName(t["tier"]): t for t in found["tiers"] if t["state"] == "ready"}
        replicas = [r for t in found["tiers"] for r in t["replicas"]]
        return FleetState(
            model=found["model"],
            machine=found["machine"],
            identities={name: t["identity"] for name, t in ready.items()},
            checkpoints={TierName(t["tier"]): t["identity"] for t in found["tiers"]},
            replicas={name: sum(r["state"] == "ready" for r in t["replicas"]) for name, t in ready.items()},
            max_num_seqs={name: t["max_num_seqs"] for name, t in ready.items()},
            max_model_len={name: t["max_model_len"] for name, t in ready.items()},
            in_flight=sum(r["in_flight"] for r in replicas),
            served=sum(r["served"] for r in replicas),
            measuring=(found.get("profiling") or {}).get("what"),
            adapters={name: t["adapters"] for name, t in ready.items()},
        )

    async def ask(
        self,
        path: str,
        tier: TierName,
        body: Mapping[str, Any],
        waiting: Callable[[], None],
        adapter: str | None = None,
    ) -> Any:
        deadline = time.monotonic() + MAX_WAIT_S
        while True:
            await self._until_quiet(waiting, deadline)
            self._own += 1
            try:
                response = await self._client.post(path, json={**_request(tier, adapter), **body})
            except httpx.HTTPError as error:
                raise self._silent(error) from error
            finally:
                self._own -= 1
            if response.status_code == httpx.codes.OK:
                return response.json()
            await _later(tier, response, deadline)

    async def time(self, tier: TierName, prompt: list[int], tokens: int, begun: Callable[[], None]) -> Timed:
        body = {**_request(tier), **timed_body(prompt, tokens)}
        deadline = time.monotonic() + MAX_WAIT_S
        self._timed += 1
        while True:
            started = time.monotonic()
            try:
                async with self._client.stream("POST", "/v1/completions", json=body) as response:
                    if response.status_code == httpx.codes.OK:
                        return await read_timed(
                            response, tier, started, prompt_tokens=len(prompt), tokens=tokens, begun=begun
                        )
                    await response.aread()
            except httpx.HTTPError as error:
                raise self._silent(error) from error
            await _later(tier, response, deadline)

    async def undisturbed(self, step: Callable[[], Coroutine[Any, Any, None]], waiting: Callable[[], None]) -> bool:
        self._quiet_until = 0.0
        await self._until_quiet(waiting, time.monotonic() + MAX_WAIT_S)
        before, timed = (await self.fleet()).served, self._timed
        await step()
        after, own = await self.fleet(), self._timed - timed
        # Leases are released a moment after the last byte.
        return after.served - before <= own and after.in_flight <= own

    async def _until_quiet(self, waiting: Callable[[], None], deadline: float) -> None:
        """Wait while others' requests are in flight. One check serves all waiting callers, and holds for ``LOOK_S``."""
        pause_s = SHORTEST_WAIT_S
        async with self._looking:
            while self._quiet_until < time.monotonic() < deadline:
                if (await self.fleet()).in_flight <= self._own:
                    self._quiet_until = time.monotonic() + LOOK_S
                    return
                if pause_s >= BUSY_WAIT_S:  # not for the moment in which its own leases are released
                    waiting()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, BUSY_WAIT_S)

    def _silent(self, error: httpx.HTTPError) -> ProfileError:
        return ProfileError(f"{self._url} does not answer any more ({type(error).__name__})")


def timed_body(prompt: list[int], tokens: int) -> dict[str, Any]:
    """Return the body of a timed completion, without model and priority."""
    return {
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def read_timed(
    response: httpx.Response,
    tier: TierName,
    started: float,
    *,
    prompt_tokens: int,
    tokens: int,
    begun: Callable[[], None],
) -> Timed:
    """Read and time the answer to ``timed_body``.

    Args:
        response: Its body is unread.
        tier: That answers.
        started: When the request was sent, by the monotonic clock in seconds.
        prompt_tokens: Of the prompt.
        tokens: That were requested.
        begun: Called with the first token.

    Raises:
        ProfileError: The answer broke off.
    """
    first = last = 0.0
    tail = b""
    async for chunk in response.aiter_raw():
        now = time.monotonic()
        if not first:
            first = now
            begun()
        # The last chunks hold no tokens, only counts and the end.
        last = now if b'"finish_reason":"' in chunk or b'"usage":{' not in chunk else last
        tail = (tail + chunk)[-2000:]
    if b"[DONE]" not in tail:
        raise ProfileError(f"{tier} broke an answer off: {tail[-300:].decode(errors='replace')}")
    # An answer may come all at once if the router got no processor time; it has no pace to measure.
    tpot_ms = (last - first) * 1000 / (tokens - 1) if tokens > 1 and last > first else None
    return Timed(prompt_tokens, (first - started) * 1000, tpot_ms, started, last)


async def _later(tier: TierName, response: httpx.Response, deadline: float) -> None:
    """Wait for a refusal's ``Retry-After``, 10 s at most."""
    if response.status_code not in TRY_LATER or time.monotonic() > deadline:
        raise refused(tier, response)
    await asyncio.sleep(min(float(response.headers.get("retry-after", BUSY_WAIT_S)), 10))


def refused(tier: TierName, response: httpx.Response) -> ProfileError:
    return ProfileError(f"{tier} answered HTTP {response.status_code}: {response.text[:300]}")


def _request(tier: TierName, adapter: str | None = None) -> dict[str, Any]:
    options = {"tier": tier, "tier_policy": "require", "priority": "batch"}
    return {"model": adapter or tier, "temperature": 0, "qarr": options}


@asynccontextmanager
async def connect(url: str, key: str, *, verify: ssl.SSLContext | bool = True) -> AsyncIterator[RouterClient]:
    """Open a client of a running router.

    Args:
        url: The router's.
        key: For the router; empty if it needs none.
        verify: How its certificate is checked.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with make_client(base_url=url, headers=headers, verify=verify) as client:
        yield RouterClient(client, url)


def make_client(
    base_url: str = "", headers: Mapping[str, str] | None = None, *, verify: ssl.SSLContext | bool = True
) -> httpx.AsyncClient:
    """Return an HTTP client with the timeouts and limits of measurements."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(
        base_url=base_url, headers=headers, timeout=ANSWER_TIMEOUT_S, trust_env=False, limits=limits, verify=verify
    )
