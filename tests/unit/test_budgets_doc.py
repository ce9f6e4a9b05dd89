"""The commands of docs/security.md about budgets, run as they stand against a router with keys."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path

import pytest

from router.auth.api_keys import read_key_file
from router.section import PROJECT
from tests.ports import reserved_ports
from tests.unit.router_stack import router_stack
from tests.waiting import until, within

pytestmark = pytest.mark.anyio
SECTION = (
    (PROJECT / "docs/security.md")
    .read_text("utf-8")
    .partition("\n## Budgets")[2]
    .partition("\n## ")[0]
)
BLOCKS = re.findall(r"^```bash\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)


async def run(commands: str, **env: str) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = await asyncio.create_subprocess_exec(
        *("bash", "-ec", commands),
        env={**os.environ, "PATH": path, **env},
        cwd=PROJECT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await within(
        process.communicate(), "the process to end", within_s=100
    )
    assert process.returncode == 0, errors.decode()
    return out.decode()


@pytest.mark.timeout(240)  # The command is started eight times.
async def test_the_commands_do_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands make keys and a team, and show in every form what a request of one key used."""
    file = tmp_path / "keys.json"
    monkeypatch.setenv("QARR_AUTH__KEYS_FILE", str(file))
    # where a router of this machine serves without keys, at its socket or port, the first key is made after a question
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (port,) = reserved_ports()
    monkeypatch.setenv("QARR_SERVER__PORT", str(port))
    commands_that_add, commands_that_show = BLOCKS
    printed = await run(commands_that_add)
    keys = re.findall(r"^qarr-\S+$", printed, re.MULTILINE)
    made = read_key_file(file)
    assert [key.name for key in made.keys] == ["ops", "ann", "ben"]
    assert [team.money_per_month for team in made.teams or ()] == [2000]
    async with router_stack(tmp_path, {"budgets": {"replica_hour": 3.99}}) as stack:
        headers = {"authorization": f"Bearer {keys[1]}"}
        answer = await stack.client.post(
            f"{stack.url}/generate", json={"prompt": "hi"}, headers=headers
        )
        assert answer.status_code == 200
        address = stack.url.removeprefix("http://")

        async def usage() -> list[object]:
            output = json.loads(await run("qarr keys usage --json"))
            rows: list[object] = output["usage"]
            return rows

        await until(usage, "qarr keys usage to show the request", within_s=100)
        shown = await run(
            commands_that_show.replace("localhost:8080", address), KEY=keys[0]
        )
    assert "engine_seconds_per_day" in shown
    assert re.search(
        r"^day,key,name,team,tier,requests,.*,highest_money$", shown, re.MULTILINE
    )
    last_line = json.loads(shown.splitlines()[-1])
    assert [row["name"] for row in last_line["usage"]] == ["ann"]
