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
        file = (folder / LOCK).open("a")
    except OSError as error:
        raise ProfileError(
            f"policy.profiles: {folder} cannot be written ({error.strerror})"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ProfileError(
                f"another measurement writes into {folder}, 'qarr profile' or a router that measures itself: wait until it "
                f"has ended; 'qarr doctor' says how far a router is, and profile.auto = false keeps it from measuring"
            ) from error
        yield


def keep_quality(folder: Path, profile: QualityProfile) -> Path:
    path = folder / profile_name(profile.checkpoints, profile.adapter)
    _write(path, profile.model_dump_json(indent=2) + "\n")
    return path


def keep_latency(folder: Path, profile: LatencyProfile) -> Path:
    path = folder / latency_name(profile.checkpoints, profile.machine)
    if path.exists() and profile.checkpoints.keys() - {
        fit.tier for fit in profile.fits
    }:
        profile = profile.with_others(load_latency(path))
    _write(path, profile.model_dump_json(indent=2) + "\n")
    return path


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    try:
        part.write_text(text, "utf-8")
        part.replace(path)
    except OSError as error:
        raise ProfileError(
            f"policy.profiles: {path} cannot be written ({error.strerror})"
        ) from error
