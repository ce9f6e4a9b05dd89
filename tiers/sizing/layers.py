"""The layers of a model: what kind each is, how many parameters it has, and what it keeps of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiers.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from tiers.sizing.model_config import ModelConfig

# Some models keep recurrent states in 32 bits, others in the activations' format. The larger one is assumed.
STATE_VALUE_BYTES = 4
CONVOLUTION_VALUE_BYTES = 2
# Names of each kind of layer in ``layer_types``.
FULL_ATTENTION = {
    "full_attention",
    "attention",
    "global",
    # It keeps all tokens, and chooses those that it reads.
    "deepseek_sparse_attention",
}
SLIDING_ATTENTION = {"sliding_attention", "chunked_attention", "local"}
MAMBA = {"mamba", "mamba2"}
DELTA_NET = {"linear_attention"}
SHORT_CONVOLUTION = {"conv"}
ATTENTION = FULL_ATTENTION | SLIDING_ATTENTION
MLP = "mlp"
# Layers of Nemotron-H, by their letters in ``hybrid_override_pattern``.
KIND_OF_LETTER = {"M": "mamba", "*": "attention", "-": MLP}
# The query projection of these models computes a gate as well.
GATED_QUERY = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
QUERY_BIAS = {"qwen2", "qwen2_moe"}
HEAD_NORMS = {"qwen3", "qwen3_moe", "qwen3_next", "gemma3_text", "gemma4_text"}
FOUR_NORMS = {"gemma2", "gemma3_text", "gemma4_text"}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What each token adds to the KV cache of one layer.

    Attributes:
        values: Numbers, not bytes.
        heads: KV heads that the values are divided into; None: they are one latent vector (MLA).
    """

    values: int
    heads: int | None

    def values_per_gpu(self, gpus: int) -> int:
        """Return the values that one of several GPUs keeps.

        The heads are divided between the GPUs, and copied where there are too few. A latent vector is copied to every GPU.

        Args:
            gpus: The GPUs of tensor parallelism.
        """
        if self.heads is None:
            return self.values
        heads_per_gpu = -(-self.heads // gpus)
        return self.values // self.heads * heads_per_gpu


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. Parameters are counted, not bytes.

    Attributes:
        linear_parameters: Those of linear layers without routed experts. Lower tiers quantize them.
        parameters_per_expert: Those of each routed expert. Lower tiers quantize them.
        experts: The number of routed experts; 0: the layer is dense.
        bf16_parameters: Those that no tier quantizes: norms, biases, the experts' router.
        router_parameters: Those of the experts' router, which ``bf16_parameters`` has too.
        kv: None: the layer has no KV cache.
        window_tokens: The latest tokens that the layer attends to; None: it attends to all.
        state_bytes: Recurrent state of a sequence, whatever the sequence's length.
    """

    linear_parameters: int
    parameters_per_expert: int = 0
    experts: int = 0
    bf16_parameters: int = 0
    router_parameters: int = 0
    kv: KvLayout | None = None
    window_tokens: int | None = None
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Mixer:
    """The part of a layer in which tokens see one another: attention, or a recurrence."""

    linear_parameters: int = 0
    bf16_parameters: int = 0
    kv: KvLayout | None = None
    window_tokens: int | None = None
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _FeedForward:
    """The part of a layer that computes each token alone."""

    linear_parameters: int = 0
    parameters_per_expert: int = 0
    experts: int = 0
    router_parameters: int = 0


def layer_kinds(config: ModelConfig, count: int) -> list[str]:
    """Return the kind of each layer, by a name that ``layer_types`` may have.

    Raises:
        PlanError: The configuration lists another number of layers than it states.
    """
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return _kinds_of_letters(pattern)
    listed = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(listed, list):
        if len(listed) != count:
            raise PlanError(
                f"layer_types has {len(listed)} entries, num_hidden_layers is {count}"
            )
        return [str(kind) for kind in listed]
    return _hybrid_kinds(config, count) or _attention_kinds(config, count)


def _kinds_of_letters(pattern: str) -> list[str]:
    unknown = sorted(set(pattern) - set(KIND_OF_LETTER))
    if unknown:
        raise PlanError(
            f"hybrid_override_pattern has {', '.join(unknown)}; known are {', '.join(KIND_OF_LETTER)}"
        )
    return [KIND_OF_LETTER[letter] for letter in pattern]


def _hybrid_kinds(config: ModelConfig, count: int) -> list[str]:
    """Return the layers of a model in which some attend and the others are recurrent; empty: it is no such model."""
    interval = config.optional_int("full_attention_interval")
    if interval:  # Qwen3-Next
        attending = _every_nth(interval, count)
        return _mixed_kinds(
            count, "linear_attention", attending, special_kind="full_attention"
        )
    period = config.optional_int("attn_layer_period")
    offset = config.optional_int("attn_layer_offset") or 0
    if period:  # Jamba
        attending = [number for number in range(count) if number % period == offset]
        return _mixed_kinds(count, "mamba", attending, special_kind="attention")
    indices = config.get("attn_layer_indices")
    if isinstance(indices, list):  # Bamba
        return _mixed_kinds(count, "mamba", indices, special_kind="attention")
    return []


def _attention_kinds(config: ModelConfig, count: int) -> list[str]:
    """Return the layers of a model in which all attend, some of them to a window only."""
    if config.window_tokens is None:
        return ["full_attention"] * count
    interval = config.optional_int("sliding_window_pattern", "_sliding_window_pattern")
    if interval:
        attending_to_all = _every_nth(interval, count)
        return _mixed_kinds(
            count, "sliding_attention", attending_to_all, special_kind="full_attention"
        )
    # Qwen2 has full attention in its first layers.
    attending_to_all = range(config.optional_int("max_window_layers") or 0)
    return _mixed_kinds(
        count, "sliding_attention", attending_to_all, special_kind="full_attention"
    )


def _every_nth(interval: int, count: int) -> Sequence[int]:
    """Return the numbers of every nth layer; numbers begin with 0, so the first of them is n - 1."""
    return range(interval - 1, count, interval)


def _mixed_kinds(
    count: int, usual_kind: str, special_numbers: Container[int], special_kind: str
) -> list[str]:
    """Return the kind of each layer: the usual one, but at the special numbers."""
    kinds = [usual_kind] * count
    for number in range(count):
        if number in special_numbers:
            kinds[number] = special_kind
    return kinds


def make_layers(config: ModelConfig, count: int) -> tuple[Layer, ...]:
    """Count what each layer has.

    Args:
        config: The model's.
        count: How many layers it states.

    Raises:
        PlanError: The configuration lacks a field, or a kind of layer is not known.
    """
    kinds = layer_kinds(config, count)
    window_tokens = config.window_tokens
    return tuple(
        _make_layer(config, number, kind, window_tokens=window_tokens)
        for number, kind in enumerate(kinds)
    )


def _make_layer(
    config: ModelConfig, number: int, kind: str, window_tokens: int | None
) -> Layer:
    hidden = config.positive_int("hidden_size")
    # In Nemotron-H mixers and MLPs are layers of their own, each with one norm.
    is_nemotron_h = bool(config.get("hybrid_override_pattern"))
    has_mixer = kind != MLP
    has_feed_forward = not has_mixer or not is_nemotron_h
    norms = 1
    if has_mixer and has_feed_forward:
        norms = 4 if config.model_type in FOUR_NORMS else 2
    feed_forward = _FeedForward()
    if has_feed_forward:
        feed_forward = _feed_forward(config, number, hidden)
    mixer = _Mixer()
    if has_mixer:
        mixer = _mixer(config, kind, hidden, window_tokens=window_tokens)
    return Layer(
        linear_parameters=mixer.linear_parameters + feed_forward.linear_parameters,
        parameters_per_expert=feed_forward.parameters_per_expert,
        experts=feed_forward.experts,
        bf16_parameters=(
            mixer.bf16_parameters + feed_forward.router_parameters + norms * hidden
        ),
        router_parameters=feed_forward.router_parameters,
        kv=mixer.kv,
        window_tokens=mixer.window_tokens,
        state_bytes=mixer.state_bytes,
    )


def _mixer(
    config: ModelConfig, kind: str, hidden: int, window_tokens: int | None
) -> _Mixer:
    if kind in FULL_ATTENTION:
        return _attention(config, kind, window_tokens=None)
    if kind in SLIDING_ATTENTION:
        return _attention(config, kind, window_tokens)
    if kind in MAMBA:
        return _mamba(config, hidden)
    if kind in DELTA_NET:
        return _delta_net(config)
    if kind in SHORT_CONVOLUTION:
        return _short_convolution(config, hidden)
    known = sorted(ATTENTION | MAMBA | DELTA_NET | SHORT_CONVOLUTION)
    raise PlanError(f"it has layers of the kind {kind!r}; known are {', '.join(known)}")


def projections_of(config: ModelConfig, kind: str) -> dict[str, int]:
    """Return the linear layers of a layer's mixer with their parameters, by their names in ``transformers``.

    A mixer of which only the whole is known has none.

    Args:
        config: The model's.
        kind: Of the layer, by a name that ``layer_types`` may have.

    Raises:
        PlanError: The configuration lacks a field.
    """
    if kind in ATTENTION and config.optional_int("kv_lora_rank"):
        return _latent_projections(config)
    if kind in ATTENTION:
        return _grouped_projections(config, kind)
    if kind in DELTA_NET:
        return _delta_net_projections(config)
    return {}


def kv_layout(config: ModelConfig, kind: str) -> KvLayout:
    """Return what each token adds to the KV cache of an attention layer of a kind."""
    latent = config.optional_int("kv_lora_rank")
    if latent:
        return KvLayout(latent + config.positive_int("qk_rope_head_dim"), heads=None)
    kv_heads = _kv_heads(config, kind)
    return KvLayout(2 * kv_heads * _head_dim(config, kind), kv_heads)


def _kv_heads(config: ModelConfig, kind: str) -> int:
    global_heads = config.optional_int("num_global_key_value_heads")
    if global_heads and kind in FULL_ATTENTION and config.get("attention_k_eq_v"):
        return global_heads
    return config.kv_heads


def _head_dim(config: ModelConfig, kind: str) -> int:
    global_head_dim = config.optional_int("global_head_dim")
    if global_head_dim and kind in FULL_ATTENTION:
        return global_head_dim
    return config.head_dim


def _attention(config: ModelConfig, kind: str, window_tokens: int | None) -> _Mixer:
    if config.optional_int("kv_lora_rank"):
        bf16_parameters = _latent_norms(config)
    else:
        bf16_parameters = _grouped_norms_and_biases(config, kind)
    return _Mixer(
        linear_parameters=sum(projections_of(config, kind).values()),
        bf16_parameters=bf16_parameters,
        kv=kv_layout(config, kind),
        window_tokens=window_tokens,
    )


def _latent_projections(config: ModelConfig) -> dict[str, int]:
    """Return the linear layers of multi-head latent attention (MLA)."""
    hidden = config.positive_int("hidden_size")
    heads = config.positive_int("num_attention_heads")
    kv_latent = config.positive_int("kv_lora_rank")
    rope_dim = config.positive_int("qk_rope_head_dim")
    nope_dim = config.positive_int("qk_nope_head_dim")
    value_dim = config.positive_int("v_head_dim")
    query_latent = config.optional_int("q_lora_rank") or 0
    queries = heads * (nope_dim + rope_dim)
    query_projections = {"q_proj": hidden * queries}
    if query_latent:
        query_projections = {
            "q_a_proj": hidden * query_latent,
            "q_b_proj": query_latent * queries,
        }
    return {
        **query_projections,
        "kv_a_proj_with_mqa": hidden * (kv_latent + rope_dim),
        "kv_b_proj": kv_latent * heads * (nope_dim + value_dim),
        "o_proj": heads * value_dim * hidden,
    }


def _latent_norms(config: ModelConfig) -> int:
    query_latent = config.optional_int("q_lora_rank") or 0
    return config.positive_int("kv_lora_rank") + query_latent


def _grouped_projections(config: ModelConfig, kind: str) -> dict[str, int]:
    """Return the linear layers of multi-head, grouped-query or multi-query attention."""
    hidden = config.positive_int("hidden_size")
    head_dim = _head_dim(config, kind)
    queries = config.positive_int("num_attention_heads") * head_dim
    keys = _kv_heads(config, kind) * head_dim
    gates = queries if config.model_type in GATED_QUERY else 0
    projections = {
        "q_proj": hidden * (queries + gates),
        "k_proj": hidden * keys,
        "v_proj": hidden * keys,
        "o_proj": queries * hidden,
    }
    if kind in FULL_ATTENTION and config.get("attention_k_eq_v"):
        # Gemma 4 takes the keys, before they are rotated, as the values.
        del projections["v_proj"]
    return projections


def _grouped_norms_and_biases(config: ModelConfig, kind: str) -> int:
    hidden = config.positive_int("hidden_size")
    projections = _grouped_projections(config, kind)
    projected = (sum(projections.values()) - projections["o_proj"]) // hidden
    parameters = 0
    if config.model_type in HEAD_NORMS:
        parameters += 2 * _head_dim(config, kind)
    if config.model_type in QUERY_BIAS:
        parameters += projected
    elif config.get("attention_bias"):
        parameters += projected + hidden
    return parameters


def _feed_forward(config: ModelConfig, number: int, hidden: int) -> _FeedForward:
    # Gate, up and down; Nemotron's feed-forward layers have no gate.
    matrices = 2 if config.get("mlp_hidden_act") == "relu2" else 3
    experts = (
        config.optional_int("num_experts", "num_local_experts", "n_routed_experts") or 0
    )
    if not experts or not _has_experts(config, number):
        width = config.positive_int("intermediate_size_mlp", "intermediate_size")
        return _FeedForward(linear_parameters=matrices * hidden * width)
    expert_width = config.positive_int("moe_intermediate_size", "intermediate_size")
    router_parameters = hidden * experts
    if config.get("topk_method") == "noaux_tc":
        router_parameters += experts
    shared_width = _shared_width(config, expert_width)
    if config.model_type == "gemma4_text":
        # Gemma 4 has a dense feed-forward layer beside the experts.
        shared_width = config.positive_int("intermediate_size")
    return _FeedForward(
        linear_parameters=matrices * hidden * shared_width,
        parameters_per_expert=matrices * hidden * expert_width,
        experts=experts,
        router_parameters=router_parameters,
    )


def _shared_width(config: ModelConfig, expert_width: int) -> int:
    """Return the width of all shared experts together, which every token passes."""
    shared_width = config.optional_int(
        "shared_expert_intermediate_size", "shared_intermediate_size"
    )
    if shared_width is not None:
        return shared_width
    shared_experts = config.optional_int("n_shared_experts") or 0
    if not shared_experts and config.get("intermediate_size_mlp"):
        # Llama 4 has one, which its configuration does not state.
        shared_experts = 1
    return shared_experts * expert_width


def _has_experts(config: ModelConfig, number: int) -> bool:
    """Tell whether a layer has experts; some models have them neither in the first layers nor in all later ones."""
    if number < (config.optional_int("first_k_dense_replace") or 0):
        return False
    dense_layers = config.get("mlp_only_layers")
    if isinstance(dense_layers, list) and number in dense_layers:
        return False
    step = config.optional_int(
        "decoder_sparse_step",
        "interleave_moe_layer_step",
        "moe_layer_freq",
        "expert_layer_period",
    )
    step = step or 1
    offset = config.optional_int("expert_layer_offset")
    if config.model_type in {"deepseek_v2", "deepseek_v3"}:
        return number % step == 0
    if offset is not None:
        return number % step == offset
    return (number + 1) % step == 0


def _mamba(config: ModelConfig, hidden: int) -> _Mixer:
    """Count Mamba 2 (arXiv 2405.21060) where it has heads, else Mamba 1."""
    kernel = config.positive_int("mamba_d_conv", "conv_kernel")
    state = config.positive_int("mamba_d_state", "ssm_state_size")
    heads = config.optional_int("mamba_n_heads", "mamba_num_heads")
    if heads:
        inner = heads * config.positive_int("mamba_d_head", "mamba_head_dim")
        groups = config.optional_int("mamba_n_groups", "n_groups") or 1
        grouped = 2 * groups * state
        convolved = inner + grouped
        projected_parameters = hidden * (2 * inner + grouped + heads)
    else:
        inner = config.positive_int("mamba_expand") * hidden
        time_step_rank = config.positive_int("mamba_dt_rank")
        convolved = inner
        projected_parameters = hidden * 2 * inner
        projected_parameters += inner * (time_step_rank + 2 * state)
        projected_parameters += time_step_rank * inner
    return _Mixer(
        linear_parameters=projected_parameters + inner * hidden,
        state_bytes=(
            _convolution_state_bytes(kernel, convolved)
            + inner * state * STATE_VALUE_BYTES
        ),
    )


def _convolution_state_bytes(kernel: int, channels: int) -> int:
    """Return the size of the last inputs of a causal convolution, all but the present one."""
    return (kernel - 1) * channels * CONVOLUTION_VALUE_BYTES


def _delta_net(config: ModelConfig) -> _Mixer:
    """Count a gated delta net (arXiv 2412.06464)."""
    key_heads = config.positive_int("linear_num_key_heads")
    value_heads = config.positive_int("linear_num_value_heads")
    key_dim = config.positive_int("linear_key_head_dim")
    value_dim = config.positive_int("linear_value_head_dim")
    keys = key_heads * key_dim
    values = value_heads * value_dim
    kernel = config.positive_int("linear_conv_kernel_dim")
    convolution_bytes = _convolution_state_bytes(kernel, 2 * keys + values)
    recurrent_bytes = value_heads * key_dim * value_dim * STATE_VALUE_BYTES
    return _Mixer(
        linear_parameters=sum(_delta_net_projections(config).values()),
        state_bytes=convolution_bytes + recurrent_bytes,
    )


def _delta_net_projections(config: ModelConfig) -> dict[str, int]:
    hidden = config.positive_int("hidden_size")
    value_heads = config.positive_int("linear_num_value_heads")
    keys = config.positive_int("linear_num_key_heads") * config.positive_int(
        "linear_key_head_dim"
    )
    values = value_heads * config.positive_int("linear_value_head_dim")
    return {
        "in_proj_qkv": hidden * (2 * keys + values),
        "in_proj_z": hidden * values,
        "in_proj_b": hidden * value_heads,
        "in_proj_a": hidden * value_heads,
        "out_proj": values * hidden,
    }


def _short_convolution(config: ModelConfig, hidden: int) -> _Mixer:
    """Count a short convolution (LFM2)."""
    width = config.optional_int("conv_dim") or hidden
    kernel = config.positive_int("conv_L_cache")
    return _Mixer(
        linear_parameters=hidden * 3 * width + width * hidden,
        state_bytes=kernel * width * CONVOLUTION_VALUE_BYTES,
    )
