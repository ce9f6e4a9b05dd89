"""Certificates for tests: an authority, and certificates that it signs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID


@dataclass(frozen=True, slots=True)
class Files:
    """A certificate and its key."""

    certificate: Path
    key: Path

    @property
    def served(self) -> dict[str, Path]:
        """Return uvicorn's options that serve them."""
        return {"ssl_certfile": self.certificate, "ssl_keyfile": self.key}


class Authority:
    """An authority that signs certificates, and whose own is in ``ca``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("QARR test authority")
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        self._identifier = x509.SubjectKeyIdentifier.from_public_key(
            self._key.public_key()
        )
        builder = (
            _builder(self._name, self._name, self._key, lasts=timedelta(days=365))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(self._identifier, critical=False)
        )
        certificate = builder.sign(self._key, hashes.SHA256())
        self.ca = folder / "ca.pem"
        self.ca.write_bytes(certificate.public_bytes(Encoding.PEM))

    def issue(
        self,
        name: str,
        lasts: timedelta = timedelta(days=30),
        address: str = "127.0.0.1",
    ) -> Files:
        """Write a certificate for a machine, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName(
            [x509.DNSName("localhost"), x509.IPAddress(ip_address(address))]
        )
        signed_by = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(
            self._identifier
        )
        builder = (
            _builder(_name(name), self._name, key, lasts=lasts)
            .add_extension(names, critical=False)
            .add_extension(signed_by, critical=False)
        )
        certificate = builder.sign(self._key, hashes.SHA256())
        files = Files(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        files.key.write_bytes(secret)
        files.key.chmod(0o600)
        files.certificate.write_bytes(certificate.public_bytes(Encoding.PEM))
        return files


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    lasts: timedelta,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=60))
        .not_valid_after(now + lasts)
    )
