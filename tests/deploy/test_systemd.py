"""The units, checked by systemd's own tools, and the reload script with a real router and a real systemd-notify."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
from pathlib import Path

import httpx
import pytest

from router.server.settings import ServerSettings
from tests.deploy.services import DEPLOY, ROOT, program
from tests.unit.server.router_processes import QARR, Routers, running_routers
from tests.waiting import until

SYSTEMD = DEPLOY / "systemd"
UNITS = ("qarr.service", "qarr-router@.service")


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """Return the units in a folder, with this checkout in the place of /opt/qarr."""
    for name in UNITS:
        text = (
            (SYSTEMD / name)
            .read_text("utf-8")
            .replace("/opt/qarr/.venv/bin/qarr", str(QARR))
            .replace("/opt/qarr", str(ROOT))
        )
        (tmp_path / name.replace("@", "@8080")).write_text(text)
    return tmp_path


@pytest.mark.parametrize("name", UNITS)
def test_systemd_accepts_the_units(units: Path, name: str) -> None:
    path = units / name.replace("@", "@8080")
    process = subprocess.run(
        [program("systemd-analyze"), "verify", "--man=no", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    about_ours = [line for line in process.stderr.splitlines() if "qarr" in line]
    assert process.returncode == 0, process.stderr
    assert about_ours == [], process.stderr


@pytest.mark.parametrize(
    ("name", "threshold"), [("qarr.service", 25), ("qarr-router@.service", 20)]
)
def test_the_units_are_hardened(units: Path, name: str, threshold: int) -> None:
    """systemd-analyze security finds little exposed (of 100; a unit without options has 96)."""
    path = units / name.replace("@", "@8080")
    command = [program("systemd-analyze"), "security", "--offline=true", "--no-pager"]
    process = subprocess.run(
        [*command, f"--threshold={threshold}", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert process.returncode == 0, process.stdout[-500:] + process.stderr


def test_the_units_agree_with_the_router() -> None:
    """A reload takes over on the port of the service, and open answers have time to finish."""
    text = (SYSTEMD / "qarr-router@.service").read_text("utf-8")
    start = re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)
    reload = re.search(r"^ExecReload=\S+/qarr-reload %i (.*)$", text, re.MULTILINE)
    assert start is not None
    assert reload is not None
    assert start[1] == reload[1]
    assert os.access(SYSTEMD / "qarr-reload", os.X_OK)
    for name in UNITS:
        stop = re.search(
            r"^TimeoutStopSec=(\d+)$", (SYSTEMD / name).read_text("utf-8"), re.MULTILINE
        )
        assert stop is not None
        assert int(stop[1]) > ServerSettings().drain_s + 10


async def reloaded(
    routers: Routers, folder: Path, old: int, *, more: str = ""
) -> tuple[int, list[bytes]]:
    """Run the reload script as systemd would; return its status and the messages to systemd."""
    messages: list[bytes] = []
    notify = folder / "notify"
    environment = {
        **routers.environment,
        "NOTIFY_SOCKET": str(notify),
        "MAINPID": str(old),
    }
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours,
        (folder / "reload.out").open("wb") as out,
    ):
        ours.bind(str(notify))

        def take() -> None:
            """Take a message as systemd does, which closes a file that comes with it in answer."""
            message, files, _, _ = socket.recv_fds(ours, 200, 4)
            messages.append(message)
            for file in files:
                os.close(file)

        asyncio.get_running_loop().add_reader(ours, take)
        script = await asyncio.create_subprocess_exec(
            *(str(SYSTEMD / "qarr-reload"), str(routers.port)),
            *(str(QARR), "serve", *routers.arguments, *more.split()),
            env=environment,
            stdout=out,
            stderr=out,
        )
        async with asyncio.timeout(60):
            status = await script.wait()
        asyncio.get_running_loop().remove_reader(ours)
        notify.unlink()
    return status, messages


@pytest.mark.anyio
async def test_a_reload_replaces_the_router(tmp_path: Path) -> None:
    """No request fails, the old process ends, and systemd learns of the new one; a failed reload changes nothing."""
    async with (
        running_routers(tmp_path) as routers,
        httpx.AsyncClient(trust_env=False, timeout=20) as client,
    ):
        old = await routers.start()
        statuses: list[int] = []
        going = True

        async def ask_on() -> None:
            while going:
                answer = await client.post(
                    f"{routers.url}/generate", json={"prompt": "hi"}
                )
                statuses.append(answer.status_code)

        asking = asyncio.create_task(ask_on())
        status, messages = await reloaded(
            routers, tmp_path, old.pid, more="--no-such-option"
        )
        assert status == 1
        assert messages == []
        status, messages = await reloaded(routers, tmp_path, old.pid)
        assert status == 0, (tmp_path / "reload.out").read_text()
        new = int(messages[0].removeprefix(b"MAINPID=").split()[0])
        assert new != old.pid
        await asyncio.wait_for(old.wait(), 30)
        seen = len(statuses)
        await until(lambda: len(statuses) > seen + 3)
        going = False
        await asking
        assert set(statuses) == {200}
        os.kill(new, 15)
        await until(lambda: ended(new))


def ended(pid: int) -> bool:
    """Tell whether a process is gone, or has ended and nobody has waited for it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8")
    except FileNotFoundError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"
