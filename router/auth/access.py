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
from router.auth.tokens import MAX_TOKEN_CHARS, TokenVerifier
from router.settings import Settings

log = logging.getLogger(f"qarr.{__name__}")
RELOAD_S = 1.0  # A change of the file takes effect within this time.
# Time between two checks whether the issuer's keys must be read again.
TOKENS_POLL_S = 1.0
FileState = tuple[int, int, int]  # Time of the last change, size and inode.


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

    def __init__(
        self,
        path: Path,
        tokens: TokenVerifier | None = None,
        *,
        allow_keyless: bool = False,
    ) -> None:
        self.path = path
        self.tokens = tokens
        self._allow_keyless = allow_keyless
        self.reached_by_others = False
        self._callers_by_hash: dict[str, Caller] = {}
        self.teams: Mapping[str, TeamRecord] = {}
        self.version: str | None = None
        self._does_file_require_keys = False
        self._last_file_state: FileState | None = None
        self._next_check_at = 0.0
        self._fault = ""  # Why the key file cannot be used; empty if it can.
        self._load()

    def use(self, replacement: KeyStore) -> None:
        """Take file, keys and issuer of another store. The same issuer's keys stay as they are."""
        self.path = replacement.path
        self._callers_by_hash = replacement._callers_by_hash
        self.teams = replacement.teams
        self._last_file_state = replacement._last_file_state
        self.version = replacement.version
        self._does_file_require_keys = replacement._does_file_require_keys
        self._allow_keyless = replacement._allow_keyless
        self._next_check_at = 0.0
        tokens = replacement.tokens
        if (
            tokens is None
            or self.tokens is None
            or tokens.settings != self.tokens.settings
        ):
            self.tokens = tokens

    @property
    def callers(self) -> list[Caller]:
        self._refresh()
        return list(self._callers_by_hash.values())

    @property
    def required(self) -> bool:
        if time.monotonic() >= self._next_check_at:
            self._refresh()
        return self._does_file_require_keys or self.tokens is not None

    @property
    def may_be_keyless(self) -> bool:
        return self._allow_keyless or not self.reached_by_others

    @property
    def notes(self) -> list[str]:
        notes = []
        if self.tokens is not None and (self.tokens.fault or not self.tokens.in_force):
            notes.append("the keys of the tokens' issuer (jwt.jwks) cannot be read")
        if self._fault:
            notes.append(
                "the key file cannot be used: the keys read before stay in force"
            )
        return notes

    @property
    def ready(self) -> bool:
        return self.tokens is None or self.tokens.in_force

    def find(self, key: str) -> Caller:
        """Return the caller with a key or token.

        The time that it takes tells nothing about the keys: only hashes are looked up, which a sender cannot choose.

        Raises:
            UnauthorizedError: The key or token is not known, was revoked, or has expired.
        """
        self._refresh()
        if (
            self.tokens is not None
            and key.count(".") == 2  # noqa: PLR2004
            and len(key) <= MAX_TOKEN_CHARS
        ):
            return self.tokens.find(key, self.teams)
        caller = self._callers_by_hash.get(hash_key(key))
        if caller is None:
            raise UnauthorizedError("the key is not known here, or was revoked")
        if caller.expires is not None and time.time() >= caller.expires.timestamp():
            expiry = caller.expires.astimezone(UTC)
            raise UnauthorizedError(
                f"the key expired at {expiry:%Y-%m-%dT%H:%M:%SZ}: ask for a new one"
            )
        return caller

    def holds(self, caller: Caller) -> bool:
        """Tell whether a caller that was let in would be let in now, with the same rights."""
        if not self.required:
            return caller == ANONYMOUS
        if self.tokens is not None and self.tokens.holds(caller):
            return True
        is_expired = (
            caller.expires is not None and time.time() >= caller.expires.timestamp()
        )
        return not is_expired and caller in self._callers_by_hash.values()

    async def renew(self) -> None:
        if self.tokens is not None:
            await self.tokens.renew()

    async def run(self) -> None:
        try:
            while True:
                if self.tokens is not None:
                    self.tokens.look()
                await asyncio.sleep(TOKENS_POLL_S)
        finally:
            if self.tokens is not None:
                await self.tokens.aclose()

    def _refresh(self) -> None:
        """Read the file again if it has changed, which is checked every ``RELOAD_S``; if it cannot be used, keys stay."""
        now = time.monotonic()
        if now < self._next_check_at:
            return
        self._next_check_at = now + RELOAD_S
        try:
            has_changed = _file_state(self.path) != self._last_file_state
            if has_changed:
                self._load()
        except KeysError as error:
            self._report(error)
            return
        self._fault = ""
        if has_changed:
            log.info(
                "keys read again from %s: %d in force",
                self.path,
                len(self._callers_by_hash),
            )

    def _report(self, error: KeysError) -> None:
        """Log a fault of the key file once, not with every request."""
        if str(error) != self._fault:
            log.error("%s; the keys read before stay in force", error)
        self._fault = str(error)

    def _load(self) -> None:
        file_state = _file_state(self.path)
        content = None
        if file_state is not None:
            content = read_content(self.path)
        if content is not None:
            self._take(content)
        elif self._does_file_require_keys:
            raise KeysError(
                f"the key file {self.path} is gone: put it back, or serve without keys ('qarr keys off')"
            )
        else:
            file_state = None  # It may have gone between the two looks.
            self.version = None
        self._last_file_state = file_state

    def _take(self, content: bytes) -> None:
        """Put a content of the key file in force."""
        key_file = parse_key_file(content, self.path)
        if key_file.is_off and self.tokens is None and not self.may_be_keyless:
            raise KeysError(
                f"the key file {self.path} says that requests need no key, but others than this machine reach this "
                f"router: set auth.allow_keyless = true to serve everyone"
            )
        self._callers_by_hash = key_file.callers()
        self.teams = key_file.by_name
        self._does_file_require_keys = not key_file.is_off
        self.version = version_of(content)


def _file_state(path: Path) -> FileState | None:
    """Return how a file is now, to see later whether it has changed; None: there is no file."""
    try:
        stat = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        # A file that cannot be looked at may hold keys, so requests must not pass without one.
        raise KeysError(
            f"the key file {path} cannot be read: {error.strerror}"
        ) from error
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def open_access(settings: Settings) -> KeyStore:
    """Return who may use the router; ``KeysError`` if the key file, or a file of the issuer's keys, cannot be used."""
    tokens: TokenVerifier | None = None
    if settings.jwt.issuer:
        tokens = TokenVerifier(settings.jwt, ca=settings.tls.ca)
    return KeyStore(
        settings.auth.keys_file, tokens, allow_keyless=settings.auth.allow_keyless
    )
