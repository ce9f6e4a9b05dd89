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
from pathlib import Path

from cryptography import x509

from router.server.settings import TlsSettings

log = logging.getLogger(f"qarr.{__name__}")
FILES_POLL_S = 1.0  # A change of the files takes effect within this time.
FileState = tuple[int, int, int]  # Time of the last change, size and inode.
MISSING_FILE: FileState = (0, 0, 0)


class TlsError(Exception):
    """The certificate or its key cannot be used. The text names the setting."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, in use.

    Attributes:
        context: Shows the certificate to clients.
        expires: When the first certificate of the chain expires, in seconds since 1970.
        file_states: How the files were when they were read.
    """

    context: ssl.SSLContext
    expires: float
    file_states: tuple[FileState, ...]


def load_pair(settings: TlsSettings) -> Pair:
    """Load certificate and key of the settings.

    Raises:
        TlsError: They cannot be used, or the certificate has expired.
    """
    assert settings.certificate is not None
    assert settings.key is not None
    file_states = _file_states(settings)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    certificate = _read_certificate(settings.certificate)
    _load_key(context, settings.certificate, settings.key)
    if settings.client_ca is not None:
        _demand_client_certificates(context, settings.client_ca)
    expires = certificate.not_valid_after_utc
    if expires <= datetime.now(UTC):
        raise TlsError(
            f"tls.certificate: {settings.certificate} has expired at {expires:%Y-%m-%d %H:%M} UTC"
        )
    return Pair(context, expires.timestamp(), file_states)


def _read_certificate(path: Path) -> x509.Certificate:
    """Return the first certificate of the chain in a file."""
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())[0]
    except (OSError, ValueError) as error:
        why = (
            error.strerror
            if isinstance(error, OSError)
            else "it holds no certificate in PEM form"
        )
        raise TlsError(f"tls.certificate: {path} cannot be used ({why})") from None


def _load_key(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ValueError) as error:
        why = (
            "it does not belong to tls.certificate"
            if "MISMATCH" in str(error)
            else _reason(error)
        )
        raise TlsError(
            f"tls.key: {key} cannot be used ({why}); the certificate's key without a password is allowed"
        ) from None


def _demand_client_certificates(context: ssl.SSLContext, authorities: Path) -> None:
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(authorities)
    except (OSError, ValueError) as error:
        raise TlsError(
            f"tls.client_ca: {authorities} cannot be used ({_reason(error)})"
        ) from None


def _no_password() -> bytes:
    """Refuse a key with a password: OpenSSL would ask for it on the terminal."""
    raise ValueError("it has a password")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return "it is not in PEM form"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)


def _file_states(settings: TlsSettings) -> tuple[FileState, ...]:
    """Return how the files are now, to see later whether one has changed."""
    return tuple(
        _file_state(path)
        for path in (settings.certificate, settings.key, settings.client_ca)
    )


def _file_state(path: Path | None) -> FileState:
    if path is None:
        return MISSING_FILE
    try:
        stat = path.stat()
    except OSError:
        return MISSING_FILE
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


class Tls:
    """What a server needs to speak TLS. ``TlsError`` is raised if its first pair cannot be used."""

    def __init__(self, settings: TlsSettings) -> None:
        self._settings = settings
        self._pair = load_pair(settings)
        self._last_file_states = self._pair.file_states
        # All connections begin with this context, and each handshake then gets that of the newest pair. OpenSSL calls the
        # callback for clients without SNI too.
        self.context = self._pair.context
        self.context.sni_callback = self._choose_newest_pair

    @property
    def expires(self) -> float:
        return self._pair.expires

    def use(self, settings: TlsSettings, pair: Pair) -> None:
        self._settings = settings
        self._pair = pair
        self._last_file_states = pair.file_states

    def look(self) -> None:
        """Load the pair again if one of its files has changed; if it cannot be used, the old one stays."""
        file_states = _file_states(self._settings)
        if file_states == self._last_file_states:
            return
        self._last_file_states = file_states
        try:
            self._pair = load_pair(self._settings)
        except TlsError as error:
            log.error("%s; the certificate loaded before stays in use", error)  # noqa: TRY400  the text says enough
        else:
            log.info("certificate loaded again from %s", self._settings.certificate)

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(FILES_POLL_S)
            self.look()

    def _choose_newest_pair(
        self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext
    ) -> None:
        connection.context = self._pair.context
