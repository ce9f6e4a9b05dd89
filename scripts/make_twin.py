"""Make a twin of a model: as good a model, whose near-ties fall otherwise.

usage: .venv/bin/python scripts/make_twin.py MODEL TWIN [--seed N] [--keep-manifest]

Processors round differently: where two tokens are nearly as likely, one processor chooses the first and another one the
second. A twin shows on one machine what depends on that. A quarter of its BF16 weights, chosen at random, are moved by one
unit in the last place, up or down. What holds for several twins holds on the next processor.

MODEL is a folder with *.safetensors files; TWIN is a new folder, which `qarr up --model TWIN` serves. The same seed gives
the same twin. In a quantized checkpoint only the BF16 tensors are moved: embeddings, norms and scales. Zeros stay, and so
does the largest finite number. All other files are copied, except the manifest of a checkpoint that QARR has made: a twin
is a model of its own. --keep-manifest copies it too, with the digest of the twin's weights: for a twin of a `model.store`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tiers.checkpoints.checkpoint import MANIFEST, making, weights_digest

if TYPE_CHECKING:
    from collections.abc import Iterator

MAGNITUDE = 0x7FFF  # the bits of a BF16 number without its sign
LARGEST = 0x7F7F  # the magnitude of the largest finite number
BITS = np.dtype("<u2")

Bits = npt.NDArray[np.uint16]


def make_twin(
    model: Path, twin: Path, seed: int, *, keep_manifest: bool = False
) -> int:
    """Write the twin of a model; return how many weights were moved."""
    moved = 0
    with making(twin) as work:
        shutil.copytree(model, work, dirs_exist_ok=True)
        for path in sorted(work.glob("*.safetensors")):
            for name, weights in bf16_tensors(path):
                moved += move_weights(
                    weights, np.random.default_rng([seed, zlib.crc32(name.encode())])
                )
        if moved == 0:
            raise SystemExit(
                f"error: {model} has no BF16 weights in *.safetensors files"
            )
        update_manifest(work, keep=keep_manifest)
    return moved


def bf16_tensors(path: Path) -> Iterator[tuple[str, Bits]]:
    """Yield the name and the bits of each BF16 tensor in a safetensors file; what is written to the bits is in the file."""
    with path.open("rb") as file:
        header_length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_length))
    for name, entry in header.items():
        if name == "__metadata__" or entry["dtype"] != "BF16":
            continue
        begin, end = entry["data_offsets"]
        if end > begin:
            offset = 8 + header_length + begin
            count = (end - begin) // BITS.itemsize
            yield (
                name,
                np.memmap(path, dtype=BITS, mode="r+", offset=offset, shape=(count,)),
            )


def move_weights(weights: Bits, chance: np.random.Generator) -> int:
    """Move an eighth of the weights up by one unit in the last place and an eighth down; return how many have moved."""
    drawn = chance.integers(0, 8, size=weights.size, dtype=np.uint8)
    magnitudes = weights & MAGNITUDE
    is_movable = (magnitudes > 0) & (magnitudes < LARGEST)
    grows = is_movable & (drawn == 0)
    shrinks = is_movable & (drawn == 1)
    weights += grows
    weights -= shrinks
    return int(grows.sum() + shrinks.sum())


def update_manifest(folder: Path, *, keep: bool) -> None:
    """Give a copied manifest the digest of the twin's weights, or remove it."""
    path = folder / MANIFEST
    if not path.exists():
        return
    if not keep:
        path.unlink()
        return
    manifest = json.loads(path.read_bytes())
    manifest["weights_digest"] = weights_digest(folder)
    path.write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of a model or checkpoint")
    parser.add_argument("twin", type=Path, help="new folder")
    parser.add_argument("--seed", type=int, default=1, help="which twin (1)")
    parser.add_argument(
        "--keep-manifest",
        action="store_true",
        help="copy the manifest of a checkpoint too",
    )
    args = parser.parse_args()
    if not (args.model / "config.json").is_file():
        parser.error(f"{args.model} has no config.json: not a model folder")
    if args.twin.exists():
        parser.error(f"{args.twin} exists already")
    if args.seed < 0:
        parser.error("--seed is negative")
    moved = make_twin(
        args.model, args.twin, args.seed, keep_manifest=args.keep_manifest
    )
    print(
        f"{args.twin}: twin {args.seed} of {args.model}, {moved:,} weights moved by one unit in the last place"
    )


if __name__ == "__main__":
    main()
