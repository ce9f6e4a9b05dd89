"""How fast an engine can be on a GPU: the longer of reading and computing (roofline; Williams et al., CACM 52(4), 2009).

In a decode step the linear layers read the weights once and compute two operations a weight and token; attention, between
them, reads the KV cache of every sequence. A prompt is computed in chunks, so near the processor's rate. Attention's own
operations are left out: of an 8B model, 3 % at 1,000 tokens.

Assumptions: 80 % of the memory's bandwidth is reached. What of the peak is reached depends on the number format and on the
GPU (``tiers.sizing.kernels``). 1 ms a step goes to scheduling, sampling and gaps between kernels. With tensor parallelism
every layer adds two all-reduces of 15 µs. The figures are round ones near those that fit ``benchmarks/roofline.py`` best,
which has speeds measured on an H200, and published ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiers.formats import FORMATS
from tiers.sizing.architecture import BF16_BYTES
from tiers.sizing.kernels import EXPERTS_REACHED, Kernel, kernel_for

if TYPE_CHECKING:
    from tiers.formats import NumberFormat
    from tiers.sizing.architecture import Architecture
    from tiers.sizing.hardware import GpuKind

BANDWIDTH_REACHED = 0.8
STEP_OVERHEAD_MS = 1.0
ALL_REDUCE_MS = 0.015
ALL_REDUCES_PER_LAYER = 2  # after attention, and after the feed-forward part
PREFILL_CHUNK_TOKENS = 8192  # vLLM's default on a GPU
FLOP_PER_PARAMETER = 2  # a multiplication and an addition, for each token
BF16 = FORMATS["bf16"]


@dataclass(frozen=True, slots=True)
class Roofline:
    """The speed of one engine.

    Attributes:
        number_format: Of the linear layers' weights.
        gpus: Those of tensor parallelism.
        context_tokens: Mean length of a sequence while it is decoded.
        kv_bytes_per_value: 2 in BF16, 1 in FP8.
        dense_format: Of the linear layers that are not experts; None: they have the experts' format.
    """

    model: Architecture
    gpu: GpuKind
    number_format: NumberFormat
    gpus: int = 1
    context_tokens: int = 1000
    kv_bytes_per_value: int = 2
    dense_format: NumberFormat | None = None

    @property
    def prefill_ms_per_token(self) -> float:
        """Return the time of each prompt token, in milliseconds."""
        compute_s = self._layers_compute_s(tokens=1)
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
        output_s = output_flop / (self._kernel(BF16).flop_per_s * self.gpus)
        compute_s = self._layers_compute_s(tokens) + output_s
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

    def _layers_compute_s(self, tokens: int) -> float:
        """Return the time in which the linear layers, without the output layer, compute so many tokens."""
        dense_parameters = self.model.dense_parameters
        expert_parameters = self.model.active_parameters - dense_parameters
        dense_flop_per_s = self._kernel(self._dense_format).flop_per_s * self.gpus
        flop_per_s = self._kernel(self.number_format).flop_per_s * self.gpus
        experts_flop_per_s = flop_per_s * EXPERTS_REACHED
        dense_s = FLOP_PER_PARAMETER * dense_parameters * tokens / dense_flop_per_s
        experts_s = FLOP_PER_PARAMETER * expert_parameters * tokens / experts_flop_per_s
        return dense_s + experts_s

    def _kernel(self, number_format: NumberFormat) -> Kernel:
        return kernel_for(number_format, self.gpu, has_experts=self.model.has_experts)

    @property
    def _dense_format(self) -> NumberFormat:
        return self.dense_format or self.number_format

    @property
    def _step_overhead_ms(self) -> float:
        """Return the time that a step takes besides, however many tokens it computes."""
        layer_ms = self._kernel(self.number_format).layer_ms
        if self.gpus > 1:
            layer_ms += ALL_REDUCE_MS * ALL_REDUCES_PER_LAYER
        return STEP_OVERHEAD_MS + layer_ms * len(self.model.layers)

    def _weight_bytes_read(self, tokens: int) -> float:
        """Return the size of the weights that a step reads."""
        dense_parameters = self.model.dense_parameters
        expert_parameters = self.model.parameters_read(tokens) - dense_parameters
        dense_bytes = dense_parameters * self._dense_format.bytes_per_weight
        expert_bytes = expert_parameters * self.number_format.bytes_per_weight
        output_bytes = BF16_BYTES * self.model.output_parameters
        return dense_bytes + expert_bytes + output_bytes
