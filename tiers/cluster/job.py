"""What the router asks of the placement, and what the placement tells: values, and the files that hold them.

The placement runs in the Ray environment, which lacks the router's packages: only the standard library here.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

LOCAL_CLUSTER = "auto"  # the address of the cluster that this machine belongs to
# of the placement: the key of its engines, which no file holds
KEY_VARIABLE = "VLLM_API_KEY"


class PlacementState(StrEnum):
    """The state of a wanted replica. Only one that is ``READY`` is in the engines' file."""

    PLACING = "placing"  # no node has its resources free
    STARTING = "starting"
    READY = "ready"  # it answers health checks
    SILENT = "silent"  # its node does not answer at the moment
    FAILED = "failed"  # it did not start, or ended; it is started again after a pause
    LOST = "lost"  # its node is gone; it is placed again


@dataclass(frozen=True, slots=True)
class WantedReplica:
    """One engine to place.

    Attributes:
        id: Its name, for people.
        tier: The tier's name.
        checkpoint: Model folder, by its path on the node.
        args: vLLM's arguments apart from the address.
        env: Its variables over those of the node.
        resources: What Ray reserves for it on one node.
        across_nodes: vLLM's own Ray executor reserves its GPUs, on any nodes.
    """

    id: str
    tier: str
    checkpoint: str
    args: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)
    across_nodes: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that the placement is to do.

    Attributes:
        address: Of the Ray cluster: ``auto`` or ``HOST:PORT``.
        replicas: What is wanted.
        engines_file: Where the addresses of engines that answer are written, by tier.
        status_file: Where the state of every replica is written.
        log_dir: Folder of the engines' logs, by its path on the node.
        base_port: First port that is tried on a node.
        start_timeout_s: From an engine's start to its first healthy answer.
        unreachable_s: An engine that answers no health check for so long is started again.
        stop_grace_s: From SIGTERM to SIGKILL.
        traced: Engines send spans.
    """

    address: str
    replicas: tuple[WantedReplica, ...]
    engines_file: str
    status_file: str
    log_dir: str
    base_port: int = 9101
    start_timeout_s: float = 600.0
    unreachable_s: float = 60.0
    stop_grace_s: float = 10.0
    traced: bool = False

    @property
    def tiers(self) -> tuple[str, ...]:
        """Return the tiers that have replicas, in order."""
        return tuple(dict.fromkeys(replica.tier for replica in self.replicas))

    def write(self, path: Path) -> None:
        """Write the job into a file.

        Raises:
            OSError: It cannot be written.
        """
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read a job that ``write`` has written.

        Raises:
            OSError: It cannot be read.
        """
        found = json.loads(path.read_text("utf-8"))
        replicas = (
            WantedReplica(**{**each, "args": tuple(each["args"])})
            for each in found.pop("replicas")
        )
        return cls(replicas=tuple(replicas), **found)


@dataclass(frozen=True, slots=True)
class PlacedReplica:
    """What is known of a wanted replica.

    Attributes:
        node: Address of its node; empty: it has none.
        url: Where it answers; empty: nowhere yet.
        detail: Why it is in this state, for people.
    """

    id: str
    tier: str
    state: PlacementState = PlacementState.PLACING
    node: str = ""
    url: str = ""
    detail: str = ""

    @property
    def line(self) -> str:
        """Return the state in words."""
        where = {
            PlacementState.STARTING: f" on {self.node}",
            PlacementState.READY: f": {self.url} answers",
        }
        return f"{self.id:16} {self.state}{where.get(self.state, '')}{f': {self.detail}' if self.detail else ''}"


def read_status(path: Path) -> tuple[PlacedReplica, ...]:
    """Return what the placement last told; nothing before it has told anything.

    Raises:
        OSError: The file cannot be read.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return ()
    return tuple(
        PlacedReplica(**{**each, "state": PlacementState(each["state"])})
        for each in found
    )


def write_status(path: Path, replicas: Sequence[PlacedReplica]) -> None:
    """Write the state of every replica.

    Raises:
        OSError: It cannot be written.
    """
    write_json(path, [asdict(each) for each in replicas])


def engines_by_tier(
    tiers: Sequence[str], replicas: Sequence[PlacedReplica]
) -> dict[str, list[str]]:
    """Return the addresses of the engines that answer, for the file that routers follow."""
    return {
        tier: [
            each.url
            for each in replicas
            if each.tier == tier and each.state is PlacementState.READY
        ]
        for tier in tiers
    }


def write_json(path: Path, value: Any) -> None:
    """Replace a file in one step, so that a reader sees the old or the new one; only its owner may read it.

    Raises:
        OSError: It cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    part.touch(mode=0o600)
    part.write_text(json.dumps(value, indent=1), "utf-8")
    part.replace(path)
