"""Settings and small checkpoints of a fleet to lay out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from router.settings import Settings, load_settings
from tests.unit.cli.sealed_checkpoint import make_checkpoint
from tiers.checkpoints.checkpoint import Checkpoint, read_checkpoint
from tiers.spec import STANDARD_TIERS, TierName

TOKENIZER_OF_TWO_WORDS = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
}


def settings(**overrides: Any) -> Settings:
    """Return settings with an engine environment that is there."""
    return load_settings(
        None, {"engine": {"python": Path(sys.executable)}, **overrides}
    )


def made(tmp_path: Path) -> dict[TierName, Checkpoint]:
    """Make a small checkpoint for each tier, with a tokenizer of two words."""
    checkpoints = {}
    for tier in STANDARD_TIERS:
        folder = make_checkpoint(tmp_path / f"made-{tier}", tier)
        checkpoint = read_checkpoint(tier, folder)
        assert checkpoint is not None
        (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER_OF_TWO_WORDS))
        checkpoints[tier] = checkpoint
    return checkpoints
