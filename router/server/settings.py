"""Where the router listens, and its certificate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    model_validator,
)

from router.section import AllBut, Section, runtime_dir

Origin = Annotated[
    str,
    Field(
        pattern=r"^(\*|[a-z][a-z0-9+.-]*://[a-z0-9.-]+(:[0-9]{1,5})?|https?://\[[0-9a-f:]+\](:[0-9]{1,5})?)$"
    ),
]


class ServerSettings(
    Section, reloads=AllBut({"cors_origins", "host", "notice", "port", "runtime_dir"})
):
    """Where the router listens."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(
        8080, ge=0, le=65535, description="Port to listen on; 0 takes any free one."
    )
    page: Literal["auto", "on", "off"] = Field(
        "auto",
        description="The page at `/`: `auto` serves it on loopback, and wherever requests need keys.",
    )
    notice: str = Field(
        "",
        description="A sentence at the head of the page, for all who may read its figures.",
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="Host names besides addresses and localhost to which a keyless router on loopback answers.",
    )
    cors_origins: tuple[Origin, ...] = Field(
        (),
        description="Origins whose web pages may send requests, as in `https://chat.example.com`; `*`: all, with a key.",
    )
    max_body_bytes: int = Field(
        32 << 20,
        ge=1024,
        description="Request bodies over this are refused unread. 32 MiB is what Anthropic's API takes; images are sent in "
        "the body.",
    )
    max_text_bytes: int = Field(
        8 << 20,
        ge=1024,
        description="Request bodies are refused that are over this without their images and other long data in base64: "
        "reading text and structure takes far more time and memory.",
    )
    max_bodies_bytes: int = Field(
        512 << 20,
        ge=1024,
        description="Most bytes of all request bodies over 64 KiB together, until their answers are complete; further ones "
        "get 503. They take about three times as much memory.",
    )
    max_header_bytes: int = Field(
        32_768,
        ge=1024,
        description="A request whose path and headers together have more bytes is refused.",
    )
    header_timeout_s: PositiveFloat = Field(
        10, description="Time in which a request's headers must arrive."
    )
    body_timeout_s: PositiveFloat = Field(
        60, description="Time in which a request's body must arrive."
    )
    write_timeout_s: PositiveFloat = Field(
        30,
        description="A client that reads nothing of its answer for this long is cut off.",
    )
    silence_s: NonNegativeFloat = Field(
        15,
        description="A stream without a token for this long gets a comment, so that proxies in between keep it open; 0: "
        "never. Before the first token, its headers are sent too, so that a later failure is an error event.",
    )
    max_connections: int = Field(
        4096,
        ge=1,
        description="Most open connections, if the limit of open files allows two files for each; further ones get 503.",
    )
    keep_alive_s: int = Field(
        75,
        ge=1,
        description="How long idle connections are kept: longer than proxies and clients keep them, so that none "
        "sends a request while the router closes.",
    )
    resume_s: PositiveFloat = Field(
        30,
        description="How long a resumable stream is kept after its end, or after its connection is lost.",
    )
    resume_bytes: int = Field(
        1 << 18,
        ge=1024,
        description="Most bytes of events that are kept of a resumable stream.",
    )
    resume_streams: NonNegativeInt = Field(
        256,
        description="Most resumable streams at once; further ones are served, but cannot be resumed.",
    )
    drain_s: NonNegativeFloat = Field(
        30,
        description="Time for open answers to finish after a signal, or after another router has taken over.",
    )
    runtime_dir: Path = Field(
        default_factory=runtime_dir,
        description="Folder of the socket by which another router takes over.",
    )


class TlsSettings(Section, reloads=frozenset({"certificate", "key"})):
    """HTTPS. The files are read again when they change."""

    certificate: Path | None = Field(
        None,
        description="PEM file of the router's certificate and those that sign it; with it, only HTTPS is served.",
    )
    key: Path | None = Field(
        None, description="PEM file of the certificate's key, without a password."
    )
    client_ca: Path | None = Field(
        None,
        description="PEM file of authorities: only clients with a certificate of one of them are served.",
    )
    ca: Path | None = Field(
        None,
        description="PEM file of authorities that are trusted besides the system's: of engines, the overflow, the tokens' "
        "issuer, and of routers that commands such as `qarr tiers` ask.",
    )

    @model_validator(mode="after")
    def _complete_pair(self) -> TlsSettings:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key are given together, or neither is")
        if self.client_ca is not None and self.certificate is None:
            raise ValueError("client_ca needs certificate and key")
        return self
