"""Stand between the supervisor and one engine, so that no engine outlives the supervisor.

A program of its own, started as ``python -I -S guard.py LOGFILE COMMAND...`` with standard input connected to the
supervisor. When that pipe closes, however the supervisor ended (kill -9 included), the guard kills the engine and every
process below it. Only the standard library, so that it starts in milliseconds and stays small.

Standard output: one line with the engine's process id, or why it could not be started. Exit status: the engine's.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
PR_SET_CHILD_SUBREAPER = 36
CANNOT_RUN = 126  # as shells have it


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _prepare_engine() -> None:
    """Run in the engine before its program starts: it dies with the guard, and does not inherit an ignored SIGTERM."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _kill_descendants() -> None:
    """Kill children until none is left: orphans of a killed child become children of this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while True:
        for pid in children.read_text().split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            os.wait()
        except ChildProcessError:
            return


def main() -> int:
    """Run the engine until it exits or the supervisor is gone."""
    log_path = sys.argv[1]
    argv = sys.argv[2:]
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    # the supervisor signals the engine itself
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with Path(log_path).open("ab", buffering=0) as log:
            engine = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_prepare_engine,  # noqa: PLW1509  one thread here
            )
    except OSError as error:
        sys.stdout.write(f"{error}\n")
        return CANNOT_RUN
    sys.stdout.write(f"{engine.pid}\n")
    sys.stdout.flush()
    poller = select.poll()
    poller.register(0, select.POLLIN | select.POLLHUP)
    engine_fd = os.pidfd_open(engine.pid)
    poller.register(engine_fd, select.POLLIN)
    poller.poll()
    status = engine.poll()
    _kill_descendants()
    return (
        status
        if status is not None and status >= 0
        else 128 + abs(status or signal.SIGKILL)
    )


if __name__ == "__main__":
    sys.exit(main())
