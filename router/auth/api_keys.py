"""Callers' keys: made, kept as hashes in one file, looked up, revoked.

A key has 256 random bits: it cannot be guessed, so one SHA-256 is enough. A running router reads the file again when it has
changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import logging
import os
import secrets
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, field_validator

from router.auth.budgets import Account, Budget
from router.policy.decision import Priority  # noqa: TC001  pydantic reads it
from router.policy.profiles import first_fault
from tiers.spec import TierName  # noqa: TC001  pydantic reads it

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


log = logging.getLogger(f"qarr.{__name__}")
PREFIX = "qarr-"
RELOAD_S = 1.0  # a change of the file takes effect within this time


class KeysError(Exception):
    """The key file cannot be used, or there is no such key."""


class Unauthorized(Exception):
    """A request has no key, or one that is not known or was revoked."""


class UnknownSigner(Unauthorized):
    """A token names a key that its issuer had not published when the issuer's keys were last read."""


class IssuerAway(UnknownSigner):
    """A token cannot be checked, since its issuer's keys cannot be read now."""


class KeyExpired(Unauthorized):
    """A request's key has expired."""

    def __init__(self, expires: datetime) -> None:
        super().__init__(f"the key expired at {expires.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}: ask for a new one")


class BeyondKey(Exception):
    """A request asks for more than its key allows, and the key refuses such requests."""

    def __init__(self, field: str, asked: str, allowed: str) -> None:
        super().__init__(f"{field} {asked} is beyond this key: it allows {allowed}")
        self.field, self.asked, self.allowed = field, asked, allowed


@dataclass(frozen=True, slots=True)
class Quota:
    """What a key may use; None: unlimited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None

    @property
    def unlimited(self) -> bool:
        return self == _UNLIMITED

    @property
    def limits(self) -> dict[Literal["requests", "tokens", "concurrent"], int | None]:
        """Return the limits by the names that errors and headers use."""
        return {
            "requests": self.requests_per_minute,
            "tokens": self.tokens_per_minute,
            "concurrent": self.concurrent_requests,
        }


_UNLIMITED = Quota()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request, and what the key allows.

    Attributes:
        key_id: Names the key in logs; not secret. Empty for callers without a key.
        tiers: That it may use; None: all.
        over: What happens to a hint or priority beyond what is allowed: lowered and disclosed, or refused.
        admin: May operate on replicas, and see everybody's requests.
        team: That the key belongs to; empty: none.
        accounts: Whose budgets its requests count against: its own, and its team's.
        over_budget: What happens to a request beyond them: it is refused, or only the cheapest tier may serve it.
        expires: When the key ends to be valid; None: never.
        overflow: Whether its prompts may leave the fleet when every tier is full.
    """

    key_id: str
    name: str
    tiers: frozenset[TierName] | None = None
    over: Literal["clamp", "refuse"] = "clamp"
    max_priority: Priority = "interactive"
    quota: Quota = _UNLIMITED
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
        """Tell whether the caller may see the requests of a key."""
        return self.sees_all or key_id == self.key_id


ANONYMOUS = Caller("", "anonymous", overflow=True)


TeamName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class TeamRecord(Budget):
    """A team, as the file has it: budgets that its keys share."""

    name: TeamName

    def account(self) -> Account | None:
        """Return what its keys' requests count against; None: it has no budget."""
        limits = self.limits()
        return Account(f"team:{self.name}", f"team {self.name}", limits) if limits else None


class KeyRecord(Budget):
    """One key, as the file has it."""

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
    overflow: bool | None = None  # None is not written: routers of older releases read the file

    @field_validator("tiers")
    @classmethod
    def _some_tier(cls, tiers: tuple[TierName, ...] | None) -> tuple[TierName, ...] | None:
        if tiers == ():
            raise ValueError("a key needs at least one tier")
        return tiers

    def account(self) -> Account | None:
        """Return what its requests count against; None: it has no budget of its own."""
        limits = self.limits()
        return Account(f"key:{self.id}", "this key", limits) if limits else None

    def caller(self, teams: Mapping[str, TeamRecord]) -> Caller:
        quota = Quota(self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests)
        tiers = None if self.tiers is None else frozenset(self.tiers)
        shared = teams[self.team].account() if self.team is not None and self.team in teams else None
        return Caller(
            self.id,
            self.name,
            tiers,
            self.over,
            self.max_priority,
            quota,
            self.admin,
            team=self.team or "",
            accounts=tuple(account for account in (self.account(), shared) if account is not None),
            over_budget=self.over_budget,
            expires=self.expires,
            overflow=bool(self.overflow),
        )


class KeyFile(BaseModel):
    """The key file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    keys: tuple[KeyRecord, ...] = ()
    teams: tuple[TeamRecord, ...] | None = None  # None is not written: routers of older releases read the file

    def callers(self) -> list[tuple[str, Caller]]:
        """Return the hashes of the keys in force, and their callers."""
        teams = self.by_name
        return [(key.sha256, key.caller(teams)) for key in self.keys if key.revoked is None]

    @property
    def by_name(self) -> dict[str, TeamRecord]:
        return {team.name: team for team in self.teams or ()}


class KeyStore:
    """The keys of one file. Requests need a key as soon as the file exists, even when all its keys are revoked.

    Attributes:
        teams: Those of the file, by name.
    """

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        """Read the file; keys expire by the clock ``now``, in seconds since 1970.

        Raises:
            KeysError: It exists and cannot be used.
        """
        self.path, self._now = path, now
        self._callers: dict[str, tuple[str, Caller]] = {}
        self.teams: Mapping[str, TeamRecord] = {}
        self._seen: tuple[int, int, int] | None = None
        self._next_look = 0.0
        self._load()

    def take(self, other: KeyStore) -> None:
        """Take the file and the keys of another store."""
        self.path, self._callers, self.teams, self._seen = other.path, other._callers, other.teams, other._seen
        self._next_look = 0.0

    @property
    def callers(self) -> list[Caller]:
        """Return the callers of all keys in force, in the file's order."""
        self._refresh()
        return [caller for _, caller in self._callers.values()]

    @property
    def required(self) -> bool:
        self._refresh()
        return self._seen is not None

    @property
    def notes(self) -> list[str]:
        """Return what an operator should know of who gets in."""
        return []

    @property
    def ready(self) -> bool:
        return True

    def find(self, key: str) -> Caller:
        """Return a key's caller.

        The time that it takes tells nothing about the keys: only hashes are looked up, which a sender cannot choose, and
        the last step compares in constant time.

        Raises:
            Unauthorized: The key is not known, was revoked, or has expired.
        """
        self._refresh()
        digest = hash_key(key)
        known, caller = self._callers.get(digest, ("", ANONYMOUS))
        if not hmac.compare_digest(known, digest):
            raise Unauthorized("the key is not known here, or was revoked")
        if caller.expires is not None and self._now() >= caller.expires.timestamp():
            raise KeyExpired(caller.expires)
        return caller

    async def renew(self) -> None:
        """Learn what is new of whoever signs tokens; a file of keys has none."""

    def holds(self, caller: Caller) -> bool:
        """Tell whether a caller still has access, with the same rights."""
        if not self.required:
            return caller == ANONYMOUS
        if caller.expires is not None and self._now() >= caller.expires.timestamp():
            return False
        return any(known == caller for _, known in self._callers.values())

    def _refresh(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + RELOAD_S
        try:
            if _state_of(self.path) == self._seen:
                return
            self._load()
        except KeysError as error:
            log.error("%s; the keys read before stay in force", error)  # noqa: TRY400  the text says enough
            return
        log.info("keys read again from %s: %d in force", self.path, len(self._callers))

    def _load(self) -> None:
        state = _state_of(self.path)
        if state is None and self._seen is not None:
            raise KeysError(f"the key file {self.path} is gone")
        if state is not None:
            file = read_key_file(self.path)
            self._callers = {digest: (digest, caller) for digest, caller in file.callers()}
            self.teams = file.by_name
        self._seen = state


def hash_key(key: str) -> str:
    """Return a key's hash as the file keeps it."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def read_keys(path: Path) -> tuple[KeyRecord, ...]:
    return read_key_file(path).keys


def read_key_file(path: Path) -> KeyFile:
    """Return the keys of a file, revoked ones too, and its teams; none if there is no file.

    Raises:
        KeysError: The file cannot be read, or is no key file.
    """
    try:
        return KeyFile.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return KeyFile()
    except OSError as error:
        raise KeysError(f"the key file {path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise KeysError(f"the key file {path} is not valid: {first_fault(error)}") from None


def add_key(path: Path, name: str, **rights: object) -> tuple[str, KeyRecord]:
    """Make a key with rights (fields of ``KeyRecord``) and add it to the file; a missing file is made.

    Returns:
        The key, which is stored nowhere, and its record.

    Raises:
        KeysError: The name is taken, a right is not valid, or the file cannot be used.
    """
    key = PREFIX + secrets.token_urlsafe(32)
    fields = {"id": secrets.token_hex(4), "name": name, "sha256": hash_key(key), "created": datetime.now(UTC)}
    try:
        record = KeyRecord.model_validate({**fields, **rights})
    except ValidationError as error:
        raise KeysError(f"{first_fault(error)} (got {error.errors()[0]['input']!r})") from None
    with _locked(path):
        file = read_key_file(path)
        if any(k.name == name and k.revoked is None for k in file.keys):
            raise KeysError(f"there is a key named {name!r} already: revoke it first, or take another name")
        if record.team is not None and record.team not in {team.name for team in file.teams or ()}:
            raise KeysError(f"there is no team {record.team!r}: make it with 'qarr keys team {record.team}'")
        _write(path, file.model_copy(update={"keys": (*file.keys, record)}))
    return key, record


def set_team(path: Path, name: str, **budget: float | None) -> TeamRecord:
    """Make a team, or replace its budgets (fields of ``Budget``).

    Raises:
        KeysError: A budget or the name is not valid, or the file cannot be used.
    """
    try:
        team = TeamRecord.model_validate({"name": name, **budget})
    except ValidationError as error:
        raise KeysError(f"{first_fault(error)} (got {error.errors()[0]['input']!r})") from None
    with _locked(path):
        file = read_key_file(path)
        others = tuple(each for each in file.teams or () if each.name != name)
        _write(path, file.model_copy(update={"teams": (*others, team)}))
    return team


def revoke_key(path: Path, id_or_name: str) -> KeyRecord:
    """Revoke a key. Its record stays, so that logs can still be read.

    Raises:
        KeysError: There is no such key in force.
    """
    with _locked(path):
        file = read_key_file(path)
        found = [k for k in file.keys if k.revoked is None and id_or_name in {k.id, k.name}]
        if not found:
            raise KeysError(f"there is no key in force with the id or name {id_or_name!r}: 'qarr keys list' shows all")
        gone = found[0].model_copy(update={"revoked": datetime.now(UTC)})
        _write(path, file.model_copy(update={"keys": tuple(gone if k.id == gone.id else k for k in file.keys)}))
    return gone


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.with_name(path.name + ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(path: Path, keys: KeyFile) -> None:
    """Replace the file atomically: a reader sees the old one or the new one. Only its owner may read it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w") as file:
        file.write(keys.model_dump_json(indent=2, exclude_none=True))
        file.flush()
        os.fsync(file.fileno())
    Path(name).replace(path)


def _state_of(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # a file that cannot be looked at may hold keys: requests must not pass without one
        raise KeysError(f"the key file {path} cannot be read: {error.strerror}") from error
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
