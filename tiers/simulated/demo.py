"""The fleet of ``qarr demo``: three simulated engines, and load for the router before them.

Both run in one process that ends with its parent.

    python -m tiers.simulated.demo ROUTER-URL REQUESTS-A-SECOND

It prints the URL of each tier's engine, as JSON in one line, and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import uvicorn
import uvloop

from tiers.errors import EngineDiedError, TierError
from tiers.simulated.engine import SimulatedEngine
from tiers.simulated.gpu import LLAMA_8B, Hardware, hardware
from tiers.sizing.architecture import architecture
from tiers.sizing.named_gpus import parse_gpus
from tiers.spec import PRECISIONS, TierName
from tiers.speed import SpeedModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiers.sizing.roofline import Roofline

MODEL = "Llama 3.1 8B"
GPU = "L4"
# Each engine decodes so many at once: a small batch, so that reading the weights takes the time.
SEQUENCES = 8
LOAD = 3.5  # requests a second: too many for BF16 alone on three of these GPUs
# With tiers.*.max_num_seqs at 8: the mean tokens are those of the requests that are made up here.
PLAN = (
    "qarr plan --model tests/unit/tiers/sizing/configs/llama-3.1-8b.json --gpus 3xL4 --load 3.5/s --prompt 220 "
    "--output 110 --max-num-seqs 8"
)
MAX_PER_S = 100
# Between these numbers of sequences a step's time is a straight line.
SMALL_BATCH = 1
LARGE_BATCH = 8
LONG_PROMPT_TOKENS = 2048  # a prompt of this length tells the time a token
USUAL_CONTEXT_TOKENS = 300  # the mean of a sequence while it is decoded
# The standard deviation of log(seen / predicted): steps differ by the prompts that are computed in them.
SPREAD = 0.15
# A request meets the second half of the step that is being computed, in the mean.
TTFT_STEPS = 0.5
STREAM_INTERVAL = 1  # an event for each token, so that answers grow on the page
POLL_S = 0.01
END_S = 5.0
TIMEOUT_S = 60.0
# These shares of requests have a bound, and a hint.
BOUND_SHARE = 0.4
HINT_SHARE = 0.06
BOUNDS: tuple[dict[str, float], ...] = (
    {"ttft_ms": 1000},
    {"ttft_ms": 2000},
    {"tpot_ms": 50},
    {"max_quality_loss": 0.002},
)
PAGE = "On {n} May the council looked at {it}: {n} weeks of work, {n},400 euros. Who pays if it takes longer was put off. "
SUBJECTS = (
    "a lighthouse",
    "tides",
    "sourdough bread",
    "a bicycle bell",
    "compound interest",
    "bees",
    "timetables",
)


class PromptKind(NamedTuple):
    """A kind of prompt.

    Attributes:
        weight: Its share of all prompts, in relation to the other weights.
        texts: Prompts with places for a subject and a number.
        fewest_pages: Fewest pages that follow the text.
        most_pages: Most pages that follow it.
    """

    weight: int
    texts: tuple[str, ...]
    fewest_pages: int = 0
    most_pages: int = 0


SMALL_TALK = PromptKind(
    weight=30,
    texts=(
        "Hello! How are you today?",
        "What is {it}?",
        "Thanks. Who invented {it}?",
        "Tell me a joke.",
    ),
)
WRITING = PromptKind(
    weight=14,
    texts=(
        "Write a story about {it}, in {n} sentences.",
        "Write a polite letter that asks about {it}.",
    ),
)
CODE_TO_WRITE = PromptKind(
    weight=12,
    texts=(
        "Write a Python function that stores {it} in a sorted list, with type hints and a docstring.",
    ),
)
CODE_TO_MEND = PromptKind(
    weight=10,
    texts=(
        "def mean(xs):\n    return sum(xs) / len(xs)\n\nWhy does it fail for []? Fix it; add {n} tests.",
    ),
)
ARITHMETIC = PromptKind(
    weight=10,
    texts=(
        "A train travels {n}12 km at 96 km/h. When does it arrive, from 14:05? Show your steps.",
    ),
)
OTHER_LANGUAGES = PromptKind(
    weight=10,
    texts=(
        "Übersetze: Der Zug hat heute {n} Minuten Verspätung.",
        "Explique {it} à un enfant de {n} ans.",
    ),
)
LONG_DOCUMENTS = PromptKind(
    weight=14,
    texts=(
        "Summarise these minutes in {n} points.\n\n",
        "List every date and sum here as JSON.\n\n",
    ),
    fewest_pages=4,
    most_pages=90,
)
PROMPT_KINDS = (
    SMALL_TALK,
    WRITING,
    CODE_TO_WRITE,
    CODE_TO_MEND,
    ARITHMETIC,
    OTHER_LANGUAGES,
    LONG_DOCUMENTS,
)


def notice(load: float) -> str:
    """Return what the page and the terminal say of the demo."""
    requests = "no requests but yours"
    if load:
        requests = f"{load:g} made-up requests a second"
    return (
        f"Simulated: no model runs. Each tier takes the time that {MODEL} would take on an {GPU} GPU of its own, and "
        f"answers with filler text; the losses are published ones. Load: {requests}."
    )


def simulated_precision(tier: TierName) -> str:
    """Return what ``tiers.*.precision`` states of an engine."""
    return f"{PRECISIONS[tier]} on simulated {GPU}"


def demo_hardware() -> dict[TierName, Hardware]:
    """Return what the engine of each tier runs on."""
    model = architecture(LLAMA_8B)
    gpu, _ = parse_gpus(GPU)
    return {tier: hardware(tier, model, gpu) for tier in PRECISIONS}


def roofline_speed(runs_on: Hardware) -> SpeedModel:
    """Return the speed of a simulated engine as the router predicts by it: there is nothing to measure, it is computed."""
    roofline = runs_on.speed
    small_ms = _decode_ms(roofline, SMALL_BATCH)
    large_ms = _decode_ms(roofline, LARGE_BATCH)
    ms_per_sequence = (large_ms - small_ms) / (LARGE_BATCH - SMALL_BATCH)
    first_ms = roofline.mixed_ms(SMALL_BATCH, SMALL_BATCH, 0)
    long_prompt_ms = roofline.mixed_ms(LONG_PROMPT_TOKENS, 1, 0) - first_ms
    return SpeedModel(
        ttft_base_ms=first_ms,
        prefill_ms_per_token=long_prompt_ms / LONG_PROMPT_TOKENS,
        step_base_ms=small_ms - ms_per_sequence * SMALL_BATCH,
        step_ms_per_sequence=ms_per_sequence,
        ttft_steps=TTFT_STEPS,
        ttft_spread=SPREAD,
        tpot_spread=SPREAD,
        profiled=True,
    )


def _decode_ms(roofline: Roofline, sequences: int) -> float:
    """Return the time of a step that computes a token of each of some sequences."""
    context_tokens = sequences * USUAL_CONTEXT_TOKENS
    return roofline.mixed_ms(sequences, sequences, context_tokens)


def rate_of(text: str) -> float:
    """Return a load in requests a second.

    Raises:
        TierError: It is none, or too much.
    """
    with contextlib.suppress(ValueError):
        rate = float(text.removesuffix("/s"))
        if 0 <= rate <= MAX_PER_S:
            return rate
    raise TierError(
        f"--load {text}: 0 to {MAX_PER_S} requests a second are allowed, as in 5/s"
    )


@contextlib.contextmanager
def simulated_engines(router: str, load: float) -> Iterator[dict[TierName, str]]:
    """Run engines and load in a process of their own; yield the engines' URLs by tier.

    Raises:
        EngineDiedError: They did not start.
    """
    argv = [sys.executable, "-m", __name__, router, str(load)]
    # Ctrl-C does not reach a session of its own: the router ends first.
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise EngineDiedError("the simulated engines did not start: see above")
            yield {TierName(tier): url for tier, url in json.loads(line).items()}
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=END_S)
            process.kill()


async def run(router: str, load: float) -> None:
    """Serve, and send requests, until standard input ends."""
    servers = {tier: _server(runs_on) for tier, runs_on in demo_hardware().items()}
    serving = [asyncio.create_task(server.serve()) for server in servers.values()]
    while not all(server.started for server in servers.values()):  # noqa: ASYNC110  uvicorn has no event for it
        await asyncio.sleep(POLL_S)
    sending: asyncio.Task[None] | None = None
    if load:
        sending = asyncio.create_task(send_load(router, load))
    parent_gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, parent_gone.set)
    urls = {tier: _url(server) for tier, server in servers.items()}
    print(json.dumps(urls), flush=True)  # noqa: T201
    await parent_gone.wait()
    if sending is not None:
        sending.cancel()
    for server in servers.values():
        server.should_exit = True
    await asyncio.gather(*serving)


def _server(runs_on: Hardware) -> uvicorn.Server:
    """Return the server of an engine, on a port that is free."""
    engine = SimulatedEngine(
        runs_on, max_num_seqs=SEQUENCES, stream_interval=STREAM_INTERVAL
    )
    config = uvicorn.Config(
        engine.app, port=0, log_config=None, timeout_graceful_shutdown=1
    )
    return uvicorn.Server(config)


def _url(server: uvicorn.Server) -> str:
    port = server.servers[0].sockets[0].getsockname()[1]
    return f"http://127.0.0.1:{port}"


async def send_load(router: str, per_s: float) -> None:
    """Send requests to a router, as a Poisson process. While it is not ready none are sent, and open ones are given up."""
    chance = random.Random()  # noqa: S311  no secret
    open_requests: set[asyncio.Task[None]] = set()
    async with httpx.AsyncClient(
        base_url=router,
        trust_env=False,
        timeout=TIMEOUT_S,
        verify=False,  # noqa: S501
    ) as client:
        while True:
            if await _ready(client):
                body = some_request(chance)
                task = asyncio.create_task(_send(client, body))
                open_requests.add(task)
                task.add_done_callback(open_requests.discard)
            else:
                for task in open_requests:
                    task.cancel()
            await asyncio.sleep(chance.expovariate(per_s))


def some_request(chance: random.Random) -> dict[str, Any]:
    """Return a request's body for ``POST /generate``."""
    weights = [kind.weight for kind in PROMPT_KINDS]
    kind = chance.choices(PROMPT_KINDS, weights)[0]
    text = chance.choice(kind.texts)
    text += PAGE * chance.randint(kind.fewest_pages, kind.most_pages)
    text = text.replace("{it}", chance.choice(SUBJECTS))
    text = text.replace("{n}", str(chance.randint(2, 28)))
    body: dict[str, Any] = {
        "prompt": text,
        "max_tokens": chance.choice((64, 256, 400)),
    }
    if chance.random() < BOUND_SHARE:
        body["sla"] = chance.choice(BOUNDS)
    if chance.random() < HINT_SHARE:
        body["tier"] = chance.choice(tuple(PRECISIONS))
    return body


async def _ready(client: httpx.AsyncClient) -> bool:
    """Tell whether the router serves, and waits for no tier."""
    with contextlib.suppress(httpx.HTTPError):
        answer = await client.get("/readyz")
        if not answer.is_success:
            return False
        states = set(answer.json()["tiers"].values())
        return not states & {"starting", "warming"}
    return False


async def _send(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    with contextlib.suppress(httpx.HTTPError):
        await client.post("/generate", json=body)


if __name__ == "__main__":
    uvloop.run(run(sys.argv[1], float(sys.argv[2])))
