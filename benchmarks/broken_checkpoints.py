"""Break checkpoints as they break in practice, for engine_check.py: the files change, the manifest stays.

.venv/bin/python benchmarks/broken_checkpoints.py KIND SOURCE TARGET
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from measure import ROOT

sys.path.insert(0, str(ROOT))
from router.settings import load_settings
from tests.engine.faults.checkpoints import (
    Change,
    move_zero_points,
    replace_template,
    scale,
    scale_layer,
)
from tiers.spec import STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from collections.abc import Callable

SCALED_MATRIX = "model.layers.15.self_attn.o_proj."
TUNE = Path(__file__).with_name("tune_checkpoint.py")


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


def without_quantizer(change: Change) -> Callable[[Path, Path], None]:
    """Return a change that takes the quantizer's Python and does not use it."""

    def apply(folder: Path, _quantizer: Path) -> None:
        change(folder)

    return apply


def scale_matrix(folder: Path) -> None:
    """Multiply the weights of one matrix of one layer."""
    scale(folder, SCALED_MATRIX)


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
    Kind("a layer scaled by 1.5", STANDARD_TIERS, without_quantizer(scale_layer)),
    Kind(
        "a matrix scaled by 1.5",
        STANDARD_TIERS,
        without_quantizer(scale_matrix),
        is_faint=True,
    ),
    Kind("wrong zero points", (TierName.FAST,), without_quantizer(move_zero_points)),
    Kind("another checkpoint", (TierName.PRECISE,), tune),
    Kind(
        "wrong chat template", (TierName.PRECISE,), without_quantizer(replace_template)
    ),
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
