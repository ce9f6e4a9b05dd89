"""What one request may ask, and OpenAI's API."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from router.section import AllBut, EngineAddress, Section, once
from tiers.spec import TierName

TierPolicy = Literal["prefer", "require"]
BaseAddress = Annotated[EngineAddress, AfterValidator(lambda url: url.rstrip("/"))]


class LimitSettings(Section, reloads=AllBut()):
    """What one request may ask."""

    max_prompt_chars: int = Field(
        16_000, ge=1, description="Most characters in a prompt, and in a system prompt."
    )
    max_prompt_words: int = Field(
        5_000, ge=1, description="Most words in a prompt, and in a system prompt."
    )
    max_tokens: int = Field(
        4_096, ge=1, description="Highest `max_tokens` of a request."
    )
    default_max_tokens: int = Field(
        256, ge=1, description="`max_tokens` of a request that gives none."
    )
    default_temperature: float = Field(
        0.7,
        ge=0,
        le=2,
        description="`temperature` of a `POST /generate` that gives none. OpenAI's endpoints leave it to the engine.",
    )
    max_sequences: int = Field(
        1024,
        ge=1,
        description="Most prompts times `n` that one request to OpenAI's endpoints may have.",
    )


class OpenAISettings(Section, reloads=AllBut()):
    """OpenAI's API."""

    tier_policy: TierPolicy = Field(
        "require", description="For a tier named as `model`; `prefer` makes it a hint."
    )
    aliases: dict[str, Literal["auto"] | TierName] = Field(
        {}, description='More model names, as in `"gpt-*" = "auto"`.'
    )
    embeddings_urls: Annotated[tuple[BaseAddress, ...], AfterValidator(once)] = Field(
        (),
        description="Engines that serve `/v1/embeddings`; the first one that answers is used.",
    )
