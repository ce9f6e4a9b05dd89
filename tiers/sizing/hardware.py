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
        also: Other names, such as those that its driver gives it.
        memory_gb: In units of 1e9 bytes.
        bandwidth_gb_s: Memory bandwidth, in 1e9 bytes a second.
        bf16_tflops: Dense throughput in BF16, in 1e12 operations a second.
        fp8_tflops: Dense throughput in FP8; None: there are no units for FP8.
        fp4_tflops: Dense throughput in FP4 by blocks that share a scale; None: there are no units for FP4.
        int8_tops: Dense, in 1e12 operations a second; None: not known.
        int4_tops: Dense, in 1e12 operations a second; None: not known. No planned tier computes in INT4.
        compute_capability: NVIDIA's, such as (9, 0); None: not known, or another maker's GPU.
        machete: Whether vLLM computes 4-bit weights with Machete there; it takes Marlin elsewhere.
        price_per_hour: The price of one GPU, given together with its figures; None: the file of prices has it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    also: tuple[str, ...] = ()
    memory_gb: float = Field(gt=0)
    bandwidth_gb_s: float = Field(gt=0)
    bf16_tflops: float = Field(gt=0)
    fp8_tflops: float | None = Field(None, gt=0)
    fp4_tflops: float | None = Field(None, gt=0)
    int8_tops: float | None = Field(None, gt=0)
    int4_tops: float | None = Field(None, gt=0)
    compute_capability: tuple[int, int] | None = None
    machete: bool = False
    price_per_hour: float | None = Field(None, ge=0)

    @property
    def memory_bytes(self) -> float:
        """Return the size of its memory."""
        return self.memory_gb * 1e9

    @property
    def is_amd(self) -> bool:
        """Tell whether it is one of AMD's, as its driver's name for it says."""
        return any(name.startswith("AMD ") for name in (self.name, *self.also))

    def is_called(self, name: str) -> bool:
        """Tell whether this is one of its names; case, spaces and hyphens do not count."""
        own_names = map(plain_name, (self.name, *self.also))
        return plain_name(name) in own_names


class _GpuFile(BaseModel):
    """The content of ``gpus.json``.

    Attributes:
        sources: For people: where the figures of each family of GPUs are from.
    """

    sources: dict[str, str]
    gpus: tuple[GpuKind, ...]


class Prices(BaseModel):
    """What GPUs cost.

    Attributes:
        currency: For people.
        sources: For people: who asks these prices, and since when they are known.
        per_gpu_hour: The price of an hour by a GPU's name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    currency: str = "USD"
    sources: str = ""
    per_gpu_hour: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]

    def of(self, gpu: GpuKind) -> float | None:
        """Return the price of an hour; None: it is not known."""
        if gpu.price_per_hour is not None:
            return gpu.price_per_hour
        for name, price in self.per_gpu_hour.items():
            if gpu.is_called(name):
                return price
        return None


@lru_cache(maxsize=1)
def known_gpus() -> tuple[GpuKind, ...]:
    """Return the kinds of GPU that are known."""
    return _GpuFile.model_validate_json(GPUS.read_bytes()).gpus


def read_prices(path: Path = PRICES) -> Prices:
    """Read a file of prices.

    Raises:
        PlanError: The file cannot be read, or has another form than ``prices.json``.
    """
    try:
        return Prices.model_validate(json.loads(path.read_bytes()))
    except OSError as error:
        raise PlanError(f"the prices cannot be read: {error}") from error
    except ValidationError as error:
        fault = error.errors()[0]
        field = ".".join(map(str, fault["loc"])) or "the file"
        raise PlanError(
            f'{path}: {field}: {fault["msg"]}. It has the form {{"per_gpu_hour": {{"H100": 3.5}}}}'
        ) from error
    except ValueError as error:
        raise PlanError(f"{path}: not JSON: {error}") from error


def plain_name(name: str) -> str:
    """Return a GPU's name without what people write in different ways: case, spaces and hyphens."""
    return re.sub(r"[\s_-]", "", name).lower()
