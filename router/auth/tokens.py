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
AGAIN_S = 10.0  # least time between two fetches
FETCH_S = 5.0  # for which a fetch may take, and requests wait for it
REFRESH_S = 300.0  # between two fetches
KEEP_S = 86_400.0  # for which the last keys stay in force while the issuer does not answer
LEEWAY_S = 30.0  # by which the issuer's clock and the router's may differ
MOST_BYTES = 1 << 18  # of a JWKS
MOST_TOKEN_CHARS = 8192
MOST_REMEMBERED = 4096  # checked tokens
OWN = {"id", "name", "sha256", "created", "revoked", "expires"}  # fields of a key's record that are not rights
PLAIN = re.compile(r"[A-Za-z0-9@._|-]{1,56}")
NO_TEAMS: Mapping[str, TeamRecord] = MappingProxyType({})
SAID = {
    jwt.ExpiredSignatureError: "the token has expired",
    jwt.ImmatureSignatureError: "the token is not valid yet",
    jwt.InvalidAudienceError: "the token is for another audience",
    jwt.InvalidIssuerError: "the token is from another issuer",
    jwt.InvalidSignatureError: "the token's signature is not valid",
}
Signer = tuple[jwt.PyJWK, str | None]  # a public key of the issuer, and the algorithm that it is for; None: any


class IssuerError(KeysError):
    def __init__(self, text: str) -> None:
        super().__init__(f"jwt.jwks: {text}")


class Tokens:
    """Checks the tokens of one issuer, by a monotonic clock. One event loop owns it.

    ``ca`` names authorities by which the issuer's certificate is trusted besides the system's.
    Keys in a file that cannot be used raise ``KeysError``.
    """

    def __init__(
        self, settings: JwtSettings, now: Callable[[], float] = time.monotonic, *, ca: Path | None = None
    ) -> None:
        self.settings, self._now, self._ca = settings, now, ca
        self._url = settings.jwks if "://" in settings.jwks else None
        self._document: bytes | None = None  # that the keys are from
        self._signers: dict[str | None, Signer] = {}
        self._read_at: float | None = None  # when the keys were last read, by the monotonic clock
        self._tried_at: float | None = None
        self.fault = ""  # why its keys could not be read the last time; empty: they could
        self._fetching: asyncio.Task[None] | None = None
        self._known: dict[bytes, tuple[float, Caller]] = {}  # when it expires, by a token's hash
        self._teams = NO_TEAMS
        if self._url is None:
            self._take(self._read_file())

    def find(self, token: str, teams: Mapping[str, TeamRecord] = NO_TEAMS) -> Caller:
        digest, now = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest(), time.time()
        if not self.in_force:
            raise IssuerUnreachableError("the keys of the tokens' issuer cannot be read now: ask again")
        if teams is not self._teams:
            self._known.clear()
            self._teams = teams
        known = self._known.get(digest)
        if known is not None and now < known[0]:
            return known[1]
        claims = self._claims(token)
        caller = self._caller(claims)
        if len(self._known) >= MOST_REMEMBERED:
            self._known.pop(next(iter(self._known)))
        self._known[digest] = (claims["exp"] + LEEWAY_S, caller)
        return caller

    def holds(self, caller: Caller) -> bool:
        now = time.time()
        return any(found == caller and now < until for until, found in self._known.values())

    async def renew(self) -> None:
        """Read the keys again, because one is not known: at most every ``AGAIN_S``; wait for it for ``FETCH_S``."""
        self._begin()
        if self._fetching is not None:
            await asyncio.wait({self._fetching}, timeout=FETCH_S)

    def look(self) -> None:
        due = self._read_at is None or self._now() - self._read_at > REFRESH_S
        if self._url is None or due:
            self._begin()

    async def aclose(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.gather(self._fetching, return_exceptions=True)

    def _begin(self) -> None:
        now, least = self._now(), AGAIN_S if self._url is not None else 0.0
        if self._fetching is None and (self._tried_at is None or now - self._tried_at >= least):
            self._tried_at = now
            self._fetching = asyncio.create_task(self._read(), name="reading the issuer's keys")
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
            text = str(error) or f"jwt.jwks: {self._url} does not answer within {FETCH_S:g} s"
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
            raise IssuerError(f"{self.settings.jwks} cannot be read ({error.strerror})") from None

    def _take(self, document: bytes) -> None:
        if document != self._document:
            self._signers, self._document = parse(document, self.settings.jwks), document
            self._known.clear()
            log.info("jwt.jwks: %d keys of the issuer are in force", len(self._signers))
        self._read_at = self._now()

    @property
    def in_force(self) -> bool:
        """Whether tokens can be checked: the issuer's keys were read, within a day if it does not answer."""
        return self._read_at is not None and self._now() - self._read_at <= KEEP_S

    def _claims(self, token: str) -> Mapping[str, Any]:
        settings = self.settings
        try:
            header = jwt.get_unverified_header(token)
            algorithm, (signer, only) = header.get("alg"), self._signer(header.get("kid"))
            if algorithm not in settings.algorithms or only not in {None, algorithm}:
                allowed = ", ".join(settings.algorithms)
                raise UnauthorizedError(f"the token's algorithm is not allowed; allowed are {allowed}")
            claims: dict[str, Any] = jwt.decode(
                token, signer.key, algorithms=[algorithm],
                audience=settings.audience, issuer=settings.issuer, leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud", settings.claims.name]},
            )  # fmt: skip
            return {**claims, "exp": float(claims["exp"])}
        except jwt.MissingRequiredClaimError as error:
            raise UnauthorizedError(f"the token lacks the claim {error.claim}") from None
        except (jwt.PyJWTError, TypeError, ValueError, OverflowError, RecursionError) as error:
            said = (text for kind, text in SAID.items() if isinstance(error, kind))
            raise UnauthorizedError(next(said, "the token is not a valid JWT")) from None

    def _signer(self, kid: str | None) -> Signer:
        if kid is None and len(self._signers) == 1:
            return next(iter(self._signers.values()))
        found = self._signers.get(kid)
        if found is None and self.fault:
            raise IssuerUnreachableError("the token's key is new here, and its issuer's cannot be read now: ask again")
        if found is None:
            raise UnknownSignerError("the token is signed by a key that the issuer has not published")
        return found

    def _caller(self, claims: Mapping[str, Any]) -> Caller:
        names = self.settings.claims
        subject, rights = claims[names.name], claims.get(names.rights, {})
        if not isinstance(subject, str) or not subject:
            raise UnauthorizedError(f"the token's claim {names.name} is no text")
        if not isinstance(rights, dict) or OWN & rights.keys():
            raise UnauthorizedError(f"the token's claim {names.rights} is no object of rights")
        if PLAIN.fullmatch(subject):
            key_id = f"jwt:{subject}"
        else:
            # No plain subject has a colon, so no other subject has this id.
            key_id = f"jwt:sha256:{hashlib.sha256(subject.encode('utf-8', 'surrogatepass')).hexdigest()[:48]}"
        record = {"id": key_id, "name": subject[:100], "sha256": "0" * 64, "created": datetime.now(UTC), **rights}
        try:
            key = KeyRecord.model_validate_json(json.dumps(record, default=str), strict=True)
        except ValidationError as error:
            raise UnauthorizedError(f"the token's claim {names.rights}: {first_fault(error)}") from None
        if key.team is not None and key.team not in self._teams:
            raise UnauthorizedError(
                f"the token's claim {names.rights}: there is no team {key.team!r} ('qarr keys team')"
            )
        return key.caller(self._teams)


def parse(document: bytes, source: str) -> dict[str | None, Signer]:
    """Return a JWKS' public keys by their ids; secrets, which anybody who checks could sign with, are left out.

    ``IssuerError``: it is none, or has no key that can be used.
    """
    found: dict[str | None, Signer] = {}
    try:
        for published in json.loads(document)["keys"]:
            if published.get("kty") != "oct" and published.get("use", "sig") == "sig":
                with suppress(jwt.PyJWTError):  # of a kind that is not known here
                    found[published.get("kid")] = jwt.PyJWK.from_dict(published), published.get("alg")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise IssuerError(f"{source} is not a JWKS ({type(error).__name__})") from None
    if not found:
        raise IssuerError(f"{source} has no public key that can be used")
    return found


async def fetch(url: str, ca: Path | None = None) -> bytes:
    """Return what an issuer publishes; ``IssuerError``: it does not answer as it should."""
    data = b""
    try:
        verify = client_context(ca)
        async with (
            httpx.AsyncClient(timeout=FETCH_S, trust_env=False, verify=verify) as client,
            client.stream("GET", url) as answer,
        ):
            if answer.status_code != httpx.codes.OK:
                raise IssuerError(f"{url} answers HTTP {answer.status_code}")
            async for part in answer.aiter_bytes():
                data += part
                if len(data) > MOST_BYTES:
                    raise IssuerError(f"{url} answers with more than {MOST_BYTES} bytes")
    except TrustError as error:
        raise IssuerError(f"{url} cannot be asked: {error}") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = tls_fault(error) or type(error).__name__
        raise IssuerError(f"{url} does not answer ({why})") from None
    return data
