"""Code of a model is run with its test, and can do nothing else."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from router.profiling.run_code import code_of, passes, run

DENIED = "try:\n    {}\nexcept (OSError, RuntimeError):\n    pass\nelse:\n    raise AssertionError"
SOLVED = "def f(x):\n    return 2 * x\n"
LATE = (
    "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n"
    "f = lambda x: A(x).x * 2\nif __name__ == '__main__':\n    input()"
)
CHEAT = """
while frame and "token" not in frame.f_locals:
    frame = frame.f_back
names = frame.f_locals
names["write"](names["answer"], names["read"](names["token"], 64)), names["leave"](0)
"""
UNDER_LOCK = "import socket, sys; s = socket.socket(); from router.profiling.sandbox import lock; assert not lock(0); "
TEST = "assert f(2) == 4"


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("Sure:\n```python\nx = 1\n```\nThen:\n```python\nx = 2\n```", "x = 1\n"),
        ("```bash\npip\n```\nand\n```py\nx = 1\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("  ```Python\n  x = 1\n  y =", "x = 1\ny ="),
    ],
)
def test_code_is_found_in_an_answer(answer: str, code: str) -> None:
    assert code_of(answer) == code


@pytest.mark.parametrize(
    ("answer", "passed"),
    [
        (f"Here:\n```python\n{SOLVED}```", True),
        (SOLVED.replace("2", "3"), False),
        ("def f(x:", False),
        (LATE, True),
    ],
)
def test_the_test_decides(answer: str, *, passed: bool) -> None:
    assert asyncio.run(passes(answer, TEST)) is passed


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "import os; os.write(3, b'0' * 32); os._exit(0)",
        "import os\nfor i in range(3, 512):\n    try: os.write(3, os.read(i, 64)); os._exit(0)\n    except OSError: pass",
        "import ctypes; ctypes.CDLL(None).read",
        "f = lambda x: exit()",
        "x = [0] * 10**9",
        "while True: pass",
        "while True: print('x' * 10**6)",
        "import os\nwhile True: os.write(3, b'x' * 10**6)",
        "f = lambda x: f(x)",
    ],
)
def test_code_that_ends_or_bursts_does_not_pass(code: str) -> None:
    assert run(f"{SOLVED}{code}", TEST) is False


@pytest.mark.parametrize(
    "call",
    [
        "open('/etc/passwd')", "open('new', 'w')", "os.listdir('.')", "os.fork()", "threading.Thread(target=print).start()",
        "os.posix_spawn('/bin/true', ['true'], {})", "os.execv('/bin/true', ['true'])", "os.kill(os.getpid(), 0)",
    ],
)  # fmt: skip
def test_what_could_leave_the_process_is_denied(call: str) -> None:
    assert run("import os, threading\nos.getpid()", DENIED.format(call))


@pytest.mark.parametrize(
    "frame",
    [
        "import sys; frame = sys._getframe()",
        "import sys; frame = sys._current_frames().popitem()[1]",
        "try:\n    0 / 0\nexcept ZeroDivisionError as error:\n    frame = error.__traceback__.tb_frame",
        "g = (g.gi_frame.f_back for _ in 'x'); frame = next(g)",
        "import sys; sys.setprofile(lambda f, *_: globals().setdefault('frame', f)); (lambda: 0)()",
    ],
)
def test_the_token_is_out_of_reach(frame: str) -> None:
    assert not run(frame + CHEAT, "")


def test_no_connection_is_made() -> None:
    """Neither by a new socket nor by one that was there before the lock."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        for call in (f"s.connect({server.getsockname()!r})", "socket.socket()"):
            done = subprocess.run(
                [sys.executable, "-c", UNDER_LOCK + call],
                capture_output=True,
                text=True,
                check=False,
                timeout=100,
            )
            assert "PermissionError" in done.stderr
        with pytest.raises(TimeoutError):
            server.accept()


def test_nothing_is_left_of_what_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert not run("import time; time.sleep(60)", "", seconds=0.3)
    assert not list(tmp_path.iterdir())
    assert not [
        child
        for child in psutil.Process().children()
        if "sandbox.py" in " ".join(child.cmdline())
    ]


def test_nothing_runs_where_the_lock_is_not_known() -> None:
    other = "import ctypes; ctypes.CDLL(None).personality(8); from router.profiling.run_code import run; run('', '')"
    done = subprocess.run(
        [sys.executable, "-c", other],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert "ProfileError: code is not run" in done.stderr
    assert "no list of system calls" in done.stderr
