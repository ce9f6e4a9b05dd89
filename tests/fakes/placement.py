"""A stand-in for ``tiers/cluster/placement_main.py`` in the Ray environment: tells what a test orders.

``FAKE_PLACEMENT`` names a file of JSON: a list of ``[id, state]`` to write as the status, or ``{"exit": STATUS, "error": TEXT}``
to end with. It is read again whenever it changes. SIGTERM ends the program.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from tiers.cluster.job import (
    KEY_VARIABLE,
    PlacedReplica,
    PlacementJob,
    PlacementState,
    engines_by_tier,
    write_json,
    write_status,
)


def main() -> int:
    job, orders, done = (
        PlacementJob.read(Path(sys.argv[1])),
        Path(os.environ["FAKE_PLACEMENT"]),
        "",
    )
    assert os.environ[KEY_VARIABLE]
    tiers = {wanted.id: wanted.tier for wanted in job.replicas}
    while True:
        order = orders.read_text("utf-8")
        if order != done:
            done = order
            if isinstance(told := json.loads(order), dict):
                sys.stderr.write(f"error: {told['error']}\n")
                return int(told["exit"])
            found = [
                PlacedReplica(
                    name,
                    tiers[name],
                    PlacementState(state),
                    "10.0.0.5",
                    f"http://10.0.0.5:{number}",
                    "why",
                )
                for number, (name, state) in enumerate(told, 9101)
            ]
            write_json(Path(job.engines_file), engines_by_tier(job.tiers, found))
            write_status(Path(job.status_file), found)
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
