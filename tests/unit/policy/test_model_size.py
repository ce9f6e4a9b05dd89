"""The model's size: from its checkpoint, else from its name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from router.policy.model_size import parameters_in_name, parameters_of
from tiers.spec import TierName, TierSpec

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("smollm2-135m-instruct", 135e6),
        ("meta-llama/Llama-3.1-8B-Instruct", 8e9),
        ("Qwen/Qwen2.5-0.5B", 0.5e9),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", 56e9),
        ("Qwen3-30B-A3B", 30e9),
        ("gpt-oss", None),
        ("model-4bit", None),
        ("simulated engines", None),
    ],
)
def test_names_tell_sizes(name: str, parameters: float | None) -> None:
    assert parameters_in_name(name) == parameters


def test_a_checkpoint_tells_exactly(tmp_path: Path) -> None:
    """One that cannot be read tells nothing, and the name counts."""
    spec = TierSpec(
        TierName.PRECISE, 2048, max_num_seqs=16, max_in_flight=16, checkpoint=tmp_path
    )
    assert parameters_of([spec], "named-8b") == 8e9
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), "utf-8")
    found = parameters_of([spec], "named-8b")
    assert found is not None
    assert 130e6 < found < 140e6
