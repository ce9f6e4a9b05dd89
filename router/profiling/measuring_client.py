"""A client for measuring tiers, which yields to the requests of others."""

from __future__ import annotations

import asyncio
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import httpx

from router.policy.profiles import ProfileError
from router.profiling.scoring import COMPLETIONS
from tiers.spec import EngineBuild, TierName

EngineResponse = AbstractAsyncContextManager[httpx.Response]
Step = Callable[[], Coroutine[Any, Any, None]]

# Pauses between two checks whether others are served. They begin short and double.
SHORTEST_CHECK_S = 0.05
LONGEST_CHECK_S = 0.5
# Pauses before a refused request is sent again: where the answer does not say how long, and the longest.
BUSY_RETRY_S = 1.0
LONGEST_RETRY_S = 10.0
# A request waits at most so long for those of others to end, or for a slot of a full or absent tier.
MAX_WAIT_S = 600.0
ANSWER_TIMEOUT_S = 900.0
# An idle connection is used again for so long: vLLM's server closes one after 5 s, perhaps while a request is on its way.
KEEP_ALIVE_S = 2.0
TAIL_BYTES = 2000
TOO_LONG = "maximum context length"  # what routers and vLLM say of a request that does not fit the context
PASSING_REFUSALS = {
    httpx.codes.TOO_MANY_REQUESTS,
    httpx.codes.SERVICE_UNAVAILABLE,
}


class TierRefusedError(ProfileError):
    """A tier refuses a request, and would refuse it again."""


class TooLongForTierError(TierRefusedError):
    """A prompt and its answer do not fit a tier's context."""


def first_of(errors: BaseExceptionGroup[ProfileError]) -> ProfileError:
    """Return the first error of a group of errors and groups."""
    first = errors.exceptions[0]
    if isinstance(first, BaseExceptionGroup):
        return first_of(first)
    return first


def ignore_waiting() -> None:
    """Take no notice of a wait for others' requests."""


def measured_identity(
    checkpoint: str | None, builds: Sequence[EngineBuild]
) -> str | None:
    """Return what a tier's answers depend on: its checkpoint, and what its engines compute with; None: not known."""
    if checkpoint is None:
        return None
    return "; ".join([checkpoint, *sorted(map(str, builds))])


class MeasuredTier(NamedTuple):
    """A tier that is ready to be measured."""

    # digest or URL of the checkpoint that it serves, and what its engines compute with
    identity: str | None
    replicas: int  # number of ready ones
    max_num_seqs: int
    max_model_len: int
    adapters: Sequence[str] = ()  # LoRA adapters that it offers


@dataclass(frozen=True, slots=True)
class FleetState:
    """The fleet as its measurement sees it.

    Attributes:
        model: Name of the model that all tiers serve.
        machine: What the machine is, for the profile of speed.
        checkpoints: Digest or URL of the checkpoint that each tier serves, ready or not.
        builds: What the engines of each tier compute with.
        tiers: The tiers that are ready.
        in_flight: Number of requests on all replicas.
        served: Number of requests that all replicas have completed.
        measuring: What the router measures itself now; None: nothing.
    """

    model: str
    machine: str
    checkpoints: Mapping[TierName, str | None]
    tiers: Mapping[TierName, MeasuredTier]
    in_flight: int = 0
    served: int = 0
    measuring: str | None = None
    builds: Mapping[TierName, tuple[EngineBuild, ...]] = field(default_factory=dict)


class TimedAnswer(NamedTuple):
    """One timed answer. Its start and end are by the monotonic clock in seconds."""

    prompt_tokens: int
    ttft_ms: float
    tpot_ms: float | None  # None for fewer than two tokens, or if all came at once
    started: float
    ended: float


class MeasuringClient(ABC):
    """Sends a measurement's requests, greedy and with the lowest priority. One event loop owns it; close it."""

    patience_s = MAX_WAIT_S  # how long it waits for others' requests to end
    slot_patience_s = MAX_WAIT_S  # how long a timed request waits for a slot

    def __init__(
        self, base_url: str = "", key: str = "", *, verify: ssl.SSLContext | bool = True
    ) -> None:
        headers = {}
        if key:
            headers["authorization"] = f"Bearer {key}"
        self._url = base_url
        self._checking = asyncio.Lock()
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers=headers,
            timeout=ANSWER_TIMEOUT_S,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEP_ALIVE_S),
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
        """Return the fleet's present state.

        ``ProfileError``: nobody answers, or shows it with this key.
        """

    @abstractmethod
    async def undisturbed(self, step: Step, report_waiting: Callable[[], None]) -> bool:
        """Run a step once nobody else is served, and tell whether it stayed undisturbed.

        Args:
            step: Calls ``time``.
            report_waiting: Called while others' requests are waited for.
        """

    @abstractmethod
    def _send(
        self,
        tier: TierName,
        path: str,
        body: Mapping[str, Any],
        adapter: str | None = None,
    ) -> EngineResponse:
        """Send a request; a tier without a free slot answers 503. ``ProfileError``: nobody answers."""

    @abstractmethod
    async def _is_quiet(self) -> bool:
        """Tell whether nobody else is served, nor was a moment ago."""

    async def ask(
        self,
        path: str,
        tier: TierName,
        body: Mapping[str, Any],
        report_waiting: Callable[[], None] = ignore_waiting,
        adapter: str | None = None,
    ) -> Any:
        """Return a tier's complete answer at a path of OpenAI's API, computed while nobody else is served.

        Args:
            path: The path of the endpoint.
            tier: The tier that is to answer.
            body: The body of the request, without model and priority.
            report_waiting: Called while others' requests are waited for.
            adapter: The LoRA adapter that is to answer; None: the model itself.

        Raises:
            TierRefusedError: The tier refuses.
            ProfileError: The tier has no free slot for ``MAX_WAIT_S``.
        """
        deadline = time.monotonic() + MAX_WAIT_S
        while True:
            await self._wait_until_quiet(report_waiting)
            async with self._send(tier, path, body, adapter) as response:
                await response.aread()
            if response.status_code == httpx.codes.OK:
                return response.json()
            await _wait_out_refusal(tier, response, deadline)

    async def ask_if_accepted(
        self,
        path: str,
        tier: TierName,
        body: Mapping[str, Any],
        adapter: str | None = None,
    ) -> Mapping[str, Any] | None:
        """Return a tier's complete answer as ``ask`` does; None: the tier refuses the request as such.

        Raises:
            ProfileError: The tier has no free slot for ``MAX_WAIT_S``.
        """
        try:
            answer: Mapping[str, Any] = await self.ask(
                path, tier, body, adapter=adapter
            )
        except TierRefusedError:
            return None
        return answer

    async def time(
        self,
        tier: TierName,
        prompt: list[int],
        tokens: int,
        report_first_token: Callable[[], None],
    ) -> TimedAnswer:
        """Time one answer of exactly ``tokens`` tokens, within ``undisturbed``.

        Args:
            tier: The tier that is to answer.
            prompt: The ids of the prompt's tokens.
            tokens: The length of the answer.
            report_first_token: Called when the first token comes.

        Raises:
            ProfileError: The tier refuses, or breaks the answer off.
        """
        body = {
            "prompt": prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        deadline = time.monotonic() + self.slot_patience_s
        while True:
            started = time.monotonic()
            async with self._send(tier, COMPLETIONS, body) as response:
                if response.status_code == httpx.codes.OK:
                    first_token_at, last_token_at = await _token_times(
                        response, tier, report_first_token
                    )
                    return TimedAnswer(
                        prompt_tokens=len(prompt),
                        ttft_ms=(first_token_at - started) * 1000,
                        tpot_ms=_tpot_ms(first_token_at, last_token_at, tokens),
                        started=started,
                        ended=last_token_at,
                    )
                await response.aread()
            await _wait_out_refusal(tier, response, deadline)

    async def _wait_until_quiet(
        self, report_waiting: Callable[[], None] = ignore_waiting
    ) -> None:
        """Wait while others' requests are served. One check serves all waiting callers."""
        deadline = time.monotonic() + self.patience_s
        pause_s = SHORTEST_CHECK_S
        async with self._checking:
            while not await self._is_quiet() and time.monotonic() < deadline:
                # A shorter wait is for the client's own leases, which are about to be released.
                if pause_s >= LONGEST_CHECK_S:
                    report_waiting()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_CHECK_S)


async def _token_times(
    response: httpx.Response, tier: TierName, report_first_token: Callable[[], None]
) -> tuple[float, float]:
    """Read a streamed completion; return when its first and last tokens came, by the monotonic clock in seconds."""
    first_token_at = 0.0
    last_token_at = 0.0
    tail = b""
    async for chunk in response.aiter_raw():
        now = time.monotonic()
        if not first_token_at:
            first_token_at = now
            report_first_token()
        # The last chunks hold no tokens, only counts and the end.
        if b'"finish_reason":"' in chunk or b'"usage":{' not in chunk:
            last_token_at = now
        tail = (tail + chunk)[-TAIL_BYTES:]
    if b"[DONE]" not in tail:
        raise ProfileError(
            f"{tier} cut an answer short: {tail[-300:].decode(errors='replace')}"
        )
    return first_token_at, last_token_at


def _tpot_ms(first_token_at: float, last_token_at: float, tokens: int) -> float | None:
    """Return the mean time of each token after the first; None: the answer has no pace.

    An answer may come all at once if the router got no processor time.
    """
    if tokens <= 1 or last_token_at <= first_token_at:
        return None
    return (last_token_at - first_token_at) * 1000 / (tokens - 1)


async def _wait_out_refusal(
    tier: TierName, response: httpx.Response, deadline: float
) -> None:
    """Wait as long as a refusal says.

    Raises:
        TooLongForTierError: The request does not fit the tier's context.
        TierRefusedError: The refusal does not pass.
        ProfileError: It does not pass before the deadline.
    """
    is_passing = response.status_code in PASSING_REFUSALS
    text = f"{tier} answered HTTP {response.status_code}: {response.text[:300]}"
    if response.is_client_error and TOO_LONG in response.text:
        raise TooLongForTierError(text)
    if response.is_client_error and not is_passing:
        raise TierRefusedError(text)
    if not is_passing or time.monotonic() > deadline:
        raise ProfileError(text)
    retry_after_s = float(response.headers.get("retry-after", BUSY_RETRY_S))
    await asyncio.sleep(min(retry_after_s, LONGEST_RETRY_S))
