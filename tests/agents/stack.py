"""A router in front of engines that follow an errand's script."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.agents.engine import AgentEngine
from tests.agents.errand import Script, make_repository
from tests.fakes.engine import Behaviour
from tests.unit.router_stack import Stack, router_stack
from tiers.spec import STANDARD_TIERS

CONTEXT = 131_072


class Errand(NamedTuple):
    """A router in front of scripted engines, and the repository that the script repairs."""

    stack: Stack
    folder: Path
    script: Script

    @property
    def requests(self) -> list[dict[str, Any]]:
        """Return what the engines were sent."""
        return [
            request
            for behaviour in self.stack.engines.values()
            for request in behaviour.requests
        ]


@asynccontextmanager
async def errand_of(
    tmp_path: Path, folder: Path | None = None, *, resumes: bool = True
) -> AsyncIterator[Errand]:
    """Run a router whose engines know an errand in a new repository, or in a folder that a recording names."""
    script = Script(folder or tmp_path / "repository")
    if folder is None:
        script.folder.mkdir()
        make_repository(script.folder)
    tiers = {name: {"max_model_len": CONTEXT} for name in STANDARD_TIERS}
    behaviours = {
        str(name): Behaviour(max_model_len=CONTEXT, resumes=resumes) for name in tiers
    }
    AgentEngine.kill_next_in = None
    AgentEngine.tokens_until_kill = 2

    def engine(behaviour: Behaviour) -> AgentEngine:
        return AgentEngine(script.answer, behaviour)

    async with router_stack(
        tmp_path, {"tiers": tiers}, engine=engine, **behaviours
    ) as stack:
        yield Errand(stack, script.folder, script)
