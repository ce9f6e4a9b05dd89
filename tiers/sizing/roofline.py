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

from tiers.sizing.architecture import BF16_BYTES
from tiers.spec import Precision

if TYPE_CHECKING:
    from tiers.sizing.architecture import Architecture
    from tiers.sizing.hardware import GpuKind

BANDWIDTH_REACHED = 0.8
PEAK_REACHED = {Precision.BF16: 0.6, Precision.FP8: 0.4, Precision.AWQ_INT4: 0.4}
STEP_OVERHEAD_MS = 1.0
MACHETE_LAYER_MS = 0.05
ALL_REDUCE_MS = 0.015
ALL_REDUCES_PER_LAYER = 2  # after attention, and after the feed-forward part
PREFILL_CHUNK_TOKENS = 8192  # vLLM's default on a GPU
FLOP_PER_PARAMETER = 2  # a multiplication and an addition, for each token
# The size of a weight in a linear layer. Published AWQ checkpoints have groups of 128 weights, each group with a scale of
# 16 bits and a zero point of 4 bits.
BYTES_PER_WEIGHT = {
    Precision.BF16: 2.0,
    Precision.FP8: 1.0,
    Precision.AWQ_INT4: (4 + (16 + 4) / 128) / 8,
}


@dataclass(frozen=True, slots=True)
class Roofline:
    """The speed of one engine.

    Attributes:
        gpus: Those of tensor parallelism.
        context_tokens: Mean length of a sequence while it is decoded.
        kv_bytes_per_value: 2 in BF16, 1 in FP8.
    """

    model: Architecture
    gpu: GpuKind
    precision: Precision
    gpus: int = 1
    context_tokens: int = 1000
    kv_bytes_per_value: int = 2

    @property
    def prefill_ms_per_token(self) -> float:
        """Return the time of each prompt token, in milliseconds."""
        flop = FLOP_PER_PARAMETER * self.model.active_parameters
        compute_s = flop / (self._flop_per_s * self.gpus)
        chunk_read_s = (
            self._weight_bytes_read(PREFILL_CHUNK_TOKENS) / self._read_bytes_per_s
        )
        read_s = chunk_read_s / PREFILL_CHUNK_TOKENS
        overhead_ms = self._step_overhead_ms / PREFILL_CHUNK_TOKENS
        return 1000 * max(compute_s, read_s) + overhead_ms

    def step_ms(self, sequences: int) -> float:
        """Return the time of one decode step of a batch, in milliseconds."""
        kv_bytes = self._sequence_bytes * sequences
        return self._step_ms(sequences, sequences, kv_bytes)

    def prompt_ms(self, tokens: int, sequences: int, /) -> float:
        """Return by how much a prompt lengthens the decode step of a batch that it is computed in, in milliseconds.

        Computing it overlaps with reading the weights, so it costs less than alone.
        """
        kv_bytes = self._sequence_bytes * sequences
        with_prompt_ms = self._step_ms(sequences + tokens, sequences + 1, kv_bytes)
        return with_prompt_ms - self._step_ms(sequences, sequences, kv_bytes)

    def mixed_ms(self, tokens: int, sampled: int, kv_tokens: int) -> float:
        """Return the time of a step that computes prompts too, in milliseconds.

        Args:
            tokens: Those computed: one for each decoded sequence, and prompt tokens.
            sampled: Sequences that get a token.
            kv_tokens: Tokens in the KV cache of the step's sequences.
        """
        kv_bytes_per_token = self.model.kv_bytes_per_token(self.kv_bytes_per_value)
        kv_bytes_per_gpu = kv_bytes_per_token / self.gpus * kv_tokens
        return self._step_ms(tokens, sampled, kv_bytes_per_gpu)

    def _step_ms(self, tokens: int, sampled: int, kv_bytes_per_gpu: float) -> float:
        """Return the time of a step: linear layers are bound by reading or by computing, attention by reading.

        Args:
            tokens: Those that the layers compute.
            sampled: Those that the output layer computes.
            kv_bytes_per_gpu: KV cache that attention reads.
        """
        model = self.model
        output_flop = FLOP_PER_PARAMETER * model.output_parameters * sampled
        output_s = output_flop / (self._bf16_flop_per_s * self.gpus)
        layers_flop = FLOP_PER_PARAMETER * model.active_parameters * tokens
        compute_s = layers_flop / (self._flop_per_s * self.gpus) + output_s
        weights_s = self._weight_bytes_read(tokens) / self._read_bytes_per_s
        attention_s = kv_bytes_per_gpu / (self._read_bytes_per_s / self.gpus)
        return 1000 * (max(weights_s, compute_s) + attention_s) + self._step_overhead_ms

    @property
    def _sequence_bytes(self) -> int:
        """Return what one GPU keeps of a sequence of mean length."""
        return self.model.sequence_bytes(
            self.context_tokens, self.kv_bytes_per_value, self.gpus
        )

    @property
    def _read_bytes_per_s(self) -> float:
        """Return how fast all GPUs together read their memory."""
        return self.gpu.bandwidth_gb_s * 1e9 * BANDWIDTH_REACHED * self.gpus

    @property
    def _bf16_flop_per_s(self) -> float:
        """Return how fast one GPU computes in BF16."""
        return self.gpu.bf16_tflops * 1e12 * PEAK_REACHED[Precision.BF16]

    @property
    def _flop_per_s(self) -> float:
        """Return how fast one GPU computes linear layers."""
        if self.precision is Precision.FP8 and self.gpu.fp8_tflops is not None:
            return self.gpu.fp8_tflops * 1e12 * PEAK_REACHED[Precision.FP8]
        if self.precision is Precision.BF16 or self._uses_machete:
            return self._bf16_flop_per_s
        return self.gpu.bf16_tflops * 1e12 * PEAK_REACHED[Precision.AWQ_INT4]

    @property
    def _step_overhead_ms(self) -> float:
        """Return the time that a step takes besides, however many tokens it computes."""
        layer_ms = 0.0
        if self.gpus > 1:
            layer_ms = ALL_REDUCE_MS * ALL_REDUCES_PER_LAYER
        if self._uses_machete:
            layer_ms += MACHETE_LAYER_MS
        return STEP_OVERHEAD_MS + layer_ms * len(self.model.layers)

    @property
    def _uses_machete(self) -> bool:
        if not self.gpu.machete or self.precision is not Precision.AWQ_INT4:
            return False
        # vLLM computes 4-bit experts with Marlin.
        return not any(layer.experts for layer in self.model.layers)

    def _weight_bytes_read(self, tokens: int) -> float:
        """Return the size of the weights that a step reads."""
        layers_bytes = (
            self.model.parameters_read(tokens) * BYTES_PER_WEIGHT[self.precision]
        )
        return layers_bytes + BF16_BYTES * self.model.output_parameters
