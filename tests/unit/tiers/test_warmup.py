"""The warm-up of engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.fakes.engine import (
    FINGERPRINT,
    TEMPLATE_TOKENS,
    Behaviour,
    FakeEngine,
    serving,
)
from tiers.errors import ProbeError, WarmupFailedError
from tiers.lifecycle.warmup import (
    WarmupPlan,
    check_answer,
    measure_speed,
    tokens_digest,
    warm_up,
)
from tiers.probe import EngineProbe, Generation
from tiers.spec import TemplateTokens

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "text",
    ["", "   ", "\ufffd\ufffd Paris", "the the the the the the the the", "12345 !!"],
)
def test_nonsense_fails_the_warm_up(text: str) -> None:
    """Empty, broken or repeated text is not an answer."""
    with pytest.raises(
        WarmupFailedError,
        match="which is not readable text: a wrong checkpoint or a broken kernel",
    ):
        check_answer(text, "Why?")


@pytest.mark.parametrize(
    "text",
    ["The capital of France is PARIS.", "Rome, perhaps.", "L'Étoile, la Marseillaise,"],
)
def test_readable_answers_pass_the_warm_up(text: str) -> None:
    """Words hang on rounding: a right engine may say another one where two are nearly as likely."""
    check_answer(text, "What is the capital of France?")


@asynccontextmanager
async def probing(behaviour: Behaviour) -> AsyncIterator[EngineProbe]:
    async with (
        serving(FakeEngine(behaviour).app) as url,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        yield EngineProbe(client, url, "")


@pytest.mark.parametrize("priorities", [True, False])
async def test_a_warm_engine_is_described(*, priorities: bool) -> None:
    """Whether it takes priorities, its build, and what its chat template adds; an engine without priorities is as good."""
    async with probing(Behaviour(priorities=priorities)) as probe:
        report = await warm_up(probe, "fake", WarmupPlan())
        assert report.takes_priority == priorities
        assert report.fingerprint == FINGERPRINT
        assert report.template.alone == TEMPLATE_TOKENS
        assert report.tokens_digest == await tokens_digest(probe, "fake")


@pytest.mark.parametrize("thinks", [True, False])
async def test_an_engine_whose_model_thinks_is_known(*, thinks: bool) -> None:
    """vLLM refuses a bound on thinking for others, and callers of Anthropic's API give one to every model."""
    async with probing(Behaviour(thinks=thinks)) as probe:
        assert (await warm_up(probe, "fake", WarmupPlan())).takes_thinking is thinks


async def test_an_engine_that_does_not_answer_is_not_warm() -> None:
    async with probing(Behaviour(status=500)) as probe:
        with pytest.raises(ProbeError, match="HTTP 500"):
            await warm_up(probe, "fake", WarmupPlan())


async def test_digests_tell_tokenizers_apart() -> None:
    """Equal for engines that read a chat as the same ids, whatever else they differ in."""
    digests = []
    for behaviour in (Behaviour(), Behaviour(first_id=7), Behaviour(vocabulary=1000)):
        async with probing(behaviour) as probe:
            digests.append(await tokens_digest(probe, "fake"))
    assert digests[0] == digests[1] != digests[2]


class Template(EngineProbe):
    """An engine whose template adds 5 tokens for each turn, 20 for a system prompt, if it takes one."""

    system = True

    async def chat_tokens(
        self, model: str, messages: Sequence[Mapping[str, str]]
    ) -> list[int]:
        roles = [message["role"] for message in messages]
        if "system" in roles and not self.system:
            raise ProbeError("System role not supported")
        text = await self.text_tokens(model, messages[0]["content"])
        return [0] * (
            len(text) * len(roles) + 5 * len(roles) + 20 * ("system" in roles)
        )


class WithoutSystem(Template):
    """The same, without a system role."""

    system = False


@pytest.mark.parametrize(
    ("engine", "with_system"), [(Template, 30), (WithoutSystem, 15)]
)
async def test_what_a_template_adds_is_measured(
    engine: type[Template], with_system: int
) -> None:
    """A template without a system role counts it as a further turn."""
    async with probing(Behaviour()) as probe:
        report = await warm_up(
            engine(probe.client, probe.url, ""), "fake", WarmupPlan()
        )
        assert report.template == TemplateTokens(
            alone=5, with_system=with_system, further_pair=10
        )


async def test_speed_is_that_of_a_short_and_of_a_long_prompt() -> None:
    """Both of the same length on this engine: no slope can be told, and none is below zero."""
    async with probing(Behaviour(delay_s=0.005)) as probe:
        speed = await measure_speed(probe, "fake", WarmupPlan())
        assert speed.source == "idle"
        assert speed.step_base_ms >= 4
        assert speed.ttft_base_ms >= 0
        assert speed.prefill_ms_per_token >= 0


async def test_each_long_prompt_starts_differently() -> None:
    """Else the second measurement would be one of the prefix cache."""
    prompts: list[str] = []

    class Recording(EngineProbe):
        async def generate(
            self, path: str, body: Mapping[str, Any], timeout_s: float
        ) -> Generation:
            prompts.append(body["prompt"])
            return await super().generate(path, body, timeout_s)

    async with probing(Behaviour()) as probe:
        for _ in range(2):
            await measure_speed(
                Recording(probe.client, probe.url, ""), "fake", WarmupPlan()
            )
    assert [len(prompt) > 500 for prompt in prompts] == [False, True] * 2
    assert prompts[1].split()[0] != prompts[3].split()[0]
    assert prompts[1].split()[1:] == prompts[3].split()[1:]
