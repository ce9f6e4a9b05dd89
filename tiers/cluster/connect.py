"""Connect to a Ray cluster, or say what is wrong. ``ray.init`` alone waits for minutes for one that is not there."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError

from tiers.cluster.job import LOCAL_CLUSTER
from tiers.cluster.resources import NodeResources

CONNECT_S = 30.0
TCP_S = 5.0
UNUSABLE = 2  # exit status: starting again is of no use
MAX_ERROR_CHARS = 500


class ClusterError(Exception):
    """The cluster cannot be used. The text says what to do."""


def connect(address: str) -> None:
    """Connect this process to the cluster at an address.

    Raises:
        ClusterError: There is none, or it has another version of Ray or Python.
    """
    if address == LOCAL_CLUSTER:
        address = os.environ.get("RAY_ADDRESS", LOCAL_CLUSTER)
    _check_reachable(address)
    silence = _absent(address, f"it did not answer within {CONNECT_S:g} s")
    timer = threading.Timer(CONNECT_S, _give_up, [silence])
    timer.daemon = True
    timer.start()
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except RuntimeError as error:
        if "ersion mismatch" not in str(error):
            raise ClusterError(_absent(address, _one_line(error))) from error
        raise ClusterError(
            f"the Ray cluster at {address} has another version of Ray or Python than {sys.executable}: start it from an "
            f"environment of the same project version ('scripts/setup ray'), or set ray.python. Ray says: {_one_line(error)}"
        ) from error
    except RayError as error:
        raise ClusterError(
            f"the Ray cluster at {address} refuses this client: {_one_line(error)}"
        ) from error
    except (ConnectionError, TimeoutError, ValueError, OSError) as error:
        raise ClusterError(_absent(address, _one_line(error))) from error
    finally:
        timer.cancel()


def nodes() -> list[NodeResources]:
    """Return the nodes that are alive, with what they have free."""
    free = available_resources_per_node()
    return [
        NodeResources(
            address=node["NodeManagerAddress"],
            total=node["Resources"],
            free=free.get(node["NodeID"], {}),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _check_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    # Without an address, Ray looks for the cluster itself.
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), TCP_S).close()
    except OSError as error:
        raise ClusterError(_absent(address, error.strerror or str(error))) from error


def _absent(address: str, why: str) -> str:
    where = "on this machine" if address == LOCAL_CLUSTER else f"at {address}"
    return (
        f"no Ray cluster can be used {where} ({why}): start one with '.venv-ray/bin/ray start --head', join it from this "
        f"machine and every other with '.venv-ray/bin/ray start --address=HEAD:6379', or set ray.address. If it has a "
        f"token, set RAY_AUTH_MODE=token here too"
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:MAX_ERROR_CHARS]


def _give_up(text: str) -> None:
    sys.stderr.write(f"error: {text}\n")
    sys.stderr.flush()
    os._exit(UNUSABLE)
