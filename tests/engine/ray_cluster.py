"""A Ray cluster of several nodes on loopback: a program for the interpreter of the Ray environment.

It reads commands: ``add NAME CPUS`` starts a node, ``kill NAME`` kills all its processes. It writes the head's address, then
a line for each command that is done. It ends with its input.
"""

from __future__ import annotations

import os
import sys
from typing import Any

# Ray then neither looks for an address that others can reach nor tells anybody that it is used.
os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
# A lost node is noticed within 2 s, and not within 15.
os.environ |= {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
}
# Engines must not wait for other tests.
os.environ.update(RAY_health_check_failure_threshold="3", RAY_worker_niceness="0")

from ray.cluster_utils import Cluster

LIMITS = {
    "node_ip_address": "127.0.0.1",
    "object_store_memory": 80_000_000,
    "include_dashboard": False,
}


def main() -> None:
    os.makedirs(f"{os.environ['RAY_TMPDIR']}/ray", exist_ok=True)  # noqa: PTH103
    cluster = Cluster()
    nodes = {}
    cluster.add_node(num_cpus=0, **LIMITS)
    say(cluster.address)
    for line in sys.stdin:
        command, name, *cpus = line.split()
        if command == "add":
            nodes[name] = cluster.add_node(num_cpus=int(cpus[0]), **LIMITS)
        else:
            cluster.remove_node(nodes.pop(name), allow_graceful=False)
        say(f"{command} {name}")
    cluster.shutdown()


def say(text: Any) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
