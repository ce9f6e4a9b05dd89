"""Files that only their owner may read: logs name callers, engines and paths."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

OWNER_ONLY = 0o600


def make_private_folder(folder: Path) -> None:
    """Create a folder that only its owner may enter; an existing one stays as it is.

    Raises:
        OSError: It cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def ends_within_line(descriptor: int) -> bool:
    """Tell whether an open file ends within a line, as after a write that a full disk cut off; no device or pipe does."""
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode) or not state.st_size:
            return False
        with open(f"/proc/self/fd/{descriptor}", "rb") as file:  # noqa: PTH123  it may be open for writing alone
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # this user may write it, but not read it
        return False


def open_private(path: str, flags: int) -> int:
    """Open a new or existing file so that only its owner may read it: an ``opener`` for ``open``.

    Raises:
        OSError: It cannot be opened.
    """
    descriptor = os.open(path, flags, OWNER_ONLY)
    with suppress(OSError):  # somebody else owns it
        if stat.S_ISREG(os.fstat(descriptor).st_mode):  # never /dev/null
            os.fchmod(descriptor, OWNER_ONLY)
    return descriptor
