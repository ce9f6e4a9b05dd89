"""The folder of profiles, into which one measurement writes at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from router.policy.profiles import (
    LatencyProfile,
    ProfileError,
    QualityProfile,
    latency_name,
    load_latency,
    profile_name,
)

JOURNAL = "quality.journal.jsonl"
LOCK = "profile.lock"


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Lock the folder against other measurements, for as long as the context or this process lasts."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock_file = (folder / LOCK).open("a")
    except OSError as error:
        raise ProfileError(
            f"policy.profiles: {folder} cannot be written ({error.strerror})"
        ) from error
    with lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ProfileError(
                f"another measurement writes into {folder}, 'qarr profile' or a router that measures itself: wait until it "
                f"has ended; 'qarr doctor' says how far a router is, and profile.auto = false keeps it from measuring"
            ) from error
        yield


def keep_quality(folder: Path, profile: QualityProfile) -> Path:
    """Write a quality profile, and return its path."""
    path = folder / profile_name(profile.checkpoints, profile.adapter)
    _write(path, profile.model_dump_json(indent=2) + "\n")
    return path


def keep_latency(folder: Path, profile: LatencyProfile) -> Path:
    """Write a latency profile, with what an earlier one has of tiers that it lacks, and return its path."""
    path = folder / latency_name(profile.checkpoints, profile.machine)
    fitted_tiers = {fit.tier for fit in profile.fits}
    lacks_tiers = bool(profile.checkpoints.keys() - fitted_tiers)
    if path.exists() and lacks_tiers:
        profile = profile.with_others(load_latency(path))
    _write(path, profile.model_dump_json(indent=2) + "\n")
    return path


def _write(path: Path, text: str) -> None:
    """Replace a file at once."""
    new_file = path.with_suffix(".part")
    try:
        new_file.write_text(text, "utf-8")
        new_file.replace(path)
    except OSError as error:
        raise ProfileError(
            f"policy.profiles: {path} cannot be written ({error.strerror})"
        ) from error
