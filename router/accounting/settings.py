"""What requests cost, where it is counted, and what several routers share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat, SecretStr
from redis.asyncio.connection import parse_url

from router.section import Section, state_dir


def _redis_address(url: SecretStr) -> SecretStr:
    try:
        if text := url.get_secret_value():
            parse_url(text)
    except ValueError:
        raise ValueError(
            "an address that begins with redis://, rediss:// or unix:// is allowed"
        ) from None
    return url


class StateSettings(Section):
    """What several routers share."""

    redis_url: Annotated[SecretStr, AfterValidator(_redis_address)] = Field(
        SecretStr(""),
        description="Redis or a Redis Cluster, for routers that share quotas, budgets and load; empty: each router counts "
        "for itself.",
    )


class BudgetSettings(
    Section, reloads=frozenset({"replica_hour", "currency", "while_unknown"})
):
    """What requests cost, and where it is counted."""

    replica_hour: PositiveFloat | None = Field(
        None,
        description="Price of an hour of one replica of the highest tier. Seconds of other tiers are weighed by "
        "`policy.prices`, or without those by their GPUs. Unset: nothing costs money.",
    )
    currency: str = Field(
        "USD",
        max_length=16,
        description="Currency of `budgets.replica_hour`, for display.",
    )
    file: Path = Field(
        default_factory=lambda: state_dir() / "usage.sqlite",
        description="File of usage by day, key, team and tier, and of what budgets have used; with `state.redis_url` a copy "
        "of that, by which it outlives Redis. Routers of one machine may share it.",
    )
    while_unknown: Literal["refuse", "serve"] = Field(
        "refuse",
        description="While a budget's use cannot be read (file or Redis): refuse its requests with `503`, or serve them "
        "and count from 0.",
    )
