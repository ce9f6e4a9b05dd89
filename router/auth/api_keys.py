"""Callers' keys and teams: their rights, quotas and budgets; made, kept as hashes in one file, revoked.

A key has 256 random bits: it cannot be guessed, so one SHA-256 is enough.
"""

from __future__ import annotations

import errno
import hashlib
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeVar

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)

from router.policy.decision import Priority
from router.policy.profiles import first_fault
from tiers.shared_file import OwnerError, locked, real_path, replace_content
from tiers.spec import TierName

PREFIX = "qarr-"
VERSION_DIGITS = 16  # A key file's version is this much of its digest.
# Amounts of budgets are millionths of an engine-second and of the currency.
MICRO = 1_000_000
Span = Literal["day", "month"]
Unit = Literal["engine_us", "money_u"]


class KeysError(Exception):
    """The key file cannot be used, or there is no such key."""


class UnauthorizedError(Exception):
    """A request has no key, or one that is not known or was revoked."""


class UnknownSignerError(UnauthorizedError):
    """A token names a key that its issuer had not published when the issuer's keys were last read."""


class IssuerUnreachableError(UnknownSignerError):
    """A token cannot be checked, since its issuer's keys cannot be read now."""


class BeyondKeyError(Exception):
    """A request asks for more than its key allows, and the key refuses such requests."""

    def __init__(self, field: str, requested: str, allowed: str) -> None:
        super().__init__(f"{field} {requested} is beyond this key: it allows {allowed}")
        self.field = field
        self.requested = requested
        self.allowed = allowed


class Quota(NamedTuple):
    """What a key may use; None: unlimited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None


class Limit(NamedTuple):
    """One budget: so many millionths of a unit in each day or month."""

    span: Span
    unit: Unit
    amount: int

    @property
    def name(self) -> str:
        unit_name = "engine_seconds" if self.unit == "engine_us" else "money"
        return f"{unit_name}_per_{self.span}"

    def text(self, currency: str) -> str:
        unit_text = "engine-seconds" if self.unit == "engine_us" else currency
        return f"{shown(self.amount)} {unit_text} a {self.span}"


class Account(NamedTuple):
    """A key or team, whose budgets requests count against.

    Attributes:
        id: ``key:`` and the key's id, or ``team:`` and the team's name.
        title: How its callers know it.
    """

    id: str
    title: str
    limits: tuple[Limit, ...]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request, with the rights of a key or token.

    Attributes:
        key_id: Names the key in logs, and is not secret; empty for callers without a key.
        tiers: The tiers that it may use; None: all.
        over: Whether a hint or priority beyond what is allowed is lowered and disclosed, or refused.
        admin: Whether it may operate on replicas, and see everybody's requests.
        team: The team that the key belongs to; empty: none.
        accounts: The accounts whose budgets its requests count against: its own, and its team's.
        over_budget: Whether a request beyond the budgets is refused, or may be served by the cheapest tier only.
        expires: When the key ceases to be valid; None: never.
        overflow: Whether its prompts may leave the fleet when every tier is full.
    """

    key_id: str
    name: str
    tiers: frozenset[TierName] | None = None
    over: Literal["clamp", "refuse"] = "clamp"
    max_priority: Priority = "interactive"
    quota: Quota | None = None
    admin: bool = False
    team: str = ""
    accounts: tuple[Account, ...] = ()
    over_budget: Literal["refuse", "cheapest"] = "refuse"
    expires: datetime | None = None
    overflow: bool = False

    @property
    def sees_all(self) -> bool:
        """Tell whether the caller may see everybody's requests and engines' addresses: admins, and all without keys."""
        return self.admin or not self.key_id

    def sees(self, key_id: str) -> bool:
        return self.sees_all or key_id == self.key_id


ANONYMOUS = Caller("", "anonymous", overflow=True)


def shown(amount: int) -> str:
    return f"{amount / MICRO:.6f}".rstrip("0").rstrip(".")


class Budget(BaseModel):
    """The budgets of a key or team by UTC day and month, as the key file has them; None: no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine_seconds_per_day: float | None = Field(
        None, gt=0, le=1e9, allow_inf_nan=False
    )
    engine_seconds_per_month: float | None = Field(
        None, gt=0, le=1e9, allow_inf_nan=False
    )
    money_per_day: float | None = Field(None, gt=0, le=1e9, allow_inf_nan=False)
    money_per_month: float | None = Field(None, gt=0, le=1e9, allow_inf_nan=False)

    def limits(self) -> tuple[Limit, ...]:
        budgets: tuple[tuple[Span, Unit, float | None], ...] = (
            ("day", "engine_us", self.engine_seconds_per_day),
            ("day", "money_u", self.money_per_day),
            ("month", "engine_us", self.engine_seconds_per_month),
            ("month", "money_u", self.money_per_month),
        )
        return tuple(
            Limit(span, unit, round(amount * MICRO))
            for span, unit, amount in budgets
            if amount is not None
        )


TeamName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class TeamRecord(Budget):
    name: TeamName

    @property
    def account(self) -> Account:
        return Account(f"team:{self.name}", f"team {self.name}", self.limits())


class KeyRecord(Budget):
    id: str
    name: str = Field(min_length=1, max_length=100)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    created: datetime
    revoked: datetime | None = None
    tiers: tuple[TierName, ...] | None = None
    over: Literal["clamp", "refuse"] = "clamp"
    max_priority: Priority = "interactive"
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    concurrent_requests: int | None = Field(None, ge=1)
    admin: bool = False
    expires: AwareDatetime | None = None
    team: TeamName | None = None
    over_budget: Literal["refuse", "cheapest"] = "refuse"
    # None is not written, because routers of older releases read the file.
    overflow: bool | None = None

    @field_validator("tiers")
    @classmethod
    def _some_tier(
        cls, tiers: tuple[TierName, ...] | None
    ) -> tuple[TierName, ...] | None:
        if tiers == ():
            raise ValueError("a key needs at least one tier")
        return tiers

    def caller(self, teams: Mapping[str, TeamRecord]) -> Caller:
        quota = Quota(
            self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests
        )
        accounts = [Account(f"key:{self.id}", title="this key", limits=self.limits())]
        if self.team is not None and self.team in teams:
            accounts.append(teams[self.team].account)
        return Caller(
            key_id=self.id,
            name=self.name,
            tiers=None if self.tiers is None else frozenset(self.tiers),
            over=self.over,
            max_priority=self.max_priority,
            quota=None if quota == Quota() else quota,
            admin=self.admin,
            team=self.team or "",
            accounts=tuple(account for account in accounts if account.limits),
            over_budget=self.over_budget,
            expires=self.expires,
            overflow=bool(self.overflow),
        )


class KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: Literal[1] = 1
    keys: tuple[KeyRecord, ...] = ()
    # Routers of older releases read the file, and None is not written. Requests need a key unless ``required`` is False.
    teams: tuple[TeamRecord, ...] | None = None
    required: bool | None = None

    @property
    def is_off(self) -> bool:
        return self.required is False

    @property
    def by_name(self) -> dict[str, TeamRecord]:
        return {team.name: team for team in self.teams or ()}

    def callers(self) -> dict[str, Caller]:
        teams = self.by_name
        return {
            key.sha256: key.caller(teams) for key in self.keys if key.revoked is None
        }


Record = TypeVar("Record", KeyRecord, TeamRecord)


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def read_keys(path: Path) -> tuple[KeyRecord, ...]:
    return read_key_file(path).keys


def read_key_file(path: Path) -> KeyFile:
    """Return the keys of a file, revoked ones too, and its teams; none if there is no file.

    Raises:
        KeysError: The file cannot be read, or is no key file.
    """
    content = read_content(path)
    return KeyFile() if content is None else parse_key_file(content, path)


def read_content(path: Path) -> bytes | None:
    """Return a key file's bytes, or None if there is no such file; ``KeysError`` if it cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise KeysError(
            f"the key file {path} cannot be read: {error.strerror}"
        ) from error


def parse_key_file(content: bytes, path: Path) -> KeyFile:
    """Return the keys and teams of a file's bytes; ``KeysError`` if it is no key file."""
    try:
        return KeyFile.model_validate_json(content)
    except ValidationError as error:
        raise KeysError(
            f"the key file {path} is not valid: {first_fault(error)}"
        ) from None


def version_of(content: bytes) -> str:
    """Return a name of the key file's content, from which nothing of its keys can be told."""
    return hashlib.sha256(content).hexdigest()[:VERSION_DIGITS]


def add_key(path: Path, name: str, **rights: object) -> tuple[str, KeyRecord]:
    """Make a key with rights (fields of ``KeyRecord``), and add it to the file; a missing file is made.

    Return the key, which is stored nowhere, and its record.

    Raises:
        KeysError: The name is in use, the name or a right is not valid, or the file cannot be used.
    """
    key = PREFIX + secrets.token_urlsafe(32)
    fields = {
        "id": secrets.token_hex(4),
        "name": name,
        "sha256": hash_key(key),
        "created": datetime.now(UTC),
    }
    record = _valid(KeyRecord, {**fields, **rights})
    _check_name(name)
    with _changing(path) as key_file:
        _check_name_is_unused(name, key_file)
        if record.team is not None and record.team not in key_file.by_name:
            raise KeysError(
                f"there is no team {record.team!r}: make it with 'qarr keys team {record.team}'"
            )
        key_file.keys += (record,)
    return key, record


def _check_name(name: str) -> None:
    """Refuse a name that does not look in lists and logs like what it is.

    Files of earlier releases may have such names, so it is not checked when a file is read.
    """
    if not name.isprintable() or name != name.strip():
        raise KeysError(
            f"name: {name!r} has control characters, or spaces at an end; printable characters, and spaces between "
            f"them, are allowed"
        )


def _check_name_is_unused(name: str, key_file: KeyFile) -> None:
    """Refuse the name of a key in force, and any key's id."""
    if any(key.name == name and key.revoked is None for key in key_file.keys):
        raise KeysError(
            f"there is a key named {name!r} already: revoke it first, or take another name"
        )
    if any(key.id == name for key in key_file.keys):
        raise KeysError(
            f"{name!r} is the id of another key, and 'qarr keys revoke' takes either: take another name"
        )


def switch_keys(path: Path, *, on: bool) -> KeyFile:
    """Say in the file whether requests need a key, and return it; its keys stay. A missing file is made.

    Raises:
        KeysError: No key is in force that requests could carry (``on``), or the file cannot be used.
    """
    with _changing(path) as key_file:
        if on and not any(key.revoked is None for key in key_file.keys):
            raise KeysError(
                f"{path} has no key in force: make one first with 'qarr keys add NAME'"
            )
        key_file.required = None if on else False
    return key_file


def set_team(path: Path, name: str, **budget: float | None) -> TeamRecord:
    """Make a team, or replace its budgets (fields of ``Budget``); ``KeysError`` as with ``add_key``."""
    team = _valid(TeamRecord, {"name": name, **budget})
    with _changing(path) as key_file:
        kept_teams = [kept for kept in key_file.teams or () if kept.name != name]
        key_file.teams = (*kept_teams, team)
    return team


def revoke_key(path: Path, id_or_name: str) -> KeyRecord:
    """Revoke a key, whose record stays, so that logs can still be read; ``KeysError`` if no such key is in force."""
    with _changing(path) as key_file:
        matching = [
            key
            for key in key_file.keys
            if key.revoked is None and id_or_name in {key.id, key.name}
        ]
        if not matching:
            raise KeysError(
                f"there is no key in force with the id or name {id_or_name!r}: 'qarr keys list' shows all"
            )
        revoked_key = matching[0].model_copy(update={"revoked": datetime.now(UTC)})
        key_file.keys = tuple(
            revoked_key if key.id == revoked_key.id else key for key in key_file.keys
        )
    return revoked_key


def _valid(kind: type[Record], fields: dict[str, object]) -> Record:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise KeysError(
            f"{first_fault(error)} (got {error.errors()[0]['input']!r})"
        ) from None


@contextmanager
def _changing(path: Path) -> Iterator[KeyFile]:
    """Replace the file by what it is changed to: a reader sees the old one or the new one.

    A symbolic link stays one, and its target is replaced. Owner, group and mode stay; only its owner reads a new file.
    """
    real = real_path(path)
    try:
        with locked(real):
            key_file = read_key_file(real)
            yield key_file
            replace_content(
                real, key_file.model_dump_json(indent=2, exclude_none=True).encode()
            )
    except OSError as error:
        raise KeysError(
            f"the key file {path} cannot be written: {_advice(error, real)}"
        ) from error


def _advice(error: OSError, real: Path) -> str:
    """Return what is in the way of a change of the key file, and what to do about it."""
    obstacle = str(error.strerror)
    if isinstance(error, OwnerError):
        return obstacle
    if error.filename is not None and Path(error.filename) != real:
        obstacle += f" ({error.filename})"
    if error.errno == errno.EROFS:
        return f"{obstacle}; mount its folder, not the file alone, and so that it can be written"
    return f"{obstacle}; let this user write to {real.parent}, or set auth.keys_file to a file in another folder"
