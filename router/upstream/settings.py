"""How the router talks to engines, and to what answers when they are full."""

from __future__ import annotations

from typing import Annotated, ClassVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, PositiveFloat, SecretStr, model_validator

from router.section import AllBut, Section, header_value
from tiers.address import wrong_with
from tiers.breaker import BreakerOptions


class UpstreamSettings(Section, reloads=AllBut()):
    """How the router talks to engines."""

    # retries before the first byte that each request adds to a budget shared by all
    retry_share: ClassVar[float] = 0.2
    # retries in that budget at the start, and at most
    retry_reserve: ClassVar[int] = 50
    breaker: ClassVar[BreakerOptions] = BreakerOptions()

    connect_timeout_s: PositiveFloat = Field(
        5, description="Time in which a connection to an engine must be made."
    )
    first_token_timeout_s: PositiveFloat = Field(
        120, description="Time from sending a request to its first token."
    )
    token_timeout_s: PositiveFloat = Field(
        60,
        description="Longest time between two tokens, and longest silence of an engine that is not seen to compute.",
    )
    answer_timeout_s: PositiveFloat = Field(
        600,
        description="Time to the whole answer of an unstreamed request, and longest silence of any stream.",
    )
    attempts: int = Field(
        3,
        ge=1,
        description="Most replicas tried before the first byte, and most failovers of one answer.",
    )


def _overflow_address(url: str) -> str:
    if not url:
        return url
    allowed = "an address like https://api.example.com/v1 is allowed"
    if "@" in url:
        raise ValueError(
            f"user and password do not belong here: overflow.api_key holds the key; {allowed}"
        )
    if not url.isascii():
        raise ValueError(f"a host's name is written in ASCII (xn--...); {allowed}")
    base = url.rstrip("/")
    objection = wrong_with(base.removesuffix("/v1"))
    if objection:
        raise ValueError(f"{objection}; {allowed}")
    if base.endswith("/completions"):
        raise ValueError(f"the path of an endpoint does not belong here; {allowed}")
    address = urlsplit(url)
    if address.scheme == "http" and address.hostname not in {
        "localhost",
        "127.0.0.1",
        "::1",
    }:
        raise ValueError(
            "prompts and the key would go over the network in the clear: https:// is allowed, or http:// of this machine"
        )
    return base


def _secret_header_value(key: SecretStr) -> SecretStr:
    header_value(key.get_secret_value())
    return key


class OverflowSettings(Section, reloads=AllBut()):
    """A server of OpenAI's API that answers what all tiers are too full for."""

    url: Annotated[str, AfterValidator(_overflow_address)] = Field(
        "",
        description="Base address, as `https://api.example.com/v1`: https, or http on this machine. Prompts are sent to it "
        "when every tier is full. Empty: such requests are refused.",
    )
    api_key: Annotated[SecretStr, AfterValidator(_secret_header_value)] = Field(
        SecretStr(""),
        description="Key for the overflow, sent nowhere else; empty: none is sent.",
    )
    model: str = Field("", description="Model to ask the overflow for.")
    name: str = Field(
        "",
        pattern=r"^[A-Za-z0-9._-]{0,64}$",
        description="Name of the overflow in answers and records; empty: the host of `overflow.url`.",
    )
    max_in_flight: int = Field(
        16, ge=1, description="Most requests that are there at once."
    )

    first_token_timeout_s: PositiveFloat = Field(
        30,
        description="Time from sending a request there to its first token. Its other times are those of `upstream`.",
    )

    @model_validator(mode="after")
    def _complete(self) -> OverflowSettings:
        if self.url and not self.model:
            raise ValueError("url needs model: the name of the model to ask it for")
        return self

    @property
    def shown_name(self) -> str:
        if not self.url:
            return ""
        return self.name or urlsplit(self.url).hostname or ""
