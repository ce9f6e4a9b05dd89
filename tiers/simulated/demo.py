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
from typing import TYPE_CHECKING, Any

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

MODEL = "Llama 3.1 8B"
GPU = "L4"
# that each engine decodes at once: small batches, so that reading the weights takes the time
SEQUENCES = 8
LOAD = 3.5  # requests a second: too many for BF16 alone on three of these GPUs
# With tiers.*.max_num_seqs at 8: the mean tokens are those of the requests that are made up here.
PLAN = (
    "qarr plan --model tests/unit/tiers/sizing/configs/llama-3.1-8b.json --gpus 3xL4 --load 3.5/s --prompt 220 "
    "--output 110 --max-num-seqs 8"
)
MOST_PER_S = 100
# sequences, between which a step's time is a straight line
SMALL_BATCH, LARGE_BATCH = 1, 8
LONG_PROMPT = 2048  # tokens, by which the time of a prompt is told
USUAL_CONTEXT = 300  # mean tokens of a sequence while it is decoded
# of log(seen / predicted): steps differ by the prompts that are computed in them
SPREAD = 0.15
STREAM_INTERVAL = 1  # an event for each token, so that answers grow on the page
END_S = 5.0
TIMEOUT_S = 60.0
WITH_BOUND, WITH_HINT = 0.4, 0.06  # shares of requests
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
# Of each kind of prompt: its weight, its texts, and how many pages follow.
KINDS = (
    (
        30,
        (
            "Hello! How are you today?",
            "What is {it}?",
            "Thanks. Who invented {it}?",
            "Tell me a joke.",
        ),
        (0, 0),
    ),
    (
        14,
        (
            "Write a story about {it}, in {n} sentences.",
            "Write a polite letter that asks about {it}.",
        ),
        (0, 0),
    ),
    (
        12,
        (
            "Write a Python function that stores {it} in a sorted list, with type hints and a docstring.",
        ),
        (0, 0),
    ),
    (
        10,
        (
            "def mean(xs):\n    return sum(xs) / len(xs)\n\nWhy does it fail for []? Fix it; add {n} tests.",
        ),
        (0, 0),
    ),
    (
        10,
        (
            "A train travels {n}12 km at 96 km/h. When does it arrive, from 14:05? Show your steps.",
        ),
        (0, 0),
    ),
    (
        10,
        (
            "Übersetze: Der Zug hat heute {n} Minuten Verspätung.",
            "Explique {it} à un enfant de {n} ans.",
        ),
        (0, 0),
    ),
    (
        14,
        (
            "Summarise these minutes in {n} points.\n\n",
            "List every date and sum here as JSON.\n\n",
        ),
        (4, 90),
    ),
)


def notice(load: float) -> str:
    """Return what the page and the terminal say of the demo."""
    asked = f"{load:g} made-up requests a second" if load else "no requests but yours"
    return (
        f"Simulated: no model runs. Each tier takes the time that {MODEL} would take on an {GPU} GPU of its own, and "
        f"answers with filler text; the losses are published ones. Load: {asked}."
    )


def simulated_precision(tier: TierName) -> str:
    """Return what ``tiers.*.precision`` states of an engine."""
    return f"{PRECISIONS[tier]} on simulated {GPU}"


def demo_hardware() -> dict[TierName, Hardware]:
    """Return what the engine of each tier runs on."""
    model, (gpu, _) = architecture(LLAMA_8B), parse_gpus(GPU)
    return {tier: hardware(tier, model, gpu) for tier in PRECISIONS}


def roofline_speed(runs_on: Hardware) -> SpeedModel:
    """Return the speed of a simulated engine as the router predicts by it: there is nothing to measure, it is computed."""
    roofline = runs_on.speed
    small = roofline.mixed_ms(SMALL_BATCH, SMALL_BATCH, SMALL_BATCH * USUAL_CONTEXT)
    large = roofline.mixed_ms(LARGE_BATCH, LARGE_BATCH, LARGE_BATCH * USUAL_CONTEXT)
    slope = (large - small) / (LARGE_BATCH - SMALL_BATCH)
    first = roofline.mixed_ms(SMALL_BATCH, SMALL_BATCH, 0)
    return SpeedModel(
        ttft_base_ms=first,
        prefill_ms_per_token=(roofline.mixed_ms(LONG_PROMPT, 1, 0) - first)
        / LONG_PROMPT,
        step_base_ms=small - slope * SMALL_BATCH,
        step_ms_per_sequence=slope,
        # of the step that is being computed, the second half in the mean
        ttft_steps=0.5,
        ttft_spread=SPREAD,
        tpot_spread=SPREAD,
        profiled=True,
    )


def rate_of(text: str) -> float:
    """Return a load in requests a second; ``TierError``: it is none, or too much."""
    with contextlib.suppress(ValueError):
        if 0 <= (rate := float(text.removesuffix("/s"))) <= MOST_PER_S:
            return rate
    raise TierError(
        f"--load {text}: 0 to {MOST_PER_S} requests a second are allowed, as in 5/s"
    )


@contextlib.contextmanager
def simulated_engines(router: str, load: float) -> Iterator[dict[TierName, str]]:
    """Run engines and load in a process of their own; yield the engines' URLs by tier.

    Raises:
        EngineDiedError: They did not start.
    """
    argv = [sys.executable, "-m", __name__, router, str(load)]
    # no Ctrl-C reaches a session of its own: the router ends first
    pipe = subprocess.PIPE
    with subprocess.Popen(
        argv, stdin=pipe, stdout=pipe, start_new_session=True
    ) as process:
        try:
            if not (line := process.stdout.readline() if process.stdout else b""):
                raise EngineDiedError("the simulated engines did not start: see above")
            yield {TierName(tier): url for tier, url in json.loads(line).items()}
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=END_S)
            process.kill()


async def run(router: str, load: float) -> None:
    """Serve, and send requests, until standard input ends."""
    runs_on = demo_hardware()
    engines = [
        SimulatedEngine(each, max_num_seqs=SEQUENCES, stream_interval=STREAM_INTERVAL)
        for each in runs_on.values()
    ]
    configs = [
        uvicorn.Config(engine.app, port=0, log_config=None, timeout_graceful_shutdown=1)
        for engine in engines
    ]
    servers = [uvicorn.Server(config) for config in configs]
    serving = [asyncio.create_task(server.serve()) for server in servers]
    while not all(server.started for server in servers):  # noqa: ASYNC110  uvicorn has no event for it
        await asyncio.sleep(0.01)
    ports = [server.servers[0].sockets[0].getsockname()[1] for server in servers]
    sending = asyncio.create_task(send_load(router, load)) if load else None
    parent_gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, parent_gone.set)
    urls = {
        tier: f"http://127.0.0.1:{port}"
        for tier, port in zip(runs_on, ports, strict=True)
    }
    print(json.dumps(urls), flush=True)  # noqa: T201
    await parent_gone.wait()
    if sending is not None:
        sending.cancel()
    for server in servers:
        server.should_exit = True
    await asyncio.gather(*serving)


async def send_load(router: str, per_s: float) -> None:
    """Send requests to a router, as a Poisson process; while it is not ready none, and those that are open are given up."""
    chance = random.Random()  # noqa: S311  no secret
    waiting: set[asyncio.Task[None]] = set()
    async with httpx.AsyncClient(
        base_url=router,
        trust_env=False,
        timeout=TIMEOUT_S,
        verify=False,  # noqa: S501
    ) as client:
        while True:
            if await _ready(client):
                task = asyncio.create_task(_answered(client, some_request(chance)))
                waiting.add(task)
                task.add_done_callback(waiting.discard)
            else:
                for task in waiting:
                    task.cancel()
            await asyncio.sleep(chance.expovariate(per_s))


def some_request(chance: random.Random) -> dict[str, Any]:
    """Return a request's body for ``POST /generate``."""
    _, texts, pages = chance.choices(KINDS, [kind[0] for kind in KINDS])[0]
    text = chance.choice(texts) + PAGE * chance.randint(*pages)
    prompt = text.replace("{it}", chance.choice(SUBJECTS)).replace(
        "{n}", str(chance.randint(2, 28))
    )
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": chance.choice((64, 256, 400)),
    }
    if chance.random() < WITH_BOUND:
        body["sla"] = chance.choice(BOUNDS)
    if chance.random() < WITH_HINT:
        body["tier"] = chance.choice(tuple(PRECISIONS))
    return body


async def _ready(client: httpx.AsyncClient) -> bool:
    """Tell whether the router serves, and waits for no tier."""
    with contextlib.suppress(httpx.HTTPError):
        answer = await client.get("/readyz")
        return answer.is_success and not {"starting", "warming"} & set(
            answer.json()["tiers"].values()
        )
    return False


async def _answered(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    with contextlib.suppress(httpx.HTTPError):
        await client.post("/generate", json=body)


if __name__ == "__main__":
    uvloop.run(run(sys.argv[1], float(sys.argv[2])))
