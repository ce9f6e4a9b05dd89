"""Load /generate with mixed prompts, hints and SLAs; ends with a summary per tier.

usage: .venv/bin/locust -f benchmarks/locustfile.py --headless -H http://127.0.0.1:8080

By default 50 users for 60 seconds: Locust's -u (users), -r (users a second at the start) and -t (time) change that. A user
sends at most one request a second and waits for its answer: the load is a closed loop, and a slow fleet gets less than 50
requests a second. Locust's own timing of a stream ends at its first byte, so this file fires events of its own for time to
first token and whole answer.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from locust import HttpUser, constant_throughput, events, task

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from locust.env import Environment

USERS, SECONDS = 50, 60
PROMPTS = (
    "hi",
    "What is the capital of France?",
    "Thanks, that was very kind of you!",
    "Explain how a refrigerator works to a curious child.",
    "Write a Python function that returns the longest word of a sentence.",
    "def add(a, b):\n    return a - b\n\nFix this.",
    "Write a haiku about rain on a tin roof.",
    "A train travels 120 km in 90 minutes. What is its average speed in km/h?",
    "Extract the date and the amount as JSON: 'Paid 34.50 on 3 May 2024 to the bakery.'",
    "Quelle est la différence entre un lac et un étang ?",
    "Summarise in one sentence: "
    + "The committee met and decided to meet again. " * 20,
)
HINTS = ("auto", "auto", "auto", "auto", "fast", "precise")
SLAS: tuple[dict[str, float], ...] = (
    {},
    {},
    {},
    {"ttft_ms": 2000},
    {"tpot_ms": 100},
    {"max_quality_loss": 0.01},
)
PRIORITIES = ("standard", "standard", "interactive", "batch")


@dataclass(slots=True)
class TierTally:
    """What one tier did. Times in milliseconds."""

    ttft: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    tokens: int = 0
    errors: int = 0


TALLY: defaultdict[str, TierTally] = defaultdict(TierTally)


class Caller(HttpUser):
    """One request a second, if the answers come in time."""

    wait_time = constant_throughput(1)

    @task
    def generate(self) -> None:
        """Ask one prompt, read its stream to the end, and report TTFT and total time."""
        choose = random.choice
        body = {
            "prompt": choose(PROMPTS),
            "max_tokens": choose((8, 16, 32)),
            "tier": choose(HINTS),
            "sla": choose(SLAS),
            "priority": choose(PRIORITIES),
        }
        started = time.perf_counter()
        with self.client.post(
            "/generate", json=body, stream=True, catch_response=True, name="accepted"
        ) as response:
            tier = response.headers.get(
                "x-qarr-tier", f"refused ({response.status_code})"
            )
            if response.status_code != 200:
                TALLY[tier].errors += 1
                response.failure(f"HTTP {response.status_code}")
                return
            if not self._read(response, tier, started):
                response.failure("the stream did not end with done")

    def _read(self, response: Any, tier: str, started: float) -> bool:
        tally, event, length, begun = TALLY[tier], "", 0, False
        for line in response.iter_lines():
            length += len(line)
            if line.startswith(b"event: "):
                event = line[7:].decode()
            elif line.startswith(b"data: ") and not event:
                if not begun:
                    begun = True
                    tally.ttft.append((time.perf_counter() - started) * 1000)
                    _fire(self.environment, "TTFT", tier, tally.ttft[-1], 0)
            elif line.startswith(b"data: ") and event == "done":
                tally.total.append((time.perf_counter() - started) * 1000)
                tally.tokens += json.loads(line[6:])["usage"]["completion_tokens"]
                _fire(self.environment, "total", tier, tally.total[-1], length)
                return True
        tally.errors += 1
        return False


def _fire(
    environment: Environment, kind: str, tier: str, took_ms: float, length: int
) -> None:
    environment.events.request.fire(
        request_type=kind,
        name=tier,
        response_time=took_ms,
        response_length=length,
        exception=None,
        context={},
    )


@events.init_command_line_parser.add_listener
def _defaults(parser: ArgumentParser) -> None:
    """Set what Locust takes without options."""
    parser.set_defaults(num_users=USERS, spawn_rate=USERS, run_time=f"{SECONDS}s")


@events.quitting.add_listener
def _summary(environment: Environment, **_kwargs: Any) -> None:
    stats = environment.stats
    took_s = max((stats.last_request_timestamp or 0) - stats.start_time, 1.0)
    print(
        f"\n{'tier':16}{'answers':>8}{'errors':>8}{'TTFT p50/p95 ms':>20}{'total p50/p95 ms':>20}{'tokens/s':>10}"
    )
    for tier, t in sorted(TALLY.items()):
        row = f"{tier:16}{len(t.total):8}{t.errors:8}{_percentiles(t.ttft):>20}{_percentiles(t.total):>20}"
        print(f"{row}{t.tokens / took_s:10.1f}")


def _percentiles(values: list[float]) -> str:
    if len(values) < 2:
        return "-"
    cuts = statistics.quantiles(values, n=20)
    return f"{cuts[9]:.0f} / {cuts[18]:.0f}"
