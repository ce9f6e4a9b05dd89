"""The state of the fleet, as the first process tells it to the workers: all of it, then what has changed."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from router.policy.table import Learned
from tiers.replica import Replica

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from router.policy.table import PolicyStore
    from router.workers.fleet import SharedFleet
    from tiers.preparing import Preparations
    from tiers.replica import ReplicaReport
    from tiers.snapshot import TemplateTokens
    from tiers.spec import TierName, TierSpec
    from tiers.speed import SpeedModel


@dataclass(frozen=True, slots=True)
class FleetPart:
    """What belongs to no replica."""

    specs: tuple[TierSpec, ...]
    template: TemplateTokens
    speeds: Mapping[TierName, SpeedModel]
    preparations: Preparations
    notes: dict[str, str]
    learned: Learned


@dataclass(frozen=True, slots=True)
class ReplicaPart:
    """One replica, with its place in the table."""

    index: int
    id: str
    url: str
    api_key: str
    report: ReplicaReport


@dataclass(frozen=True, slots=True)
class News:
    """What has changed.

    Attributes:
        fleet: None: nothing of it.
        replicas: Those that are new or have changed.
        order: Ids of all replicas, in the fleet's order.
    """

    fleet: FleetPart | None
    replicas: tuple[ReplicaPart, ...]
    order: tuple[str, ...]


@dataclass(slots=True)
class Teller:
    """The first process' side: finds what has changed."""

    fleet: SharedFleet
    learned: Callable[[], Learned] = Learned
    _told: bytes = b""
    _reports: dict[str, ReplicaReport] = field(default_factory=dict)

    def news(self) -> News | None:
        """Return what has changed since the last call; None: nothing."""
        part, fleet = self._part(), self.fleet
        fleet.flush()  # what is common to all comes before what it belongs to
        reports = {replica.id: replica.report() for replica in fleet.replicas}
        changed = [r for r in fleet.replicas if self._reports.get(r.id) != reports[r.id]]
        removed = self._reports.keys() - reports.keys()
        told = pickle.dumps(part)
        if told == self._told and not changed and not removed:
            return None
        news = News(part if told != self._told else None, tuple(map(self._of, changed)), tuple(reports))
        self._told, self._reports = told, reports
        return news

    def all(self) -> News:
        """Return the whole state."""
        replicas = self.fleet.replicas
        return News(self._part(), tuple(map(self._of, replicas)), tuple(replica.id for replica in replicas))

    def _part(self) -> FleetPart:
        fleet = self.fleet
        return FleetPart(
            fleet.specs, fleet.template, dict(fleet.speeds), fleet.preparations, fleet.notes, self.learned()
        )

    def _of(self, replica: Replica) -> ReplicaPart:
        index = self.fleet.index(replica)
        return ReplicaPart(index, replica.id, replica.url, replica.api_key, replica.report())


def follow(news: News, fleet: SharedFleet, policy: PolicyStore | None = None) -> None:
    """Apply what the first process tells, in a worker."""
    if news.fleet is not None:
        part = news.fleet
        fleet.specs, fleet.template, fleet.preparations = part.specs, part.template, part.preparations
        fleet.speeds, fleet.notes = part.speeds, part.notes
        if policy is not None:
            policy.follow(part.learned)
    known: dict[str, Replica] = {replica.id: replica for replica in fleet.replicas}
    for name in known.keys() - set(news.order):
        fleet.remove(known[name])
    for part_of in news.replicas:
        replica = known.get(part_of.id)
        if replica is None:
            report: Any = part_of.report
            replica = Replica(part_of.id, report.spec, part_of.url, part_of.api_key, report.model)
            fleet.add_at(replica, part_of.index)
        fleet.follow(replica, part_of.report)
    fleet.bell()
