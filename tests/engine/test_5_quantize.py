"""Real quantization of a tiny model: after an interruption it goes on where it stopped."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from router.settings import load_settings
from tiers.checkpoints.precision import checkpoint_precision
from tiers.checkpoints.prepare import PrepareOptions, prepare
from tiers.errors import CheckpointError
from tiers.spec import TierName

if TYPE_CHECKING:
    from pathlib import Path

LAYERS = 3
MAKE_MODEL = f"""
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers={LAYERS},
                     num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1])
"""


class InterruptedByHandError(Exception):
    """Somebody pressed Ctrl-C."""


@pytest.fixture
def options(tmp_path: Path) -> PrepareOptions:
    """Make a model of random weights, and return options that quantize it in seconds."""
    python = load_settings(None, {}).quantizer.python
    base = tmp_path / "base"
    subprocess.run(
        [python, "-c", MAKE_MODEL, base], check=True, capture_output=True, timeout=600
    )
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(
            vocab={letter: token for token, letter in enumerate(letters)}, merges=[]
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(base / "tokenizer.json"))
    (base / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return PrepareOptions(
        str(base),
        tmp_path / "store",
        python,
        calibration_samples=7,
        calibration_tokens=32,
    )


def test_interrupted_calibration_goes_on_and_ends_the_same(
    options: PrepareOptions,
) -> None:
    """Layers that were done are not searched again, and the weights are those of an uninterrupted run, to the bit."""
    # An event is a message, how many parts are done, and how many there are.
    seen: list[tuple[str, int, int]] = []

    def interrupt(message: str, done: int, total: int) -> None:
        # The last layer is being searched: the first part is the embedding.
        if "AWQ" in message and done == total - 1:
            raise InterruptedByHandError

    with pytest.raises(InterruptedByHandError):
        prepare(options, interrupt)
    folder = next(options.store.glob("base-*"))
    kept = next(folder.glob("awq-*.layers"))
    names = sorted((path.name for path in kept.glob("*.safetensors")), reverse=True)
    layers = {name.split(".")[2] for name in names}
    assert layers >= {str(layer) for layer in range(LAYERS - 1)}
    (kept / names[0]).write_bytes(b"cut off")

    checkpoints = prepare(options, lambda *event: seen.append(event))
    assert all(checkpoint.manifest.reference for checkpoint in checkpoints)
    fast = checkpoints[0]
    assert fast.tier is TierName.FAST
    assert fast.manifest.scheme == "awq-int4"
    assert fast.manifest.formats == ("pack-quantized",)
    assert any(message.startswith("going over") for message, _, _ in seen)
    last_event = ("quantizing to AWQ int4, groups of 64", LAYERS, LAYERS + 1)
    assert last_event in seen
    assert not kept.exists()
    assert fast.manifest.calibration_samples == 7
    assert 7 <= (fast.manifest.calibration_tokens or 0) <= 7 * 32

    shutil.rmtree(fast.path)
    seen.clear()
    again = prepare(options, lambda *event: seen.append(event))[0]
    assert again.manifest.weights_digest == fast.manifest.weights_digest
    assert not any(message.startswith("going over") for message, _, _ in seen)


def test_other_schemes_are_made_and_scored(options: PrepareOptions) -> None:
    """Each is what its manifest says, in a folder of its own, and says nearly what its base says."""
    for fast_scheme, balanced_scheme in (
        ("nvfp4", "int8-w8a8"),
        ("mxfp4", "gptq-int4"),
    ):
        schemes = {TierName.FAST: fast_scheme, TierName.BALANCED: balanced_scheme}
        fast, balanced, precise = prepare(
            replace(options, schemes=schemes), lambda *_: None
        )
        assert fast.path.name.startswith(f"{fast_scheme}-")
        for checkpoint, scheme in ((fast, fast_scheme), (balanced, balanced_scheme)):
            assert checkpoint.manifest.scheme == scheme
            assert checkpoint.manifest.precision == scheme
            assert checkpoint_precision(checkpoint.path, ()) == scheme
            assert checkpoint.manifest.kept_in_16_bits == ("lm_head",)
            assert checkpoint.manifest.weights_digest != precise.manifest.weights_digest
            # None where transformers cannot run it
            assert checkpoint.manifest.reference is not None
        is_calibrated = fast_scheme == "nvfp4"
        assert (fast.manifest.calibration_samples == 7) is is_calibrated


def test_widths_that_blocks_do_not_fit_are_refused(options: PrepareOptions) -> None:
    """By name, with what to take instead."""
    blocks = replace(options, schemes={TierName.BALANCED: "fp8-block"})
    with pytest.raises(
        CheckpointError,
        match=r"fp8-block needs input widths that are multiples of 128, and model\.layers\.0\.\S+ has 64: take another scheme",
    ):
        prepare(blocks, lambda *_: None)
