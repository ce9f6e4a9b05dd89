"""JWTs in the place of keys: signed by an issuer, checked with its published keys, and mapped to a key's rights.

The issuer's keys (JWKS) are read from a file, or fetched in the background; requests wait for a fetch only if a token names
a key that is not known, and then not for long. While the issuer does not answer, the last keys stay in force for a limited
time. Tokens that were checked are remembered until they expire.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import jwt
from pydantic import ValidationError

from router.auth.api_keys import (
    Caller,
    IssuerUnreachableError,
    KeyRecord,
    KeysError,
    TeamRecord,
    UnauthorizedError,
    UnknownSignerError,
)
from router.auth.settings import JwtSettings
from router.policy.profiles import first_fault
from tiers.errors import TrustError
from tiers.trust import client_context, tls_fault

log = logging.getLogger(f"qarr.{__name__}")
MIN_REFETCH_INTERVAL_S = 10.0  # Least time between two fetches.
FETCH_S = 5.0  # Most time that a fetch takes, and that requests wait for it.
REFRESH_S = 300.0  # Time between two fetches that nobody waits for.
# The last keys stay in force for this time while the issuer does not answer.
MAX_KEY_AGE_S = 86_400.0
LEEWAY_S = 30.0  # The issuer's clock and the router's may differ by this much.
MAX_BYTES = 1 << 18  # Largest JWKS.
MAX_TOKEN_CHARS = 8192
MAX_REMEMBERED = 4096  # Most checked tokens that are remembered.
# Fields of a key's record that are not rights.
NOT_RIGHTS = {"id", "name", "sha256", "created", "revoked", "expires"}
PLAIN_SUBJECT = re.compile(r"[A-Za-z0-9@._|-]{1,56}")
NO_TEAMS: Mapping[str, TeamRecord] = MappingProxyType({})
REASONS = {
    jwt.ExpiredSignatureError: "the token has expired",
    jwt.ImmatureSignatureError: "the token is not valid yet",
    jwt.InvalidAudienceError: "the token is for another audience",
    jwt.InvalidIssuerError: "the token is from another issuer",
    jwt.InvalidSignatureError: "the token's signature is not valid",
}
# A public key of the issuer, and the algorithm that it is for; None: any.
Signer = tuple[jwt.PyJWK, str | None]


class IssuerError(KeysError):
    def __init__(self, text: str) -> None:
        super().__init__(f"jwt.jwks: {text}")


class TokenVerifier:
    """Checks the tokens of one issuer, by a monotonic clock. One event loop owns it.

    ``ca`` names authorities by which the issuer's certificate is trusted besides the system's.
    Keys in a file that cannot be used raise ``KeysError``.
    """

    def __init__(
        self,
        settings: JwtSettings,
        now: Callable[[], float] = time.monotonic,
        *,
        ca: Path | None = None,
    ) -> None:
        self.settings = settings
        self._now = now
        self._ca = ca
        self._url = settings.jwks if "://" in settings.jwks else None
        self._document: bytes | None = None  # The JWKS that the keys are from.
        self._signers: dict[str | None, Signer] = {}
        # When the keys were last read, by the monotonic clock.
        self._read_at: float | None = None
        self._tried_at: float | None = None
        # Why the keys could not be read the last time; empty if they could.
        self.fault = ""
        self._fetching: asyncio.Task[None] | None = None
        # When each token expires that was checked, and whose it is, by the token's hash.
        self._checked_tokens: dict[bytes, tuple[float, Caller]] = {}
        self._teams = NO_TEAMS
        if self._url is None:
            self._take(self._read_file())

    def find(self, token: str, teams: Mapping[str, TeamRecord] = NO_TEAMS) -> Caller:
        """Return the caller with a token.

        Raises:
            UnauthorizedError: The token is not valid, or has expired.
            IssuerUnreachableError: It cannot be checked now.
        """
        digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
        now = time.time()
        if not self.in_force:
            raise IssuerUnreachableError(
                "the keys of the tokens' issuer cannot be read now: ask again"
            )
        if teams is not self._teams:
            self._checked_tokens.clear()
            self._teams = teams
        checked = self._checked_tokens.get(digest)
        if checked is not None:
            expires_at, caller = checked
            if now < expires_at:
                return caller
        claims = self._claims(token)
        caller = self._caller(claims)
        if len(self._checked_tokens) >= MAX_REMEMBERED:
            oldest = next(iter(self._checked_tokens))
            del self._checked_tokens[oldest]
        self._checked_tokens[digest] = (claims["exp"] + LEEWAY_S, caller)
        return caller

    def holds(self, caller: Caller) -> bool:
        """Tell whether a checked token that has not expired is this caller's."""
        now = time.time()
        return any(
            holder == caller and now < expires_at
            for expires_at, holder in self._checked_tokens.values()
        )

    async def renew(self) -> None:
        """Read the keys again, because one is not known: at most every ``MIN_REFETCH_INTERVAL_S``.

        Wait for them for ``FETCH_S``.
        """
        self._begin()
        if self._fetching is not None:
            await asyncio.wait({self._fetching}, timeout=FETCH_S)

    def look(self) -> None:
        """Begin to read the keys again, if it is time; a file is read each time."""
        is_due = self._read_at is None or self._now() - self._read_at > REFRESH_S
        if self._url is None or is_due:
            self._begin()

    async def aclose(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.gather(self._fetching, return_exceptions=True)

    def _begin(self) -> None:
        """Read the keys in the background, unless that goes on or was done a moment ago."""
        now = self._now()
        least_interval_s = MIN_REFETCH_INTERVAL_S if self._url is not None else 0.0
        if self._fetching is not None:
            return
        if self._tried_at is not None and now - self._tried_at < least_interval_s:
            return
        self._tried_at = now
        self._fetching = asyncio.create_task(
            self._read(), name="reading the issuer's keys"
        )
        self._fetching.add_done_callback(self._done)

    def _done(self, _task: asyncio.Task[None]) -> None:
        self._fetching = None

    async def _read(self) -> None:
        try:
            if self._url is None:
                self._take(await asyncio.to_thread(self._read_file))
            else:
                async with asyncio.timeout(FETCH_S):
                    self._take(await fetch(self._url, self._ca))
        except (IssuerError, TimeoutError) as error:
            text = (
                str(error)
                or f"jwt.jwks: {self._url} does not answer within {FETCH_S:g} s"
            )
            if text != self.fault:
                log.warning("%s; the keys read before stay in force for a day", text)
            self.fault = text
        else:
            if self.fault:
                log.info("jwt.jwks: the issuer's keys are read again")
            self.fault = ""

    def _read_file(self) -> bytes:
        try:
            return Path(self.settings.jwks).read_bytes()
        except OSError as error:
            raise IssuerError(
                f"{self.settings.jwks} cannot be read ({error.strerror})"
            ) from None

    def _take(self, document: bytes) -> None:
        if document != self._document:
            self._signers = parse(document, self.settings.jwks)
            self._document = document
            self._checked_tokens.clear()
            log.info("jwt.jwks: %d keys of the issuer are in force", len(self._signers))
        self._read_at = self._now()

    @property
    def in_force(self) -> bool:
        """Whether tokens can be checked: the issuer's keys were read, within a day if it does not answer."""
        return (
            self._read_at is not None and self._now() - self._read_at <= MAX_KEY_AGE_S
        )

    def _claims(self, token: str) -> Mapping[str, Any]:
        """Check a token and return its claims; ``UnauthorizedError`` if it is not valid."""
        settings = self.settings
        try:
            header = jwt.get_unverified_header(token)
            algorithm = header.get("alg")
            signer, signer_algorithm = self._signer(header.get("kid"))
            if algorithm not in settings.algorithms or signer_algorithm not in {
                None,
                algorithm,
            }:
                allowed = ", ".join(settings.algorithms)
                raise UnauthorizedError(
                    f"the token's algorithm is not allowed; allowed are {allowed}"
                )
            claims: dict[str, Any] = jwt.decode(
                token,
                signer.key,
                algorithms=[algorithm],
                audience=settings.audience,
                issuer=settings.issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud", settings.claims.name]},
            )
            return {**claims, "exp": float(claims["exp"])}
        except jwt.MissingRequiredClaimError as error:
            raise UnauthorizedError(
                f"the token lacks the claim {error.claim}"
            ) from None
        except (
            jwt.PyJWTError,
            TypeError,
            ValueError,
            OverflowError,
            RecursionError,
        ) as error:
            reasons = (
                reason for kind, reason in REASONS.items() if isinstance(error, kind)
            )
            raise UnauthorizedError(
                next(reasons, "the token is not a valid JWT")
            ) from None

    def _signer(self, kid: str | None) -> Signer:
        """Return the issuer's key with this id; a token needs no id if there is one key only."""
        if kid is None and len(self._signers) == 1:
            return next(iter(self._signers.values()))
        signer = self._signers.get(kid)
        if signer is None and self.fault:
            raise IssuerUnreachableError(
                "the token's key is new here, and its issuer's cannot be read now: ask again"
            )
        if signer is None:
            raise UnknownSignerError(
                "the token is signed by a key that the issuer has not published"
            )
        return signer

    def _caller(self, claims: Mapping[str, Any]) -> Caller:
        """Make a token's caller, whose rights are read as those of a key are."""
        names = self.settings.claims
        subject = claims[names.name]
        rights = claims.get(names.rights, {})
        if not isinstance(subject, str) or not subject:
            raise UnauthorizedError(f"the token's claim {names.name} is no text")
        if not isinstance(rights, dict) or NOT_RIGHTS & rights.keys():
            raise UnauthorizedError(
                f"the token's claim {names.rights} is no object of rights"
            )
        record = {
            "id": _key_id(subject),
            "name": subject[:100],
            "sha256": "0" * 64,
            "created": datetime.now(UTC),
            **rights,
        }
        try:
            key = KeyRecord.model_validate_json(
                json.dumps(record, default=str), strict=True
            )
        except ValidationError as error:
            raise UnauthorizedError(
                f"the token's claim {names.rights}: {first_fault(error)}"
            ) from None
        if key.team is not None and key.team not in self._teams:
            raise UnauthorizedError(
                f"the token's claim {names.rights}: there is no team {key.team!r} ('qarr keys team')"
            )
        return key.caller(self._teams)


def _key_id(subject: str) -> str:
    """Return the id that stands for a token's subject in logs and budgets."""
    if PLAIN_SUBJECT.fullmatch(subject):
        return f"jwt:{subject}"
    # A plain subject has no colon, so none gets such an id.
    digest = hashlib.sha256(subject.encode("utf-8", "surrogatepass")).hexdigest()
    return f"jwt:sha256:{digest[:48]}"


def parse(document: bytes, source: str) -> dict[str | None, Signer]:
    """Return a JWKS' public keys by their ids; secrets, which anybody who checks could sign with, are left out.

    Raises:
        IssuerError: The document is no JWKS, or has no key that can be used.
    """
    signers: dict[str | None, Signer] = {}
    try:
        for published in json.loads(document)["keys"]:
            if published.get("kty") != "oct" and published.get("use", "sig") == "sig":
                # Keys of a kind that is not known here are left out.
                with suppress(jwt.PyJWTError):
                    signers[published.get("kid")] = (
                        jwt.PyJWK.from_dict(published),
                        published.get("alg"),
                    )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise IssuerError(f"{source} is not a JWKS ({type(error).__name__})") from None
    if not signers:
        raise IssuerError(f"{source} has no public key that can be used")
    return signers


async def fetch(url: str, ca: Path | None = None) -> bytes:
    """Return what an issuer publishes; ``IssuerError`` if it does not answer as it should."""
    document = b""
    try:
        # It reads the system's authorities from disk.
        verify = await asyncio.to_thread(client_context, ca)
        async with (
            httpx.AsyncClient(
                timeout=FETCH_S, trust_env=False, verify=verify
            ) as client,
            client.stream("GET", url) as answer,
        ):
            if answer.status_code != httpx.codes.OK:
                raise IssuerError(f"{url} answers HTTP {answer.status_code}")
            async for part in answer.aiter_bytes():
                document += part
                if len(document) > MAX_BYTES:
                    raise IssuerError(f"{url} answers with more than {MAX_BYTES} bytes")
    except TrustError as error:
        raise IssuerError(f"{url} cannot be asked: {error}") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = tls_fault(error) or type(error).__name__
        raise IssuerError(f"{url} does not answer ({why})") from None
    return document
