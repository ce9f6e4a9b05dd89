"""A model's ``config.json``, whose fields have other names, or are left out, in some families of models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiers.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping

# What a published configuration leaves out has the value that the class for this ``model_type`` has in ``transformers``.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 4096, "sliding_window_pattern": 2, "head_dim": 256},
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131_072,
    },
    "qwen3_next": {"full_attention_interval": 4, "linear_conv_kernel_dim": 4},
}


class ModelConfig:
    """The fields of a configuration, with the defaults of its model type."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.model_type = str(fields.get("model_type", "unknown"))
        stated = {name: value for name, value in fields.items() if value is not None}
        self._fields = {**DEFAULTS.get(self.model_type, {}), **stated}

    def get(self, name: str) -> Any:
        """Return a field as it is written; None: there is none."""
        return self._fields.get(name)

    def optional_int(self, *names: str) -> int | None:
        """Return the first of these fields that is a whole number.

        Raises:
            PlanError: The number is negative.
        """
        for name in names:
            value = self._fields.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                if value < 0:
                    raise PlanError(f"{name} is {value}: it must not be negative")
                return value
        return None

    def positive_int(self, *names: str) -> int:
        """Return the first of these fields that is a whole number.

        Raises:
            PlanError: There is none, or it is not above 0.
        """
        value = self.optional_int(*names)
        if not value:
            raise PlanError(
                f"the model's config.json has no {' or '.join(names)}: its size cannot be planned"
            )
        return value

    @property
    def head_dim(self) -> int:
        """Return the dimension of an attention head."""
        head_dim = self.optional_int("head_dim")
        if head_dim:
            return head_dim
        return self.positive_int("hidden_size") // self.positive_int(
            "num_attention_heads"
        )

    @property
    def kv_heads(self) -> int:
        """Return the KV heads of an attention layer: as many as query heads, if the configuration names no number."""
        if self.get("multi_query"):
            return 1
        kv_heads = self.optional_int("num_key_value_heads")
        return kv_heads or self.positive_int("num_attention_heads")

    @property
    def window_tokens(self) -> int | None:
        """Return the window of the sliding layers; None: no layer slides."""
        if self.get("use_sliding_window") is False:
            return None
        return self.optional_int("sliding_window", "attention_chunk_size") or None


def text_config(fields: Mapping[str, Any]) -> ModelConfig:
    """Return a configuration, or the text part of a multimodal model's.

    Args:
        fields: The model's ``config.json``.
    """
    text = fields.get("text_config")
    if not isinstance(text, dict):
        return ModelConfig(fields)
    # A multimodal model may state beside its text part whether the embedding is tied.
    inherited = {"tie_word_embeddings": fields.get("tie_word_embeddings")}
    return ModelConfig({**inherited, **text})
