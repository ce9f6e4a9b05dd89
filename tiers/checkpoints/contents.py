"""What a checkpoint holds: its number formats by their share of the parameters, its KV cache, and who quantized it.

Where the weights are there, their own headers are counted. Else the parameters are counted by the architecture that
``config.json`` describes, and the formats are those that it says of each module.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tiers.checkpoints.config_files import as_mapping, read_json, read_text
from tiers.checkpoints.module_names import canonical_name, without_layer_numbers
from tiers.checkpoints.modules import Module, ModuleKind, modules_of
from tiers.checkpoints.quantization_rules import (
    StoredFormat,
    configured_dtype,
    kv_cache_of,
    quantizer_of,
    rules_of,
)
from tiers.checkpoints.weight_files import Storage, stored_tensors
from tiers.errors import PlanError
from tiers.formats import FORMATS, number_format
from tiers.kv_precision import with_kv_cache
from tiers.spec import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from tiers.checkpoints.quantization_rules import QuantizationRules
    from tiers.checkpoints.weight_files import StoredTensor

# A format with a smaller share of the parameters is named only if it is the lowest.
SHARE_WORTH_NAMING = 0.01
BITS_OF_WORD = 32
VALUES_OF_BYTE = 2  # A byte holds two 4-bit floats.
_VISION = ("visual", "vision_tower", "vision_model", "embed_vision")
_ROUTERS = (".gate", ".router")


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """What a checkpoint holds.

    Attributes:
        formats: Share of the parameters, 0..1, by the name of a ``NumberFormat`` or ``unknown``. A format that the
            configuration names for modules that are not known here has the share 0. Empty: nothing is told.
        kv_cache: The format that the checkpoint demands for the KV cache, so that vLLM takes it if no argument says another;
            None: it demands none.
        quantized_by: The program, with its version where it is told; None: nothing is told.
        kept_in_16_bits: Patterns of modules that the quantization left alone, as they are written, ``*`` for each layer.
        is_exact: Whether the files of the weights were read, so that the shares are those of the checkpoint.
        parameters: How many there are; None: not known.
        weight_bytes: Their size in memory, scales included; None: not known.
    """

    formats: Mapping[str, float]
    kv_cache: str | None = None
    quantized_by: str | None = None
    kept_in_16_bits: tuple[str, ...] = ()
    is_exact: bool = False
    parameters: int | None = None
    weight_bytes: int | None = None

    @property
    def is_quantized(self) -> bool:
        """Tell whether any weights have fewer than 16 bits, or a format that is not known."""
        return any(_is_quantized(name) for name in self.formats)

    @property
    def precision(self) -> str:
        """Return the formats as one text: those worth naming, without what a quantization left in 16 bits.

        The lowest format is always named: it decides who may be served with it.
        """
        if not self.formats:
            return UNKNOWN
        names = [name for name in self.formats if _is_quantized(name)]
        if not names:
            names = [max(self.formats, key=lambda name: self.formats[name])]
        known = [found for name in names if (found := number_format(name))]
        fewest_bits = min((found.weight_bits for found in known), default=0)
        shown = {
            name
            for name in names
            if name == UNKNOWN
            or self.formats[name] >= SHARE_WORTH_NAMING
            or _bits(name) == fewest_bits
        }
        return with_kv_cache("+".join(sorted(shown)), self.kv_cache)


@dataclass(slots=True)
class _Count:
    """Parameters and bytes by format, while they are counted."""

    parameters: Counter[str] = field(default_factory=Counter)
    total_bytes: float = 0.0

    def add(self, stored: StoredFormat, parameters: int) -> None:
        self.parameters[stored.name] += parameters
        self.total_bytes += parameters * stored.bytes_per_weight


def read_contents(folder: Path) -> CheckpointContents:
    """Read what a checkpoint holds.

    Args:
        folder: The checkpoint. What is not there, or cannot be read, is not known.
    """
    config = read_json(folder / "config.json")
    hf_quant = read_json(folder / "hf_quant_config.json")
    recipe = read_text(folder / "recipe.yaml")
    if not config:
        return CheckpointContents({})
    quantization = _quantization(config, hf_quant)
    rules = rules_of(quantization, config, recipe)
    tensors = stored_tensors(folder)
    if not tensors:
        return contents_of(config, hf_quant, recipe)
    count = _Count()
    for tensor in tensors:
        if quantization:
            stored, parameters = _format_of_tensor(tensor, rules)
            count.add(stored, parameters)
        else:
            # An engine casts whatever the files hold.
            count.add(rules.unquantized, tensor.values)
    return _contents(count, rules, quantization, recipe, is_exact=True)


def contents_of(
    config: Mapping[str, Any],
    hf_quant: Mapping[str, Any] | None = None,
    recipe: str = "",
) -> CheckpointContents:
    """Return what a checkpoint holds, as its small files say.

    Args:
        config: Its ``config.json``.
        hf_quant: Its ``hf_quant_config.json``, as ModelOpt writes it; None: there is none.
        recipe: The text of its ``recipe.yaml``, as llm-compressor writes it; empty: there is none.
    """
    quantization = _quantization(config, as_mapping(hf_quant))
    if not quantization and not configured_dtype(config):
        return CheckpointContents({})
    rules = rules_of(quantization, config, recipe)
    count = _Count()
    try:
        modules: Iterable[Module] = modules_of(config)
    except PlanError:
        modules = ()
    for module in modules:
        count.add(rules.format_of(module), module.parameters)
    return _contents(count, rules, quantization, recipe, is_exact=False)


def _contents(
    count: _Count,
    rules: QuantizationRules,
    quantization: Mapping[str, Any],
    recipe: str,
    *,
    is_exact: bool,
) -> CheckpointContents:
    total = count.parameters.total()
    shares = {name: counted / total for name, counted in count.parameters.items()}
    if not is_exact:
        shares = _with_named_formats(shares, rules)
    weight_bytes = None
    if total and UNKNOWN not in shares:
        weight_bytes = round(count.total_bytes)
    return CheckpointContents(
        formats=dict(sorted(shares.items())),
        kv_cache=kv_cache_of(quantization),
        quantized_by=quantizer_of(quantization, recipe),
        kept_in_16_bits=without_layer_numbers(rules.kept_texts),
        is_exact=is_exact,
        parameters=total or None,
        weight_bytes=weight_bytes,
    )


def _with_named_formats(
    shares: dict[str, float], rules: QuantizationRules
) -> dict[str, float]:
    """Return shares that have every format that the configuration names.

    If none of its modules is known here, the formats share the parameters evenly.
    """
    named = tuple(rules.stored_by_name)
    if not named:
        return shares or {rules.unquantized.name: 1.0}
    if not any(name in shares for name in named):
        return dict.fromkeys(named, 1 / len(named))
    return {**dict.fromkeys(named, 0.0), **shares}


def _quantization(
    config: Mapping[str, Any], hf_quant: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return how a checkpoint is quantized; empty: it is not.

    The configuration counts before ModelOpt's own file, as in vLLM: ModelOpt up to 0.29 writes only that one.
    """
    for source in (config, as_mapping(config.get("text_config"))):
        quantization = as_mapping(
            source.get("quantization_config") or source.get("compression_config")
        )
        if quantization:
            return quantization
    quantization = as_mapping(hf_quant.get("quantization"))
    if not quantization:
        return {}
    return {"producer": hf_quant.get("producer"), **quantization}


def _format_of_tensor(
    tensor: StoredTensor, rules: QuantizationRules
) -> tuple[StoredFormat, int]:
    """Return the format of a tensor, and how many parameters it holds."""
    said = rules.format_of(Module(tensor.module, tensor.values, _kind_of(tensor)))
    match tensor.storage:
        case Storage.UNQUANTIZED:
            return rules.unquantized, tensor.values
        case Storage.FLOAT_32:
            return _usual("fp32"), tensor.values
        case Storage.FLOAT_8:
            return _of_bits(said, rules, "fp8", "mxfp8"), tensor.values
        case Storage.INT_8:
            return _of_bits(said, rules, "int8", "int8"), tensor.values
        case Storage.NVFP4:
            stored = _of_bits(said, rules, "nvfp4", "nvfp4")
        case Storage.MXFP4:
            stored = _of_bits(said, rules, "mxfp4", "mxfp4")
        case Storage.BITSANDBYTES:
            stored = _of_bits(said, rules, "nf4", "fp4")
        case Storage.PACKED_INT:
            stored = _packed(said, rules)
            return stored, tensor.values * BITS_OF_WORD // (_bits(stored.name) or 4)
    return stored, tensor.values * VALUES_OF_BYTE


def _of_bits(
    said: StoredFormat, rules: QuantizationRules, *families: str
) -> StoredFormat:
    """Return the format that the configuration says of a module if it can be that of its weights; else one that can.

    Args:
        said: What the configuration says of the module.
        rules: What it says of all.
        families: What the names of possible formats begin with; the first is taken if the configuration has none.
    """
    if said.name.startswith(families):
        return said
    for name, stored in rules.stored_by_name.items():
        if name.startswith(families):
            return stored
    return _usual(families[0])


def _packed(said: StoredFormat, rules: QuantizationRules) -> StoredFormat:
    """Return the format of integers in words of 32 bits, whose number of bits only the configuration tells."""
    for stored in (said, *rules.stored_by_name.values()):
        if "int" in stored.name:
            return stored
    return _usual("int4")


def _kind_of(tensor: StoredTensor) -> ModuleKind:
    """Return the kind of a tensor's module, by its name."""
    canonical = canonical_name(tensor.module)
    if canonical == "lm_head":
        return ModuleKind.OUTPUT
    if any(part in canonical.split(".") for part in _VISION):
        return ModuleKind.VISION
    if canonical.endswith(_ROUTERS):
        return ModuleKind.ROUTER
    return ModuleKind.LINEAR


def _usual(name: str) -> StoredFormat:
    return StoredFormat(name, FORMATS[name].bytes_per_weight)


def _is_quantized(name: str) -> bool:
    known = number_format(name)
    return known is None or known.is_quantized


def _bits(name: str) -> int:
    known = number_format(name)
    return 0 if known is None else known.weight_bits
