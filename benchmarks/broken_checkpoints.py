"""Break checkpoints as they break in practice, for engine_check.py: the files change, the manifest stays.

.venv/bin/python benchmarks/broken_checkpoints.py KIND SOURCE TARGET
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from measure import ROOT

sys.path.insert(0, str(ROOT))
from router.settings import load_settings
from tiers.spec import STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

SCALED_LAYER = "model.layers.15."
SCALED_MATRIX = "model.layers.15.self_attn.o_proj."
FACTOR = 1.5
TEMPLATE = "{% for m in messages %}### {{ m['role'] }}:\n{{ m['content'] }}\n{% endfor %}### assistant:\n"
TUNE = Path(__file__).with_name("tune_checkpoint.py")
DTYPES: dict[str, type[Any]] = {"BF16": np.uint16, "I32": np.uint32}


@dataclass(frozen=True, slots=True)
class Kind:
    """A way of breaking.

    Attributes:
        name: For people.
        tiers: Whose checkpoints can be broken so.
        apply: Changes a copied folder.
        is_faint: Whether it is too faint for the check to be held to it.
    """

    name: str
    tiers: tuple[TierName, ...]
    apply: Callable[[Path, Path], None]
    is_faint: bool = False


def tensors(folder: Path, dtype: str) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of one type by name, as flat arrays of their bits that write through to the file."""
    found = {}
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
                found[name] = np.memmap(
                    path, kind, "r+", 8 + header_length + begin, (count,)
                )
    return found


def scale_layer(folder: Path, _quantizer: Path) -> None:
    """Multiply all linear weights of one layer, or their scales where they are quantized."""
    scale(folder, SCALED_LAYER)


def scale_matrix(folder: Path, _quantizer: Path) -> None:
    """Multiply the weights of one matrix of one layer."""
    scale(folder, SCALED_MATRIX)


def scale(folder: Path, prefix: str) -> None:
    """Multiply the linear weights whose names begin so."""
    for name, bits in tensors(folder, "BF16").items():
        if name.startswith(prefix) and "proj" in name:
            values = (bits.astype(np.uint32) << 16).view(np.float32) * np.float32(
                FACTOR
            )
            bits[:] = values.view(np.uint32) >> 16


def move_zero_points(folder: Path, _quantizer: Path) -> None:
    """Add one to each 4-bit zero point."""
    for name, words in tensors(folder, "I32").items():
        if name.endswith("weight_zero_point"):
            moved = np.zeros_like(words)
            for shift in range(0, 32, 4):
                moved |= (((words >> shift) + 1) & 15) << shift
            words[:] = moved


def replace_template(folder: Path, _quantizer: Path) -> None:
    """Write a chat template of another model family."""
    (folder / "chat_template.jinja").write_text(TEMPLATE, "utf-8")


def tune(folder: Path, quantizer: Path) -> None:
    """Train the model for some steps: a later version of the same model."""
    # -P: transformers imports a package that has the name of a benchmark.
    subprocess.run(
        [quantizer, "-P", TUNE, folder],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


KINDS = (
    Kind("a layer scaled by 1.5", STANDARD_TIERS, scale_layer),
    Kind("a matrix scaled by 1.5", STANDARD_TIERS, scale_matrix, is_faint=True),
    Kind("wrong zero points", (TierName.FAST,), move_zero_points),
    Kind("another checkpoint", (TierName.PRECISE,), tune),
    Kind("wrong chat template", (TierName.PRECISE,), replace_template),
)


def break_checkpoint(kind: Kind, source: Path, target: Path, quantizer: Path) -> None:
    """Copy a checkpoint and break the copy."""
    shutil.copytree(source, target)
    kind.apply(target, quantizer)


def main() -> None:
    """Break one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=[kind.name for kind in KINDS])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    kind = next(kind for kind in KINDS if kind.name == args.kind)
    break_checkpoint(
        kind, args.source, args.target, load_settings(None, {}).quantizer.python
    )


if __name__ == "__main__":
    main()
