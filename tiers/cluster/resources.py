"""Why Ray has no place for a replica, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SHOWN_NODES = 8


@dataclass(frozen=True, slots=True)
class NodeResources:
    """What one node has, and what of it is free."""

    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]

    def has(self, wanted: Mapping[str, float]) -> bool:
        """Tell whether the node, were it empty, could hold what is wanted."""
        return all(self.total.get(name, 0) >= amount for name, amount in wanted.items())

    def has_free(self, wanted: Mapping[str, float]) -> bool:
        """Tell whether what is wanted is free."""
        return all(self.free.get(name, 0) >= amount for name, amount in wanted.items())


def why_not_placed(wanted: Mapping[str, float], nodes: Sequence[NodeResources]) -> str:
    """Return what is missing, and what is free where; nothing is if only the start of a process takes long."""
    if any(node.has_free(wanted) for node in nodes):
        return "Ray is about to start its process"
    amounts = [f"{name} {amount:g}" for name, amount in wanted.items()]
    needs = " and ".join(amounts) or "no resources"
    reason = f"it needs {needs} on one node. Free are {_free_on(nodes, wanted)}"
    if any(node.has(wanted) for node in nodes):
        return reason
    return f"{reason}. No node has as much: add one ('ray start'), or set ray.resources or tiers.<name>.ray_resources"


def _free_on(nodes: Sequence[NodeResources], wanted: Mapping[str, float]) -> str:
    """Return what is free of each wanted resource on each node; only some of many nodes are shown."""
    if not nodes:
        return "none: there are no nodes"
    shown = [f"{node.address}: {_free(wanted, node)}" for node in nodes[:SHOWN_NODES]]
    if len(nodes) > SHOWN_NODES:
        shown.append(f"and {len(nodes) - SHOWN_NODES} more nodes")
    return "; ".join(shown)


def _free(wanted: Mapping[str, float], node: NodeResources) -> str:
    return ", ".join(
        f"{name} {node.free.get(name, 0):g} of {node.total.get(name, 0):g}"
        for name in wanted
    )
