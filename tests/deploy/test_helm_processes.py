"""The commands of the chart's router, with its rendered settings and environment, run in front of fake engines."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from router.auth.api_keys import add_key
from tests.deploy.charts import NAMESPACE, Mapped, argument, release
from tests.fakes.engine import Behaviour, FakeEngine, serving_all
from tests.ports import reserved_ports
from tests.unit.classifier.made_tokenizers import BYTE_LEVEL, byte_level
from tests.unit.router_stack import events
from tests.waiting import until, within

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.conftest import RedisServer

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]
BIN = Path(sys.executable).parent


@dataclass(slots=True)
class Pod:
    """A router's pod as processes of this machine.

    Attributes:
        prestop: The pod's preStop command.
    """

    url: str
    process: asyncio.subprocess.Process
    prestop: list[str]
    client: httpx.AsyncClient
    engines: dict[str, Behaviour]

    async def ready(self) -> bool:
        assert self.process.returncode is None
        try:
            return (await self.client.get(f"{self.url}/readyz")).status_code == 200
        except httpx.TransportError:
            return False

    async def ask(self) -> httpx.Response:
        return await self.client.post(
            f"{self.url}/generate", json={"prompt": "hi", "tier": "precise"}
        )


@asynccontextmanager
async def pod(tmp_path: Path, sample: str, redis: RedisServer) -> AsyncIterator[Pod]:
    made = release(sample, {"router": {"preStopSeconds": 1}})
    spec = made.pods["qarr-router"]
    tiers = [name.removeprefix("qarr-") for name in made.pods if name != "qarr-router"]
    lengths = {
        tier: int(
            argument(made.pods[f"qarr-{tier}"]["containers"][0], "--max-model-len")
        )
        for tier in tiers
    }
    engines = {
        tier: Behaviour(max_model_len=length) for tier, length in lengths.items()
    }
    port, nobody = reserved_ports(2)
    apps = [FakeEngine(behaviour).app for behaviour in engines.values()]
    async with serving_all(*apps) as urls:
        services = [f"http://qarr-{tier}.{NAMESPACE}.svc:8000" for tier in tiers]
        changes = (
            *zip(services, urls, strict=True),
            ("0.0.0.0", "127.0.0.1"),
            ("port = 8080", f"port = {port}"),
            ("http://otel-collector.monitoring:4317", f"http://127.0.0.1:{nobody}"),
        )
        mapped = Mapped(
            tmp_path, changes, {"api-key": "an-engine-key", "url": redis.url}
        )
        mapped.mount(spec, made.settings)
        headers = {}
        if (tmp_path / "etc/qarr/keys").is_dir():
            key, _ = add_key(tmp_path / "etc/qarr/keys/keys.json", "me")
            headers["authorization"] = f"Bearer {key}"
        (tmp_path / "models/precise").mkdir()
        byte_level(BYTE_LEVEL).save(str(tmp_path / "models/precise/tokenizer.json"))
        for container in spec.get("initContainers", ()):
            first = await asyncio.create_subprocess_exec(*mapped.command(container))
            assert await asyncio.wait_for(first.wait(), 30) == 0
        (container,) = spec["containers"]
        environment = mapped.environment(container, "Containerfile.router")
        environment["PATH"] = f"{BIN}:{environment['PATH']}"
        argv = mapped.command(container)
        with (tmp_path / "router.out").open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                str(BIN / argv[0]), *argv[1:], env=environment, stdout=out, stderr=out
            )
        try:
            async with httpx.AsyncClient(
                timeout=60, trust_env=False, headers=headers
            ) as client:
                prestop = container["lifecycle"]["preStop"]["exec"]["command"]
                yield Pod(
                    f"http://127.0.0.1:{port}",
                    process,
                    prestop=prestop,
                    client=client,
                    engines=engines,
                )
        finally:
            if process.returncode is None:
                process.kill()
            await within(process.wait(), "the process to end")


@pytest.mark.parametrize("sample", ["laptop", "one-node", "cluster"])
async def test_the_router_serves(
    tmp_path: Path, sample: str, redis_server: RedisServer
) -> None:
    """The router finds every tier's engines by name, has their key, becomes ready, answers, and passes its startup probe."""
    async with pod(tmp_path, sample, redis_server) as router_pod:
        await until(router_pod.ready)
        assert (
            await router_pod.client.get(f"{router_pod.url}/healthz")
        ).status_code == 200

        async def all_ready() -> bool:
            tiers = (await router_pod.client.get(f"{router_pod.url}/readyz")).json()[
                "tiers"
            ]
            return all(tiers[tier] == "ready" for tier in router_pod.engines)

        await until(all_ready)
        answer = await router_pod.ask()
        assert answer.status_code == 200
        assert answer.headers["x-qarr-precision"] == "bf16 (stated)"
        for behaviour in router_pod.engines.values():
            for sent in behaviour.headers:
                assert sent["authorization"] == "Bearer an-engine-key"
        async with httpx.AsyncClient(trust_env=False) as keyless:
            refused = await keyless.post(
                f"{router_pod.url}/generate", json={"prompt": "hi"}
            )
        assert refused.status_code == (200 if sample == "laptop" else 401)


async def test_a_leaving_router_finishes_its_answers(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    """The router serves while the preStop command runs; after SIGTERM open answers end well, and it exits with 0."""
    async with pod(tmp_path, "one-node", redis_server) as router_pod:
        await until(router_pod.ready)
        router_pod.engines["precise"].delay_s = 0.5
        leaving = await asyncio.create_subprocess_exec(*router_pod.prestop)
        assert await router_pod.ready()
        stream = asyncio.create_task(router_pod.ask())
        await until(lambda: router_pod.engines["precise"].running)
        assert await asyncio.wait_for(leaving.wait(), 30) == 0
        router_pod.process.send_signal(signal.SIGTERM)
        answer = await stream
        assert events(answer.text)[-1][0] == "done"
        assert await asyncio.wait_for(router_pod.process.wait(), 45) == 0
