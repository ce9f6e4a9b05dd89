"""Sizes of published models, from the numbers in their ``config.json``, beside published ones."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.tiers.sizing.published_models import (
    PUBLISHED,
    published_model,
    read_config,
)
from tiers.errors import PlanError
from tiers.sizing.architecture import architecture, kv_bytes_per_token

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1024,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name: str) -> None:
    """Parameters are exact, and so is the KV cache of a token."""
    parameters, kv_bytes = PUBLISHED[name]
    model = published_model(name)
    assert model.parameters == parameters
    assert model.kv_bytes_per_token() == kv_bytes
    assert model.kv_bytes_per_token(bytes_per_value=1) == kv_bytes // 2
    assert kv_bytes_per_token(read_config(name)) == kv_bytes


def test_weights_of_published_checkpoints() -> None:
    """BF16 takes two bytes a parameter; DeepSeek-V3's own FP8 checkpoint is 685 GB with its 14 billion for prediction."""
    llama = published_model("llama-3.1-8b")
    deepseek = published_model("deepseek-v3")
    assert llama.weight_bytes(2) == 2 * 8_030_261_248
    assert llama.weight_bytes(0.52) == pytest.approx(5.7e9, rel=0.01)
    assert deepseek.weight_bytes(1) == pytest.approx(671e9, rel=0.01)


def test_sliding_windows_keep_their_last_tokens() -> None:
    """Of Gemma 3's 62 layers, ten hold the whole context and 52 the last 1,024 tokens."""
    model = published_model("gemma-3-27b")
    layer_bytes = 2 * 16 * 128 * 2
    assert [layer.window_tokens for layer in model.layers].count(1024) == 52
    assert model.sequence_bytes(1000) == 1000 * 62 * layer_bytes
    assert model.sequence_bytes(32_768) == (10 * 32_768 + 52 * 1024) * layer_bytes


def test_a_latent_vector_is_copied_to_every_gpu() -> None:
    """MLA's one vector is on each GPU."""
    deepseek = published_model("deepseek-v3")
    assert deepseek.kv_bytes_per_token(gpus=8) == 70_272


@pytest.mark.parametrize(
    ("gpus", "kv_bytes"), [(1, 131_072), (2, 65_536), (8, 16_384), (16, 16_384)]
)
def test_heads_are_divided_between_gpus(gpus: int, kv_bytes: int) -> None:
    """They are copied where there are fewer heads than GPUs."""
    llama = published_model("llama-3.1-8b")
    assert llama.kv_bytes_per_token(gpus=gpus) == kv_bytes


def test_a_hybrid_keeps_a_state_beside_its_kv_cache() -> None:
    """Qwen3-Next: 12 of 48 layers attend, with 2 KV heads of 256; the others' state does not grow."""
    model = published_model("qwen3-next-80b-a3b")
    token_bytes = 12 * 2 * 2 * 256 * 2
    convolution_bytes = 3 * (2 * 2048 + 4096) * 2
    recurrent_bytes = 32 * 128 * 128 * 4
    state_bytes = 36 * (convolution_bytes + recurrent_bytes)
    assert token_bytes == 24_576
    assert model.kv_bytes_per_token() == token_bytes
    assert model.sequence_bytes(1) == token_bytes + state_bytes
    assert model.sequence_bytes(100_001) == 100_001 * token_bytes + state_bytes
    assert model.parameters == pytest.approx(80e9, rel=0.02)
    assert model.active_parameters == pytest.approx(3e9, rel=0.1)


def test_experts_are_read_as_tokens_ask_for_them() -> None:
    """One token reads its own, many read all; a token computes eight of 128."""
    model = published_model("qwen3-30b-a3b")
    by_few = model.parameters_read(16)
    by_many = model.parameters_read(1000)
    assert model.parameters_read(1) == pytest.approx(model.active_parameters)
    assert model.active_parameters < by_few < by_many
    assert by_many == pytest.approx(model.quantizable_parameters, rel=1e-6)
    # "A3B": 3.3 billion with both embeddings
    with_embeddings = model.active_parameters + 2 * model.output_parameters
    assert with_embeddings == pytest.approx(3.3e9, rel=0.02)


@pytest.mark.parametrize(
    ("changed_fields", "kv_values"),
    [
        ({"num_key_value_heads": 8}, 4 * 2 * 8 * 8),  # multi-head
        ({"num_key_value_heads": None}, 4 * 2 * 8 * 8),
        ({"num_key_value_heads": 1}, 4 * 2 * 1 * 8),  # multi-query
        ({"multi_query": True}, 4 * 2 * 1 * 8),
        ({"head_dim": 32}, 4 * 2 * 2 * 32),
        ({"layer_types": ["full_attention", "linear_attention"] * 2}, 2 * 2 * 2 * 8),
        ({"layers_block_type": ["mamba", "attention", "mamba", "mamba"]}, 2 * 2 * 8),
        ({"attn_layer_period": 4, "attn_layer_offset": 1}, 2 * 2 * 8),
        ({"attn_layer_indices": [0, 3]}, 2 * 2 * 2 * 8),
        ({"hybrid_override_pattern": "M-*-"}, 2 * 2 * 8),
    ],
)
def test_kinds_of_attention(changed_fields: dict[str, Any], kv_values: int) -> None:
    """Values a token: layers that attend x 2 x KV heads x head dimension; two bytes each."""
    assert kv_bytes_per_token({**LLAMA, **changed_fields}) == 2 * kv_values


@pytest.mark.parametrize(
    ("changed_fields", "windows"),
    [
        ({"sliding_window": 16}, [16] * 4),  # Mistral's first
        (
            {"sliding_window": 16, "use_sliding_window": False, "max_window_layers": 2},
            [None] * 4,
        ),
        (
            {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2},
            [None, None, 16, 16],
        ),
        ({"sliding_window": 16, "sliding_window_pattern": 2}, [16, None, 16, None]),
        (
            {
                "sliding_window": 16,
                "layer_types": ["sliding_attention", *["full_attention"] * 3],
            },
            [16, None, None, None],
        ),
        (
            {"attention_chunk_size": 8, "layer_types": ["chunked_attention"] * 4},
            [8] * 4,
        ),
    ],
)
def test_which_layers_slide(
    changed_fields: dict[str, Any], windows: list[int | None]
) -> None:
    model = architecture({**LLAMA, **changed_fields})
    assert [layer.window_tokens for layer in model.layers] == windows


@pytest.mark.parametrize(
    ("changed_fields", "error_text"),
    [
        ({"num_hidden_layers": None}, "has no num_hidden_layers"),
        ({"vocab_size": 0}, "has no vocab_size"),
        ({"hidden_size": -1}, "hidden_size is -1"),
        (
            {"layer_types": ["full_attention"]},
            "layer_types has 1 entries, num_hidden_layers is 4",
        ),
        (
            {"layer_types": ["retention"] * 4},
            "layers of the kind 'retention'; known are",
        ),
        ({"hybrid_override_pattern": "MX"}, "hybrid_override_pattern has X"),
        ({"kv_lora_rank": 8}, "has no qk_rope_head_dim"),
        ({"layer_types": ["mamba"] * 4}, "has no mamba_d_conv or conv_kernel"),
    ],
)
def test_what_is_not_known_is_an_error(
    changed_fields: dict[str, Any], error_text: str
) -> None:
    with pytest.raises(PlanError, match=error_text):
        architecture({**LLAMA, **changed_fields})
