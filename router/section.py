"""What the rooms' sections of settings are made of: the base class, folders, and checks that several sections need."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from tiers.address import normalised, wrong_with
from tiers.spec import RESERVED, STANDARD_TIERS

PROJECT = Path(__file__).resolve().parents[1]


class SettingsError(Exception):
    """A setting is wrong. The text names the key, what is wrong and what is allowed."""


def cache_dir() -> Path:
    """Return the folder for checkpoints, profiles and logs: ``QARR_CACHE_DIR``, else in the user's cache folder."""
    own_folder = os.environ.get("QARR_CACHE_DIR")
    if own_folder:
        return Path(os.path.expanduser(own_folder))  # noqa: PTH111  pathlib's fails without a home folder
    return Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "qarr"


def runtime_dir() -> Path:
    """Return the folder for the sockets over which a router hands over to another on this machine."""
    runtime_folder = os.environ.get("XDG_RUNTIME_DIR")
    if not runtime_folder:
        return cache_dir() / "run"
    return Path(runtime_folder) / "qarr"


def state_dir() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or _home() / ".local/state") / "qarr"


def config_dir() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or _home() / ".config") / "qarr"


def _home() -> Path:
    """Return the user's home folder; ``QARR_CACHE_DIR`` for a user without one, as containers have with any user id."""
    with suppress(RuntimeError):
        return Path.home()
    if os.environ.get("QARR_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME"):
        return cache_dir()
    raise SettingsError(
        "this user has no home folder: set QARR_CACHE_DIR to a folder for checkpoints, profiles and logs, and perhaps "
        "XDG_CONFIG_HOME for keys and XDG_STATE_HOME for usage, which are kept there else; or set HOME"
    )


class AllBut(frozenset[str]):
    def __contains__(self, name: object) -> bool:
        return not super().__contains__(name)


class Section(BaseModel):
    """A part of the settings, beside the code that reads it: unknown keys are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    # settings that a running router takes over when it reads its settings again; others need a restart
    reloads: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(
        cls, reloads: frozenset[str] | None = None, **options: Any
    ) -> None:
        super().__init_subclass__(**options)
        if reloads is not None:
            cls.reloads = reloads


T = TypeVar("T")


def different(
    values: tuple[T, ...], key: Callable[[T], object] = lambda value: value
) -> tuple[T, ...]:
    """Return values that all differ by a key; ``ValueError``: two of them have the same."""
    value_keys = [key(value) for value in values]
    for value, value_key in zip(values, value_keys, strict=True):
        if value_keys.count(value_key) > 1:
            raise ValueError(f"{value} is named more than once")
    return values


def _engine_address(url: str) -> str:
    fault_text = wrong_with(url)
    if fault_text is not None:
        raise ValueError(
            f"{fault_text}; an address like http://10.0.0.5:8000 is allowed"
        )
    return url


def once(urls: tuple[str, ...]) -> tuple[str, ...]:
    return different(urls, normalised)


def header_value(key: str) -> str:
    if key and not (key.isascii() and key.isprintable() and " " not in key):
        raise ValueError(
            "a key of printable ASCII characters without spaces is allowed"
        )
    return key


def _no_tier(name: str) -> str:
    if name in {*RESERVED, *STANDARD_TIERS}:
        raise ValueError(f"{name} names tiers: give the adapter another name")
    return name


Share = Annotated[float, Field(ge=0, le=1)]
AdapterName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,99}$"), AfterValidator(_no_tier)
]
# unchanged: profiles of a tier are named by it
EngineAddress = Annotated[str, AfterValidator(_engine_address)]
