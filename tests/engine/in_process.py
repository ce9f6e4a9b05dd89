"""A router in the test's own process, in front of the session's real engines: for settings that would disturb other tests."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from classifier import ModelTokenCounter
from router.api.problems import refusal
from router.app import App
from router.auth.access import KeyStore
from router.server.http_protocol import protocol_for
from router.telemetry.tracing import Telemetry
from tests.fakes.engine import serving
from tests.turned import turned
from tiers.fleet import Fleet
from tiers.replica import Replica
from tiers.spec import ReplicaStatus, TemplateTokens, TierName, TierSpec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Tiered(Protocol):
    """Real engines by tier."""

    def tiers(self) -> dict[str, dict[str, Any]]:
        """Return what ``/tiers`` says of each tier."""


@asynccontextmanager
async def real_router(
    up: Tiered, engine_keys: dict[str, str], folder: Path, overrides: dict[str, Any]
) -> AsyncIterator[tuple[str, Fleet]]:
    """Serve a router over the running engines; yield its URL and its fleet.

    Args:
        up: The engines.
        engine_keys: The engines' keys, by tier.
        folder: The folder of profiles.
        overrides: Settings that are not the defaults.
    """
    settings = turned(
        {
            **overrides,
            "policy": {"profiles": str(folder), **overrides.get("policy", {})},
        }
    )
    fleet = Fleet(())
    counter: Any = None
    for name, tier in up.tiers().items():
        replica = tier["replicas"][0]
        spec = TierSpec(
            TierName(name),
            tier["max_model_len"],
            max_num_seqs=tier["max_num_seqs"],
            max_in_flight=32,
            digest=tier["checkpoint_digest"],
        )
        fleet.specs = (*fleet.specs, spec)
        counter = counter or ModelTokenCounter.from_file(
            Path(tier["checkpoint"]) / "tokenizer.json"
        )
        in_process_replica = Replica(
            f"{name}-0",
            spec,
            url=replica["url"],
            api_key=engine_keys[name],
            model="smollm2-135m-instruct",
            status=ReplicaStatus.READY,
        )
        fleet.add(in_process_replica)
    fleet.note_template(TemplateTokens(alone=30, with_system=10, further_pair=10))
    app = App(
        settings,
        fleet,
        counter=counter,
        telemetry=Telemetry(None),
        model="smollm2-135m-instruct",
        keys=KeyStore(folder / "none"),
    ).asgi
    async with serving(app, http=protocol_for(settings.server, refusal)) as url:
        yield url, fleet
