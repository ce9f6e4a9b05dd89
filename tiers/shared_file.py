"""Replace a file that others read: the link to it, its owner, its group and its mode stay.

The commands that change it may run as another user than the router (``sudo``), and the file may be reached through a
symbolic link, or be mounted alone into a container.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import pwd
import stat
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(f"qarr.{__name__}")
OWNER_ALONE = 0o600
OWNER_ALONE_FOLDER = 0o700
ROOT = 0


class OwnerError(PermissionError):
    """The present user cannot give a file to the user that it belongs to."""


def real_path(path: Path) -> Path:
    """Return the file that a path leads to, whether it exists or not."""
    return Path(os.path.realpath(path))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time change a file; make its folder where there is none.

    A lock file beside it keeps out all processes that see the same folder. A file that is mounted alone has another folder
    in each container, so the file itself is locked as well.
    """
    make_folder(path.parent, mode=OWNER_ALONE_FOLDER)
    lock = _open_lock(path.with_name(path.name + ".lock"), like=path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with _file_locked(path):
            yield
    finally:
        os.close(lock)


@contextmanager
def _file_locked(path: Path) -> Iterator[None]:
    """Lock the file itself, if it exists."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def replace_content(path: Path, content: bytes) -> None:
    """Replace a file's content in one step; owner, group, mode and access list stay as they are.

    A file that is mounted alone cannot be replaced, so it is overwritten.

    Raises:
        OwnerError: The file belongs to another user, and the present one is not root.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            _copy_ownership(path, file.fileno())
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        _overwrite(path, content)
        log.warning(
            "%s is mounted alone and was overwritten: mount its folder, so that it is replaced at once",
            path,
        )
    finally:
        temporary.unlink(missing_ok=True)


def _overwrite(path: Path, content: bytes) -> None:
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())


def _copy_ownership(path: Path, handle: int) -> None:
    """Give a new file the owner, group, mode and extended attributes of an existing one.

    Where there is none, it gets the owner of the folder.
    """
    try:
        old = path.stat()
    except FileNotFoundError:
        _give_to_owner_of(path.parent, handle)
        return
    new = os.fstat(handle)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        try:
            os.fchown(handle, old.st_uid, old.st_gid)
        except PermissionError:
            raise OwnerError(
                errno.EPERM,
                f"it belongs to {_user_name(old.st_uid)}, and would not any more: run this as that user",
            ) from None
    os.fchmod(handle, stat.S_IMODE(old.st_mode))
    with suppress(OSError):  # the file system may have no extended attributes
        _copy_attributes(path, handle)


def _copy_attributes(path: Path, handle: int) -> None:
    """Copy a file's extended attributes, which hold its access list."""
    for attribute in os.listxattr(path):
        with suppress(OSError):  # the kernel keeps some of them to itself
            os.setxattr(handle, attribute, os.getxattr(path, attribute))


def _open_lock(path: Path, *, like: Path) -> int:
    """Open a lock file, which is made if it is missing, with the owner and the mode of the file that it guards."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        with suppress(FileNotFoundError):
            return os.open(path, flags)
        with suppress(FileExistsError):
            lock = os.open(path, flags | os.O_CREAT | os.O_EXCL, OWNER_ALONE)
            try:
                _copy_ownership(like, lock)
            except BaseException:
                os.close(lock)
                raise
            return lock


def make_folder(folder: Path, *, mode: int) -> None:
    """Make a folder and those above it. What root makes belongs to the owner of the folder in which it is made."""
    if folder.is_dir():
        return
    make_folder(folder.parent, mode=mode)
    with suppress(FileExistsError):
        folder.mkdir(mode=mode)
        _give_to_owner_of(folder.parent, folder)


def _give_to_owner_of(folder: Path, new: int | Path) -> None:
    """Give a new file or folder that root has made to the owner of the folder that it is in.

    Root may change keys for the router, which runs as another user and must be able to read them.
    """
    if os.geteuid() != ROOT:
        return
    owner = folder.stat()
    with suppress(OSError):  # root of a container may not give away everything
        if isinstance(new, Path):
            os.chown(new, owner.st_uid, owner.st_gid, follow_symlinks=False)
        else:
            os.fchown(new, owner.st_uid, owner.st_gid)


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
