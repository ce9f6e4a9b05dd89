"""The units: what systemd's own tools say of them, and the reload script with a real router and a real systemd-notify."""

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
from tests.unit.server.test_handover import QARR, Routers, routers
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
    done = subprocess.run(
        [program("systemd-analyze"), "verify", "--man=no", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    about_ours = [line for line in done.stderr.splitlines() if "qarr" in line]
    assert (done.returncode, about_ours) == (0, []), done.stderr


@pytest.mark.parametrize(
    ("name", "most"), [("qarr.service", 25), ("qarr-router@.service", 20)]
)
def test_the_units_are_hardened(units: Path, name: str, most: int) -> None:
    """systemd-analyze security finds little exposed (of 100; a unit without options has 96)."""
    path = units / name.replace("@", "@8080")
    done = subprocess.run(
        [program("systemd-analyze"), "security", "--offline=true", f"--threshold={most}", "--no-pager", str(path)],
        capture_output=True, text=True, check=False,
    timeout=100)  # fmt: skip
    assert done.returncode == 0, done.stdout[-500:] + done.stderr


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
    found: Routers, folder: Path, old: int, *more: str
) -> tuple[int, list[bytes]]:
    """Run the reload script as systemd would; return its status and what systemd was told."""
    told: list[bytes] = []
    notify = folder / "notify"
    environment = {
        **found.environment,
        "NOTIFY_SOCKET": str(notify),
        "MAINPID": str(old),
    }
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours,
        (folder / "reload.out").open("wb") as out,
    ):
        ours.bind(str(notify))

        def take() -> None:
            """Take a message as systemd does: what comes with a file is answered by closing it."""
            message, files, _, _ = socket.recv_fds(ours, 200, 4)
            told.append(message)
            for file in files:
                os.close(file)

        asyncio.get_running_loop().add_reader(ours, take)
        script = await asyncio.create_subprocess_exec(
            str(SYSTEMD / "qarr-reload"), str(found.port), str(QARR), "serve", *found.arguments, *more,
            env=environment, stdout=out, stderr=out,
        )  # fmt: skip
        async with asyncio.timeout(60):
            status = await script.wait()
        asyncio.get_running_loop().remove_reader(ours)
        notify.unlink()
    return status, told


@pytest.mark.anyio
async def test_a_reload_replaces_the_router(tmp_path: Path) -> None:
    """Requests go on without one that fails, the old process ends, systemd is told of the new one; a failed reload changes nothing."""
    async with (
        routers(tmp_path) as found,
        httpx.AsyncClient(trust_env=False, timeout=20) as client,
    ):
        old = await found.start()
        statuses: list[int] = []
        going = True

        async def ask_on() -> None:
            while going:
                statuses.append(
                    (
                        await client.post(
                            f"{found.url}/generate", json={"prompt": "hi"}
                        )
                    ).status_code
                )

        asking = asyncio.create_task(ask_on())
        status, told = await reloaded(found, tmp_path, old.pid, "--no-such-option")
        assert (status, told) == (1, [])
        status, told = await reloaded(found, tmp_path, old.pid)
        assert status == 0, (tmp_path / "reload.out").read_text()
        new = int(told[0].removeprefix(b"MAINPID=").split()[0])
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
    """Tell whether a process is gone, or has ended and nobody has asked how."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
            == "Z"
        )
    except FileNotFoundError:
        return True
