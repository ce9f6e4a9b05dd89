"""Runs the Python that a model wrote, with a test, locked in a process that can compute and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent

from router.policy.profiles import ProfileError

SANDBOX = Path(__file__).with_name("sandbox.py")
START_S, WALL_S = 30.0, 5.0
LONGEST = 20_000  # characters of an answer
_BLOCKS = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


def code_of(answer: str) -> str:
    """Return the first block of Python, else the first block, else the whole answer."""
    blocks = _BLOCKS.findall(answer)
    python = [
        block
        for language, block in blocks
        if language.lower() in {"python", "python3", "py"}
    ]
    return dedent([*python, *(block for _, block in blocks), answer][0])


async def passes(answer: str, test: str) -> bool:
    """Run the answer's code and then the test; True if the test comes to its end.

    ``ProfileError``: the kernel refuses to lock the process in; nothing was run.
    """
    return await asyncio.to_thread(run, code_of(answer[:LONGEST]), test)


def run(code: str, test: str, seconds: float = WALL_S) -> bool:
    token = secrets.token_hex(16).encode()
    job = json.dumps([code, test]).encode() + b"\n" + token
    command = [sys.executable, "-I", "-S", "-X", "utf8", str(SANDBOX)]
    with (
        TemporaryDirectory(prefix="qarr-run-") as folder,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
            bufsize=0,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(job)
            output = process.stdout.fileno()
            if (begun := _read(output, 1, START_S)) != b"+":
                why = (begun + _read(output, 200, 1)).decode(
                    errors="replace"
                ) or "the sandbox did not start"
                raise ProfileError(
                    f"code is not run, for it cannot be locked in: {why}; leave out --run-code"
                )
            return _read(output, len(token) + 1, seconds) == token
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _read(pipe: int, size: int, seconds: float) -> bytes:
    until, found = time.monotonic() + seconds, b""
    waiting = select.poll()
    waiting.register(pipe)
    while (
        len(found) < size
        and (left := until - time.monotonic()) > 0
        and waiting.poll(left * 1000)
    ):
        if not (chunk := os.read(pipe, size - len(found))):
            break
        found += chunk
    return found
