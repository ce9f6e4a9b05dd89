"""The command as a person uses it, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.waiting import within

QARR = Path(sys.executable).with_name("qarr")


def qarr(
    *args: str, stdin: str | bytes = "", **env: str
) -> subprocess.CompletedProcess[str]:
    stdin_bytes = stdin.encode() if isinstance(stdin, str) else stdin
    result = subprocess.run(
        [QARR, *args],
        input=stdin_bytes,
        capture_output=True,
        env={**os.environ, **env},
        timeout=60,
        check=False,
    )
    return subprocess.CompletedProcess(
        result.args,
        result.returncode,
        stdout=result.stdout.decode(),
        stderr=result.stderr.decode(),
    )


def test_version() -> None:
    assert qarr("--version").stdout.startswith("qarr 0.")


@pytest.mark.parametrize("command", [(), ("model", "prepare")])
def test_help_explains(command: tuple[str, ...]) -> None:
    """Every --help has usage and a description, and exits with 0."""
    result = qarr(*command, "--help", COLUMNS="120")
    assert result.returncode == 0
    assert "Usage: qarr" in result.stdout


def test_classify_jsonl(tmp_path: Path) -> None:
    """One JSON object a line, in order, with the promised fields; non-ASCII and blank lines pass."""
    lines = '{"text": "hi"}\n\n{"text": "Schreibe eine Python-Funktion, die Primzahlen z\u00e4hlt"}\n'
    result = qarr(
        "classify",
        "--jsonl",
        stdin=lines,
        QARR_CACHE_DIR=str(tmp_path),
        QARR_SERVER__PORT="9",
    )
    assert result.returncode == 0, result.stderr
    greeting, code = [json.loads(line) for line in result.stdout.splitlines()]
    fields = {
        "contains_code",
        "asks_for_code",
        "language",
        "class",
        "confidence",
        "tokens",
        "tier",
    }
    assert fields <= greeting.keys()
    assert greeting["class"] == "small_talk"
    assert greeting["tier"] == "fast"
    assert greeting["asks_for_code"] is False
    assert code["class"] == "code"
    assert code["asks_for_code"] is True
    assert code["language"] == "python"
    assert code["tier"] != "fast"


def test_wrong_setting_ends_with_its_name() -> None:
    result = qarr("settings", QARR_SERVER__PROT="1")
    assert result.returncode == 2
    assert "QARR_SERVER__PROT" in result.stderr
    assert "Traceback" not in result.stderr


def test_variables_of_opentelemetry_that_cannot_be_used_are_told() -> None:
    """In one line each, whatever the command; what is installed stays."""
    result = qarr(
        "classify",
        "hi",
        OTEL_PROPAGATORS="xray, tracecontext,b3",
        OTEL_PYTHON_CONTEXT="none_such",
    )
    warnings = [line for line in result.stderr.splitlines() if "OTEL_" in line]
    assert result.returncode == 0
    assert len(warnings) == 2
    assert "Traceback" not in result.stderr
    assert (
        "OTEL_PROPAGATORS=xray, tracecontext,b3: xray, b3 is not installed and left out; installed: "
        in warnings[0]
    )


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        ({}, 2, "set QARR_CACHE_DIR"),
        ({"XDG_STATE_HOME": "{0}", "XDG_CONFIG_HOME": "{0}"}, 2, "set QARR_CACHE_DIR"),
        ({"QARR_CACHE_DIR": "{0}"}, 0, "<cache>/.config/qarr/keys.json"),
        (
            {"QARR_CACHE_DIR": "{0}", "XDG_CONFIG_HOME": "{0}-etc"},
            0,
            "<config>/keys.json",
        ),
        ({"XDG_CACHE_HOME": "{0}"}, 0, "<cache>/models"),
    ],
)
def test_a_user_without_a_home_is_told_what_to_set(
    given: dict[str, str], status: int, said: str, tmp_path: Path
) -> None:
    """As in containers with any user id: no HOME, no entry among the users. ``QARR_CACHE_DIR`` is enough."""
    nobody = [
        "unshare",
        "--user",
        "--map-user=12345",
        "--map-group=12345",
        QARR,
        "settings",
    ]
    env = {
        "PATH": os.environ["PATH"],
        **{name: value.format(tmp_path) for name, value in given.items()},
    }
    result = subprocess.run(
        nobody, capture_output=True, text=True, env=env, timeout=60, check=False
    )
    assert (result.returncode, said in result.stdout + result.stderr) == (
        status,
        True,
    ), result.stderr
    assert "Traceback" not in result.stderr


def test_serve_without_engines_says_what_to_give() -> None:
    """The router alone needs at least one engine's URL."""
    result = qarr("serve")
    assert result.returncode == 2
    assert "--fast" in result.stderr


@pytest.mark.parametrize(
    ("args", "settings", "said"),
    [
        (("--fast", "notaurl"), {}, "tiers.fast.urls.0: not an address"),
        (
            ("--fast", "http://h:1", "--tokenizer", "/nope"),
            {},
            "--tokenizer: /nope is no folder",
        ),
        (
            ("--fast", "http://h:1", "--tokenizer", "/proc"),
            {},
            "--tokenizer: /proc has no tokenizer.json",
        ),
        (
            ("--fast", "http://h:1"),
            {"QARR_TELEMETRY__DECISION_LOG": "/proc/none/log"},
            "telemetry.decision_log: /proc/none/log cannot be written",
        ),
        (
            ("--fast", "http://h:1"),
            {"QARR_POLICY__PROFILES": "/proc/version"},
            "policy.profiles: /proc/version is not a folder",
        ),
    ],
)
def test_serve_refuses_what_would_fail_later(
    args: tuple[str, ...], settings: dict[str, str], said: str
) -> None:
    """Status 2 at the start, with what is wrong and by which name it was given."""
    result = qarr("serve", "--port", "0", *args, **settings)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_classify_refuses_a_folder_without_a_tokenizer() -> None:
    """A folder that was named is not passed over for an estimate."""
    result = qarr("classify", "hi", "--tokenizer", "/nope")
    assert result.returncode == 2
    assert "--tokenizer: /nope is no folder" in result.stderr


@pytest.mark.anyio
async def test_any_free_port_is_printed(tmp_path: Path) -> None:
    """With port 0 the address is on standard error before any engine is ready, and serves."""
    for args, more in ((["--port", "0"], {}), ([], {"QARR_SERVER__PORT": "0"})):
        env = {
            **os.environ,
            **more,
            "QARR_ENGINE__LOG_DIR": str(tmp_path),
            "QARR_SERVER__RUNTIME_DIR": str(tmp_path),
        }
        process = await asyncio.create_subprocess_exec(
            QARR,
            "serve",
            "--fast",
            "http://127.0.0.1:9",
            *args,
            env=env,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        seen = ""
        try:
            async with (
                asyncio.timeout(60),
                httpx.AsyncClient(trust_env=False) as client,
            ):
                while (
                    named := re.search(r"listening on (http://127\.0\.0\.1:\d+);", seen)
                ) is None:
                    seen += (await process.stderr.readline()).decode()
                # The port is taken before anything is served: a connection waits until the router accepts it.
                assert (await client.get(f"{named[1]}/healthz")).status_code == 200
        finally:
            process.kill()
            await within(process.communicate(), "the process to end")


def test_taken_port_ends_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = qarr(
            "serve",
            "--fast",
            "http://127.0.0.1:1",
            "--port",
            str(taken.getsockname()[1]),
        )
    assert result.returncode == 2
    assert "cannot listen" in result.stderr


def test_up_without_engine_environment_says_how_to_make_it(tmp_path: Path) -> None:
    """Missing environments are named with the command that makes them."""
    result = qarr(
        "up", "--port", "0", "--model", "no such model", QARR_CACHE_DIR=str(tmp_path)
    )
    assert result.returncode == 2
    assert "neither a folder" in result.stderr
