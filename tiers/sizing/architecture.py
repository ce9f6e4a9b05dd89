"""A model's weights and KV cache, by its ``config.json``. No weights are read.

Known are decoder-only models of the transformer kind as ``transformers`` configures them: with grouped-query, multi-query or
latent (MLA) attention, over the whole context or a sliding window, dense or with experts, and hybrids that have recurrent
layers besides. An unknown kind of layer is an error, never a guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiers.sizing.layers import ATTENTION, Layer, kv_layout, layer_kinds, make_layers
from tiers.sizing.model_config import ModelConfig, text_config

if TYPE_CHECKING:
    from collections.abc import Mapping

BF16_BYTES = 2
# In these families of models the embedding is the output layer too, unless the configuration says otherwise.
TIED = ("gemma", "cohere")


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model, as far as memory and time depend on it. Parameters are counted, not bytes.

    Attributes:
        layers: In order.
        embedding_parameters: Those of the token embedding.
        output_parameters: Those of the output layer, which computes each token that is sampled.
        is_output_tied: Whether the output layer is the embedding.
        vision_parameters: Those of an encoder for images.
        final_norm_parameters: Those of the norm before the output layer.
        experts_per_token: Routed experts that each token passes, in each layer that has some.
        attention_heads: Of one layer: tensor parallelism divides them.
        context: Longest context, in tokens.
    """

    layers: tuple[Layer, ...]
    embedding_parameters: int
    output_parameters: int
    is_output_tied: bool
    vision_parameters: int
    final_norm_parameters: int
    experts_per_token: int
    attention_heads: int
    context: int

    @property
    def quantizable_parameters(self) -> int:
        """Return the parameters that get a lower precision in the lower tiers."""
        return sum(
            layer.linear_parameters + layer.parameters_per_expert * layer.experts
            for layer in self.layers
        )

    @property
    def bf16_parameters(self) -> int:
        """Return the parameters that stay in BF16 in every tier."""
        parameters = sum(layer.bf16_parameters for layer in self.layers)
        parameters += self.embedding_parameters
        parameters += self.vision_parameters
        parameters += self.final_norm_parameters
        if not self.is_output_tied:
            parameters += self.output_parameters
        return parameters

    @property
    def parameters(self) -> int:
        """Return all parameters."""
        return self.quantizable_parameters + self.bf16_parameters

    @property
    def active_parameters(self) -> int:
        """Return the parameters of linear layers that a token passes, without the output layer."""
        experts_per_token = self.experts_per_token
        return sum(
            layer.linear_parameters
            + layer.parameters_per_expert * min(experts_per_token, layer.experts)
            for layer in self.layers
        )

    @property
    def dense_parameters(self) -> int:
        """Return the parameters of linear layers that are not experts, without the output layer: each token passes them."""
        return sum(layer.linear_parameters for layer in self.layers)

    @property
    def has_experts(self) -> bool:
        """Tell whether any layer has routed experts."""
        return any(layer.experts for layer in self.layers)

    def parameters_read(self, tokens: float) -> float:
        """Return the parameters of linear layers that a step reads, without the output layer.

        A step reads the experts that any of its tokens is sent to. Tokens are taken to be sent at random: of E experts, with
        k for each of n tokens, a step reads ``E * (1 - (1 - k / E)**n)``.

        Args:
            tokens: Those that the step computes.
        """
        parameters = 0.0
        for layer in self.layers:
            share_of_experts = 0.0
            if layer.experts:
                chosen_share = min(self.experts_per_token / layer.experts, 1.0)
                share_of_experts = 1 - (1 - chosen_share) ** tokens
            parameters += (
                layer.linear_parameters
                + layer.parameters_per_expert * layer.experts * share_of_experts
            )
        return parameters

    def weight_bytes(
        self, bytes_per_weight: float, bytes_per_expert_weight: float | None = None
    ) -> int:
        """Return the size of the weights.

        Args:
            bytes_per_weight: Of the linear layers; the other weights stay in BF16.
            bytes_per_expert_weight: Of the experts; None: as of the other linear layers.
        """
        if bytes_per_expert_weight is None:
            bytes_per_expert_weight = bytes_per_weight
        dense_parameters = self.dense_parameters
        expert_parameters = self.quantizable_parameters - dense_parameters
        quantized_bytes = round(
            dense_parameters * bytes_per_weight
            + expert_parameters * bytes_per_expert_weight
        )
        return quantized_bytes + BF16_BYTES * self.bf16_parameters

    def kv_bytes_per_token(self, bytes_per_value: int = 2, gpus: int = 1) -> int:
        """Return the KV cache of one token, in all layers, while every layer's window holds it.

        Args:
            bytes_per_value: 2 in BF16, 1 in FP8.
            gpus: The GPUs of tensor parallelism; the result is for one of them.
        """
        values = 0
        for layer in self.layers:
            if layer.kv is not None:
                values += layer.kv.values_per_gpu(gpus)
        return values * bytes_per_value

    def sequence_bytes(
        self, tokens: int, bytes_per_value: int = 2, gpus: int = 1
    ) -> int:
        """Return the KV cache and the recurrent state of one sequence.

        Layers with a sliding window keep the last tokens of the sequence only.

        Args:
            tokens: Those of prompt and answer.
            bytes_per_value: 2 in BF16, 1 in FP8.
            gpus: The GPUs of tensor parallelism; the result is for one of them.
        """
        total_bytes = 0
        for layer in self.layers:
            if layer.kv is not None:
                kept_tokens = tokens
                if layer.window_tokens is not None:
                    kept_tokens = min(tokens, layer.window_tokens)
                values = kept_tokens * layer.kv.values_per_gpu(gpus)
                total_bytes += values * bytes_per_value
            if layer.state_bytes:
                total_bytes += -(-layer.state_bytes // gpus)
        return total_bytes


def architecture(config: Mapping[str, Any]) -> Architecture:
    """Return what a configuration describes; of a multimodal model, its text part, and the size of its vision encoder.

    Args:
        config: A model's ``config.json``.

    Raises:
        PlanError: It lacks a field, or has one that is not known here.
    """
    text = text_config(config)
    hidden = text.positive_int("hidden_size")
    layer_count = text.positive_int("num_hidden_layers")
    vocabulary = text.positive_int("vocab_size")
    layers = make_layers(text, layer_count)
    vision = config.get("vision_config")
    vision_parameters = 0
    if isinstance(vision, dict):
        vision_parameters = _vision_parameters(ModelConfig(vision), hidden)
    experts_per_token = text.optional_int(
        "num_experts_per_tok", "num_experts_per_token", "top_k_experts"
    )
    return Architecture(
        layers=layers,
        embedding_parameters=vocabulary * hidden,
        output_parameters=vocabulary * hidden,
        is_output_tied=_is_output_tied(text),
        vision_parameters=vision_parameters,
        final_norm_parameters=hidden,
        experts_per_token=experts_per_token or 0,
        attention_heads=text.positive_int("num_attention_heads"),
        context=text.positive_int(
            "max_position_embeddings", "max_sequence_length", "n_positions"
        ),
    )


def _is_output_tied(config: ModelConfig) -> bool:
    stated = config.get("tie_word_embeddings")
    if stated is None:
        return config.model_type.startswith(TIED)
    return bool(stated)


def kv_bytes_per_token(
    config: Mapping[str, Any], bytes_per_value: int = 2, gpus: int = 1
) -> int:
    """Return the KV cache of one token, in all layers; fewer fields are needed than for the whole architecture.

    Args:
        config: The model's ``config.json``.
        bytes_per_value: 2 in BF16, 1 in FP8.
        gpus: The GPUs of tensor parallelism; the result is for one of them.

    Raises:
        PlanError: It lacks a field, or has one that is not known here.
    """
    text = text_config(config)
    kinds = layer_kinds(text, text.positive_int("num_hidden_layers"))
    values = sum(
        kv_layout(text, kind).values_per_gpu(gpus)
        for kind in kinds
        if kind in ATTENTION
    )
    return values * bytes_per_value


def _vision_parameters(config: ModelConfig, text_hidden: int) -> int:
    """Return the parameters of a vision transformer with biases, and of a normed linear projection of its patches.

    Encoders of another kind are left out: they have no ``patch_size`` or ``intermediate_size``.
    """
    hidden = config.optional_int("hidden_size")
    intermediate = config.optional_int("intermediate_size")
    layer_count = config.optional_int("num_hidden_layers", "depth")
    patch_size = config.optional_int("patch_size")
    if not (hidden and intermediate and layer_count and patch_size):
        return 0
    image_size = config.optional_int("image_size") or 0
    patches = (image_size // patch_size) ** 2
    patch_embedding = 3 * patch_size * patch_size * hidden + hidden
    position_embedding = patches * hidden
    layers = layer_count * _vision_layer_parameters(hidden, intermediate)
    final_norm = 2 * hidden
    projection_with_norm = hidden * text_hidden + hidden
    return (
        patch_embedding
        + position_embedding
        + layers
        + final_norm
        + projection_with_norm
    )


def _vision_layer_parameters(hidden: int, intermediate: int) -> int:
    attention = 4 * (hidden * hidden + hidden)
    feed_forward = 2 * hidden * intermediate + intermediate + hidden
    layer_norms = 4 * hidden
    return attention + feed_forward + layer_norms
