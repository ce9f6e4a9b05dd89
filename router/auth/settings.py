"""Who may use the router: keys, and the tokens of an issuer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from router.section import AllBut, Section, config_dir

Algorithm = Literal[
    "RS256",
    "RS384",
    "RS512",
    "PS256",
    "PS384",
    "PS512",
    "ES256",
    "ES384",
    "ES512",
    "EdDSA",
]

THIS_MACHINE = {"localhost", "127.0.0.1", "::1"}


class AuthSettings(Section, reloads=AllBut()):
    """Who may use the router."""

    keys_file: Path = Field(
        default_factory=lambda: config_dir() / "keys.json",
        description="File of the keys, kept as hashes. Once it exists, requests need a key, until `qarr keys off`.",
    )
    allow_keyless: bool = Field(
        False,
        description="Serve without keys to everyone who reaches an address that is not loopback.",
    )


class ClaimSettings(Section, reloads=AllBut()):
    """Which claims of a JWT say who it is for, and what that caller may do."""

    name: str = Field(
        "sub", min_length=1, description="Claim of a token that names its caller."
    )
    rights: str = Field(
        "qarr",
        min_length=1,
        description="Claim that holds the caller's rights, an object of a key's fields; it may be absent.",
    )


class JwtSettings(Section, reloads=AllBut()):
    """JWTs of an issuer, which let callers in as keys do."""

    issuer: str = Field(
        "",
        description="Issuer of the tokens: their claim `iss`, to the letter; empty: tokens are not accepted.",
    )
    audience: str = Field("", description="Audience that the claim `aud` must contain.")
    jwks: str = Field(
        "",
        description="The issuer's public keys (JWKS): a file, or an address: https, or http on this machine.",
    )
    algorithms: Annotated[tuple[Algorithm, ...], Field(min_length=1)] = Field(
        ("RS256", "ES256", "EdDSA"), description="Accepted signature algorithms."
    )
    claims: ClaimSettings = ClaimSettings()

    @model_validator(mode="after")
    def _complete_issuer(self) -> JwtSettings:
        values = {"issuer": self.issuer, "audience": self.audience, "jwks": self.jwks}
        lacking = [name for name, value in values.items() if not value]
        if lacking and len(lacking) < len(values):
            raise ValueError(
                f"{' and '.join(lacking)}: issuer, audience and jwks are given together, or none is"
            )
        if "://" in self.jwks and not _is_safe_address(self.jwks):
            raise ValueError(
                "jwks: a file, an address with https://, or with http:// of this machine is allowed"
            )
        return self


def _is_safe_address(url: str) -> bool:
    """Tell whether nobody on the way can change what is read from an address."""
    address = urlsplit(url)
    if not address.hostname:
        return False
    if address.scheme == "https":
        return True
    return address.scheme == "http" and address.hostname in THIS_MACHINE
