"""The state of ``qarr top``, from the events of ``GET /live`` and the keys pressed. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

KEPT_RECORDS = 200
RESENT_RECORDS = 60  # more than the router sends at the beginning of a stream
SORTS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "age": lambda r: -r["age_ms"],
    "tokens": lambda r: -(r["prompt_tokens"] + r["output_tokens"]),
    "tier": lambda r: (str(r["tier"]), -r["age_ms"]),
    "class": lambda r: (r["class"], -r["age_ms"]),
}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the router has sent.

    Attributes:
        fleet: Its last picture of the fleet; None: none yet.
        records: Records of ended requests, the newest first.
        trouble: Why the router sends nothing; empty while it does.
        silent_since: Since when it sends nothing, in monotonic seconds.
    """

    fleet: Mapping[str, Any] | None = None
    records: tuple[Mapping[str, Any], ...] = ()
    trouble: str = ""
    silent_since: float = 0.0

    def apply(self, event: str, data: Mapping[str, Any]) -> Snapshot:
        """Return the snapshot after an event; after a reconnection the router sends its last requests again."""
        if event == "fleet":
            return replace(self, fleet=data, trouble="")
        known = {(r["request_id"], r["at"]) for r in self.records[:RESENT_RECORDS]}
        if event != "request" or (data["request_id"], data["at"]) in known:
            return self
        return replace(self, fleet=_without(self.fleet, data), records=(data, *self.records)[:KEPT_RECORDS])


def _without(fleet: Mapping[str, Any] | None, ended: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the fleet without a request that has ended since it was sent."""
    if fleet is None:
        return None
    left = [r for r in fleet["in_flight"] if r["request_id"] != ended["request_id"]]
    gone = len(fleet["in_flight"]) - len(left)
    return {**fleet, "in_flight": left, "in_flight_total": fleet["in_flight_total"] - gone} if gone else fleet


@dataclass(frozen=True, slots=True)
class ViewState:
    """What the user has chosen to see.

    Attributes:
        frozen: The snapshot that is shown while paused.
        selected: Index into both lists together, in-flight requests first; None: none.
        opened: The request whose verdicts are shown.
        unicode: Whether the terminal can show blocks and arrows.
    """

    sort: Literal["age", "tokens", "tier", "class"] = "age"
    frozen: Snapshot | None = None
    selected: int | None = None
    opened: Mapping[str, Any] | None = None
    unicode: bool = True

    def key(self, key: str, picture: Snapshot) -> ViewState:
        """Return the view after a key."""
        shown = self.frozen or picture
        if key == "p":
            return replace(self, frozen=None if self.frozen else picture)
        if key == "s":
            names: list[Any] = list(SORTS)
            return replace(self, sort=names[(names.index(self.sort) + 1) % len(names)])
        if key in {"up", "down"} and self.opened is None:
            last = len(self.rows(shown)) - 1
            now = -1 if self.selected is None else self.selected
            moved = min(now + 1, last) if key == "down" else max(now - 1, 0)
            return replace(self, selected=moved if last >= 0 else None)
        if key == "enter" and self.opened is None and self.selected is not None:
            rows = self.rows(shown)
            return replace(self, opened=rows[min(self.selected, len(rows) - 1)] if rows else None)
        if key in {"enter", "escape"}:
            return replace(self, opened=None) if self.opened is not None else replace(self, selected=None)
        return self

    def rows(self, picture: Snapshot) -> list[Mapping[str, Any]]:
        """Return the requests that can be selected, in the order shown."""
        return [*self.in_flight(picture), *picture.records]

    def in_flight(self, picture: Snapshot) -> list[Mapping[str, Any]]:
        """Return the requests in flight, in the chosen order."""
        return sorted(picture.fleet["in_flight"] if picture.fleet else [], key=SORTS[self.sort])
