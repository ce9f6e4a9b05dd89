"""A client that measures through a running router: what it needs to know, how it waits, and what it makes of refusals."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from router.auth.api_keys import add_key
from router.policy.profiles import ProfileError
from router.profiling import measuring_client, router_client
from router.profiling.measuring_client import first_of
from router.profiling.router_client import RouterClient
from tests.fakes.engine import ANSWER
from tests.ports import reserved_ports
from tests.unit.router_stack import router_stack
from tests.waiting import until, within
from tiers.spec import STANDARD_TIERS, ReplicaStatus, TierName

pytestmark = pytest.mark.anyio
FAST = TierName.FAST
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
PATH = "/v1/chat/completions"


def nothing() -> None:
    """Do nothing."""


async def test_the_fleet_is_what_the_router_shows(tmp_path: Path) -> None:
    """What is not ready can be told from what is; nobody is served by now."""
    async with router_stack(tmp_path) as stack, RouterClient(stack.url, "") as client:
        stack.fleet.replicas[0].mark(ReplicaStatus.DRAINING)
        fleet = await client.fleet()
        assert set(fleet.tiers) == set(STANDARD_TIERS) - {FAST}
        assert set(fleet.checkpoints) == set(STANDARD_TIERS)
        assert fleet.checkpoints[FAST] == stack.fleet.replicas[0].url
        assert fleet.in_flight == 0
        assert fleet.served == 0
        assert fleet.measuring is None
        assert fleet.model == "fake"
        assert (
            fleet.tiers[TierName.PRECISE].max_model_len
            == stack.fleet.spec(TierName.PRECISE).max_model_len
        )


async def test_a_router_that_is_not_there_is_named() -> None:
    (port,) = reserved_ports()
    async with RouterClient(f"http://127.0.0.1:{port}", "") as client:
        with pytest.raises(
            ProfileError,
            match=rf"no router answers at http://127\.0\.0\.1:{port} \(ConnectError\)",
        ):
            await client.fleet()


async def test_a_key_is_asked_for(tmp_path: Path) -> None:
    """None, or one that does not show where engines are, says which is needed."""
    keys = tmp_path / "keys.json"
    plain, _ = add_key(keys, "ci")
    admin, _ = add_key(keys, "boss", admin=True)
    async with router_stack(tmp_path, {"auth": {"keys_file": str(keys)}}) as stack:
        for key, why in (("", "needs a key"), (plain, "made with --admin")):
            async with RouterClient(stack.url, key) as client:
                with pytest.raises(ProfileError, match=why):
                    await client.fleet()
        async with RouterClient(stack.url, admin) as client:
            assert set((await client.fleet()).tiers) == set(STANDARD_TIERS)


async def test_answers_are_greedy_and_of_one_tier(tmp_path: Path) -> None:
    """Beneath everybody else's priority, whatever the body says of other things."""
    async with router_stack(tmp_path) as stack, RouterClient(stack.url, "") as client:
        answer = await client.ask(PATH, FAST, CHAT)
        assert answer["choices"][0]["message"]["content"] == "".join(ANSWER)
        (request,) = stack.engines[FAST].requests
        assert request["temperature"] == 0
        assert request["priority"] == 1
        assert request["max_tokens"] == 8


async def test_a_lasting_refusal_is_an_error(tmp_path: Path) -> None:
    async with router_stack(tmp_path) as stack, RouterClient(stack.url, "") as client:
        stack.engines[FAST].status = 400
        with pytest.raises(ProfileError, match=r"fast answered HTTP 400: .*broken"):
            await client.ask(PATH, FAST, CHAT)
        with pytest.raises(ProfileError, match="fast answered HTTP 4"):
            await client.time(FAST, [1, 2], 4, report_first_token=nothing)


async def test_a_passing_refusal_is_waited_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tier that is away is asked again, but not for ever."""
    async with router_stack(tmp_path) as stack, RouterClient(stack.url, "") as client:
        replica = stack.fleet.replicas[0]
        replica.mark(ReplicaStatus.DRAINING)
        monkeypatch.setattr(measuring_client, "MAX_WAIT_S", -1.0)
        with pytest.raises(ProfileError, match="fast answered HTTP 503"):
            await client.ask(PATH, FAST, CHAT)


async def test_others_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked while a request of somebody else is served; it says that it waits."""
    shortest_s = measuring_client.SHORTEST_CHECK_S
    monkeypatch.setattr(measuring_client, "LONGEST_CHECK_S", shortest_s)
    monkeypatch.setattr(router_client, "LONGEST_CHECK_S", shortest_s)
    async with router_stack(tmp_path) as stack, RouterClient(stack.url, "") as client:
        lease = stack.fleet.lease(TierName.PRECISE, prompt_tokens=1, max_tokens=1)
        assert lease is not None
        waited = asyncio.Event()
        asking = asyncio.create_task(
            client.ask(PATH, FAST, CHAT, report_waiting=waited.set)
        )
        await within(waited.wait(), "the client to wait")
        assert not stack.engines[FAST].requests
        lease.release()
        assert (await asking)["choices"]


async def test_an_answer_is_timed_from_its_first_token(tmp_path: Path) -> None:
    """Exactly as many tokens as asked for; what comes all at once, or is one token, has no pace."""
    async with router_stack(tmp_path) as stack, RouterClient(stack.url, "") as client:
        engine = stack.engines[FAST]
        begun: list[bool] = []
        engine.delay_s = 0.01
        timed = await client.time(
            FAST, [1, 2, 3], 5, report_first_token=lambda: begun.append(True)
        )
        assert begun == [True]
        assert timed.prompt_tokens == 3
        assert timed.ttft_ms >= 10
        assert timed.tpot_ms is not None
        assert timed.tpot_ms > 5
        assert timed.ended - timed.started >= timed.ttft_ms / 1000
        (request,) = engine.requests
        assert request["prompt"] == [1, 2, 3]
        assert request["max_tokens"] == 5
        assert request["ignore_eos"] is True
        assert (
            await client.time(FAST, [1], 1, report_first_token=nothing)
        ).tpot_ms is None


async def test_an_answer_that_breaks_off_is_an_error(tmp_path: Path) -> None:
    async with router_stack(tmp_path) as stack, RouterClient(stack.url, "") as client:
        for engine in stack.engines.values():
            engine.error_after = 2
        with pytest.raises(ProfileError, match="fast cut an answer short"):
            await client.time(FAST, [1], 5, report_first_token=nothing)


async def test_a_step_tells_whether_somebody_came(tmp_path: Path) -> None:
    async with router_stack(tmp_path) as stack, RouterClient(stack.url, "") as client:

        async def own() -> None:
            await client.time(FAST, [1], 3, report_first_token=nothing)

        async def with_another() -> None:
            await own()
            assert (await stack.generate()).status_code == 200

        assert await client.undisturbed(own, nothing)
        assert not await client.undisturbed(with_another, nothing)
        await until(lambda: not stack.leases())


def test_the_first_error_of_groups_in_groups() -> None:
    first = ProfileError("first")
    second = ProfileError("second")
    assert first_of(ExceptionGroup("", [ExceptionGroup("", [first]), second])) is first
