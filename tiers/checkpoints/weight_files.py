"""The weights of a checkpoint as its safetensors files hold them: only their headers are read, which list every tensor.

A file begins with the length of its header, 8 bytes, and the header, JSON (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from tiers.checkpoints.config_files import as_mapping, read_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# What tells how a tensor is packed, but has no parameters of its own.
_SCALE_ENDINGS = (
    "scale",
    "scale_inv",
    "scale_2",
    "scales",
    "qzeros",
    "g_idx",
    "weight_shape",
    "zero_point",
    "absmax",
    "quant_map",
)
_BITSANDBYTES = ("quant_state", "nested_")
# Endings of the tensors that hold a module's weights in packed form.
_PACKED_ENDINGS = ("_packed", "_blocks", "qweight")


class Storage(Enum):
    """How a tensor's bytes hold its parameters."""

    UNQUANTIZED = "unquantized"
    FLOAT_32 = "32-bit floats"
    FLOAT_8 = "8-bit floats"
    INT_8 = "8-bit integers"
    NVFP4 = "4-bit floats, 8-bit float scales"
    MXFP4 = "4-bit floats, scales that are powers of two"
    BITSANDBYTES = "4-bit floats, bitsandbytes"
    PACKED_INT = "integers packed into words of 32 bits"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that holds parameters.

    Attributes:
        module: The module that it is a part of.
        values: Bytes, words or numbers, as ``storage`` says.
    """

    module: str
    storage: Storage
    values: int


_UNQUANTIZED = {"BF16": Storage.UNQUANTIZED, "F16": Storage.UNQUANTIZED}
_STORAGES = {
    **_UNQUANTIZED,
    "F32": Storage.FLOAT_32,
    "F8_E4M3": Storage.FLOAT_8,
    "F8_E5M2": Storage.FLOAT_8,
    "I8": Storage.INT_8,
    "I32": Storage.PACKED_INT,
}


def stored_tensors(folder: Path) -> tuple[StoredTensor, ...] | None:
    """Return all tensors with parameters of a checkpoint; None: its files are not there, or not all of them.

    Args:
        folder: The checkpoint.
    """
    files = _weight_files(folder)
    if not files:
        return None
    entries: dict[str, Any] = {}
    for file in files:
        header = _header(file)
        if header is None:
            return None
        entries |= header
    return tuple(_tensors(entries))


def _weight_files(folder: Path) -> Sequence[Path]:
    """Return the files that hold the weights; none if one of them is missing."""
    listed = as_mapping(read_json(folder / INDEX).get("weight_map")).values()
    names = sorted({name for name in listed if isinstance(name, str)})
    files = [folder / name for name in names]
    if not files:
        files = [folder / SINGLE_FILE]
    return files if all(file.is_file() for file in files) else ()


def _header(file: Path) -> Mapping[str, Any] | None:
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(LENGTH_BYTES))
            if length > MAX_HEADER_BYTES:
                return None
            return as_mapping(json.loads(stream.read(length)))
    except (OSError, ValueError, struct.error, RecursionError):
        return None


def _tensors(entries: Mapping[str, Any]) -> Iterator[StoredTensor]:
    for name, entry in entries.items():
        values = _values(as_mapping(entry).get("shape"))
        if values is None or _is_scale(name):
            continue
        dtype = str(entry.get("dtype"))
        module = name.rpartition(".")[0]
        if name.endswith("_blocks"):
            module = name.removesuffix("_blocks")
        storage = _STORAGES.get(dtype)
        if dtype == "U8":
            storage = _storage_of_bytes(name, entries)
        is_packed = name.endswith(_PACKED_ENDINGS)
        if storage is Storage.INT_8 and is_packed:
            storage = _storage_of_bytes(name, entries)
        if storage is Storage.PACKED_INT and not is_packed:
            # A table of numbers, as the experts that a token's text decides.
            continue
        if storage is not None:
            yield StoredTensor(module, storage, values)


def _storage_of_bytes(name: str, entries: Mapping[str, Any]) -> Storage | None:
    """Return how a tensor holds two parameters a byte, as its scales tell; None: it has no scales, so no parameters."""
    if f"{name}.absmax" in entries:
        return Storage.BITSANDBYTES
    stem = name.removesuffix("_blocks").removesuffix("_packed")
    scales = as_mapping(entries.get(f"{stem}_scale") or entries.get(f"{stem}_scales"))
    if not scales:
        return None
    return Storage.NVFP4 if scales.get("dtype") == "F8_E4M3" else Storage.MXFP4


def _is_scale(name: str) -> bool:
    last_part = name.rpartition(".")[2]
    return last_part.endswith(_SCALE_ENDINGS) or any(
        text in name for text in _BITSANDBYTES
    )


def _values(shape: object) -> int | None:
    if not isinstance(shape, list) or not all(isinstance(size, int) for size in shape):
        return None
    return math.prod(shape)
