"""Which engines that run elsewhere belong to the fleet. Nothing else adds or removes them.

Settings, an operator, a file and DNS each name engines. What they name together is wanted. ``reconcile`` adds what is wanted
and not there, and drains and removes what is there and not wanted. An engine that is wanted again while it drains stays.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from tiers.address import normalised
from tiers.errors import NotPossibleError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tiers.fleet import Fleet
    from tiers.lifecycle.engine import Engine
    from tiers.replica import Replica
    from tiers.spec import TierName, TierSpec

log = logging.getLogger(f"qarr.{__name__}")
RETRY_S = 1.0  # What could not be added or removed at once is tried again after this.
# Addresses by tier. A tier without any is awaited.
Members = dict["TierName", tuple[str, ...]]


class Source(StrEnum):
    """Who names engines, the strongest first: if two name one engine for different tiers, the first one counts."""

    SETTINGS = "settings"
    COMMAND = "command"
    FILE = "file"
    DNS = "dns"


# A source has one key; DNS has one for each name.
Key = tuple[Source, str]


@dataclass(frozen=True, slots=True)
class Wanted:
    """An engine that belongs to the fleet; ``sources`` are those that name it."""

    tier: TierName
    url: str
    sources: tuple[Source, ...]

    @property
    def source(self) -> str:
        """Return the sources for people."""
        return ", ".join(self.sources)


def all_wanted(named: Mapping[Key, Members]) -> dict[str, Wanted]:
    """Return what the sources name together, by normalised address."""
    found: dict[str, Wanted] = {}
    for (source, _), members in sorted(
        named.items(), key=lambda item: list(Source).index(item[0][0])
    ):
        for tier, urls in members.items():
            for url in urls:
                known = found.setdefault(
                    normalised(url), Wanted(tier, url.rstrip("/"), ())
                )
                if known.tier is tier and source not in known.sources:
                    found[normalised(url)] = replace(
                        known, sources=(*known.sources, source)
                    )
    return found


class RosterControl(Protocol):
    """What is needed of the supervisor."""

    fleet: Fleet

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Return all engines."""

    def add_elsewhere(self, spec: TierSpec, url: str, source: str) -> Engine:
        """Begin to watch an engine that runs elsewhere."""


class Removals(Protocol):
    """What is needed of operations."""

    def withdraw(self, engine: Engine) -> None:
        """Begin to drain and remove an engine, unless that is being done."""

    def keep(self, engine: Engine) -> None:
        """Break off its removal, if it only drains."""


class Roster:
    """The engines that each source names, and the specs that engines elsewhere have, by tier."""

    def __init__(self, control: RosterControl, removals: Removals) -> None:
        self._control = control
        self._removals = removals
        self._specs: dict[TierName, TierSpec] = {}
        self._named: dict[Key, Members] = {}
        self._refused: set[str] = set()  # addresses for which there is no space

    @property
    def tiers(self) -> tuple[TierName, ...]:
        """Return the tiers that engines can be added to."""
        return tuple(self._specs)

    def begin(self, specs: Sequence[TierSpec]) -> None:
        """Add the engines of the settings.

        Args:
            specs: Of every tier, as its engines elsewhere have it.
        """
        self._specs = {spec.name: replace(spec, urls=(), named_by=()) for spec in specs}
        self.name(
            Source.SETTINGS, {spec.name: spec.urls for spec in specs if spec.urls}
        )

    def name(self, source: Source, members: Members, which: str = "") -> None:
        """Replace what a source names, and add and remove engines accordingly."""
        if self._named.get((source, which)) != members:
            self._named[source, which] = members
            self.reconcile()

    def add(self, tier: TierName, url: str) -> Replica:
        """Add an engine at an operator's request; it gets requests once it is ready.

        Raises:
            NotPossibleError: It is in the fleet, or cannot be added now.
        """
        known = all_wanted(self._named).get(normalised(url))
        if known is not None:
            raise NotPossibleError(
                f"{url} is in tier {known.tier} already, named by {known.source}"
            )
        before = self._named.get((Source.COMMAND, ""), {})
        self._named[Source.COMMAND, ""] = {**before, tier: (*before.get(tier, ()), url)}
        try:
            self._await()
            return self._added(tier, url)
        except NotPossibleError:
            self._named[Source.COMMAND, ""] = before
            self._await()
            raise

    def _added(self, tier: TierName, url: str) -> Replica:
        engine = self._present().get(normalised(url))
        if engine is None:
            return self._add(Wanted(tier, url.rstrip("/"), (Source.COMMAND,))).replica
        if engine.replica.spec.name is tier:
            self._removals.keep(engine)
        if engine.replica.spec.name is not tier or engine.leaving:
            raise NotPossibleError(
                f"{url} is still being removed as {engine.replica.id}: try again when it is gone"
            )
        engine.replica.source = Source.COMMAND
        return engine.replica

    def release(self, engine: Engine) -> None:
        """Forget that the settings or an operator name an engine, because an operator removes it.

        Raises:
            NotPossibleError: It was started here, or something that the router follows names it.
        """
        replica = engine.replica
        if engine.launch is not None:
            raise NotPossibleError(
                f"{replica.id} was started here: 'qarr tiers drain {replica.id}' keeps requests from it"
            )
        address = normalised(replica.url)
        wanted = all_wanted(self._named).get(address)
        sources = wanted.sources if wanted else ()
        if Source.FILE in sources or Source.DNS in sources:
            where = (
                "discovery.file"
                if Source.FILE in sources
                else f"tiers.{replica.spec.name}.dns"
            )
            raise NotPossibleError(
                f"{replica.id} is named by {where}: take it out there, and it is drained and removed"
            )
        for source in (Source.SETTINGS, Source.COMMAND):
            members = self._named.get((source, ""), {})
            self._named[source, ""] = _without(members, address)
        self._await()

    def reconcile(self) -> None:
        """Add what is wanted and not there; drain and remove what is there and not wanted."""
        self._await()
        all_named = all_wanted(self._named)
        present = self._present()
        for address, engine in present.items():
            wanted = all_named.get(address)
            if wanted is None or wanted.tier is not engine.replica.spec.name:
                self._removals.withdraw(engine)
            else:
                engine.replica.source = wanted.source
                self._removals.keep(engine)
        for address, wanted in all_named.items():
            if address not in present:
                self._try_to_add(address, wanted)

    async def run(self) -> None:
        """Try again what could not be done at once, until cancelled."""
        while True:
            await asyncio.sleep(RETRY_S)
            self.reconcile()

    def _try_to_add(self, address: str, wanted: Wanted) -> None:
        try:
            self._add(wanted)
            self._refused.discard(address)
        except NotPossibleError as error:
            if address not in self._refused:
                log.warning(
                    "%s is not added to tier %s: %s", wanted.url, wanted.tier, error
                )
            self._refused.add(address)

    def _present(self) -> dict[str, Engine]:
        return {
            normalised(engine.replica.url): engine
            for engine in self._control.engines
            if engine.launch is None
        }

    def _add(self, wanted: Wanted) -> Engine:
        spec = replace(self._specs[wanted.tier], urls=(wanted.url,))
        return self._control.add_elsewhere(spec, wanted.url, wanted.source)

    def _await(self) -> None:
        """Note the tiers for which engines are named while the router runs; without any they are not absent."""
        fleet = self._control.fleet
        awaited: set[TierName] = set()
        for (source, _), members in self._named.items():
            if source is not Source.SETTINGS:
                awaited.update(members)
        for spec in fleet.specs:
            if spec.awaited is not (spec.name in awaited):
                fleet.configure(replace(spec, awaited=spec.name in awaited))


def _without(members: Members, address: str) -> Members:
    """Return the engines of a source without the one at a normalised address; tiers that have none left go."""
    kept: Members = {}
    for tier, urls in members.items():
        kept_urls = tuple(url for url in urls if normalised(url) != address)
        if kept_urls:
            kept[tier] = kept_urls
    return kept
