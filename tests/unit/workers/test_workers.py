"""Several workers behind one port: real processes in front of fake engines, as operators run them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from router.auth.api_keys import add_key
from router.policy.profiles import profile_name
from tests.browser.made_up import quality
from tests.fakes.engine import ANSWER, FakeEngine, serving_all
from tests.unit.own_engines import until
from tests.unit.own_router import QARR, own_router
from tests.unit.router_stack import events
from tiers.spec import TierName

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.unit.own_router import OwnRouter

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def connection(**headers: str) -> AsyncIterator[httpx.AsyncClient]:
    """Give a client whose connections are new."""
    async with httpx.AsyncClient(trust_env=False, timeout=30, headers=headers) as client:
        yield client


def workers(router: OwnRouter) -> list[int]:
    """Return the processes of the workers."""
    found = Path(f"/proc/{router.process.pid}/task/{router.process.pid}/children").read_text().split()
    return [int(pid) for pid in found if "router.deployment.worker" in Path(f"/proc/{pid}/cmdline").read_text()]


def runs(pid: int) -> bool:
    """Tell whether a process runs."""
    return Path(f"/proc/{pid}").exists()


async def generate(router: OwnRouter, **body: Any) -> httpx.Response:
    """Ask on a new connection."""
    async with connection() as client:
        return await client.post(f"{router.url}/generate", json={"prompt": "hi", **body})


async def get(router: OwnRouter, path: str, **headers: str) -> Any:
    """Read an endpoint on a new connection."""
    async with connection(**headers) as client:
        answer = await client.get(f"{router.url}{path}")
        assert answer.status_code == httpx.codes.OK, answer.text
        return answer.text if path == "/metrics" else answer.json()


def total(metrics: str, name: str) -> float:
    """Return the sum of a family's samples."""
    lines = [line for line in metrics.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(line.split(" # ")[0].rsplit(" ", 1)[1]) for line in lines)


def replicas(tiers: dict[str, Any], field: str) -> int:
    """Return the sum of a field over all replicas."""
    return sum(replica[field] for tier in tiers["tiers"] for replica in tier["replicas"])


async def each_worker(read: Callable[[], Any], count: int = 6) -> list[Any]:
    """Read something on several connections, so that every worker answers."""
    return [await read() for _ in range(count)]


class Streams:
    """Streams that are read at the same time, each on its own connection.

    Attributes:
        ids: Of each stream, in the order in which they began.
        rows: Of the worker of each.
        texts: What each has sent.
        broken: Which of them ended before their end.
    """

    def __init__(self, router: OwnRouter, count: int, **body: Any) -> None:
        self._router, self._body = router, {"prompt": "hi", "stream": True, "resumable": True, **body}
        self.ids: dict[int, str] = {}
        self.rows: dict[int, int] = {}
        self.texts: dict[int, str] = {}
        self.broken: set[int] = set()
        self.tasks = [asyncio.create_task(self._read(number)) for number in range(count)]

    async def _read(self, number: int) -> None:
        try:
            async with (
                connection() as client,
                client.stream("POST", f"{self._router.url}/generate", json=self._body) as answer,
            ):
                assert answer.status_code == httpx.codes.OK
                self.ids[number] = answer.headers["x-qarr-stream-id"]
                self.rows[number] = int(self.ids[number].split(".")[0])
                self.texts[number] = ""
                async for text in answer.aiter_text():
                    self.texts[number] += text
        except httpx.HTTPError:
            self.broken.add(number)

    async def begun(self) -> None:
        """Wait until every stream has its headers."""
        await until(lambda: len(self.rows) == len(self.tasks))

    async def ended(self) -> None:
        """Wait until every stream has ended."""
        async with asyncio.timeout(60):
            await asyncio.gather(*self.tasks)

    def complete(self, number: int) -> bool:
        """Tell whether a stream has its last event."""
        return events(self.texts[number])[-1][0] == "done"


@asynccontextmanager
async def two_workers(tmp_path: Path, delay_s: float = 0.0, **settings: str) -> AsyncIterator[OwnRouter]:
    """Run a router with two workers in front of engines that wait before each piece, once they are ready.

    However long a slot is expected to take, requests wait for it: the machine may stand still for seconds.
    """
    waits = {f"QARR_ADMISSION__MAX_WAIT_S__{name}": "1e6" for name in ("INTERACTIVE", "STANDARD", "BATCH")}
    async with own_router(tmp_path, **{"QARR_SERVER__WORKERS": "2", **waits, **settings}) as router:
        for behaviour in router.behaviours:
            behaviour.delay_s = delay_s
        yield router


async def test_every_figure_is_that_of_all_workers(tmp_path: Path) -> None:
    """Whichever worker answers, /tiers, /metrics, /requests, /traces and /live show the requests of both."""
    async with two_workers(tmp_path) as router:
        ids = set()
        for _ in range(20):
            answer = await generate(router)
            assert answer.status_code == httpx.codes.OK
            ids.add(answer.headers["x-request-id"])
        assert {replicas(t, "served") for t in await each_worker(lambda: get(router, "/tiers"))} == {20}
        for text in await each_worker(lambda: get(router, "/metrics")):
            assert total(text, "qarr_requests_total") == 20
            assert total(text, "qarr_overhead_seconds_count") == 20
            assert total(text, "qarr_output_tokens_total") == 20 * len(ANSWER)
        for shown in await each_worker(lambda: get(router, "/requests")):
            assert {request["request_id"] for request in shown["requests"]} == ids
        for shown in await each_worker(lambda: get(router, "/traces?limit=100")):
            assert sum(trace["name"] == "POST /generate" for trace in shown["traces"]) == 20
        trace_id = shown["traces"][-1]["trace_id"]
        assert {t["trace_id"] for t in await each_worker(lambda: get(router, f"/traces/{trace_id}"))} == {trace_id}
        assert await router.stop() == 0
        assert "ERROR" not in router.errors.read_text(), router.errors.read_text()


async def test_the_loss_budget_is_one_of_all_workers(tmp_path: Path) -> None:
    """Counters are those of both workers added up; the mean, which they share through a file, is that of all answers."""
    async with two_workers(tmp_path, QARR_POLICY__BUDGET_HALF_LIFE_S="1e9", QARR_POLICY__LOSS_BUDGET="0.1") as router:
        tiers = (await get(router, "/tiers"))["tiers"]
        identities = {TierName(tier["tier"]): tier["identity"] for tier in tiers}
        folder = Path(os.environ["QARR_POLICY__PROFILES"])
        (folder / profile_name(identities)).write_text(quality(identities).model_dump_json())
        await router.stop()
        await router.start()
        for _ in range(20):
            assert (await generate(router)).status_code == httpx.codes.OK
        names = ("counted", "differing", "allowed")
        for text in await each_worker(lambda: get(router, "/metrics")):
            counted, differing, allowed = (total(text, f"qarr_loss_{name}_tokens_total") for name in names)
            assert (counted, allowed) == (20 * len(ANSWER), pytest.approx(2 * len(ANSWER)))
        mean = pytest.approx(differing / counted, abs=1e-5)
        async with asyncio.timeout(20):
            while (await get(router, "/tiers"))["loss_budget"]["mean"] != mean:
                await asyncio.sleep(0.1)
        assert total(await get(router, "/metrics"), "qarr_loss_mean_ratio") == mean


async def test_both_workers_serve(tmp_path: Path) -> None:
    """Connections reach both; test_acceptor shows how they are divided."""
    async with two_workers(tmp_path, 0.2) as router:
        rows: set[int] = set()
        while rows != {1, 2}:
            streams = Streams(router, 12)
            await streams.begun()
            rows |= set(streams.rows.values())
            await streams.ended()
            assert all(map(streams.complete, range(12)))


async def test_the_live_stream_shows_all_workers(tmp_path: Path) -> None:
    """A reader gets the requests of both workers, and snapshots of the whole."""
    async with (
        two_workers(tmp_path) as router,
        connection() as client,
        client.stream("GET", f"{router.url}/live") as live,
        asyncio.timeout(30),
    ):
        asked = {(await generate(router)).headers["x-request-id"] for _ in range(8)}
        seen: set[str] = set()
        totals = 0
        async for line in live.aiter_lines():
            if line.startswith("data: "):
                data = json.loads(line.removeprefix("data: "))
                seen.add(data.get("request_id", ""))
                totals = data.get("totals", {}).get("requests", totals)
            if seen >= asked and totals == 8:
                break


async def test_limits_hold_over_all_workers(tmp_path: Path) -> None:
    """Never more requests on an engine than its limit, and all that wait in either worker are served."""
    limits = {f"QARR_TIERS__{name}__MAX_IN_FLIGHT": "3" for name in ("FAST", "BALANCED", "PRECISE")}
    async with two_workers(tmp_path, 0.02, **limits) as router:
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, *(b.callers for b in router.behaviours))  # the router's own requests take no slot
                await asyncio.sleep(0.001)

        watching = asyncio.create_task(watch())
        answers = await asyncio.gather(*(generate(router) for _ in range(80)))
        watching.cancel()
        assert {answer.status_code for answer in answers} == {httpx.codes.OK}
        assert most == 3
        await until_idle(router)


async def until_idle(router: OwnRouter) -> None:
    """Wait until no replica has a request."""
    async with asyncio.timeout(20):
        while replicas(await get(router, "/tiers"), "in_flight"):
            await asyncio.sleep(0.05)


async def test_killing_a_worker_loses_only_its_own_streams(tmp_path: Path) -> None:
    """Its open streams break; the others', new requests, limits and totals go on, and another one takes its place."""
    async with two_workers(tmp_path, 0.2) as router:
        for _ in range(10):
            assert (await generate(router)).status_code == httpx.codes.OK
        streams = Streams(router, 12)
        await streams.begun()
        before = await get(router, "/metrics")
        victim = workers(router)[0]
        os.kill(victim, signal.SIGKILL)
        asked = [asyncio.create_task(generate(router)) for _ in range(20)]
        await streams.ended()
        lost = {streams.rows[number] for number in streams.broken}
        assert len(lost) == 1
        assert streams.broken == {number for number, row in streams.rows.items() if row in lost}
        assert all(streams.complete(number) for number in set(range(12)) - streams.broken)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        served = [a for a in answers if isinstance(a, httpx.Response)]
        assert {a.status_code for a in served} == {httpx.codes.OK}
        assert len(served) >= 10  # others were accepted by the victim
        await until(lambda: len(workers(router)) == 2 and victim not in workers(router))
        await until_idle(router)
        after = await get(router, "/metrics")
        for name in ("qarr_requests_total", "qarr_http_requests_total", "qarr_prompt_tokens_total"):
            assert total(after, name) >= total(before, name)
        assert replicas(await get(router, "/tiers"), "served") >= 10 + len(served) + 12 - len(streams.broken)
        async with connection(**{"last-event-id": f"{streams.ids[min(streams.broken)]}.1"}) as client:
            resumed = await client.post(f"{router.url}/generate")
        assert resumed.status_code == httpx.codes.GONE, resumed.text
        assert "has ended" in resumed.json()["detail"]
        again = Streams(router, 12)
        await again.begun()
        assert len(set(again.rows.values())) == 2
        await again.ended()
        assert await router.stop() == 0


async def test_a_stuck_worker_is_replaced(tmp_path: Path) -> None:
    """Figures are shown meanwhile, the other worker's streams go on, and what it holds is free afterwards."""
    async with two_workers(tmp_path, 0.2, QARR_SERVER__WORKER_TIMEOUT_S="1") as router:
        streams = Streams(router, 12)
        await streams.begun()
        victim = workers(router)[0]
        os.kill(victim, signal.SIGSTOP)
        await get(router, "/metrics")
        await streams.ended()
        lost = {streams.rows[number] for number in streams.broken}
        assert len(lost) == 1
        assert streams.broken == {number for number, row in streams.rows.items() if row in lost}
        await until(lambda: len(workers(router)) == 2 and victim not in workers(router))
        assert f"worker process {victim} has done nothing" in router.errors.read_text()
        await until_idle(router)
        assert {answer.status_code for answer in await each_worker(lambda: generate(router))} == {httpx.codes.OK}
        assert await router.stop() == 0


async def test_quotas_hold_over_all_workers(tmp_path: Path) -> None:
    """A key's requests a minute and its requests at once are counted over both workers, to the last one."""
    keys = tmp_path / "keys.json"
    many, _ = add_key(keys, "many", requests_per_minute=40)
    few, _ = add_key(keys, "few", concurrent_requests=3)
    async with two_workers(tmp_path, 0.02, QARR_AUTH__KEYS_FILE=str(keys)) as router:

        async def ask(key: str) -> int:
            async with connection(authorization=f"Bearer {key}") as client:
                return (await client.post(f"{router.url}/generate", json={"prompt": "hi"})).status_code

        statuses = await asyncio.gather(*(ask(many) for _ in range(100)))
        assert statuses.count(200) == 40
        assert statuses.count(429) == 60
        statuses = await asyncio.gather(*(ask(few) for _ in range(30)))
        assert 3 <= statuses.count(200) < 30
        assert set(statuses) == {200, 429}
        assert [await ask(few) for _ in range(5)] == [200] * 5


async def test_budgets_hold_over_all_workers(tmp_path: Path) -> None:
    """Charges of both workers are in one file: within the budget, the same as the usage, and nothing stays reserved."""
    keys, file = tmp_path / "keys.json", tmp_path / "usage.sqlite"
    rich, _ = add_key(keys, "rich", admin=True, engine_seconds_per_day=1e6)
    env = {"QARR_AUTH__KEYS_FILE": str(keys), "QARR_BUDGETS__FILE": str(file)}
    async with two_workers(tmp_path, 0.001, **env) as router:

        async def ask(key: str) -> int:
            async with connection(authorization=f"Bearer {key}") as client:
                asked = {"prompt": "hi", "max_tokens": 20, "tier": "fast"}
                return (await client.post(f"{router.url}/generate", json=asked)).status_code

        assert set(await asyncio.gather(*(ask(rich) for _ in range(20)))) == {200}
        async with asyncio.timeout(30):
            while not (shown := await get(router, "/usage", authorization=f"Bearer {rich}"))["usage"]:
                await asyncio.sleep(0.1)
        limit = 2 * shown["budgets"][0]["used"]
        poor, made = add_key(keys, "poor", engine_seconds_per_month=limit)
        statuses: list[int] = []
        async with asyncio.timeout(60):
            while not {200, 429} <= set(statuses):  # how many fit hangs on the speed that is predicted for each
                statuses += await asyncio.gather(*(ask(poor) for _ in range(40)))
        assert set(statuses) <= {200, 400, 401, 429}  # larger than the budget; not read yet; used up
        served = statuses.count(200)
        async with asyncio.timeout(30):
            while f'qarr_key_requests_total{{key="poor",team="",tier="fast"}} {served}.0' not in await get(
                router, "/metrics", authorization=f"Bearer {rich}"
            ):
                await asyncio.sleep(0.1)
        assert await router.stop() == 0
    with sqlite3.connect(file) as sql:
        (spent,) = sql.execute(
            "SELECT engine_us FROM spent WHERE account = ? AND length(period) = 7", (f"key:{made.id}",)
        )
        (used,) = sql.execute("SELECT sum(engine_us), sum(requests) FROM usage WHERE key = ?", (made.id,))
        assert used == (*spent, served)
        assert 0 < spent[0] <= limit * 1e6
        assert sql.execute("SELECT * FROM held").fetchall() == []
    sql.close()


async def test_a_signal_lets_every_worker_finish(tmp_path: Path) -> None:
    """After SIGTERM all open streams are answered to their end, and no process is left."""
    async with two_workers(tmp_path, 0.2) as router:
        pids = workers(router)
        streams = Streams(router, 12)
        await streams.begun()
        assert await router.stop() == 0
        await streams.ended()
        assert not streams.broken
        assert all(map(streams.complete, range(12)))
        await until(lambda: not any(map(runs, pids)))


async def test_a_router_is_taken_over_by_another(tmp_path: Path) -> None:
    """A second router with two workers takes the socket; no connection is refused, and open streams end well."""
    async with two_workers(tmp_path, 0.2) as router:
        old = router.process
        streams = Streams(router, 8)
        await streams.begun()
        asking = asyncio.create_task(each_worker(lambda: generate(router), 12))
        names = ("--fast", "--balanced", "--precise")
        urls = [part for pair in zip(names, router.engines, strict=True) for part in pair]
        with router.errors.open("ab") as errors:
            new = await asyncio.create_subprocess_exec(
                QARR, "serve", "--takeover", "--port", str(router.port), *urls,
                stderr=errors, env=router.env,
            )  # fmt: skip
        try:
            assert await asyncio.to_thread(old.wait, 60) == 0
            await streams.ended()
            assert not streams.broken
            assert {answer.status_code for answer in await asking} == {httpx.codes.OK}
            assert (await generate(router)).status_code == httpx.codes.OK
            assert replicas(await get(router, "/tiers"), "served") >= 1
        finally:
            with suppress(ProcessLookupError):
                new.terminate()
            await new.wait()


async def test_a_stream_is_resumed_from_whichever_worker(tmp_path: Path) -> None:
    """The rest of a stream comes from the worker that has it, also on a connection to another one."""
    async with two_workers(tmp_path, 0.05) as router:
        streams = Streams(router, 1)
        await streams.ended()
        whole = events(streams.texts[0])
        last = [line for line in streams.texts[0].splitlines() if line.startswith("id: ")][2].removeprefix("id: ")

        async def resume() -> str:
            async with connection(**{"last-event-id": last}) as client:
                answer = await client.post(f"{router.url}/generate")
                assert answer.status_code == httpx.codes.OK, answer.text
                return answer.text

        for text in await each_worker(resume):
            assert events(text) == whole[3:]
        unknown = f"{3 - streams.rows[0]}.nothing.1"
        async with connection(**{"last-event-id": unknown}) as client:
            assert (await client.post(f"{router.url}/generate")).status_code == httpx.codes.NOT_FOUND


async def test_operators_reach_the_supervisor_through_any_worker(tmp_path: Path) -> None:
    """A drained replica gets no request from either worker until it is resumed."""
    async with two_workers(tmp_path) as router:

        async def operate(kind: str) -> None:
            async with connection() as client:
                begun = await client.post(f"{router.url}/admin/replicas/fast-0/{kind}")
                assert begun.status_code == httpx.codes.ACCEPTED, begun.text
                operation = begun.json()["id"]
            async with asyncio.timeout(20):
                while (await get(router, f"/admin/operations/{operation}"))["state"] == "running":
                    await asyncio.sleep(0.05)

        await operate("drain")
        router.behaviours[0].requests.clear()
        assert {(await generate(router, stream=False)).json()["tier"] for _ in range(10)} == {"balanced"}
        assert not router.behaviours[0].requests
        await operate("resume")
        assert {(await generate(router, stream=False)).json()["tier"] for _ in range(10)} == {"fast"}


async def test_workers_end_when_the_first_process_is_killed(tmp_path: Path) -> None:
    """They answer what is open, accept nothing more, and end."""
    async with two_workers(tmp_path, 0.2) as router:
        pids = workers(router)
        streams = Streams(router, 6)
        await streams.begun()
        router.kill()
        await streams.ended()
        assert not streams.broken
        await until(lambda: not any(map(runs, pids)))


async def test_a_breaker_counts_the_failures_of_all_workers(tmp_path: Path) -> None:
    """Failures in a row open a replica's breaker, whichever workers see them, and both spare it then."""
    async with two_workers(tmp_path, QARR_UPSTREAM__BREAKER_PAUSE_S="20") as router:
        router.behaviours[0].requests.clear()
        router.behaviours[0].status = 500
        for _ in range(8):
            assert (await generate(router)).status_code == httpx.codes.OK
        assert len(router.behaviours[0].requests) == 3
        for text in await each_worker(lambda: get(router, "/metrics")):
            assert total(text, "qarr_breaker_opened_total") == 1


async def test_replicas_that_come_and_go_do_so_in_every_worker(tmp_path: Path) -> None:
    """Named by a file or by a command; requests to every worker reach a new one, and none reaches one that is removed."""
    path = tmp_path / "fleet.json"
    path.write_text("{}")
    settings = {"QARR_DISCOVERY__FILE": str(path), "QARR_DISCOVERY__INTERVAL_S": "0.1"}
    async with (
        serving_all(FakeEngine().app, FakeEngine().app) as (named, added),
        two_workers(tmp_path, **settings) as router,
    ):

        async def replica(url: str) -> dict[str, Any]:
            tiers = (await get(router, "/tiers"))["tiers"]
            return next((r for tier in tiers for r in tier["replicas"] if r["url"] == url), {"state": "gone"})

        async def until_state(url: str, state: str) -> None:
            async with asyncio.timeout(30):
                while (await replica(url))["state"] != state:
                    await asyncio.sleep(0.05)

        path.write_text(json.dumps({"fast": [named]}))
        await until_state(named, "ready")
        done = await router.qarr("tiers", "add", "fast", added, "--url", router.url)
        assert (done.returncode, done.stdout) == (0, "fast-2: added, is ready\n"), done.stderr
        assert ((await replica(named))["source"], (await replica(added))["source"]) == ("file", "command")
        done = await router.qarr("tiers", "remove", router.engines[0], "--url", router.url)
        assert (done.returncode, done.stdout) == (0, "fast-0: remove done, removed\n"), done.stderr
        answers = [await generate(router, tier="fast", tier_policy="require") for _ in range(20)]
        assert {answer.status_code for answer in answers} == {200}
        assert (await replica(named))["served"] + (await replica(added))["served"] == 20
        path.write_text("no JSON")
        async with asyncio.timeout(30):
            while not all(
                "it is not JSON" in str(h["reasons"]) for h in await each_worker(lambda: get(router, "/health"))
            ):
                await asyncio.sleep(0.05)
        assert (await replica(named))["state"] == "ready"
        path.write_text(json.dumps({"fast": []}))
        await until_state(named, "gone")
        answers = [await generate(router, tier="fast", tier_policy="require") for _ in range(6)]
        assert {answer.status_code for answer in answers} == {200}
        assert (await replica(added))["served"] >= 6
        refused = await router.qarr("tiers", "add", "fast", added, "--url", router.url)
        assert refused.returncode == 2
        assert f"{added} is in tier fast already, named by command" in refused.stderr
        assert (await router.qarr("tiers", "remove", added, "--now", "--url", router.url)).returncode == 0
        assert (await generate(router, tier="fast", tier_policy="require")).status_code == 503
