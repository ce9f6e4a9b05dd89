"""A running router reads its settings again, and takes over all changes or none."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from router.auth.api_keys import add_key
from router.settings import Settings, changes, leaves, load_settings
from tests.unit.own_router import QARR, OwnRouter, connection, own_router
from tests.unit.router_stack import events
from tests.waiting import until

pytestmark = pytest.mark.anyio
LIMITED = "[limits]\nmax_tokens = 7\n"


def test_changes_are_listed_by_field_without_secrets() -> None:
    """Each setting that differs is one change; passwords and keys are masked."""
    before = load_settings(
        None, {"tiers": {"int8": {"urls": ["http://10.0.0.9:8000"]}}}
    )
    after = load_settings(
        None,
        {
            "limits": {"max_tokens": 7},
            "policy": {"max_loss": {"code": 0.01}},
            "tiers": {"fast": {"env": {"A": "hidden"}}},
            "engine": {"api_key": "hidden"},
            "overflow": {"api_key": "hidden"},
            "state": {"redis_url": "redis://:hidden@localhost"},
        },
    )
    by_key = {change.key: change for change in changes(before, after)}
    assert {key: change.reloads for key, change in by_key.items()} == {
        "limits.max_tokens": True,
        "tiers.fast.env": False,
        "tiers.int8": False,
        "engine.api_key": False,
        "policy.max_loss": True,
        "state.redis_url": False,
        "overflow.api_key": True,
    }
    assert str(by_key["limits.max_tokens"]) == "limits.max_tokens: 4096 -> 7"
    assert "hidden" not in "".join(map(str, by_key.values()))


def test_what_reloads_exists() -> None:
    """Every section names only settings that it has, and a restart is needed for what is not named."""
    known = {".".join(key): reloads for key, _, reloads in leaves(Settings)}
    assert known["limits.max_tokens"]
    assert known["tiers.*.urls"]
    assert not known["server.port"]
    for section in Settings.model_fields.values():
        named = getattr(section.annotation, "reloads", frozenset())
        assert named <= set(getattr(section.annotation, "model_fields", {}))


@asynccontextmanager
async def configured(
    tmp_path: Path, text: str = "", **variables: str
) -> AsyncIterator[tuple[OwnRouter, Path]]:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    async with own_router(tmp_path, QARR_CONFIG=str(file), **variables) as router:
        yield router, file


async def stream(router: OwnRouter, begun: list[int]) -> str:
    """Read a stream to its end on a connection of its own, and note the status once its headers are there."""
    async with (
        connection() as client,
        client.stream(
            "POST", f"{router.url}/generate", json={"prompt": "hi", "stream": True}
        ) as answer,
    ):
        begun.append(answer.status_code)
        return (await answer.aread()).decode()


async def refused(router: OwnRouter) -> bool:
    """Tell whether a request for more than 7 tokens is refused, on a new connection."""
    async with connection() as client:
        answer = await client.post(
            f"{router.url}/route", json={"prompt": "hi", "max_tokens": 8}
        )
    assert answer.status_code in {httpx.codes.OK, httpx.codes.BAD_REQUEST}, answer.text
    return answer.status_code == httpx.codes.BAD_REQUEST


async def test_a_reload_disturbs_no_stream(tmp_path: Path) -> None:
    """After ``qarr reload`` the new limits apply, and streams that were open go on to their end."""
    async with configured(tmp_path) as (router, file):
        for behaviour in router.behaviours:
            behaviour.delay_s = 2.0
        begun: list[int] = []
        streams = [asyncio.create_task(stream(router, begun)) for _ in range(6)]
        await until(lambda: len(begun) == len(streams))
        file.write_text(LIMITED)
        reload = await router.qarr("reload")
        assert reload.returncode == 0
        assert reload.stdout.splitlines(keepends=True) == [
            "limits.max_tokens: 4096 -> 7\n",
            "settings reloaded: 1 changed\n",
        ]
        assert await refused(router)
        assert not any(stream.done() for stream in streams)
        for behaviour in router.behaviours:
            behaviour.delay_s = 0.0
        for text in await asyncio.gather(*streams):
            assert events(text)[-1][0] == "done"
        again = await router.qarr("reload")
        assert again.stdout == "settings reloaded: 0 changed\n"
        assert (
            "setting changed: limits.max_tokens: 4096 -> 7" in router.errors.read_text()
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[limits]\nmax_tokens = 0\n",
            "limits.max_tokens: Input should be greater than or equal to 1 (got 0)",
        ),
        (
            "[limits]\nmax_tokens = 7\nmost = 1\n",
            "limits.most: there is no such setting",
        ),
        ("[limits\n", "is not TOML"),
        (
            f"{LIMITED}[engine]\nbase_port = 9000\n",
            "engine.base_port: 9101 -> 9000: a running router cannot change this",
        ),
        (f'{LIMITED}[auth]\nkeys_file = "FOLDER"\n', "the key file"),
    ],
    ids=["bound", "unknown", "toml", "restart", "keys"],
)
async def test_a_fault_leaves_everything_as_it_was(
    tmp_path: Path, text: str, message: str
) -> None:
    """Settings that are not valid, or need a restart, are refused as a whole, by command and in the log."""
    async with configured(tmp_path) as (router, file):
        file.write_text(text.replace("FOLDER", str(tmp_path)))
        reload = await router.qarr("reload", "--url", router.url)
        assert reload.returncode == 2
        assert message in reload.stderr
        assert not await refused(router)
        assert "those before stay in force" in router.errors.read_text()


async def test_hangup_reloads(tmp_path: Path) -> None:
    """SIGHUP reloads policy, queue, timeouts, level and keys; the router serves on."""
    async with configured(tmp_path) as (router, file):
        keys = tmp_path / "keys.json"
        key, _ = add_key(keys, "me", admin=True)
        file.write_text(
            f'{LIMITED}[auth]\nkeys_file = "{keys}"\n[policy]\nmax_loss = {{ code = 0.01 }}\ngive_up = "quality"\n'
            '[admission]\nmax_waiting = 3\n[upstream]\nattempts = 2\n[telemetry]\nlog_level = "debug"\n'
        )
        router.process.send_signal(signal.SIGHUP)
        await until(lambda: "settings reloaded: 7 changed" in router.errors.read_text())
        async with connection() as client:
            answer = await client.get(f"{router.url}/tiers")
            assert answer.status_code == httpx.codes.UNAUTHORIZED
        async with connection(authorization=f"Bearer {key}") as client:
            answer = await client.post(
                f"{router.url}/generate", json={"prompt": "hi", "max_tokens": 5}
            )
            assert answer.status_code == httpx.codes.OK, answer.text
            metrics = (await client.get(f"{router.url}/metrics")).text
        assert "\nqarr_waiting_requests_limit 3.0\n" in metrics
        assert '\nqarr_loss_bound_ratio{class="code"} 0.01\n' in metrics
        assert router.process.poll() is None


async def test_engines_of_the_settings_are_added_and_removed(tmp_path: Path) -> None:
    """A tier's changed addresses are followed; without any engine left the reload is refused."""
    async with configured(tmp_path) as (started, file):
        port = started.port
        await started.stop()
        first_url = started.engines[0]
        second_url = started.engines[1]
        env = {**started.env, "QARR_SERVER__PORT": str(port)}
        file.write_text(f'[tiers.fast]\nurls = ["{first_url}"]\n')
        with started.errors.open("ab") as errors:
            started.process = subprocess.Popen([QARR, "serve"], env=env, stderr=errors)

        async def serves_by(url: str) -> bool:
            return await _urls(started) == {url}

        await until(lambda: serves_by(first_url))
        file.write_text(f'[tiers.fast]\nurls = ["{second_url}"]\n')
        assert (await started.qarr("reload")).returncode == 0
        await until(lambda: serves_by(second_url))
        file.write_text("")
        reload = await started.qarr("reload")
        assert "no engine would be left" in reload.stderr
        assert await serves_by(second_url)


async def _urls(router: OwnRouter) -> set[str]:
    try:
        tiers = (await router.client.get(f"{router.url}/tiers")).json()["tiers"]
    except (httpx.HTTPError, json.JSONDecodeError):
        return set()
    urls: set[str] = set()
    for tier in tiers:
        urls |= {replica["url"] for replica in tier["replicas"]}
    return urls


async def test_only_operators_reload(tmp_path: Path) -> None:
    """A key without the right to operate may not reload, and neither may a web page or a proxy's client."""
    keys = tmp_path / "keys.json"
    key, _ = add_key(keys, "me")
    async with configured(tmp_path, QARR_AUTH__KEYS_FILE=str(keys)) as (router, _):
        for headers in ({}, {"authorization": f"Bearer {key}"}):
            async with connection(**headers) as client:
                answer = await client.post(f"{router.url}/admin/reload")
                refusal = httpx.codes.FORBIDDEN if headers else httpx.codes.UNAUTHORIZED
                assert answer.status_code == refusal


async def test_a_terminal_that_goes_away_ends_the_router(tmp_path: Path) -> None:
    """A SIGHUP because the terminal is gone does not ask for a reload: the router ends."""
    async with configured(tmp_path) as (router, _):
        await router.stop()
        leader, follower = pty.openpty()
        serve = [QARR, "serve", "--port", str(router.port)]
        for option, url in zip(("--fast", "--balanced"), router.engines, strict=False):
            serve += [option, url]
        with router.errors.open("ab") as errors:
            router.process = subprocess.Popen(
                ["setsid", "--ctty", "--wait", *serve],
                stdin=follower,
                stdout=errors,
                stderr=errors,
                env=router.env,
            )
        os.close(follower)
        await router.until_ready()
        os.close(leader)
        assert await asyncio.to_thread(router.process.wait, 30) == 0
