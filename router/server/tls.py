"""TLS: the certificate that the router shows, replaced without a restart when its files change.

New connections get the newest pair of certificate and key that could be used; open ones keep theirs. A pair that cannot be
used changes nothing. Every process reads the files by itself.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime

from cryptography import x509

from router.server.settings import TlsSettings

log = logging.getLogger(f"qarr.{__name__}")
LOOK_S = 1.0  # a change of the files takes effect within this time
State = tuple[tuple[int, int, int], ...]


class TlsError(Exception):
    """The certificate or its key cannot be used. The text names the setting."""


@dataclass(frozen=True, slots=True)
class Pair:
    context: ssl.SSLContext  # that shows it
    expires: float  # when the first certificate of the chain does, in seconds since 1970
    state: State  # of its files


def load_pair(settings: TlsSettings) -> Pair:
    """Return the pair of the settings; ``TlsError``: it cannot be used, or has expired."""
    certificate, key = settings.certificate, settings.key
    assert certificate is not None
    assert key is not None
    state = _state(settings)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        found = x509.load_pem_x509_certificates(certificate.read_bytes())[0]
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it holds no certificate in PEM form"
        raise TlsError(f"tls.certificate: {certificate} cannot be used ({why})") from None
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ValueError) as error:
        why = "it does not belong to tls.certificate" if "MISMATCH" in str(error) else _reason(error)
        raise TlsError(
            f"tls.key: {key} cannot be used ({why}); the certificate's key without a password is allowed"
        ) from None
    if settings.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(settings.client_ca)
        except (OSError, ValueError) as error:
            raise TlsError(f"tls.client_ca: {settings.client_ca} cannot be used ({_reason(error)})") from None
    expires = found.not_valid_after_utc
    if expires <= datetime.now(UTC):
        raise TlsError(f"tls.certificate: {certificate} has expired at {expires:%Y-%m-%d %H:%M} UTC")
    return Pair(context, expires.timestamp(), state)


def _no_password() -> bytes:
    """Refuse a key with a password: OpenSSL would ask for it on the terminal."""
    raise ValueError("it has a password")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return "it is not in PEM form"
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _state(settings: TlsSettings) -> State:
    """Return what is another value when a file has changed; files that are missing have none."""
    found = []
    for path in (settings.certificate, settings.key, settings.client_ca):
        try:
            stat = path.stat() if path is not None else None
        except OSError:
            stat = None
        found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino) if stat is not None else (0, 0, 0))
    return tuple(found)


class Tls:
    """What a server needs to speak TLS; ``TlsError``: the pair cannot be used."""

    def __init__(self, settings: TlsSettings) -> None:
        self._settings, self._pair = settings, load_pair(settings)
        self._seen = self._pair.state
        self.context = self._pair.context  # for all connections; each handshake gets the newest pair
        self.context.sni_callback = self._choose  # called for clients without SNI too

    @property
    def expires(self) -> float:
        return self._pair.expires

    def use(self, settings: TlsSettings, pair: Pair) -> None:
        self._settings, self._pair, self._seen = settings, pair, pair.state

    def look(self) -> None:
        state = _state(self._settings)
        if state == self._seen:
            return
        self._seen = state
        try:
            self._pair = load_pair(self._settings)
        except TlsError as error:
            log.error("%s; the certificate loaded before stays in use", error)  # noqa: TRY400  the text says enough
        else:
            log.info("certificate loaded again from %s", self._settings.certificate)

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._pair.context
