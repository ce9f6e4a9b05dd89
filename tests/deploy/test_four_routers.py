"""Four routers on one machine over one Redis, behind nginx, set up by the commands of docs/scaling.md.

The commands run as they stand, but for the ports, and for a folder in place of /etc. ``systemctl`` is a stand-in that starts
the command of the unit file; nginx and redis-server are the real programs.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import time
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from router.auth.api_keys import add_key
from tests.deploy.nginx_config import configure
from tests.deploy.services import DEPLOY, ROOT, program
from tests.fakes.engine import Behaviour, FakeEngine, serving_all
from tests.ports import reserved_ports
from tests.unit.own_router import QARR
from tests.unit.router_stack import events
from tests.waiting import until, within

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]
# Each engine has so many slots for all routers together.
LIMITS = {"fast": 12, "balanced": 12, "precise": 24}
QUOTA = 25
UNIT = DEPLOY / "systemd/qarr-router@.service"


@dataclass(slots=True)
class Machine:
    """Four routers, their engines, and nginx in front of them."""

    url: str
    folder: Path
    ports: list[int]
    operator: str
    behaviours: dict[str, Behaviour]
    # The highest number of requests that each engine had at once.
    highest_running: Counter[str] = field(default_factory=Counter)

    def pid(self, port: int) -> int:
        return int((self.folder / f"{port}.pid").read_text())

    async def limits(self, ports: list[int]) -> dict[str, int]:
        """Return the slots that several routers have of each tier's ready replicas."""
        total: Counter[str] = Counter()
        headers = {"authorization": f"Bearer {self.operator}"}
        async with httpx.AsyncClient(
            trust_env=False, headers=headers, timeout=20
        ) as client:
            for port in ports:
                answer = await client.get(f"http://127.0.0.1:{port}/tiers")
                for tier in answer.json()["tiers"]:
                    total[tier["tier"]] += sum(
                        replica["limit"]
                        for replica in tier["replicas"]
                        if replica["state"] == "ready"
                    )
        return dict(total)

    async def watch(self) -> None:
        """Note the most that each engine has at once, until cancelled."""
        while True:
            for tier, behaviour in self.behaviours.items():
                self.highest_running[tier] = max(
                    self.highest_running[tier], behaviour.running
                )
            await asyncio.sleep(0.002)


def commands() -> str:
    """Return the commands that docs/scaling.md shows for several routers."""
    text = (ROOT / "docs/scaling.md").read_text("utf-8")
    section = text.partition("\n## Several routers")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```bash\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return str(block)


def shims(folder: Path, nginx_port: int) -> Path:
    """Write stand-ins for apt-get, qarr and systemctl, and return their folder."""
    start = re.search(
        r"^ExecStart=/opt/qarr/\.venv/bin/qarr (.*)$",
        UNIT.read_text("utf-8"),
        re.MULTILINE,
    )
    assert start is not None
    arguments = (
        start[1]
        .replace("%i", "$port")
        .replace("/etc/", f"{folder}/etc/")
        .replace("$ROUTER_OPTIONS", "")
    )
    nginx = (
        f"{program('nginx')} -p {folder}/nginx -c {folder}/nginx/nginx.conf -e stderr"
    )
    written = {
        "apt-get": "exit 0",
        "qarr": f'exec {QARR} "$@"',
        "systemctl": f"""
            if [ "$1 $2" = "reload nginx" ]; then
                cp {folder}/etc/nginx/qarr-routers.inc {folder}/nginx/
                {nginx} > {folder}/nginx.out 2>&1 & echo $! > {folder}/nginx.pid; exit 0
            fi
            test "$1 $2" = "enable --now"; shift 2
            set -a; . {folder}/etc/qarr/router.env; set +a
            for unit in "$@"; do
                port=${{unit#qarr-router@}}
                QARR_SERVER__RUNTIME_DIR={folder}/run-$port {QARR} {arguments} > {folder}/$port.out 2>&1 &
                echo $! > {folder}/$port.pid
            done""",
    }
    shim_folder = folder / "bin"
    shim_folder.mkdir()
    for name, body in written.items():
        (shim_folder / name).write_text(f"#!/bin/sh\nset -eu\n{body}\n")
        (shim_folder / name).chmod(0o755)
    configure(folder / "nginx", nginx_port, "")
    return shim_folder


@asynccontextmanager
async def machine(tmp_path: Path) -> AsyncIterator[Machine]:
    redis_port, nginx_port, *ports = reserved_ports(6)
    behaviours = {tier: Behaviour(delay_s=0.02) for tier in LIMITS}
    engines = [FakeEngine(behaviour).app for behaviour in behaviours.values()]
    keys = tmp_path / "etc/qarr/keys.json"
    for name in ("etc/qarr", "etc/nginx/conf.d", "etc/systemd/system", "var"):
        (tmp_path / name).mkdir(parents=True)
    operator, _ = add_key(keys, "operator", admin=True)
    text = (
        commands()
        .replace("/etc/", f"{tmp_path}/etc/")
        .replace(":6379", f":{redis_port}")
    )
    text, count = re.subn(
        r"\b808([0-3])\b", lambda match: str(ports[int(match[1])]), text
    )
    assert count == 8
    async with AsyncExitStack() as stack:
        urls = await stack.enter_async_context(serving_all(*engines))
        redis = await asyncio.create_subprocess_exec(
            *(program("redis-server"), "--port", str(redis_port)),
            *("--bind", "127.0.0.1", "--save", ""),
            stdout=asyncio.subprocess.DEVNULL,
        )
        stack.callback(redis.kill)
        routers = Machine(
            f"http://127.0.0.1:{nginx_port}",
            tmp_path,
            ports=ports,
            operator=operator,
            behaviours=behaviours,
        )
        path = f"{shims(tmp_path, nginx_port)}:{os.environ['PATH']}"
        # The operator changes two things: the engines' addresses, and where this machine keeps its files.
        tiers = "".join(
            f'[tiers.{tier}]\nmax_in_flight = {LIMITS[tier]}\nurls = ["{url}"]\n'
            for tier, url in zip(LIMITS, urls, strict=True)
        )
        (tmp_path / "engines.toml").write_text(
            f'{tiers}[auth]\nkeys_file = "{keys}"\n[policy]\nprofiles = "{tmp_path}/var"\nmax_slowdown = 1e9\n'
            f'[engine]\nlog_dir = "{tmp_path}/var"\n[budgets]\nfile = "{tmp_path}/var/usage.sqlite"\n'
            "[admission.max_wait_s]\ninteractive = 1e6\nstandard = 1e6\nbatch = 1e6\n"
            # what each router asks engines to verify them takes no slot, and would count as requests here
            '[quality]\ngate = "off"\n'
        )
        text = text.replace(
            "deploy/settings/routers-redis.toml", str(tmp_path / "engines.toml")
        )
        env = {**os.environ, "PATH": path, "XDG_CONFIG_HOME": str(tmp_path / "config")}
        script = await asyncio.create_subprocess_exec(
            "bash", "-euc", text, cwd=ROOT, env=env
        )
        assert await within(script.wait(), "the script to end", within_s=100) == 0
        for name in (*ports, "nginx"):
            stack.callback(kill, tmp_path / f"{name}.pid")

        async def slots_are_shared() -> bool:
            try:
                return await routers.limits(ports) == LIMITS
            except (httpx.TransportError, KeyError):
                return False

        await until(slots_are_shared, within_s=90)
        yield routers


def kill(pid_file: Path) -> None:
    with suppress(ProcessLookupError):
        os.kill(int(pid_file.read_text()), signal.SIGKILL)


async def ask(client: httpx.AsyncClient, url: str, **body: Any) -> str:
    """Send a request, and return how its answer ended: with "done", or with what went wrong."""
    try:
        answer = await client.post(
            f"{url}/generate", json={"prompt": "hi", "max_tokens": 8, **body}
        )
    except httpx.TransportError:
        return "broken"
    if answer.status_code != httpx.codes.OK:
        return answer.json()["type"].rpartition(":")[2]
    return "done" if events(answer.text)[-1][0] == "done" else "cut"


async def test_four_routers_are_one_to_their_callers(tmp_path: Path) -> None:
    """After one router is killed under load the others answer, engines' limits hold, and a quota is kept exactly."""
    async with machine(tmp_path) as routers, AsyncExitStack() as stack:
        key, _ = add_key(
            tmp_path / "etc/qarr/keys.json", "limited", requests_per_minute=QUOTA
        )
        client = await stack.enter_async_context(
            httpx.AsyncClient(
                trust_env=False,
                timeout=120,
                limits=httpx.Limits(max_connections=60),
                headers={"authorization": f"Bearer {routers.operator}"},
            )
        )
        watching = asyncio.create_task(routers.watch())
        outcomes: list[str] = []
        going = True

        async def ask_on(tier: str) -> None:
            while going:
                outcomes.append(
                    await ask(client, routers.url, tier=tier, tier_policy="require")
                )

        askers = []
        for tier, limit in LIMITS.items():
            askers += [asyncio.create_task(ask_on(tier)) for _ in range(2 * limit)]
        await until(lambda: len(outcomes) > 150)
        killed, *left = routers.ports
        os.kill(routers.pid(killed), signal.SIGKILL)
        before = len(outcomes)
        await until(lambda: len(outcomes) > before + 200)

        async def have_all_slots() -> bool:
            return await routers.limits(left) == LIMITS

        await until(have_all_slots)
        going = False
        await asyncio.gather(*askers)
        watching.cancel()
        lost = [outcome for outcome in outcomes if outcome != "done"]
        # The killed router's streams break off, and nginx does not send its unanswered requests again.
        assert set(lost) <= {"broken", "no-router", "cut"}, Counter(outcomes)
        assert len(lost) <= sum(LIMITS.values()) * 2
        # While shares move, each router may have a request on a slot that another has now. Unshared it would be 4 x limit.
        for tier, limit in LIMITS.items():
            assert routers.highest_running[tier] <= limit + len(routers.ports), (
                routers.highest_running
            )

        began = time.monotonic()
        async with httpx.AsyncClient(
            trust_env=False, timeout=120, headers={"authorization": f"Bearer {key}"}
        ) as limited:
            answers = await asyncio.gather(
                *(ask(limited, routers.url) for _ in range(3 * QUOTA))
            )
        counts = Counter(answers)
        minutes = math.ceil((time.monotonic() - began) / 60)
        assert QUOTA <= counts["done"] <= QUOTA * minutes, counts
        assert set(counts) == {"done", "over-quota"}
        for port in left:
            assert "Traceback" not in (tmp_path / f"{port}.out").read_text()
