"""Checkpoints that are served as somebody published them: fetched from the hub, or in a folder of this machine.

What a checkpoint says of itself (configuration, tokenizer, chat template: some MB) is fetched before its weights, so that
checkpoints that do not fit together are refused before anything large is downloaded or loaded.
"""

from __future__ import annotations

import fcntl
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiers.checkpoints.hub import (
    CONFIG,
    HUB_ID,
    checkpoint_folder,
    hub_error,
)
from tiers.checkpoints.prepare import download
from tiers.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tiers.checkpoints.prepare import PrepareOptions

    Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class PublishedCheckpoint:
    """A checkpoint as the settings name it.

    Attributes:
        key: The setting that names it, for errors.
        name: A folder, or an id of the Hugging Face hub.
    """

    key: str
    name: str


class CheckpointFetcher:
    """Finds published checkpoints on the disk, and fetches those of the hub that are not there.

    Args:
        options: The store, and an interpreter that has the hub's library.
        progress: Called at each step with a message, parts done, and parts in total (0 of 0 if they cannot be counted).
    """

    def __init__(self, options: PrepareOptions, progress: Progress) -> None:
        self._options = options
        self._progress = progress

    def folder(self, checkpoint: PublishedCheckpoint) -> Path:
        """Return the folder that a checkpoint has once it is fetched."""
        return checkpoint_folder(checkpoint.name, self._options.store)

    def small_files(self, checkpoint: PublishedCheckpoint) -> Path:
        """Return a folder with all of a checkpoint but its weights, which may be there as well.

        Raises:
            CheckpointError: There is no such folder, or the hub does not give it.
        """
        folder = self.folder(checkpoint)
        if (folder / CONFIG).is_file():
            return folder
        self._check_name(checkpoint)
        target = folder.with_name(f"{folder.name}.config")
        # It may have been changed since it was fetched, and takes seconds.
        shutil.rmtree(target, ignore_errors=True)
        self._fetch(checkpoint, target, "--without-weights")
        return target

    def fetch(self, checkpoint: PublishedCheckpoint) -> Path:
        """Return a checkpoint's folder, with its weights.

        Raises:
            CheckpointError: The hub does not give it, or the disk has no room for it.
        """
        folder = self.folder(checkpoint)
        if not (folder / CONFIG).is_file():
            self._check_name(checkpoint)
            self._fetch(checkpoint, folder)
            shutil.rmtree(folder.with_name(f"{folder.name}.config"), ignore_errors=True)
        return folder

    def _check_name(self, checkpoint: PublishedCheckpoint) -> None:
        if not HUB_ID.match(checkpoint.name):
            raise CheckpointError(
                f"{checkpoint.key}: {checkpoint.name!r} is neither a folder with {CONFIG} nor a Hugging Face id "
                f"(owner/name)"
            )

    def _fetch(
        self, checkpoint: PublishedCheckpoint, target: Path, *more_argv: str
    ) -> None:
        with _downloading(target) as work:
            try:
                download(
                    self._options,
                    checkpoint.name,
                    work,
                    *more_argv,
                    progress=self._progress,
                )
            except CheckpointError as error:
                raise hub_error(checkpoint.key, checkpoint.name, str(error)) from error
            if not (work / CONFIG).is_file():
                shutil.rmtree(work)
                raise CheckpointError(
                    f"{checkpoint.key}: {checkpoint.name} has no {CONFIG} on the hub, so vLLM cannot serve it here: name a "
                    f"repository in the format of transformers"
                )


@contextmanager
def _downloading(target: Path) -> Iterator[Path]:
    """Yield a folder that becomes ``target`` when it is filled without an error. What came before an error is kept.

    The hub's library continues with what is in the folder, so an interrupted download does not begin anew. Other processes
    that download into the same parent folder wait.
    """
    try:
        work = target.with_name(f"{target.name}.download")
        work.mkdir(parents=True, exist_ok=True)
        with (target.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield work
            shutil.rmtree(target, ignore_errors=True)
            work.rename(target)
    except OSError as error:
        raise CheckpointError(
            f"{target} cannot be made: {error.filename or 'writing'}: {error.strerror}; checkpoints are kept in "
            f"model.store, which needs room and to be writable by this user: repair it, or set another folder"
        ) from error
