"""How fast an engine can be on a GPU: the longer of reading and computing (roofline; Williams et al., CACM 52(4), 2009).

In a decode step the linear layers read the weights once and compute two operations a weight and token; attention, between
them, reads the KV cache of every sequence. A prompt is computed in chunks, so near the processor's rate. Attention's own
operations are left out: of an 8B model, 3 % at 1,000 tokens.

Assumptions: 80 % of the memory's bandwidth is reached, and of the dense peak 60 % in BF16 and 40 % in FP8. Kernels unpack
4-bit weights to BF16: Marlin 0.6 to 0.7 times as fast as BF16's from 512 tokens a step on (vllm-project/vllm, pull request
2497), Machete at BF16's rate, but with 50 µs more a layer. 1 ms a step goes to scheduling, sampling and gaps between
kernels. With tensor parallelism every layer adds two all-reduces of 15 µs. The figures are round ones near those that fit
``benchmarks/roofline.py`` best, which has speeds measured on an H200, and published ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiers.spec import Precision

if TYPE_CHECKING:
    from tiers.sizing.architecture import Architecture
    from tiers.sizing.hardware import GpuKind

BANDWIDTH_REACHED = 0.8
PEAK_REACHED = {Precision.BF16: 0.6, Precision.FP8: 0.4, Precision.AWQ_INT4: 0.4}
OVERHEAD_MS = 1.0
MACHETE_LAYER_MS = 0.05
ALL_REDUCE_MS = 0.015
ALL_REDUCES = 2  # a layer: after attention, and after the feed-forward part
CHUNK = 8192  # prompt tokens a step, vLLM's default on a GPU
# Of a weight in a linear layer. Published AWQ checkpoints have groups of 128: a scale of 16 bits and a zero point of 4.
BYTES_PER_WEIGHT = {
    Precision.BF16: 2.0,
    Precision.FP8: 1.0,
    Precision.AWQ_INT4: (4 + (16 + 4) / 128) / 8,
}


@dataclass(frozen=True, slots=True)
class Roofline:
    """The speed of one engine.

    Attributes:
        gpus: Of tensor parallelism.
        context: Mean tokens of a sequence while it is decoded.
        kv_bytes: Of a value in the KV cache.
    """

    model: Architecture
    gpu: GpuKind
    precision: Precision
    gpus: int = 1
    context: int = 1000
    kv_bytes: int = 2

    @property
    def prefill_ms_per_token(self) -> float:
        """Return the time of each prompt token, in milliseconds."""
        compute = 2 * self.model.active / (self._flops * self.gpus)
        read = self._weights(CHUNK) / self._bandwidth / CHUNK
        return 1000 * max(compute, read) + self._fixed_ms / CHUNK

    def step_ms(self, sequences: int) -> float:
        """Return the time of one decode step of a batch, in milliseconds."""
        kept = (
            self.model.sequence_bytes(self.context, self.kv_bytes, self.gpus)
            * sequences
        )
        return self._step_ms(sequences, sequences, kept)

    def prompt_ms(self, tokens: int, sequences: int, /) -> float:
        """Return by how much a prompt lengthens the decode step of a batch that it is computed in, in milliseconds.

        Computing it overlaps with reading the weights, so it costs less than alone.
        """
        kept = (
            self.model.sequence_bytes(self.context, self.kv_bytes, self.gpus)
            * sequences
        )
        return self._step_ms(sequences + tokens, sequences + 1, kept) - self._step_ms(
            sequences, sequences, kept
        )

    def mixed_ms(self, tokens: int, sampled: int, kept: int) -> float:
        """Return the time of a step that computes prompts too, in milliseconds.

        Args:
            tokens: Computed: one for each decoded sequence, and prompt tokens.
            sampled: Sequences that get a token.
            kept: Tokens in the KV cache of the step's sequences.
        """
        return self._step_ms(
            tokens,
            sampled,
            self.model.kv_bytes_per_token(self.kv_bytes) / self.gpus * kept,
        )

    def _step_ms(self, tokens: int, sampled: int, kept_bytes: float) -> float:
        head = 2 * self.model.head * sampled / (self._bf16_flops * self.gpus)
        compute = 2 * self.model.active * tokens / (self._flops * self.gpus) + head
        linear = max(self._weights(tokens) / self._bandwidth, compute)
        return (
            1000 * (linear + kept_bytes / (self._bandwidth / self.gpus))
            + self._fixed_ms
        )

    @property
    def _bandwidth(self) -> float:
        return self.gpu.bandwidth_gb_s * 1e9 * BANDWIDTH_REACHED * self.gpus

    @property
    def _bf16_flops(self) -> float:
        return self.gpu.bf16_tflops * 1e12 * PEAK_REACHED[Precision.BF16]

    @property
    def _flops(self) -> float:
        if self.precision is Precision.FP8 and self.gpu.fp8_tflops is not None:
            return self.gpu.fp8_tflops * 1e12 * PEAK_REACHED[Precision.FP8]
        if self.precision is Precision.BF16 or self._machete:
            return self._bf16_flops
        return self.gpu.bf16_tflops * 1e12 * PEAK_REACHED[Precision.AWQ_INT4]

    @property
    def _fixed_ms(self) -> float:
        """Of a step, however many tokens it computes."""
        layer = ALL_REDUCE_MS * ALL_REDUCES if self.gpus > 1 else 0.0
        layer += MACHETE_LAYER_MS if self._machete else 0.0
        return OVERHEAD_MS + layer * len(self.model.layers)

    @property
    def _machete(self) -> bool:
        # vLLM computes those with Marlin
        experts = any(layer.experts for layer in self.model.layers)
        return self.gpu.machete and self.precision is Precision.AWQ_INT4 and not experts

    def _weights(self, tokens: int) -> float:
        return (
            self.model.read(tokens) * BYTES_PER_WEIGHT[self.precision]
            + 2 * self.model.head
        )
