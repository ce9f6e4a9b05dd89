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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent

from router.policy.profiles import ProfileError

SANDBOX = Path(__file__).with_name("sandbox.py")
LOCKED_IN = b"+"  # what the sandbox answers before it runs the code
START_S = 30.0
RUN_S = 5.0
MAX_REFUSAL_BYTES = 200
MAX_ANSWER_CHARS = 20_000
PYTHON_NAMES = {"python", "python3", "py"}
_BLOCKS = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


def code_of(answer: str) -> str:
    """Return the first block of Python, else the first block, else the complete answer."""
    blocks = _BLOCKS.findall(answer)
    code = blocks[0][1] if blocks else answer
    for language, block in blocks:
        if language.lower() in PYTHON_NAMES:
            code = block
            break
    return dedent(code)


async def passes(answer: str, test: str) -> bool:
    """Run the answer's code and then the test; True if the test comes to its end.

    ``ProfileError``: the kernel refuses to lock the process in; nothing was run.
    """
    code = code_of(answer[:MAX_ANSWER_CHARS])
    return await asyncio.to_thread(run, code, test)


def run(code: str, test: str, seconds: float = RUN_S) -> bool:
    """Run code and then its test in a sandbox; True if the test comes to its end in time.

    The sandbox can send the token only after the test: the code cannot know it.
    """
    token = secrets.token_hex(16).encode()
    job = json.dumps([code, test]).encode() + b"\n" + token
    with _sandbox() as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(job)
        output = process.stdout.fileno()
        first_byte = _read(output, 1, START_S)
        if first_byte != LOCKED_IN:
            refusal = first_byte + _read(output, MAX_REFUSAL_BYTES, 1)
            why = refusal.decode(errors="replace") or "the sandbox did not start"
            raise ProfileError(
                f"code is not run, for it cannot be locked in: {why}; leave out --run-code"
            )
        return _read(output, len(token) + 1, seconds) == token


@contextmanager
def _sandbox() -> Iterator[subprocess.Popen[bytes]]:
    """Start a sandbox in an empty folder; kill it, and what it has started, at the end."""
    with (
        TemporaryDirectory(prefix="qarr-run-") as folder,
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", str(SANDBOX)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
            bufsize=0,
        ) as process,
    ):
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _read(pipe: int, size: int, seconds: float) -> bytes:
    """Read ``size`` bytes from a pipe; fewer if it ends or the time is over."""
    deadline = time.monotonic() + seconds
    poll = select.poll()
    poll.register(pipe)
    received = b""
    while len(received) < size:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            break
        chunk = os.read(pipe, size - len(received))
        if not chunk:
            break
        received += chunk
    return received
