"""The KV cache's number format as a part of a precision's name."""

from __future__ import annotations

import pytest

from tiers.checkpoints.reference import ROUNDED_ACTIVATIONS_GAP, allowed_gap
from tiers.formats import quantizations_of, rank_bits
from tiers.kv_precision import is_quantized, weights_of, with_kv_cache


@pytest.mark.parametrize(
    ("precision", "dtype", "shown"),
    [
        ("fp8", "fp8", "fp8+kv-fp8"),
        ("fp8", "fp8_e4m3", "fp8+kv-fp8"),
        ("awq-int4", "fp8_e5m2", "awq-int4+kv-fp8_e5m2"),
        ("fp8+int4", "nvfp4", "fp8+int4+kv-nvfp4"),
        ("fp8 (stated)", "fp8", "fp8+kv-fp8 (stated)"),
        ("unknown", "int8_per_token_head", "unknown+kv-int8_per_token_head"),
        ("bf16", "a b\r\nc", "bf16+kv-a_b__c"),
        ("fp8", "auto", "fp8"),
        ("bf16", "bfloat16", "bf16"),
        ("fp8", None, "fp8"),
    ],
)
def test_a_quantized_kv_cache_is_shown_beside_the_weights(
    precision: str, dtype: str | None, shown: str
) -> None:
    """One of the model's own type, or of 16 bits, adds nothing; neither does one that is not told."""
    assert with_kv_cache(precision, dtype) == shown
    assert weights_of(shown) == precision
    assert with_kv_cache(shown, dtype) == shown
    assert is_quantized(dtype) == (shown != precision)


def test_an_engine_that_is_started_again_shows_its_present_kv_cache() -> None:
    assert with_kv_cache("fp8+kv-fp8", "auto") == "fp8"
    assert with_kv_cache("fp8+kv-nvfp4 (stated)", "fp8") == "fp8+kv-fp8 (stated)"


def test_the_weights_alone_are_the_precision_that_callers_ask_for() -> None:
    """A tier's rank, too, is by the bits of its weights."""
    assert quantizations_of("bf16+kv-fp8, awq-int4+kv-fp8") == {"bf16", "int4"}
    assert quantizations_of("unknown+kv-fp8") == {"unknown"}
    assert rank_bits("bf16+kv-fp8") == 16
    assert rank_bits("unknown+kv-fp8") is None


def test_a_quantized_kv_cache_lets_sound_engines_differ_more() -> None:
    assert allowed_gap("bf16+kv-fp8") == ROUNDED_ACTIVATIONS_GAP
    assert allowed_gap("awq-int4+kv-fp8") == ROUNDED_ACTIVATIONS_GAP
