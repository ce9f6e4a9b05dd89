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
# The placement finds its engines' key in this variable: no file holds it.
KEY_VARIABLE = "VLLM_API_KEY"


class PlacementState(StrEnum):
    """The state of a wanted replica. Only one that is ``READY`` is in the engines' file."""

    PLACING = "placing"  # no node has its resources free
    STARTING = "starting"
    READY = "ready"  # the engine answers health checks
    SILENT = "silent"  # its node does not answer at the moment
    FAILED = "failed"  # the engine did not start, or ended; it is started again after a pause
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
class PlacementJob:
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
    def read(cls, path: Path) -> PlacementJob:
        """Read a job that ``write`` has written.

        Raises:
            OSError: It cannot be read.
        """
        members = json.loads(path.read_text("utf-8"))
        replicas = []
        for wanted in members.pop("replicas"):
            args = tuple(wanted.pop("args"))
            replicas.append(WantedReplica(args=args, **wanted))
        return cls(replicas=tuple(replicas), **members)


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
        text = f"{self.id:16} {self.state}"
        if self.state is PlacementState.STARTING:
            text += f" on {self.node}"
        elif self.state is PlacementState.READY:
            text += f": {self.url} answers"
        if self.detail:
            text += f": {self.detail}"
        return text


def read_status(path: Path) -> tuple[PlacedReplica, ...]:
    """Return what the placement last told; nothing before it has told anything.

    Raises:
        OSError: The file cannot be read.
    """
    try:
        members = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return ()
    replicas = []
    for placed in members:
        state = PlacementState(placed.pop("state"))
        replicas.append(PlacedReplica(state=state, **placed))
    return tuple(replicas)


def write_status(path: Path, replicas: Sequence[PlacedReplica]) -> None:
    """Write the state of every replica.

    Raises:
        OSError: It cannot be written.
    """
    write_json(path, [asdict(replica) for replica in replicas])


def engines_by_tier(
    tiers: Sequence[str], replicas: Sequence[PlacedReplica]
) -> dict[str, list[str]]:
    """Return the addresses of the engines that answer, for the file that routers follow."""
    urls: dict[str, list[str]] = {tier: [] for tier in tiers}
    for replica in replicas:
        if replica.tier in urls and replica.state is PlacementState.READY:
            urls[replica.tier].append(replica.url)
    return urls


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
