"""What routing costs a request, by the number of replicas: snapshot and decision, slot, tokens, decision log.

python benchmarks/decision_cost.py [--replicas 3 30 100 300]

Every replica serves six requests. Their counters change between two decisions as they do under load: a request begins, one
gets its first token, one ends, and every replica produces a token. ``alike`` is a decision while nothing changes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from classifier import EstimatingCounter, extract
from router.policy.decide import decide
from router.policy.decision import PolicyParameters, RoutingQuery, Sla
from router.policy.decision_log import DecisionLog
from router.policy.explain import verdict
from router.policy.losses import losses
from tiers.fleet import Fleet
from tiers.replica import Replica
from tiers.spec import STANDARD_TIERS, ReplicaStatus, TierName, TierSpec
from tiers.speed import SpeedModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.policy.decision import Decision
    from tiers.choice import Candidate
    from tiers.fleet import Lease

PROMPT = "Can you explain how tides work, and why there are two of them a day? I never understood the second one. "
CALLS = 1500
OPEN = 6  # requests on each replica
MAX_TOKENS = 1 << 20  # so that none of them is done before the measurement is
TABLE = PolicyParameters(
    {
        TierName.FAST: losses("awq-int4", (), 8e9),
        TierName.BALANCED: losses("fp8", (), 8e9),
    }
)


class Load:
    """A fleet under load."""

    def __init__(self, replicas: int, query: RoutingQuery, log: DecisionLog) -> None:
        self.query, self.log = query, log
        specs = tuple(
            TierSpec(name, 8192, 16, 32, digest="d") for name in STANDARD_TIERS
        )
        self.fleet = Fleet(specs)
        for number in range(replicas):
            spec = specs[number % len(specs)]
            name = f"{spec.name}-{number}"
            replica = self.fleet.add(
                Replica(
                    name, spec, "http://127.0.0.1", "", "m", status=ReplicaStatus.READY
                )
            )
            replica.measured(
                SpeedModel(
                    20,
                    1,
                    20 + 20 * STANDARD_TIERS.index(spec.name),
                    2,
                    1,
                    0.5,
                    0.1,
                    0.1,
                    profiled=True,
                )
            )
        self.open = [
            self.lease(spec.name, MAX_TOKENS)
            for _ in range(OPEN * replicas // 3)
            for spec in specs
        ]
        self.streams = {lease.replica.id: lease for lease in self.open}.values()
        self.times: dict[str, list[float]] = defaultdict(list)

    def lease(
        self, tier: TierName, max_tokens: int, candidate: Candidate | None = None
    ) -> Lease:
        """Take a slot that must be free; ``candidate``: see ``Fleet.lease``."""
        lease = self.fleet.lease(
            tier,
            prompt_tokens=self.query.prompt_tokens,
            max_tokens=max_tokens,
            candidate=candidate,
        )
        assert lease is not None
        return lease

    def time(self, what: str, step: Callable[[], object], calls: int = 1) -> None:
        """Measure a step."""
        began = perf_counter()
        for _ in range(calls):
            step()
        self.times[what].append((perf_counter() - began) / calls * 1e6)

    def request(self) -> None:
        """Measure one request, and what comes between it and the next."""
        fleet, query = self.fleet, self.query
        began = perf_counter()
        snapshot = fleet.snapshot()
        snapped = perf_counter()
        decision = decide(query, snapshot, TABLE)
        decided = perf_counter()
        self.times["snapshot"].append((snapped - began) * 1e6)
        self.times["decision, bounds on everything"].append((decided - snapped) * 1e6)
        self.times["both"].append((decided - began) * 1e6)
        self.time(
            "its report on every tier",
            lambda: [
                verdict(decision.comparison, each)
                for each in decision.comparison.estimates
            ],
        )
        self.time("both, alike", lambda: decide(query, fleet.snapshot(), TABLE))
        assert decision.tier is not None
        self.time("lease, first token, end, release", lambda: self.serve(decision))
        self.time("one token", next(iter(self.streams)).produced, 10)
        for stream in self.streams:
            stream.produced()
        if len(self.times["both"]) % 10 == 0:
            self.time(
                "decision log, one line",
                lambda: self.log.decided("id", decision, snapshot, TABLE),
            )

    def serve(self, decision: Decision) -> None:
        """Serve a request to its end, on the replica that was decided for."""
        assert decision.chosen is not None
        lease = self.lease(decision.chosen.tier, 200, decision.chosen.candidate)
        lease.first_token(500.0)
        lease.finished(50.0, 100)
        lease.release()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, nargs="+", default=[3, 30, 100, 300])
    sizes = parser.parse_args().replicas
    features = extract(PROMPT, EstimatingCounter())
    query = RoutingQuery(
        features, 40, 200, sla=Sla(ttft_ms=5000, tpot_ms=500, max_quality_loss=0.1)
    )
    with tempfile.TemporaryDirectory() as folder:
        log = DecisionLog(Path(folder) / "log", 1 << 30)
        loads = [Load(size, query, log) for size in sizes]
        # in turns, so that the machine's moods fall on all of them alike
        for _ in range(CALLS):
            for load in loads:
                load.request()
        log.close()
    print(
        f"$ python {' '.join(sys.argv)}\nmicroseconds, median of {CALLS} calls (a tenth of them for the log); replicas:"
    )
    print(f"{'':34}" + "".join(f"{size:9}" for size in sizes))
    for name in loads[0].times:
        print(
            f"{name:34}"
            + "".join(f"{statistics.median(load.times[name]):9.1f}" for load in loads)
        )


if __name__ == "__main__":
    main()
