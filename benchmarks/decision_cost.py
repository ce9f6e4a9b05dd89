"""What a routing decision costs: snapshot, policy and decision log, beside classifying a prompt.

python benchmarks/decision_cost.py
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import timeit
from pathlib import Path
from typing import TYPE_CHECKING

from classifier import EstimatingCounter, PromptClass, extract
from router.policy.decide import decide
from router.policy.decision import ExpectedLoss, PolicyParameters, Query, Sla
from router.policy.decision_log import DecisionLog
from router.settings import CLASS_FLOOR, CLASS_MAX_LOSS
from tiers.fleet import Fleet
from tiers.replica import Replica
from tiers.spec import ReplicaState, TierName, TierSpec
from tiers.speed import SpeedModel

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = "Can you explain how tides work, and why there are two of them a day? I never understood the second one. "
LOOPS, RUNS = 500, 9


def main() -> None:
    """Measure and print."""
    specs = tuple(TierSpec(name, 8192, 16, 32, digest="d") for name in TierName)
    fleet = Fleet(specs)
    for spec in specs:
        replica = fleet.add(Replica(f"{spec.name}-0", spec, "http://127.0.0.1", "", "m", state=ReplicaState.READY))
        replica.measured(SpeedModel(20, 1, 20 + 20 * spec.name.rank, 2, 1, 0.5, 0.1, 0.1, profiled=True))
    loss = {kind: ExpectedLoss(0.02, 0.01, 0.03) for kind in PromptClass}
    table = PolicyParameters(CLASS_FLOOR, CLASS_MAX_LOSS, losses={TierName.FAST: loss, TierName.BALANCED: loss})
    counter = EstimatingCounter()
    features = extract(PROMPT, counter)
    query = Query(features, 40, 200, sla=Sla(ttft_ms=500, tpot_ms=50, max_quality_loss=0.1))
    snapshot = fleet.snapshot()
    decision = decide(query, snapshot, table)
    with tempfile.TemporaryDirectory() as folder:
        log = DecisionLog(Path(folder) / "log", 1 << 30)
        steps: dict[str, Callable[[], object]] = {
            "snapshot of three replicas": fleet.snapshot,
            "decision, bounds on everything": lambda: decide(query, snapshot, table),
            "decision log, one line": lambda: log.decided("id", decision, snapshot, table),
            f"classifying {len(PROMPT)} characters": lambda: extract(PROMPT, counter),
        }
        print(f"$ python {sys.argv[0]}\n{LOOPS} calls, median of {RUNS} runs, in microseconds")
        for name, step in steps.items():
            runs = [seconds / LOOPS * 1e6 for seconds in timeit.repeat(step, number=LOOPS, repeat=RUNS)]
            print(f"{name:32} {statistics.median(runs):7.1f}  (best {min(runs):.1f}, worst {max(runs):.1f})")
        log.close()


if __name__ == "__main__":
    main()
