"""Which module of a checkpoint has which number format, as its configuration says.

Known are compressed-tensors (llm-compressor), NVIDIA's ModelOpt, AMD's Quark, AutoRound, AWQ, GPTQ, bitsandbytes, and the
formats that models are published in: FP8 by blocks (DeepSeek, Qwen, GLM) and MXFP4 (gpt-oss). Sources are vLLM 0.32
(``vllm/model_executor/layers/quantization``) and compressed-tensors 0.19. A method that is not known is ``unknown``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tiers.checkpoints.config_files import as_mapping, as_texts
from tiers.checkpoints.module_names import (
    REGULAR_EXPRESSION,
    NamePatterns,
    canonical_name,
    parents_of,
)
from tiers.checkpoints.modules import ModuleKind
from tiers.formats import number_format
from tiers.spec import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiers.checkpoints.modules import Module

FOUR_BITS = 4
EIGHT_BITS = 8
SIXTEEN_BITS = 16
LINEAR_TARGET = "Linear"
UNKNOWN_WEIGHT_BYTES = 2.0
MX_GROUP = 32
# One scale is of a tensor, a channel or a block of 128 x 128.
_WITHOUT_GROUPS = {"fp8", "fp8-block", "fp8-w8a16"}
_AUTO_ROUND = {"auto-round", "inc"}
# Methods of integer weights, by what their formats' names begin with.
_INTEGER_METHODS = {
    **dict.fromkeys(("awq", "auto_awq", "awq_marlin"), "awq-"),
    **dict.fromkeys(("gptq", "auto_gptq", "gptq_marlin"), "gptq-"),
    **dict.fromkeys(_AUTO_ROUND, ""),
}
# Methods that say all by their name; vLLM's.
_METHODS = {
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "deepseek_v4_fp8": "fp8-block",
    "mxfp8": "mxfp8",
    "mxfp4": "mxfp4",
    "gpt_oss_mxfp4": "mxfp4",
}
# ``quant_algo`` of ModelOpt and TensorRT-LLM (tensorrt_llm/quantization/mode.py; vllm .../quantization/modelopt.py). vLLM
# rounds activations for FP8_PB_WO, whose name says "weight only".
_ALGORITHMS = {
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "FP8_PB_WO": "fp8-block",
    "FP8_BLOCK_SCALES": "fp8-block",
    "MXFP8": "mxfp8",
    "NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4",
    "W4A16_NVFP4": "nvfp4-w4a16",
    "W4A8_NVFP4_FP8": "nvfp4-w4a8",
    "MXFP4": "mxfp4-w4a4",
    "W4A16_MXFP4": "mxfp4",
    "W4A8_MXFP4_FP8": "mxfp4-w4a8",
    "W4A8_MXFP4_MXFP8": "mxfp4-w4a8",
    "W4A16": "int4",
    "W4A16_AWQ": "awq-int4",
    "W4A8_AWQ": "awq-int4-w4a8",
    "W4A16_GPTQ": "gptq-int4",
    "W8A16": "int8",
    "W8A16_GPTQ": "gptq-int8",
    "W8A8_SQ_PER_CHANNEL": "int8-w8a8",
    "W8A8_SQ_PER_TENSOR_PLUGIN": "int8-w8a8",
    "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN": "int8-w8a8",
}
# 4-bit floats of compressed-tensors, by what a group's ``format`` begins with, and by the bits of activations.
_FLOAT4 = {
    "nvfp4": {4: "nvfp4", 8: "nvfp4-w4a8", 16: "nvfp4-w4a16"},
    "mxfp4": {4: "mxfp4-w4a4", 8: "mxfp4-w4a8", 16: "mxfp4"},
}
_KV_CACHES = {"FP8": "fp8", "NVFP4": "nvfp4", "INT8": "int8"}


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """How the weights of a module are stored.

    Attributes:
        name: Of a ``NumberFormat``, or ``unknown``.
        bytes_per_weight: Scales and zero points included, with the groups that the checkpoint has.
    """

    name: str
    bytes_per_weight: float


@dataclass(frozen=True, slots=True)
class QuantizationRules:
    """What a configuration says of the modules of a checkpoint.

    Attributes:
        unquantized: The format of what no rule reaches.
        kept: The format of what ``kept_patterns`` name: that, or FP8 where FP8 was quantized further.
        for_linear: Of all linear layers that no other rule reaches; None: of none.
        for_output: Whether ``for_linear`` reaches the output layer.
        by_name: Of single modules, by their names in one spelling.
        by_pattern: Of groups of modules.
        kept_texts: The patterns of modules left alone, as they are written.
    """

    unquantized: StoredFormat
    kept: StoredFormat
    for_linear: StoredFormat | None = None
    for_output: bool = False
    by_name: Mapping[str, StoredFormat] = field(default_factory=dict)
    by_pattern: tuple[tuple[NamePatterns, StoredFormat], ...] = ()
    kept_texts: tuple[str, ...] = ()
    kept_patterns: NamePatterns = field(default_factory=lambda: NamePatterns(()))

    @property
    def stored_by_name(self) -> Mapping[str, StoredFormat]:
        """Return all formats that a rule gives, by their names; the unquantized one is left out."""
        given = [*self.by_name.values(), *(stored for _, stored in self.by_pattern)]
        if self.for_linear is not None:
            given.append(self.for_linear)
        return {stored.name: stored for stored in given}

    def format_of(self, module: Module) -> StoredFormat:
        """Return the format of a module."""
        if module.kind is ModuleKind.REST:
            return self.unquantized
        canonical = canonical_name(module.name)
        for parent in parents_of(canonical):
            if parent in self.by_name:
                return self.by_name[parent]
        if self.kept_patterns.matches(module.name):
            is_linear = module.kind is ModuleKind.LINEAR
            return self.kept if is_linear else self.unquantized
        for patterns, stored in self.by_pattern:
            if patterns.matches(module.name):
                return stored
        is_reached = module.kind is ModuleKind.LINEAR or (
            self.for_output and module.kind is ModuleKind.OUTPUT
        )
        if self.for_linear is not None and is_reached:
            return self.for_linear
        return self.unquantized


def rules_of(
    quantization: Mapping[str, Any], config: Mapping[str, Any], recipe: str
) -> QuantizationRules:
    """Read what a configuration says of a checkpoint's quantization.

    Args:
        quantization: The ``quantization_config``; empty: the checkpoint is not quantized.
        config: The whole ``config.json``.
        recipe: The text of llm-compressor's ``recipe.yaml``.
    """
    unquantized = _stored(unquantized_format(config))
    if not quantization:
        return QuantizationRules(unquantized, kept=unquantized)
    kept_texts = _kept_texts(quantization)
    rules = QuantizationRules(
        unquantized,
        kept=unquantized,
        kept_texts=kept_texts,
        kept_patterns=NamePatterns(kept_texts),
    )
    if quantization.get("quantized_layers"):
        return _with_quantized_layers(rules, quantization)
    if quantization.get("quant_method") == "compressed-tensors":
        return _with_groups(rules, quantization, recipe)
    if quantization.get("quant_method") == "quark":
        return _with_quark(rules, quantization)
    rules = replace(
        rules,
        for_linear=_format_of_all(quantization),
        for_output=quantization.get("lm_head") is True,
        by_pattern=_other_bits(quantization),
    )
    if config.get("expert_dtype") == "fp4":
        # DeepSeek V4: its experts are MXFP4, the rest is what the method says (vllm/models/deepseek_v4).
        experts = NamePatterns((f"{REGULAR_EXPRESSION}.*\\.experts\\.",))
        return replace(rules, by_pattern=((experts, _stored("mxfp4-w4a8")),))
    return rules


def unquantized_format(config: Mapping[str, Any]) -> str:
    """Return the format that a model computes in, as its configuration says; else ``bf16``, as most of today's models."""
    return {"float16": "fp16", "half": "fp16", "float32": "fp32"}.get(
        configured_dtype(config), "bf16"
    )


def configured_dtype(config: Mapping[str, Any]) -> str:
    """Return the number format that a configuration names; empty: none."""
    for source in (config, as_mapping(config.get("text_config"))):
        for name in ("dtype", "torch_dtype"):
            if source.get(name):
                return str(source[name]).removeprefix("torch.")
    return ""


def kv_cache_of(quantization: Mapping[str, Any]) -> str | None:
    """Return the format of the KV cache that a checkpoint demands, as vLLM names it; None: it demands none."""
    scheme = quantization.get("kv_cache_scheme") or quantization.get(
        "kv_cache_quant_algo"
    )
    if isinstance(scheme, str):
        return _KV_CACHES.get(scheme.upper())
    bits = as_mapping(scheme).get("num_bits")
    kind = as_mapping(scheme).get("type")
    if kind == "float":
        return {EIGHT_BITS: "fp8", FOUR_BITS: "nvfp4"}.get(_whole(bits))
    if kind == "int" and bits == EIGHT_BITS:
        return "int8"
    return None


def quantizer_of(quantization: Mapping[str, Any], recipe: str) -> str | None:
    """Return the program that quantized a checkpoint, with its version where that is told; None: nothing is told."""
    producer = as_mapping(quantization.get("producer"))
    if producer.get("name"):
        return " ".join(
            str(producer[key]) for key in ("name", "version") if producer.get(key)
        )
    quantizers = as_mapping(quantization.get("meta")).get("quantizer")
    for quantizer in (
        [quantizers] if isinstance(quantizers, str) else as_texts(quantizers)
    ):
        return quantizer.replace(":", " ")
    method = str(quantization.get("quant_method", "")).lower()
    if method == "compressed-tensors" and recipe:
        return "llm-compressor"
    if quantization.get("autoround_version"):
        return f"auto-round {quantization['autoround_version']}"
    told_by_method = {"quark": "quark", "bitsandbytes": "bitsandbytes"}
    if method in _AUTO_ROUND:
        return "auto-round"
    return told_by_method.get(method)


def calibration_of(recipe: str) -> str:
    """Return how integer weights were found, as llm-compressor's own record says; empty: there is none."""
    if "AWQModifier" in recipe:
        return "awq-"
    if "GPTQModifier" in recipe:
        return "gptq-"
    return ""


def _kept_texts(quantization: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the patterns of the modules that a quantization leaves alone."""
    kept: list[str] = []
    for name in (
        "ignore",
        "exclude_modules",
        "modules_to_not_convert",
        "exclude",
        "llm_int8_skip_modules",
    ):
        kept += as_texts(quantization.get(name))
    # GPTQModel's: modules by a regular expression, which are not quantized if it begins with "-:".
    for pattern in as_mapping(quantization.get("dynamic")):
        if pattern.startswith("-:"):
            kept.append(REGULAR_EXPRESSION + pattern.removeprefix("-:"))
    return tuple(dict.fromkeys(kept))


def _other_bits(
    quantization: Mapping[str, Any],
) -> tuple[tuple[NamePatterns, StoredFormat], ...]:
    """Return GPTQModel's modules of another number of bits than the rest."""
    by_pattern = []
    for pattern, entry in as_mapping(quantization.get("dynamic")).items():
        if pattern.startswith("-:") or not as_mapping(entry).get("bits"):
            continue
        expression = REGULAR_EXPRESSION + pattern.removeprefix("+:")
        stored = _format_of_all({**quantization, **entry})
        by_pattern.append((NamePatterns((expression,)), stored))
    return tuple(by_pattern)


def _with_quantized_layers(
    rules: QuantizationRules, quantization: Mapping[str, Any]
) -> QuantizationRules:
    """Add the formats of single layers, as ModelOpt's ``MIXED_PRECISION`` lists them."""
    by_name = {}
    for name, entry in as_mapping(quantization.get("quantized_layers")).items():
        stored = _format_of_all(as_mapping(entry))
        canonical = canonical_name(name)
        by_name[canonical] = stored
        # An entry of one matrix of an expert is of all experts of the layer.
        experts, separator, _ = canonical.partition(".experts.")
        if separator:
            by_name.setdefault(f"{experts}.experts", stored)
    if quantization.get("quant_method") != "fp8":
        return replace(rules, by_name=by_name)
    # What was FP8 before, and is not quantized further, still is (NVIDIA/TensorRT-LLM, pull request 16276).
    base = _fp8(quantization)
    return replace(rules, by_name=by_name, for_linear=base, kept=base)


def _with_groups(
    rules: QuantizationRules, quantization: Mapping[str, Any], recipe: str
) -> QuantizationRules:
    """Add the formats of compressed-tensors' groups."""
    for_linear = None
    by_pattern = []
    for group in as_mapping(quantization.get("config_groups")).values():
        weights = as_mapping(as_mapping(group).get("weights"))
        if not weights:
            # It quantizes attention itself, or the KV cache.
            continue
        packing = str(group.get("format") or quantization.get("format"))
        stored = _format_of_group(group, packing, calibration_of(recipe))
        targets = as_texts(group.get("targets")) or (LINEAR_TARGET,)
        if LINEAR_TARGET in targets and for_linear is None:
            for_linear = stored
        else:
            by_pattern.append((NamePatterns(targets), stored))
    if for_linear is None and not by_pattern:
        for_linear = _stored(UNKNOWN)
    return replace(rules, for_linear=for_linear, by_pattern=tuple(by_pattern))


def _format_of_group(
    group: Mapping[str, Any], packing: str, calibration: str
) -> StoredFormat:
    weights = as_mapping(group.get("weights"))
    activations = as_mapping(group.get("input_activations"))
    kind = weights.get("type")
    bits = _whole(weights.get("num_bits"))
    activation_bits = _whole(activations.get("num_bits")) or SIXTEEN_BITS
    group_size = _whole(weights.get("group_size"))
    has_zero_points = weights.get("symmetric") is False
    if kind == "int" and bits:
        name = _integers(bits, activation_bits, calibration)
    elif kind == "float" and bits == FOUR_BITS:
        name = _FLOAT4.get(packing[:5], {}).get(activation_bits, "fp4")
    elif kind == "float" and bits == EIGHT_BITS:
        name = _floats_of_8_bits(weights, packing, activation_bits)
    elif kind == "float" and bits:
        name = f"fp{bits}"
    else:
        name = UNKNOWN
    return _stored(name, group_size, has_zero_points=has_zero_points)


def _integers(bits: int, activation_bits: int, calibration: str) -> str:
    if activation_bits == SIXTEEN_BITS:
        return f"{calibration}int{bits}"
    computed = f"w{bits}a{activation_bits}"
    if bits == EIGHT_BITS:
        return f"int8-{computed}"
    return f"{calibration}int{bits}-{computed}"


def _floats_of_8_bits(
    weights: Mapping[str, Any], packing: str, activation_bits: int
) -> str:
    if packing.startswith("mxfp8") or weights.get("group_size") == MX_GROUP:
        return "mxfp8"
    if activation_bits == SIXTEEN_BITS:
        return "fp8-w8a16"
    if weights.get("strategy") == "block" or weights.get("block_structure"):
        return "fp8-block"
    return "fp8"


def _with_quark(
    rules: QuantizationRules, quantization: Mapping[str, Any]
) -> QuantizationRules:
    """Add the formats of AMD's Quark: one of all layers, and those of patterns."""
    by_pattern = tuple(
        (NamePatterns((pattern,)), _format_of_quark(as_mapping(entry)))
        for pattern, entry in as_mapping(quantization.get("layer_quant_config")).items()
    )
    of_all = as_mapping(quantization.get("global_quant_config"))
    return replace(rules, for_linear=_format_of_quark(of_all), by_pattern=by_pattern)


def _format_of_quark(entry: Mapping[str, Any]) -> StoredFormat:
    weights = as_mapping(entry.get("weight"))
    inputs = as_mapping(entry.get("input_tensors"))
    input_bits = _bits_of_quark(inputs) or SIXTEEN_BITS
    dtype = str(weights.get("dtype"))
    bits = _bits_of_quark(weights)
    group_size = _whole(weights.get("group_size"))
    if dtype == "fp4":
        family = "mxfp4" if group_size == MX_GROUP else "nvfp4"
        name = _FLOAT4[family].get(input_bits, "fp4")
    elif dtype.startswith("fp8"):
        name = "fp8" if input_bits < SIXTEEN_BITS else "fp8-w8a16"
    elif dtype.startswith(("int", "uint")) and bits:
        name = _integers(bits, input_bits, calibration="")
    else:
        name = UNKNOWN
    return _stored(name, group_size)


def _bits_of_quark(tensor: Mapping[str, Any]) -> int:
    """Return the bits of a tensor as Quark names its type: ``fp8_e4m3`` has 8; 0: it is not quantized."""
    digits = str(tensor.get("dtype", "")).lstrip("uintfp").partition("_")[0]
    return int(digits) if digits.isdecimal() else 0


def _format_of_all(quantization: Mapping[str, Any]) -> StoredFormat:
    """Return the one format of a checkpoint, or of one of ModelOpt's layers, whose method is its format."""
    method = str(quantization.get("quant_method", "")).lower()
    bits = _whole(quantization.get("bits") or quantization.get("w_bit"))
    group_size = _whole(
        quantization.get("group_size") or quantization.get("q_group_size")
    )
    if method in _INTEGER_METHODS and bits:
        is_asymmetric = (
            quantization.get("zero_point") is True or quantization.get("sym") is False
        )
        name = f"{_INTEGER_METHODS[method]}int{bits}"
        return _stored(name, group_size, has_zero_points=is_asymmetric)
    if method == "bitsandbytes":
        return _bitsandbytes(quantization)
    if method == "fp8":
        return _fp8(quantization)
    if method in _METHODS:
        return _stored(_METHODS[method])
    algorithm = str(quantization.get("quant_algo")).upper()
    return _stored(_ALGORITHMS.get(algorithm, UNKNOWN), group_size)


def _fp8(quantization: Mapping[str, Any]) -> StoredFormat:
    match quantization.get("weight_block_size"):
        case [1, int(width)] if width == MX_GROUP:
            return _stored("mxfp8")
        case [int(), int()]:
            return _stored("fp8-block")
    return _stored("fp8")


def _bitsandbytes(quantization: Mapping[str, Any]) -> StoredFormat:
    if quantization.get("load_in_4bit"):
        return _stored(str(quantization.get("bnb_4bit_quant_type", "fp4")))
    if quantization.get("load_in_8bit"):
        return _stored("int8")
    return _stored(UNKNOWN)


def _stored(
    name: str, group_size: int = 0, *, has_zero_points: bool = False
) -> StoredFormat:
    """Return a format with the size of a weight, by the groups that a configuration tells, else by the usual ones."""
    known = number_format(name)
    if known is None:
        return StoredFormat(UNKNOWN, UNKNOWN_WEIGHT_BYTES)
    has_groups = group_size > 0 and known.is_quantized
    if not has_groups or name in _WITHOUT_GROUPS:
        return StoredFormat(name, known.bytes_per_weight)
    size = known.with_groups(group_size, has_zero_points=has_zero_points)
    return StoredFormat(name, size)


def _whole(value: object) -> int:
    """Return a whole number; 0: the value is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        return 0
    return value
