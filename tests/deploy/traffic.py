"""Two routers under load, to which everything happens that their metrics show."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from router.auth.api_keys import add_key, set_team
from router.policy.profiles import latency_name
from tests.browser.made_up import SPEEDS, speed
from tests.unit.router_stack import router_stack
from tests.waiting import until
from tiers.spec import STANDARD_TIERS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import httpx

    from tests.unit.router_stack import Stack

FAST, BALANCED, PRECISE = STANDARD_TIERS
# The first router has this tier more.
ADDED = {"int8": {"urls": ["http://127.0.0.1:1"], "precision": "int8"}}
CHAT = "Which river flows through Paris?"
PROMPTS = (
    CHAT,
    "Write a Python function that sorts a list of dicts by a key.",
    "What is 17 * 23 + 4? Show each step.",
)


@dataclass(slots=True)
class Routers:
    """Two routers in front of engines of their own, the key of all requests, and how many were sent."""

    stacks: list[Stack]
    sent: int = 0
    key: str = ""
    statuses: list[int] = field(default_factory=list)

    async def ask(self, stack: Stack, **body: Any) -> httpx.Response:
        """Send a request that gets as far as a decision, and read its answer."""
        self.sent += 1
        answer = await stack.generate(**{"prompt": CHAT, "max_tokens": 20, **body})
        self.statuses.append(answer.status_code)
        return answer

    async def leave(self, stack: Stack) -> None:
        """Send a request, and go away once the answer has begun."""
        self.sent += 1
        async with stack.client.stream(
            "POST", f"{stack.url}/generate", json={"prompt": CHAT}
        ) as answer:
            async for _ in answer.aiter_bytes():
                break

    async def ordinary(self) -> None:
        bounds = {"ttft_ms": 60_000, "tpot_ms": 60_000}
        for stack in self.stacks:
            for prompt in PROMPTS:
                await self.ask(stack, prompt=prompt)
                await self.ask(stack, prompt=prompt, sla=bounds, priority="interactive")
        await self.ask(self.stacks[0], tier="int8", sla=bounds)

    async def refusals(self) -> None:
        for stack in self.stacks:
            await self.ask(stack, prompt="word " * 3000, max_tokens=4096)
            await self.ask(stack, sla={"ttft_ms": 0.001}, tier_policy="require")

    async def misses(self) -> None:
        """Let bounds be missed by answers that are slower than they ever were, and let a client go away."""
        for stack in self.stacks:
            for behaviour in stack.engines.values():
                behaviour.delay_s = 0.05
            await asyncio.gather(
                *(self.ask(stack, sla={"tpot_ms": 20}) for _ in range(3))
            )
            await self.leave(stack)
            for behaviour in stack.engines.values():
                behaviour.delay_s = 0.0

    async def failures(self) -> None:
        """Let engines fail before their first token, amid an answer, and all at once."""
        for stack in self.stacks:
            fast = stack.engines[FAST]
            fast.break_after = 2
            await self.ask(stack, tier="fast")
            fast.break_after = None
            for behaviour in stack.engines.values():
                behaviour.status = 500
            await self.ask(stack)
            # It is chance which tiers the first request tried.
            for spec in stack.fleet.specs:
                await self.ask(stack, tier=spec.name, tier_policy="require")
            for behaviour in stack.engines.values():
                behaviour.status = 200

    async def everything(self) -> None:
        await self.ordinary()
        await self.refusals()
        await self.misses()
        await self.failures()


@asynccontextmanager
async def two_routers(tmp_path: Path) -> AsyncIterator[Routers]:
    """Run two routers; the second one knows the tiers' speed, and has a cap."""
    async with AsyncExitStack() as cleanup:
        stacks = []
        keys = tmp_path / "keys.json"
        add_key(keys, "first")
        set_team(keys, "blue", money_per_month=1e6)
        key, _ = add_key(
            keys, "ann", admin=True, team="blue", engine_seconds_per_day=1e6
        )
        more = {"auth": {"keys_file": str(keys)}, "budgets": {"replica_hour": 3.6}}
        capped = {"max_loss": {"chat": 0.12}}
        for name, policy in (("first", {}), ("second", capped)):
            (profiles := tmp_path / name / "profiles").mkdir(parents=True)
            own = {"policy": {"profiles": str(profiles), "max_slowdown": 1e9, **policy}}
            tiers = {"tiers": ADDED} if name == "first" else {}
            stacks.append(
                await cleanup.enter_async_context(
                    router_stack(tmp_path / name, {**own, **tiers, **more})
                )
            )
            stacks[-1].client.headers["authorization"] = f"Bearer {key}"
        fleet = stacks[1].fleet
        identities = {spec.name: spec.identity for spec in fleet.specs}
        profile = tmp_path / "second/profiles" / latency_name(identities, fleet.machine)
        profile.write_text(speed(identities, fleet.machine, SPEEDS).model_dump_json())
        await until(
            lambda: all(
                replica.state.speed is not None and replica.state.speed.under_load
                for replica in fleet.replicas
            )
        )
        yield Routers(stacks, key=key)
