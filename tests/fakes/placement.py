"""A stand-in for ``tiers/cluster/placement_main.py`` in the Ray environment, which obeys a test's orders.

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
    job = PlacementJob.read(Path(sys.argv[1]))
    orders = Path(os.environ["FAKE_PLACEMENT"])
    done = ""
    assert os.environ[KEY_VARIABLE]
    tiers = {wanted.id: wanted.tier for wanted in job.replicas}
    while True:
        order = orders.read_text("utf-8")
        if order != done:
            done = order
            states = json.loads(order)
            if isinstance(states, dict):
                sys.stderr.write(f"error: {states['error']}\n")
                return int(states["exit"])
            replicas = [
                PlacedReplica(
                    name,
                    tiers[name],
                    state=PlacementState(state),
                    node="10.0.0.5",
                    url=f"http://10.0.0.5:{number}",
                    detail="why",
                )
                for number, (name, state) in enumerate(states, 9101)
            ]
            write_json(Path(job.engines_file), engines_by_tier(job.tiers, replicas))
            write_status(Path(job.status_file), replicas)
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
