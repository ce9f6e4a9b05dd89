"""The modules of a model with the number of their parameters, by its ``config.json``: what a quantization is said of.

The names are those of ``transformers`` (``model.layers.0.self_attn.q_proj``). All experts of a layer count as one module,
named after the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from tiers.sizing.architecture import architecture
from tiers.sizing.layers import DELTA_NET, layer_kinds, projections_of
from tiers.sizing.model_config import text_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tiers.sizing.layers import Layer
    from tiers.sizing.model_config import ModelConfig

FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


class ModuleKind(Enum):
    """What a module is: it decides whether a quantization of all linear layers reaches it."""

    LINEAR = "linear"
    ROUTER = "router"
    OUTPUT = "output"
    VISION = "vision"
    # Embeddings, norms and biases: nothing quantizes them.
    REST = "rest"


@dataclass(frozen=True, slots=True)
class Module:
    """A part of a model that has one number format.

    Attributes:
        name: As ``transformers`` names it.
        parameters: How many it has, with all other experts of its layer.
    """

    name: str
    parameters: int
    kind: ModuleKind = ModuleKind.LINEAR


def modules_of(config: Mapping[str, Any]) -> tuple[Module, ...]:
    """Return all modules of a model.

    Args:
        config: Its ``config.json``.

    Raises:
        PlanError: The configuration lacks a field, or has one that is not known here.
    """
    model = architecture(config)
    text = text_config(config)
    kinds = layer_kinds(text, len(model.layers))
    modules = [
        Module("model.embed_tokens", model.embedding_parameters, ModuleKind.REST),
        Module("model.norm", model.final_norm_parameters, ModuleKind.REST),
    ]
    if not model.is_output_tied:
        modules.append(Module("lm_head", model.output_parameters, ModuleKind.OUTPUT))
    if model.vision_parameters:
        modules.append(Module("visual", model.vision_parameters, ModuleKind.VISION))
    for number, (kind, layer) in enumerate(zip(kinds, model.layers, strict=True)):
        modules += _layer_modules(text, f"model.layers.{number}", kind, layer=layer)
    return tuple(modules)


def _layer_modules(
    config: ModelConfig, prefix: str, kind: str, layer: Layer
) -> Iterator[Module]:
    mixer_name = "linear_attn" if kind in DELTA_NET else "self_attn"
    projections = projections_of(config, kind)
    for name, parameters in projections.items():
        yield Module(f"{prefix}.{mixer_name}.{name}", parameters)
    # What is no projection of the mixer is the dense or shared part of the feed-forward layer.
    feed_forward = layer.linear_parameters - sum(projections.values())
    is_gemma = config.model_type.startswith("gemma4")
    dense_name = "mlp"
    if layer.experts and not is_gemma:
        dense_name = "mlp.shared_experts"
    if feed_forward:
        yield from _feed_forward(f"{prefix}.{dense_name}", feed_forward)
    router_parameters = 0
    if layer.experts:
        experts_name = "experts" if is_gemma else "mlp.experts"
        yield from _feed_forward(
            f"{prefix}.{experts_name}.0", layer.parameters_per_expert * layer.experts
        )
        router_name = "router" if is_gemma else _router_name(config)
        router_parameters = layer.router_parameters
        yield Module(f"{prefix}.{router_name}", router_parameters, ModuleKind.ROUTER)
    yield Module(
        f"{prefix}.norms", layer.bf16_parameters - router_parameters, ModuleKind.REST
    )


def _router_name(config: ModelConfig) -> str:
    return "mlp.router" if config.model_type == "gpt_oss" else "mlp.gate"


def _feed_forward(prefix: str, parameters: int) -> Iterator[Module]:
    """Yield the three matrices of a gated feed-forward layer, which are of one size."""
    for number, name in enumerate(FEED_FORWARD):
        share = parameters // len(FEED_FORWARD)
        if number == 0:
            share += parameters % len(FEED_FORWARD)
        yield Module(f"{prefix}.{name}", share)
