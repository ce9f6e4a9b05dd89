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


class GpuKind(BaseModel):
    """A kind of GPU.

    Attributes:
        also: Other names, as those of its driver.
        memory_gb: In units of 1e9 bytes.
        bandwidth_gb_s: Of its memory, in 1e9 bytes a second.
        bf16_tflops: Dense, in 1e12 operations a second.
        fp8_tflops: Dense; None: it has no units for FP8.
        int8_tops: Dense, in 1e12 operations a second; None: not known. No planned tier computes in INT8.
        int4_tops: Dense, in 1e12 operations a second; None: not known. No planned tier computes in INT4.
        machete: vLLM computes 4-bit weights with Machete there, else with Marlin.
        price_per_hour: Of one GPU, as given with it; None: as the file of prices says.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    also: tuple[str, ...] = ()
    memory_gb: float = Field(gt=0)
    bandwidth_gb_s: float = Field(gt=0)
    bf16_tflops: float = Field(gt=0)
    fp8_tflops: float | None = Field(None, gt=0)
    int8_tops: float | None = Field(None, gt=0)
    int4_tops: float | None = Field(None, gt=0)
    machete: bool = False
    price_per_hour: float | None = Field(None, ge=0)

    @property
    def memory(self) -> float:
        """Return its memory in bytes."""
        return self.memory_gb * 1e9

    def is_called(self, name: str) -> bool:
        """Tell whether this is one of its names; case, spaces and hyphens do not count."""
        return plain_name(name) in map(plain_name, (self.name, *self.also))


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
        if gpu.price_per_hour is not None:
            return gpu.price_per_hour
        return next(
            (price for name, price in self.per_gpu_hour.items() if gpu.is_called(name)),
            None,
        )


@lru_cache(maxsize=1)
def known_gpus() -> tuple[GpuKind, ...]:
    """Return the kinds of GPU that are known."""
    return _Gpus.model_validate_json(GPUS.read_bytes()).gpus


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


def plain_name(name: str) -> str:
    """Return a GPU's name without what people write in different ways: case, spaces and hyphens."""
    return re.sub(r"[\s_-]", "", name).lower()
