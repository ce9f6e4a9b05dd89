"""Which authorities are trusted: by the router of engines, the overflow and issuers, and by its commands of routers."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import certifi

from tiers.errors import TrustError

# OpenSSL's variables, which curl and httpx take as well.
FILE = "SSL_CERT_FILE"
FOLDER = "SSL_CERT_DIR"
SETTING = "tls.ca"
# Where systems keep their authorities, for a Python whose OpenSSL looks elsewhere (Go's crypto/x509/root_linux.go).
SYSTEM_FILES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/tls/cacert.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
# OpenSSL's codes for a chain that ends at nobody who is trusted, from X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT on.
UNKNOWN_AUTHORITY = {18, 19, 20, 21}


def client_context(ca: Path | None = None) -> ssl.SSLContext:
    """Return a client's TLS context: it trusts the system's authorities, and besides those of a PEM file.

    The system's are those that ``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` name, else those of OpenSSL's file and folder, else
    those of the first usual file that is there, else certifi's.

    Raises:
        TrustError: A file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # as curl: a file may name an intermediate authority alone
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    file = os.environ.get(FILE)
    folder = os.environ.get(FOLDER)
    if file:
        _load(context, FILE, file)
    if folder:
        _load_folder(context, folder)
    if not file and not folder:
        _load_system(context)
    if ca is not None:
        _load(context, SETTING, str(ca))
    return context


def tls_fault(error: BaseException | None) -> str | None:
    """Return why TLS failed, where that is what led to an error; None: something else did."""
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return why_untrusted(error)
        error = error.__cause__ or error.__context__
    return None


def why_untrusted(error: ssl.SSLError) -> str:
    """Return why a TLS connection failed; where nobody trusted has signed the certificate, with what to do about it."""
    why = getattr(error, "verify_message", "") or error.reason or str(error)
    if getattr(error, "verify_code", None) in UNKNOWN_AUTHORITY:
        return f"{why}: name the authority that signed its certificate in {SETTING} or {FILE}"
    return str(why)


def _load(context: ssl.SSLContext, name: str, file: str) -> None:
    try:
        context.load_verify_locations(cafile=file)
    except ssl.SSLError:
        why = "it holds no certificate in PEM form"
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
    else:
        return
    raise TrustError(
        f"{name}: {file} cannot be used ({why}); a PEM file of authorities is allowed"
    )


def _load_folder(context: ssl.SSLContext, folder: str) -> None:
    """Let OpenSSL look for authorities in a folder, or in several with colons between; it reads them when it needs one."""
    if not any(Path(part).is_dir() for part in folder.split(os.pathsep)):
        raise TrustError(
            f"{FOLDER}: {folder} is not a folder; one that 'openssl rehash' has prepared is allowed"
        )
    context.load_verify_locations(capath=folder)


def _load_system(context: ssl.SSLContext) -> None:
    paths = ssl.get_default_verify_paths()
    folder = Path(paths.openssl_capath)
    has_folder = any(folder.glob("*.0"))  # 'openssl rehash' names them so
    if has_folder:
        context.load_verify_locations(capath=folder)
    candidates = (
        (paths.openssl_cafile,)
        if has_folder
        else (paths.openssl_cafile, *SYSTEM_FILES, certifi.where())
    )
    file = next(
        (candidate for candidate in candidates if Path(candidate).is_file()), None
    )
    if file is not None:
        _load(context, "the system's authorities", file)
