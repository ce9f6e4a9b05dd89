"""Who may use the router: holders of a key of the key file, or of a token of the issuer. A changed file is read again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from datetime import UTC
from pathlib import Path

from router.auth.api_keys import (
    ANONYMOUS,
    Caller,
    KeysError,
    TeamRecord,
    UnauthorizedError,
    hash_key,
    parse_key_file,
    read_content,
    version_of,
)
from router.auth.tokens import MOST_TOKEN_CHARS, Tokens
from router.settings import Settings

log = logging.getLogger(f"qarr.{__name__}")
RELOAD_S = 1.0  # a change of the file takes effect within this time
LOOK_S = 1.0  # between two looks at whether the issuer's keys must be read again


class KeyStore:
    """The keys and teams of one file, and the tokens of an issuer, if there is one.

    Requests need one as soon as there is an issuer or the file exists, even when all its keys are revoked, unless the
    file says that they need none ('qarr keys off'). A file that exists and cannot be used raises ``KeysError``.

    Args:
        path: Of the key file.
        tokens: Of the issuer; None: there is none.
        allow_keyless: Whether the router may serve everyone on an address that others reach.

    Attributes:
        version: Tells the content of the key file that is in force from others; None: there is no file.
        reached_by_others: Whether the router serves an address that is not loopback.
    """

    def __init__(self, path: Path, tokens: Tokens | None = None, *, allow_keyless: bool = False) -> None:
        self.path, self.tokens = path, tokens
        self._allow_keyless = allow_keyless
        self.reached_by_others = False
        self._callers: dict[str, Caller] = {}  # by their keys' hashes
        self.teams: Mapping[str, TeamRecord] = {}
        self.version: str | None = None
        self._file_requires = False
        self._seen: tuple[int, int, int] | None = None
        self._next_look, self._fault = 0.0, ""  # why the key file cannot be used
        self._load()

    def use(self, other: KeyStore) -> None:
        """Take file, keys and issuer of another store. The same issuer's keys stay as they are."""
        self.path, self._callers, self.teams, self._seen = other.path, other._callers, other.teams, other._seen
        self.version = other.version
        self._file_requires = other._file_requires
        self._allow_keyless = other._allow_keyless
        self._next_look = 0.0
        if other.tokens is None or self.tokens is None or other.tokens.settings != self.tokens.settings:
            self.tokens = other.tokens

    @property
    def callers(self) -> list[Caller]:
        self._refresh()
        return list(self._callers.values())

    @property
    def required(self) -> bool:
        if time.monotonic() >= self._next_look:
            self._refresh()
        return self._file_requires or self.tokens is not None

    @property
    def may_be_keyless(self) -> bool:
        return self._allow_keyless or not self.reached_by_others

    @property
    def notes(self) -> list[str]:
        away = self.tokens is not None and (self.tokens.fault or not self.tokens.in_force)
        found = ["the keys of the tokens' issuer (jwt.jwks) cannot be read"] if away else []
        return [*found, "the key file cannot be used: the keys read before stay in force"] if self._fault else found

    @property
    def ready(self) -> bool:
        return self.tokens is None or self.tokens.in_force

    def find(self, key: str) -> Caller:
        """Return the caller with a key or token; ``UnauthorizedError``: it is not known, was revoked, or has expired.

        The time that it takes tells nothing about the keys: only hashes are looked up, which a sender cannot choose.
        """
        self._refresh()
        if self.tokens is not None and key.count(".") == 2 and len(key) <= MOST_TOKEN_CHARS:  # noqa: PLR2004
            return self.tokens.find(key, self.teams)
        caller = self._callers.get(hash_key(key))
        if caller is None:
            raise UnauthorizedError("the key is not known here, or was revoked")
        if caller.expires is not None and time.time() >= caller.expires.timestamp():
            ended = caller.expires.astimezone(UTC)
            raise UnauthorizedError(f"the key expired at {ended:%Y-%m-%dT%H:%M:%SZ}: ask for a new one")
        return caller

    def holds(self, caller: Caller) -> bool:
        if not self.required:
            return caller == ANONYMOUS
        if self.tokens is not None and self.tokens.holds(caller):
            return True
        expired = caller.expires is not None and time.time() >= caller.expires.timestamp()
        return not expired and caller in self._callers.values()

    async def renew(self) -> None:
        if self.tokens is not None:
            await self.tokens.renew()

    async def run(self) -> None:
        try:
            while True:
                if self.tokens is not None:
                    self.tokens.look()
                await asyncio.sleep(LOOK_S)
        finally:
            if self.tokens is not None:
                await self.tokens.aclose()

    def _refresh(self) -> None:
        if (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + RELOAD_S
        try:
            if _state_of(self.path) == self._seen:
                self._fault = ""
                return
            self._load()
        except KeysError as error:
            if str(error) != self._fault:  # once, not with every request
                log.error("%s; the keys read before stay in force", error)  # noqa: TRY400  the text says enough
            self._fault = str(error)
            return
        self._fault = ""
        log.info("keys read again from %s: %d in force", self.path, len(self._callers))

    def _load(self) -> None:
        state = _state_of(self.path)
        content = None if state is None else read_content(self.path)
        if content is not None:
            self._take(content)
        elif self._file_requires:
            raise KeysError(f"the key file {self.path} is gone: put it back, or serve without keys ('qarr keys off')")
        else:
            state = None
            self.version = None
        self._seen = state

    def _take(self, content: bytes) -> None:
        """Put a content of the key file in force."""
        file = parse_key_file(content, self.path)
        if file.is_off and self.tokens is None and not self.may_be_keyless:
            raise KeysError(
                f"the key file {self.path} says that requests need no key, but others than this machine reach this "
                f"router: set auth.allow_keyless = true to serve everyone"
            )
        self._callers = file.callers()
        self.teams = file.by_name
        self._file_requires = not file.is_off
        self.version = version_of(content)


def _state_of(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # a file that cannot be looked at may hold keys: requests must not pass without one
        raise KeysError(f"the key file {path} cannot be read: {error.strerror}") from error
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def open_access(settings: Settings) -> KeyStore:
    """Return who may use the router; ``KeysError``: the key file, or a file of the issuer's keys, cannot be used."""
    tokens = Tokens(settings.jwt, ca=settings.tls.ca) if settings.jwt.issuer else None
    return KeyStore(settings.auth.keys_file, tokens, allow_keyless=settings.auth.allow_keyless)
