"""The GPUs that a fleet may run on: what they are able to do, and what they cost."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tiers.errors import PlanError

GPUS = Path(__file__).with_name("gpus.json")
PRICES = Path(__file__).with_name("prices.json")
_COUNTED = re.compile(r"\s*(?:(\d+)\s*[x*]\s*)?(\S.*?)\s*", re.IGNORECASE)


class GpuKind(BaseModel):
    """A kind of GPU.

    Attributes:
        also: Other names, as those of its driver.
        memory_gb: In units of 1e9 bytes.
        bandwidth_gb_s: Of its memory, in 1e9 bytes a second.
        bf16_tflops: Dense, in 1e12 operations a second.
        fp8_tflops: Dense; None: it has no units for FP8.
        machete: vLLM computes 4-bit weights with Machete there, else with Marlin.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    also: tuple[str, ...] = ()
    memory_gb: float = Field(gt=0)
    bandwidth_gb_s: float = Field(gt=0)
    bf16_tflops: float = Field(gt=0)
    fp8_tflops: float | None = Field(gt=0)
    machete: bool = False

    @property
    def memory(self) -> float:
        """Return its memory in bytes."""
        return self.memory_gb * 1e9

    def is_called(self, name: str) -> bool:
        """Tell whether this is one of its names; case, spaces and hyphens do not count."""
        return _plain(name) in map(_plain, (self.name, *self.also))


class _Gpus(BaseModel):
    sources: str
    gpus: tuple[GpuKind, ...]


class Prices(BaseModel):
    """What GPUs cost.

    Attributes:
        currency: For people.
        sources: For people: where the prices are from, and of when.
        per_gpu_hour: By the GPU's name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    currency: str = "USD"
    sources: str = ""
    per_gpu_hour: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]

    def of(self, gpu: GpuKind) -> float | None:
        """Return the price of an hour; None: it is not known."""
        return next((price for name, price in self.per_gpu_hour.items() if gpu.is_called(name)), None)


@lru_cache(maxsize=1)
def known_gpus() -> tuple[GpuKind, ...]:
    """Return the kinds of GPU that are known."""
    return _Gpus.model_validate_json(GPUS.read_bytes()).gpus


def parse_gpus(text: str) -> tuple[GpuKind, int | None]:
    """Read a kind of GPU, and how many there are, as in ``2xH100``; without a number, as many as are needed.

    Raises:
        PlanError: The kind is not known, or the number is 0.
    """
    found = _COUNTED.fullmatch(text)
    count, name = found.groups() if found else (None, text)
    kind = next((gpu for gpu in known_gpus() if gpu.is_called(name)), None)
    if kind is None:
        known = ", ".join(gpu.name for gpu in known_gpus())
        raise PlanError(f"--gpus {text}: no such kind of GPU; known are {known}. Write 2xH100 for two of them")
    if count is not None and int(count) == 0:
        raise PlanError(f"--gpus {text}: at least one GPU is needed; leave the number out for as many as are needed")
    return kind, None if count is None else int(count)


def parse_all_gpus(text: str) -> dict[GpuKind, int | None]:
    """Read several kinds of GPU, as in ``2xA100,4xL4``.

    Raises:
        PlanError: One is not known, or named twice.
    """
    found: dict[GpuKind, int | None] = {}
    for part in text.split(","):
        kind, count = parse_gpus(part)
        if kind in found:
            raise PlanError(f"--gpus {text}: {kind.name} is named twice; write how many there are in all")
        found[kind] = count
    return found


def read_prices(path: Path = PRICES) -> Prices:
    """Read a file of prices.

    Raises:
        PlanError: It cannot be read, or is not as ``prices.json`` is.
    """
    try:
        return Prices.model_validate(json.loads(path.read_bytes()))
    except OSError as error:
        raise PlanError(f"the prices cannot be read: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise PlanError(
            f'{path}: {where}: {first["msg"]}. It has the form {{"per_gpu_hour": {{"H100": 3.5}}}}'
        ) from error
    except ValueError as error:
        raise PlanError(f"{path}: not JSON: {error}") from error


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()
