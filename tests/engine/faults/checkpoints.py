"""Break copies of checkpoints as they break in practice; their manifests stay."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tiers.checkpoints.checkpoint import MANIFEST, making

SCALED_LAYER = "model.layers.15."
FACTOR = 1.5
TEMPLATE = "{% for m in messages %}### {{ m['role'] }}:\n{{ m['content'] }}\n{% endfor %}### assistant:\n"
TEMPERATURE = 1.5
LAYERS = 30  # of the small model
FIRST_SWAPPED = 20
DTYPES: dict[str, type[Any]] = {"BF16": np.uint16, "I32": np.uint32}

Change = Callable[[Path], None]


def changed_checkpoint(source: Path, name: str, changes: tuple[Change, ...]) -> Path:
    """Return the folder of a changed copy; it is made once, beside the folder of the source's model.

    Args:
        source: A checkpoint that QARR has made.
        name: For people.
        changes: What is done to the copy, in turn.
    """
    content = (source / MANIFEST).read_bytes() + Path(__file__).read_bytes()
    digest = hashlib.sha256(content).hexdigest()[:8]
    target = source.parents[1] / "faults" / f"{source.name}-{name}-{digest}"
    if not target.exists():
        with making(target) as work:
            shutil.copytree(source, work, dirs_exist_ok=True)
            for change in changes:
                change(work)
    return target


def tensors(folder: Path, dtype: str) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of one type by name, as flat arrays of their bits that write through to the file."""
    by_name: dict[str, npt.NDArray[Any]] = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header_length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if entry["dtype"] == dtype and end > begin:
                kind = np.dtype(DTYPES[dtype])
                count = (end - begin) // kind.itemsize
                by_name[name] = np.memmap(
                    path, kind, "r+", 8 + header_length + begin, (count,)
                )
    return by_name


def scale_layer(folder: Path) -> None:
    """Multiply all linear weights of one layer, or their scales where they are quantized."""
    scale(folder, SCALED_LAYER)


def scale(folder: Path, prefix: str) -> None:
    """Multiply the linear weights whose names begin so."""
    for name, bits in tensors(folder, "BF16").items():
        if name.startswith(prefix) and "proj" in name:
            values = (bits.astype(np.uint32) << 16).view(np.float32) * np.float32(
                FACTOR
            )
            bits[:] = values.view(np.uint32) >> 16


def move_zero_points(folder: Path) -> None:
    """Add one to each 4-bit zero point."""
    for name, words in tensors(folder, "I32").items():
        if name.endswith("weight_zero_point"):
            moved = np.zeros_like(words)
            for shift in range(0, 32, 4):
                moved |= (((words >> shift) + 1) & 15) << shift
            words[:] = moved


def replace_template(folder: Path) -> None:
    """Write a chat template of another model family."""
    (folder / "chat_template.jinja").write_text(TEMPLATE, "utf-8")


def raise_temperature(folder: Path) -> None:
    """Write a high temperature into the sampling defaults."""
    path = folder / "generation_config.json"
    config = json.loads(path.read_bytes())
    config.update(do_sample=True, temperature=TEMPERATURE)
    path.write_text(json.dumps(config), "utf-8")


def swap_layers(folder: Path) -> None:
    """Make another model with the same tokenizer and architecture: swap neighbouring layers in the last third."""
    weights = tensors(folder, "BF16")
    for name, upper_name in _swapped_names(weights):
        kept = weights[name].copy()
        weights[name][:] = weights[upper_name]
        weights[upper_name][:] = kept


def _swapped_names(weights: dict[str, npt.NDArray[Any]]) -> Iterator[tuple[str, str]]:
    """Yield the names of each tensor of a lower layer and of the layer above it, which change places."""
    for layer in range(FIRST_SWAPPED, LAYERS, 2):
        prefix = f"model.layers.{layer}."
        for name in weights:
            if name.startswith(prefix):
                yield name, name.replace(prefix, f"model.layers.{layer + 1}.")
