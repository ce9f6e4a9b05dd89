"""A model's weights and KV cache, by its ``config.json``. No weights are read.

Known are decoder-only models of the transformer kind as ``transformers`` configures them: with grouped-query, multi-query or
latent (MLA) attention, over the whole context or a sliding window, dense or with experts, and hybrids that have recurrent
layers besides. An unknown kind of layer is an error, never a guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiers.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# recurrent states are kept in 32 bits by some models, and in the activations' format by others
STATE_BYTES = 4
CONV_BYTES = 2
FULL = {"full_attention", "attention", "global"}
SLIDING = {"sliding_attention", "chunked_attention", "local"}
MAMBA, DELTA_NET, CONV = {"mamba", "mamba2"}, {"linear_attention"}, {"conv"}
# What a published configuration leaves out is as ``transformers`` has it in the class of this ``model_type``.
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
# their query projection makes a gate as well
GATED_QUERY = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
QUERY_BIAS = {"qwen2", "qwen2_moe"}
HEAD_NORMS = {"qwen3", "qwen3_moe", "qwen3_next", "gemma3_text"}
FOUR_NORMS = {"gemma2", "gemma3_text"}
# embedding and output layer are one, unless the configuration says otherwise
TIED = ("gemma", "cohere")


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. Parameters and values are counted, not bytes.

    Attributes:
        linear: Parameters of its linear layers without routed experts: those that get a lower precision.
        expert: Parameters of each of its routed experts.
        experts: Number of routed experts; 0: it is dense.
        other: Parameters that stay in BF16: norms, biases, the experts' router.
        kv_values: Values that each token adds to the KV cache; 0: none.
        kv_heads: Heads that these are divided into; 0: one latent vector, of which every GPU holds a copy.
        window: Latest tokens that it attends to; None: all.
        state_bytes: Of a sequence's recurrent state, whatever its length.
    """

    linear: int
    expert: int = 0
    experts: int = 0
    other: int = 0
    kv_values: int = 0
    kv_heads: int = 0
    window: int | None = None
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model, as far as memory and time depend on it. Parameters are counted, not bytes.

    Attributes:
        kind: ``model_type`` of its configuration.
        layers: In order.
        embedding: Parameters of the token embedding.
        head: Parameters of the output layer, which every step computes; it may be the embedding.
        tied: Whether it is.
        vision: Parameters of an encoder for images.
        experts_per_token: Routed experts that each token passes, in each layer that has some.
        attention_heads: Of one layer: tensor parallelism divides them.
        context: Longest context, in tokens.
    """

    kind: str
    layers: tuple[Layer, ...]
    embedding: int
    head: int
    tied: bool
    vision: int
    experts_per_token: int
    attention_heads: int
    context: int

    @property
    def quantizable(self) -> int:
        """Return the parameters that get a lower precision in the lower tiers."""
        return sum(layer.linear + layer.expert * layer.experts for layer in self.layers)

    @property
    def kept(self) -> int:
        """Return the parameters that stay in BF16."""
        other = sum(layer.other for layer in self.layers)
        return other + self.embedding + self.vision + (0 if self.tied else self.head)

    @property
    def parameters(self) -> int:
        """Return all parameters."""
        return self.quantizable + self.kept

    @property
    def active(self) -> int:
        """Return the parameters of linear layers that a token passes, without the output layer."""
        return sum(
            layer.linear + layer.expert * min(self.experts_per_token, layer.experts)
            for layer in self.layers
        )

    def read(self, tokens: float) -> float:
        """Return the parameters of linear layers that a step reads, without the output layer.

        Of the experts, it reads those that one of its tokens is sent to, here as if at random: of E experts, with k for each
        of n tokens, ``E * (1 - (1 - k / E)**n)``.

        Args:
            tokens: Computed in the step.
        """
        read = 0.0
        for layer in self.layers:
            share = 0.0
            if layer.experts:
                share = (
                    1 - (1 - min(self.experts_per_token / layer.experts, 1.0)) ** tokens
                )
            read += layer.linear + layer.expert * layer.experts * share
        return read

    def weight_bytes(self, bytes_per_weight: float) -> int:
        """Return the size of the weights.

        Args:
            bytes_per_weight: Of the linear layers; the rest stays in BF16.
        """
        return round(self.quantizable * bytes_per_weight) + 2 * self.kept

    def kv_bytes_per_token(self, bytes_per_value: int = 2, gpus: int = 1) -> int:
        """Return the KV cache of one token, in all layers, while every layer's window holds it.

        Args:
            bytes_per_value: 2 in BF16, 1 in FP8.
            gpus: Of tensor parallelism; the result is that of one of them.
        """
        return sum(_share(layer, gpus) for layer in self.layers) * bytes_per_value

    def sequence_bytes(
        self, tokens: int, bytes_per_value: int = 2, gpus: int = 1
    ) -> int:
        """Return the KV cache and recurrent state of one sequence, of which sliding windows hold the last tokens only.

        Args:
            tokens: Of prompt and answer.
            bytes_per_value: 2 in BF16, 1 in FP8.
            gpus: Of tensor parallelism; the result is that of one of them.
        """
        kept = 0
        for layer in self.layers:
            held = tokens if layer.window is None else min(tokens, layer.window)
            kept += held * _share(layer, gpus) * bytes_per_value + -(
                -layer.state_bytes // gpus
            )
        return kept


def _share(layer: Layer, gpus: int) -> int:
    return _of_one(layer.kv_values, layer.kv_heads, gpus)


def _of_one(values: int, heads: int, gpus: int) -> int:
    """Return the values a token that one of several GPUs keeps: heads are divided, and copied where there are too few."""
    return values // heads * -(-heads // gpus) if heads else values


def architecture(config: Mapping[str, Any]) -> Architecture:
    """Return what a configuration describes; of a multimodal model, its text part, and the size of its vision encoder.

    Args:
        config: A model's ``config.json``.

    Raises:
        PlanError: It lacks a field, or has one that is not known here.
    """
    inner, vision = _text_config(config), config.get("vision_config")
    hidden, count, vocabulary = (
        inner.number("hidden_size"),
        inner.number("num_hidden_layers"),
        inner.number("vocab_size"),
    )
    tied = inner.get("tie_word_embeddings")
    kinds, windows = _kinds(inner, count), inner.window
    layers = tuple(
        _layer(inner, number, kind, windows) for number, kind in enumerate(kinds)
    )
    return Architecture(
        kind=inner.kind,
        layers=layers,
        embedding=vocabulary * hidden,
        head=vocabulary * hidden,
        tied=inner.kind.startswith(TIED) if tied is None else bool(tied),
        # and the last norm
        vision=(_vision(_Config(vision), hidden) if isinstance(vision, dict) else 0)
        + hidden,
        experts_per_token=inner.optional(
            "num_experts_per_tok", "num_experts_per_token", "top_k_experts"
        )
        or 0,
        attention_heads=inner.number("num_attention_heads"),
        context=inner.number(
            "max_position_embeddings", "max_sequence_length", "n_positions"
        ),
    )


def kv_bytes_per_token(
    config: Mapping[str, Any], bytes_per_value: int = 2, gpus: int = 1
) -> int:
    """Return the KV cache of one token, in all layers; fewer fields are needed than for the whole architecture.

    Args:
        config: The model's ``config.json``.
        bytes_per_value: 2 in BF16, 1 in FP8.
        gpus: Of tensor parallelism; the result is that of one of them.

    Raises:
        PlanError: It lacks a field, or has one that is not known here.
    """
    inner = _text_config(config)
    kinds = _kinds(inner, inner.number("num_hidden_layers"))
    values, heads = _kv_cache(inner)
    return (
        sum(_of_one(values, heads, gpus) for kind in kinds if kind in FULL | SLIDING)
        * bytes_per_value
    )


def _text_config(config: Mapping[str, Any]) -> _Config:
    """Return a configuration, or the text part of a multimodal model's."""
    text = config.get("text_config")
    if isinstance(text, dict):
        return _Config(
            {"tie_word_embeddings": config.get("tie_word_embeddings"), **text}
        )
    return _Config(config)


class _Config:
    """A configuration whose fields are looked up with the defaults of its kind."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.kind = str(config.get("model_type", "unknown"))
        self._config = {
            **DEFAULTS.get(self.kind, {}),
            **{k: v for k, v in config.items() if v is not None},
        }

    def get(self, name: str) -> Any:
        return self._config.get(name)

    def optional(self, *names: str) -> int | None:
        """Return the first of these fields that is a whole number."""
        for name in names:
            value = self._config.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                if value < 0:
                    raise PlanError(f"{name} is {value}: it must not be negative")
                return value
        return None

    def number(self, *names: str) -> int:
        """Return the first of these fields that is a whole number above 0."""
        value = self.optional(*names)
        if not value:
            raise PlanError(
                f"the model's config.json has no {' or '.join(names)}: its size cannot be planned"
            )
        return value

    @property
    def head_dim(self) -> int:
        return self.optional("head_dim") or self.number("hidden_size") // self.number(
            "num_attention_heads"
        )

    @property
    def window(self) -> int | None:
        """Return the sliding layers' window; None: there is none."""
        if self.get("use_sliding_window") is False:
            return None
        return self.optional("sliding_window", "attention_chunk_size") or None


def _kinds(config: _Config, count: int) -> list[str]:
    """Return the kind of each layer, by its name in ``layer_types``."""
    pattern, given = (
        config.get("hybrid_override_pattern"),
        config.get("layer_types") or config.get("layers_block_type"),
    )
    if isinstance(pattern, str):
        return _lettered(pattern)
    if isinstance(given, list):
        if len(given) != count:
            raise PlanError(
                f"layer_types has {len(given)} entries, num_hidden_layers is {count}"
            )
        return [str(kind) for kind in given]
    return _hybrid(config, count) or _windowed(config, count)


def _lettered(pattern: str) -> list[str]:
    """Read Nemotron-H's layers: a letter each, MLPs being layers of their own."""
    names = {"M": "mamba", "*": "attention", "-": "mlp"}
    if unknown := sorted(set(pattern) - set(names)):
        raise PlanError(
            f"hybrid_override_pattern has {', '.join(unknown)}; known are {', '.join(names)}"
        )
    return [names[letter] for letter in pattern]


def _hybrid(config: _Config, count: int) -> list[str]:
    """Return the layers of models with attention in some layers only; none: it is in all."""
    every = config.optional("full_attention_interval")
    if every:  # Qwen3-Next
        return [
            "linear_attention" if (number + 1) % every else "full_attention"
            for number in range(count)
        ]
    period, offset = (
        config.optional("attn_layer_period"),
        config.optional("attn_layer_offset") or 0,
    )
    if period:  # Jamba
        return [
            "attention" if number % period == offset else "mamba"
            for number in range(count)
        ]
    indices = config.get("attn_layer_indices")
    if isinstance(indices, list):  # Bamba
        return [
            "attention" if number in indices else "mamba" for number in range(count)
        ]
    return []


def _windowed(config: _Config, count: int) -> list[str]:
    if config.window is None:
        return ["full_attention"] * count
    every = config.optional("sliding_window_pattern", "_sliding_window_pattern")
    if every:
        return [
            "sliding_attention" if (number + 1) % every else "full_attention"
            for number in range(count)
        ]
    # Qwen2: those below attend to everything
    first = config.optional("max_window_layers") or 0
    return [
        "full_attention" if number < first else "sliding_attention"
        for number in range(count)
    ]


def _layer(config: _Config, number: int, kind: str, window: int | None) -> Layer:
    hidden = config.number("hidden_size")
    norms = (4 if config.kind in FOUR_NORMS else 2) * hidden
    if config.get("hybrid_override_pattern") and kind != "mlp":
        norms, feed = hidden, (0, 0, 0, 0)
    else:
        feed = _feed_forward(config, number, hidden)
    linear, expert, experts, router = feed
    if kind in FULL | SLIDING:
        own, other = _attention(config, hidden)
        values, heads = _kv_cache(config)
        seen = window if kind in SLIDING else None
        return Layer(
            linear + own, expert, experts, other + norms + router, values, heads, seen
        )
    if kind == "mlp":
        return Layer(linear, expert, experts, hidden + router)
    recurrent = _recurrent(kind)
    own, state = recurrent(config, hidden)
    return Layer(linear + own, expert, experts, norms + router, state_bytes=state)


def _kv_cache(config: _Config) -> tuple[int, int]:
    """Return the values that a token adds to a layer's KV cache, and the KV heads; 0 heads: a latent vector (MLA)."""
    latent = config.optional("kv_lora_rank")
    if latent:
        return latent + config.number("qk_rope_head_dim"), 0
    heads = _kv_heads(config)
    return 2 * heads * config.head_dim, heads


def _kv_heads(config: _Config) -> int:
    if config.get("multi_query"):
        return 1
    return config.optional("num_key_value_heads") or config.number(
        "num_attention_heads"
    )


def _attention(config: _Config, hidden: int) -> tuple[int, int]:
    """Return parameters of linear layers, and others."""
    heads, latent = (
        config.number("num_attention_heads"),
        config.optional("kv_lora_rank"),
    )
    if latent:
        rope, nope = (
            config.number("qk_rope_head_dim"),
            config.number("qk_nope_head_dim"),
        )
        value, low = config.number("v_head_dim"), config.optional("q_lora_rank")
        query = (
            hidden * low + low * heads * (nope + rope)
            if low
            else hidden * heads * (nope + rope)
        )
        own = (
            query
            + hidden * (latent + rope)
            + latent * heads * (nope + value)
            + heads * value * hidden
        )
        return own, latent + (low or 0)
    dim = config.head_dim
    queries, keys = (
        heads * dim * (2 if config.kind in GATED_QUERY else 1),
        _kv_heads(config) * dim,
    )
    other = 2 * dim if config.kind in HEAD_NORMS else 0
    if config.kind in QUERY_BIAS or config.get("attention_bias"):
        other += queries + 2 * keys + (0 if config.kind in QUERY_BIAS else hidden)
    return hidden * (queries + 2 * keys) + heads * dim * hidden, other


def _feed_forward(
    config: _Config, number: int, hidden: int
) -> tuple[int, int, int, int]:
    """Return parameters of linear layers, of one expert, the number of experts, and parameters of their router."""
    # gate, up and down; Nemotron's have no gate
    matrices = 2 if config.get("mlp_hidden_act") == "relu2" else 3
    experts = (
        config.optional("num_experts", "num_local_experts", "n_routed_experts") or 0
    )
    if not experts or not _has_experts(config, number):
        return (
            matrices
            * hidden
            * config.number("intermediate_size_mlp", "intermediate_size"),
            0,
            0,
            0,
        )
    width = config.number("moe_intermediate_size", "intermediate_size")
    shared = config.optional(
        "shared_expert_intermediate_size", "shared_intermediate_size"
    )
    if shared is None:
        llama4 = width if config.get("intermediate_size_mlp") else 0
        shared = (config.optional("n_shared_experts") or 0) * width or llama4
    router = hidden * experts + (
        experts if config.get("topk_method") == "noaux_tc" else 0
    )
    return matrices * hidden * shared, matrices * hidden * width, experts, router


def _has_experts(config: _Config, number: int) -> bool:
    """Tell whether a layer has experts: not the first ones, and only every so many, in some models."""
    if number < (config.optional("first_k_dense_replace") or 0):
        return False
    dense = config.get("mlp_only_layers")
    if isinstance(dense, list) and number in dense:
        return False
    step = (
        config.optional(
            "decoder_sparse_step",
            "interleave_moe_layer_step",
            "moe_layer_freq",
            "expert_layer_period",
        )
        or 1
    )
    offset = config.optional("expert_layer_offset")
    if config.kind in {"deepseek_v2", "deepseek_v3"}:
        return number % step == 0
    return number % step == offset if offset is not None else (number + 1) % step == 0


def _recurrent(kind: str) -> Callable[[_Config, int], tuple[int, int]]:
    for kinds, found in ((MAMBA, _mamba), (DELTA_NET, _delta_net), (CONV, _conv)):
        if kind in kinds:
            return found
    known = sorted(FULL | SLIDING | MAMBA | DELTA_NET | CONV)
    raise PlanError(f"it has layers of the kind {kind!r}; known are {', '.join(known)}")


def _mamba(config: _Config, hidden: int) -> tuple[int, int]:
    """Return parameters, and bytes of a sequence's state: Mamba 2 where it has heads (arXiv 2405.21060), else Mamba 1."""
    kernel = config.number("mamba_d_conv", "conv_kernel")
    state = config.number("mamba_d_state", "ssm_state_size")
    heads = config.optional("mamba_n_heads", "mamba_num_heads")
    if heads:
        inner = heads * config.number("mamba_d_head", "mamba_head_dim")
        grouped = 2 * (config.optional("mamba_n_groups", "n_groups") or 1) * state
        own = hidden * (2 * inner + grouped + heads) + inner * hidden
        return own, (kernel - 1) * (
            inner + grouped
        ) * CONV_BYTES + inner * state * STATE_BYTES
    inner, rank = config.number("mamba_expand") * hidden, config.number("mamba_dt_rank")
    own = (
        hidden * 2 * inner + inner * (rank + 2 * state) + rank * inner + inner * hidden
    )
    return own, (kernel - 1) * inner * CONV_BYTES + inner * state * STATE_BYTES


def _delta_net(config: _Config, hidden: int) -> tuple[int, int]:
    """Return parameters, and bytes of a sequence's state, of a gated delta net (arXiv 2412.06464)."""
    key_heads, value_heads = (
        config.number("linear_num_key_heads"),
        config.number("linear_num_value_heads"),
    )
    key_dim, value_dim = (
        config.number("linear_key_head_dim"),
        config.number("linear_value_head_dim"),
    )
    keys, values = key_heads * key_dim, value_heads * value_dim
    own = hidden * (2 * keys + 2 * values + 2 * value_heads) + values * hidden
    conv = (
        (config.number("linear_conv_kernel_dim") - 1) * (2 * keys + values) * CONV_BYTES
    )
    return own, conv + value_heads * key_dim * value_dim * STATE_BYTES


def _conv(config: _Config, hidden: int) -> tuple[int, int]:
    """Return parameters, and bytes of a sequence's state, of a short convolution (LFM2)."""
    width = config.optional("conv_dim") or hidden
    return hidden * 3 * width + width * hidden, config.number(
        "conv_L_cache"
    ) * width * CONV_BYTES


def _vision(config: _Config, hidden: int) -> int:
    """Return the parameters of a vision transformer with biases, and of a linear projection of its patches.

    Encoders of another kind are left out: they have no ``patch_size`` or ``intermediate_size``.
    """
    width, inner = config.optional("hidden_size"), config.optional("intermediate_size")
    count, patch = (
        config.optional("num_hidden_layers", "depth"),
        config.optional("patch_size"),
    )
    if not (width and inner and count and patch):
        return 0
    image = config.optional("image_size") or 0
    embedding = 3 * patch * patch * width + width + (image // patch) ** 2 * width
    layer = 4 * (width * width + width) + 2 * width * inner + inner + width + 4 * width
    return embedding + count * layer + 2 * width + width * hidden + width
