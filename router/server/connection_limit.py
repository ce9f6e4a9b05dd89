"""How many connections a router takes: those of the settings, or fewer where the process may not open as many files."""

from __future__ import annotations

import contextlib
import logging
import resource
import sys
from dataclasses import dataclass

log = logging.getLogger(f"qarr.{__name__}")
# This many beyond the limit get an error; further ones are dropped.
SPARE_CONNECTIONS = 64
# Open files besides connections. If the limit is low, a quarter of it is kept for them.
FILES_BESIDES = 256


@dataclass(frozen=True, slots=True)
class ConnectionLimit:
    """How many connections are served, and how many beyond that are told that they are too many."""

    served: int
    spare: int

    @classmethod
    def of(cls, max_connections: int, files: int) -> ConnectionLimit:
        """Return the limit of a process that may open so many files: each connection needs one more to an engine.

        Without files for engines, these would seem to have failed.
        """
        besides = _files_besides(files)
        served = max(1, min(max_connections, (files - besides) // 2))
        return cls(served, spare=min(SPARE_CONNECTIONS, besides // 2))

    @classmethod
    def of_this_process(cls, max_connections: int) -> ConnectionLimit:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files == resource.RLIM_INFINITY:
            return cls(max_connections, SPARE_CONNECTIONS)
        return cls.of(max_connections, files)


def files_for_clients() -> int:
    """Return how many files may be open before new connections wait: the others are for connections to engines."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        sys.maxsize
        if files == resource.RLIM_INFINITY
        else files - _files_besides(files) // 2
    )


def _files_besides(files: int) -> int:
    return min(FILES_BESIDES, files // 4)


def allow_files(connections: int) -> None:
    """Raise the limit of open files for so many connections, each with one to an engine; warn if it stays too low."""
    needed = 2 * connections + FILES_BESIDES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < needed:
        log.warning(
            "this process may open %d files, and server.max_connections = %d needs %d: it takes %d connections; raise the "
            "limit (ulimit -n) or lower the setting",
            wanted,
            connections,
            needed,
            ConnectionLimit.of(connections, wanted).served,
        )
