"""Plan how the engines share one machine, before anything starts. Pure, apart from ``read_machine``."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from tiers.checkpoints.checkpoint import quantized_bytes
from tiers.checkpoints.precision import checkpoint_precision
from tiers.errors import CheckpointError, NoRoomError, PlanError
from tiers.formats import FORMATS, lowest_format
from tiers.kernels import (
    InstructionSet,
    Kernel,
    added_bytes,
    choose_kernel,
    instruction_set,
)
from tiers.sizing.architecture import kv_bytes_per_token
from tiers.spec import (
    NGRAM,
    PRECISIONS,
    STANDARD_TIERS,
    EnginePlacement,
    Precision,
    TierName,
    TierSpec,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

FAST, BALANCED, PRECISE = STANDARD_TIERS
GIB = 1 << 30
# This share of a GPU's memory is left for the CUDA contexts of three processes and fragmentation.
GPU_RESERVE = 0.06
# Per engine, besides weights and KV cache: activations of a full prefill batch and captured CUDA graphs.
GPU_OVERHEAD_GIB = 2.0
# Per CPU engine, besides weights and KV cache: two processes that share what they have imported, torch most of it. Three
# engines with a 135M model (vLLM 0.32) had 1.0 to 1.3 GiB each.
CPU_OVERHEAD_GIB = 1.3
USUAL_TOKENS = 512  # prompt and output of a usual request
CPUINFO = Path("/proc/cpuinfo")
SMALLEST_GROUP = 32  # 4-bit weights that share a scale of 16 bits and a zero point of 4
# Bytes per weight of a linear layer, scales and zero points of the smallest groups included.
BF16_BYTES = 2.0
AWQ_BYTES = 0.5 + (16 + 4) / 8 / SMALLEST_GROUP


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device. Memory in bytes."""

    index: int
    name: str
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources to share. Memory in bytes.

    Attributes:
        instructions: The processor's widest instruction set; None: vLLM's CPU build cannot run on it.
    """

    cores: tuple[int, ...]
    memory_available: int
    gpus: tuple[Gpu, ...]
    instructions: InstructionSet | None = None


@dataclass(frozen=True, slots=True)
class EngineShare:
    """One engine's share. Memory in bytes, of all its GPUs together.

    Attributes:
        weights: Size in the engine's memory.
        on_disk: Size in the checkpoint.
        kv_tokens: Tokens that fit into ``kv_cache``.
        number: The engine's number among those of its tier that are started here.
    """

    tier: TierName
    weights: int
    on_disk: int
    kv_cache: int
    kv_tokens: int
    placement: EnginePlacement
    number: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How the machine is shared.

    Attributes:
        left_out: Tiers for whose engines there is no memory.
        lacking: What the engines of all tiers would need, for people; empty: none is left out.
    """

    device: str
    shares: tuple[EngineShare, ...]
    left_out: tuple[TierName, ...] = ()
    lacking: str = ""

    def placement(self, tier: TierName, number: int = 0) -> EnginePlacement:
        """Return the share of the machine of one of a tier's engines."""
        return next(
            share.placement
            for share in self.shares
            if (share.tier, share.number) == (tier, number)
        )


def read_machine() -> Machine:
    """Read this machine's usable cores, free memory, CUDA devices (with ``nvidia-smi``) and instructions."""
    memory = min(psutil.virtual_memory().available, group_room())
    return Machine(
        cores=_cores(),
        memory_available=memory,
        gpus=tuple(_gpus()),
        instructions=instruction_set(cpu_flags()),
    )


def group_room(
    groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> int:
    """Return the bytes that this process' control group, or one above it, leaves; files in memory give way, as elsewhere."""
    if not own.exists():
        return sys.maxsize
    room = sys.maxsize
    for line in own.read_text("utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = _GROUP_V2
        elif controllers == "memory":
            names = _GROUP_V1
        else:
            continue
        group = Path(path.lstrip("/"))
        for ancestor in (group, *group.parents):
            with suppress(OSError, ValueError):  # the topmost has no limit
                room = min(room, _room_of_group(groups / controllers / ancestor, names))
    return max(room, 0)


class _GroupFiles(NamedTuple):
    """How a version of Linux's control groups names what a group uses and may use of memory."""

    limit: str
    used: str
    reclaimable: str


_GROUP_V1 = _GroupFiles(
    "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
)
_GROUP_V2 = _GroupFiles("memory.max", "memory.current", "inactive_file")


def _room_of_group(folder: Path, names: _GroupFiles) -> int:
    """Return the bytes that one control group leaves.

    Raises:
        OSError: It has no limit.
        ValueError: It has no limit in numbers.
    """
    limit = int((folder / names.limit).read_text())
    used = int((folder / names.used).read_text())
    statistics = dict(
        entry.split() for entry in (folder / "memory.stat").read_text().splitlines()
    )
    return limit - used + int(statistics[names.reclaimable])


def cpu_flags(cpuinfo: Path = CPUINFO) -> set[str]:
    """Return the processor's instruction sets, as Linux names them."""
    return set(_cpuinfo("flags", cpuinfo).split())


def machine_name() -> str:
    """Return the names of the machine's processors, to which measured speeds belong."""
    model_name = _cpuinfo("model name") or "CPU"
    processors = [f"{model_name} ({len(_cores())} cores)"]
    processors += [gpu.name for gpu in _gpus()]
    return ", ".join(processors)


def _cores() -> tuple[int, ...]:
    """Return the cores that this process may use: all, where the system knows no such limit."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _cpuinfo(name: str, cpuinfo: Path = CPUINFO) -> str:
    """Return a field of the first processor's entry; empty if it is missing."""
    try:
        lines = cpuinfo.read_text("utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return ""


def weight_bytes(checkpoint: Path) -> int:
    """Return the size of a checkpoint's weight files, in bytes."""
    return sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))


def held_bytes(checkpoint: Path, instructions: InstructionSet | None) -> int:
    """Return the memory, in bytes, of a checkpoint's weights in a CPU engine.

    It is more than on disk where a kernel holds quantized weights otherwise than the checkpoint: see ``added_bytes``.

    Raises:
        PlanError: A weight file cannot be read.
    """
    try:
        quantized = quantized_bytes(checkpoint)
    except CheckpointError as error:
        raise PlanError(str(error)) from error
    kernel = choose_kernel(checkpoint_precision(checkpoint), instructions)
    group_size = SMALLEST_GROUP
    if kernel is Kernel.VLLM_INT4:
        group_size = _group_size(checkpoint)
    return _bytes_in_memory(
        kernel,
        on_disk=weight_bytes(checkpoint),
        quantized=quantized,
        group_size=group_size,
        instructions=instructions,
    )


def _bytes_in_memory(
    kernel: Kernel,
    *,
    on_disk: int,
    quantized: int,
    group_size: int,
    instructions: InstructionSet | None,
) -> int:
    """Return the memory, in bytes, of weights that a kernel computes with.

    Args:
        kernel: The kernel.
        on_disk: The bytes of all weights in the checkpoint.
        quantized: Those of the quantized ones among them.
        group_size: How many 4-bit weights share a scale.
        instructions: Of the processor.
    """
    if kernel is Kernel.QARR_BF16:  # It holds float32.
        return 2 * on_disk
    return on_disk + added_bytes(
        kernel, quantized, group_size, instructions=instructions
    )


def _group_size(checkpoint: Path) -> int:
    """Return how many weights of a checkpoint share a scale; the fewest possible if its configuration does not say."""
    quantization = model_config(checkpoint).get("quantization_config")
    if not isinstance(quantization, dict):
        return SMALLEST_GROUP
    sizes = []
    for group in quantization.get("config_groups", {}).values():
        size = (group.get("weights") or {}).get("group_size")
        if isinstance(size, int) and size > 0:
            sizes.append(size)
    return min(sizes, default=SMALLEST_GROUP)


def expected_bytes(
    base: Path, precision: str, instructions: InstructionSet | None
) -> tuple[int, int]:
    """Estimate the size, in bytes, of weights to be made from a BF16 checkpoint: on disk and in an engine's memory.

    Embeddings and output head, whose size follows from the vocabulary's, stay in BF16.

    Args:
        base: The BF16 checkpoint.
        precision: The name of a number format; one that is not known counts as BF16.
        instructions: Of the processor.
    """
    number_format = FORMATS.get(precision, FORMATS[Precision.BF16])
    linear_bytes = number_format.bytes_per_weight
    if precision == Precision.AWQ_INT4:
        linear_bytes = AWQ_BYTES
    base_bytes = weight_bytes(base)
    kept_bytes = min(_unquantized_bytes(base), base_bytes)
    weight_count = (base_bytes - kept_bytes) / BF16_BYTES
    on_disk = kept_bytes + int(weight_count * linear_bytes)
    quantized = 0
    if number_format.is_quantized:
        quantized = int(weight_count * number_format.weight_bits / 8)
    held = _bytes_in_memory(
        choose_kernel(precision, instructions),
        on_disk=on_disk,
        quantized=quantized,
        group_size=SMALLEST_GROUP,
        instructions=instructions,
    )
    return on_disk, held


def _unquantized_bytes(base: Path) -> int:
    """Return the size, in bytes, of a model's embeddings and output head in BF16; 0 if it is not known."""
    config = model_config(base)
    vocabulary = config.get("vocab_size")
    width = config.get("hidden_size")
    if not isinstance(vocabulary, int) or not isinstance(width, int):
        return 0
    embedding_bytes = 2 * vocabulary * width
    if config.get("tie_word_embeddings"):
        return embedding_bytes
    return 2 * embedding_bytes


def model_config(checkpoint: Path) -> dict[str, object]:
    """Read a checkpoint's ``config.json``, or the text part of a multimodal model's."""
    config_file = checkpoint / "config.json"
    config = json.loads(config_file.read_bytes())
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{config_file}: a JSON object is expected, this is a {type(config).__name__}: fetch the file again"
        )
    text_config = config.get("text_config")
    if isinstance(text_config, dict):
        return text_config
    return config


# The tiers to leave out where memory does not suffice; the first set that helps is taken. The base model comes late,
# because it serves every request, and loss is measured against it. Beside it the lowest precision stays longest: it differs
# most from the base model, so it leaves most to choose, and it takes the least memory.
LEFT_OUT = (
    (),
    (BALANCED,),
    (FAST,),
    (BALANCED, FAST),
    (PRECISE,),
    (BALANCED, PRECISE),
    (FAST, PRECISE),
)


def make_plan(
    machine: Machine,
    tiers: Sequence[TierSpec],
    *,
    kv_cache_gib: float | None = None,
    base: Path | None = None,
    optional: Collection[TierName] = (),
) -> MemoryPlan:
    """Share the machine between engines started here: GPUs if there are any, else the CPU.

    Args:
        machine: The resources.
        tiers: Tiers, each with its number of replicas, and with a checkpoint or one that will be made from ``base``.
        kv_cache_gib: KV cache of each CPU engine, in GiB; None: ``usual_kv_cache_gib``.
        base: BF16 checkpoint.
        optional: Tiers that are left out where memory does not suffice, but for one.

    Raises:
        PlanError: It does not fit; the text has the arithmetic.
    """
    needs = [_need(tier, base, machine.instructions) for tier in tiers]
    if not any(need.tier.replicas for need in needs):
        return MemoryPlan("none", ())
    errors: list[NoRoomError] = []
    for left_out in LEFT_OUT:
        kept_needs = _needs_without(left_out, needs, optional)
        if not kept_needs:
            continue
        try:
            plan = _share_machine(machine, kept_needs, kv_cache_gib)
        except NoRoomError as error:
            errors.append(error)
            continue
        if not left_out:
            return plan
        return replace(plan, left_out=left_out, lacking=str(errors[0]))
    raise errors[-1]


def _needs_without(
    left_out: Collection[TierName],
    needs: Sequence[_Need],
    optional: Collection[TierName],
) -> list[_Need]:
    """Return what engines need without some tiers; nothing if not all of those are there and optional."""
    kept_needs = [need for need in needs if need.tier.name not in left_out]
    are_all_there = len(needs) - len(kept_needs) == len(left_out)
    if are_all_there and set(left_out) <= set(optional):
        return kept_needs
    return []


def _share_machine(
    machine: Machine, needs: Sequence[_Need], kv_cache_gib: float | None
) -> MemoryPlan:
    """Share the machine between all engines of some tiers."""
    engine_needs = []
    for need in needs:
        engine_needs += [
            need._replace(number=number) for number in range(need.tier.replicas)
        ]
    if machine.gpus:
        return _gpu_plan(machine.gpus, engine_needs)
    return _cpu_plan(machine, engine_needs, kv_cache_gib)


class _Need(NamedTuple):
    """What an engine needs, in bytes.

    Attributes:
        tier: Its tier.
        on_disk: Weights in the checkpoint.
        held: Weights in a CPU engine's memory.
        kv_per_token: KV cache of a token, on each GPU.
        number: The engine's number among those of its tier.
    """

    tier: TierSpec
    on_disk: int
    held: int
    kv_per_token: int
    number: int = 0

    @property
    def weights_each(self) -> int:
        """Return the weights on each GPU, in bytes."""
        return _divide_up(self.on_disk, self.tier.world_size)

    @property
    def largest_batch(self) -> int:
        """Return the tokens of the largest batch of the longest sequences."""
        return self.tier.max_model_len * self.tier.max_num_seqs


def _need(
    tier: TierSpec, base: Path | None, instructions: InstructionSet | None
) -> _Need:
    """Return what one engine of a tier needs; a draft model adds its weights and a KV cache of its own."""
    if tier.checkpoint is not None:
        on_disk, held = _served_bytes(tier, tier.checkpoint, instructions)
        per_token = _kv_per_token(tier, tier.checkpoint)
    else:
        assert base is not None
        precision = tier.expected_precision or PRECISIONS[tier.name]
        on_disk, held = expected_bytes(base, precision, instructions)
        per_token = _kv_per_token(tier, base)
    need = _Need(tier, on_disk=on_disk, held=held, kv_per_token=per_token)
    if tier.draft is None or tier.draft.source == NGRAM:
        return need
    if tier.draft.checkpoint is not None:
        draft_on_disk, draft_held = _checkpoint_bytes(
            tier.draft.checkpoint, instructions
        )
        draft_per_token = _kv_per_token(tier, tier.draft.checkpoint)
    else:
        assert base is not None
        draft_on_disk, draft_held = expected_bytes(
            base, PRECISIONS[TierName(tier.draft.source)], instructions
        )
        draft_per_token = per_token
    return need._replace(
        on_disk=on_disk + draft_on_disk,
        held=held + draft_held,
        kv_per_token=per_token + draft_per_token,
    )


def _served_bytes(
    tier: TierSpec, checkpoint: Path, instructions: InstructionSet | None
) -> tuple[int, int]:
    """Return the size, in bytes, of a tier's weights: as they are loaded, and in a CPU engine's memory.

    Weights that vLLM quantizes while it loads them take what a checkpoint of that format would.
    """
    served = lowest_format(tier.precision)
    stored = lowest_format(checkpoint_precision(checkpoint))
    is_quantized_on_loading = (
        served is not None
        and stored is not None
        and served.is_quantized
        and not stored.is_quantized
    )
    if served is not None and is_quantized_on_loading:
        return expected_bytes(checkpoint, served.name, instructions)
    return _checkpoint_bytes(checkpoint, instructions)


def _checkpoint_bytes(
    checkpoint: Path, instructions: InstructionSet | None
) -> tuple[int, int]:
    """Return the size, in bytes, of a checkpoint's weights: on disk and in a CPU engine's memory."""
    return weight_bytes(checkpoint), held_bytes(checkpoint, instructions)


def kv_per_token(tier: TierSpec) -> int:
    """Return the bytes of KV cache that a token takes in one of a tier's engines, on each of its GPUs.

    Args:
        tier: With all that its engines are started from.
    """
    assert tier.checkpoint is not None
    per_token = _kv_per_token(tier, tier.checkpoint)
    if tier.draft is not None and tier.draft.checkpoint is not None:
        per_token += _kv_per_token(tier, tier.draft.checkpoint)
    return per_token


def _kv_per_token(tier: TierSpec, checkpoint: Path) -> int:
    all_layers = kv_bytes_per_token(model_config(checkpoint), gpus=tier.tensor_parallel)
    return _divide_up(all_layers, tier.pipeline_parallel)


def _divide_up(dividend: int, divisor: int) -> int:
    """Divide, and round up."""
    return -(-dividend // divisor)


def _gpu_plan(gpus: Sequence[Gpu], needs: Sequence[_Need]) -> MemoryPlan:
    """Place the engines on GPUs, and share what their weights leave by the tokens of each engine's largest batch.

    An engine on several GPUs gets the same fraction of each, so the smallest of its shares counts.
    """
    places = _places(gpus, needs)
    shares = [_gpu_share(position, needs, places) for position in range(len(needs))]
    chosen_gpus = set(chain.from_iterable(places))
    return MemoryPlan(
        _shown_gpus([gpu for gpu in gpus if gpu in chosen_gpus]), tuple(shares)
    )


def _shown_gpus(gpus: Sequence[Gpu]) -> str:
    """Return the indices of some GPUs, and their names without repetition."""
    indices = ", ".join(str(gpu.index) for gpu in gpus)
    names = ", ".join(dict.fromkeys(gpu.name for gpu in gpus))
    plural = "s" if len(gpus) > 1 else ""
    return f"GPU{plural} {indices} ({names})"


def _places(gpus: Sequence[Gpu], needs: Sequence[_Need]) -> list[tuple[Gpu, ...]]:
    """Choose each engine's GPUs: those of its tier's setting in turn, else those with most memory left; largest first."""
    gpus_by_index = sorted(gpus, key=lambda gpu: gpu.index)
    left_bytes = {gpu.index: gpu.free for gpu in gpus}
    places: list[tuple[Gpu, ...]] = [()] * len(needs)
    largest_first = sorted(
        range(len(needs)), key=lambda position: -needs[position].on_disk
    )
    for position in largest_first:
        need = needs[position]
        chosen_indices = _choose_gpus(need, left_bytes)
        for index in chosen_indices:
            left_bytes[index] -= need.weights_each + int(GPU_OVERHEAD_GIB * GIB)
        places[position] = tuple(
            gpu for gpu in gpus_by_index if gpu.index in chosen_indices
        )
    return places


def _choose_gpus(need: _Need, left_bytes: Mapping[int, int]) -> list[int]:
    """Choose an engine's GPUs, by index: in turn those of its tier's setting, else those with the most memory left.

    Raises:
        PlanError: There are not enough, or the setting names one that there is not.
    """
    tier = need.tier
    emptiest_first = sorted(left_bytes, key=lambda index: -left_bytes[index])
    chosen = emptiest_first[: tier.world_size]
    more_gpus = ""
    if tier.gpus:
        chosen = _gpus_in_turn(need)
        more_gpus = ", or name more gpus"
    for index in chosen:
        if index not in left_bytes:
            known_indices = ", ".join(map(str, left_bytes))
            raise PlanError(
                f"tiers.{tier.name}.gpus names GPU {index}: there are {known_indices}"
            )
    usable_gpus = len(set(chosen))
    if usable_gpus < tier.world_size:
        raise PlanError(
            f"an engine of tier {tier.name} takes {tier.world_size} GPUs, {usable_gpus} can be used: lower "
            f"tiers.{tier.name}.tensor_parallel or pipeline_parallel{more_gpus}"
        )
    return chosen


def _gpus_in_turn(need: _Need) -> list[int]:
    """Return the GPUs of a tier's setting that are one engine's turn; after the last one the first comes again."""
    tier = need.tier
    first = need.number * tier.world_size
    return [
        tier.gpus[number % len(tier.gpus)]
        for number in range(first, first + tier.world_size)
    ]


def _gpu_share(
    position: int, needs: Sequence[_Need], places: Sequence[tuple[Gpu, ...]]
) -> EngineShare:
    """Return the share of one engine, given the GPUs of all."""
    need = needs[position]
    tier = need.tier
    caches = []
    fractions = []
    for gpu in places[position]:
        engines = [
            engine for engine, place in zip(needs, places, strict=True) if gpu in place
        ]
        kv_cache = _kv_cache_on(gpu, need, engines)
        caches.append(kv_cache)
        fractions.append(
            (need.weights_each + int(GPU_OVERHEAD_GIB * GIB) + kv_cache) / gpu.total
        )
    smallest_cache = min(caches)
    return EngineShare(
        tier=tier.name,
        weights=need.on_disk,
        on_disk=need.on_disk,
        kv_cache=smallest_cache * tier.world_size,
        kv_tokens=smallest_cache // need.kv_per_token,
        placement=EnginePlacement(
            gpus=tuple(gpu.index for gpu in places[position]),
            gpu_memory_fraction=min(fractions),
        ),
        number=need.number,
    )


def _kv_cache_on(gpu: Gpu, need: _Need, engines: Sequence[_Need]) -> int:
    """Return an engine's KV cache on one GPU, in bytes.

    Args:
        gpu: The GPU.
        need: What the engine needs.
        engines: What all engines on that GPU need.

    Raises:
        NoRoomError: One request would not fit.
    """
    tier = need.tier
    weight_bytes_there = sum(engine.weights_each for engine in engines)
    overhead_bytes = int(GPU_OVERHEAD_GIB * GIB) * len(engines)
    reserve_bytes = int(GPU_RESERVE * gpu.total)
    left_bytes = gpu.free - reserve_bytes - weight_bytes_there - overhead_bytes
    batch_tokens = sum(engine.largest_batch for engine in engines)
    kv_cache = left_bytes * need.largest_batch // batch_tokens
    needed_bytes = need.kv_per_token * tier.max_model_len
    if kv_cache < needed_bytes:
        raise NoRoomError(
            f"GPU {gpu.index} ({gpu.name}) has {gpu.free / GIB:.1f} GiB free. Weights take "
            f"{weight_bytes_there / GIB:.1f} GiB and {_engine_count(len(engines))} {overhead_bytes / GIB:.1f} GiB more, "
            f"which leaves tier {tier.name} "
            f"{max(kv_cache, 0) / GIB:.2f} GiB of KV cache; one request of {tier.max_model_len} tokens needs "
            f"{needed_bytes / GIB:.2f} GiB. Take a smaller model, lower tiers.{tier.name}.max_model_len, raise "
            f"tiers.{tier.name}.tensor_parallel, or run a tier elsewhere with tiers.{tier.name}.urls"
        )
    return kv_cache


def _engine_count(engines: int) -> str:
    if engines == 1:
        return "1 engine"
    return f"{engines} engines"


def usual_kv_cache_gib(per_token: int, context: int, sequences: int) -> float:
    """Return a CPU engine's KV cache, in quarters of a GiB, by the bytes that a token takes.

    It holds two of the longest requests, or as many of ``USUAL_TOKENS`` as are computed together; above 1 GiB, one request.
    """
    wanted_bytes = max(2 * context, USUAL_TOKENS * sequences) * per_token
    most_bytes = max(context * per_token, GIB)
    return math.ceil(4 * min(wanted_bytes, most_bytes) / GIB) / 4


def _cpu_plan(
    machine: Machine, needs: Sequence[_Need], kv_cache_gib: float | None
) -> MemoryPlan:
    needed_bytes = 0
    shares = []
    for need, cores in zip(needs, _share_cores(machine.cores, len(needs)), strict=True):
        share = _cpu_share(need, cores, kv_cache_gib)
        shares.append(share)
        needed_bytes += _cpu_need(share.weights, share.on_disk, share.kv_cache)
    if needed_bytes > machine.memory_available:
        engines = "1 CPU engine needs"
        if len(needs) > 1:
            engines = f"{len(needs)} CPU engines need"
        raise NoRoomError(
            f"{engines} about {needed_bytes / GIB:.1f} GiB of memory, "
            f"{machine.memory_available / GIB:.1f} GiB are available: "
            f"free memory, take a smaller model, or run a tier elsewhere with tiers.<name>.urls"
        )
    return MemoryPlan(f"CPU ({len(machine.cores)} cores)", tuple(shares))


def _cpu_share(
    need: _Need, cores: tuple[int, ...], kv_cache_gib: float | None
) -> EngineShare:
    """Return one engine's share of a machine without GPUs.

    Raises:
        PlanError: The tier is to have GPUs, or too small a KV cache for one request.
    """
    tier = need.tier
    if tier.world_size > 1 or tier.gpus:
        plural = "s" if tier.world_size > 1 else ""
        raise PlanError(
            f"tier {tier.name} is to have {tier.world_size} GPU{plural} for each engine, and this "
            f"machine has none: leave out tiers.{tier.name}.gpus, tensor_parallel and pipeline_parallel, or run the "
            f"tier elsewhere with tiers.{tier.name}.urls"
        )
    kv_gib = kv_cache_gib or usual_kv_cache_gib(
        need.kv_per_token, tier.max_model_len, tier.max_num_seqs
    )
    kv_cache = int(kv_gib * GIB)
    longest_request = need.kv_per_token * tier.max_model_len
    if kv_cache < longest_request:
        raise PlanError(
            f"tier {tier.name} needs {longest_request / GIB:.2f} GiB of KV cache for one request of "
            f"{tier.max_model_len} tokens, engine.cpu_kv_cache_gib is {kv_cache_gib}: raise it"
        )
    return EngineShare(
        tier=tier.name,
        weights=need.held,
        on_disk=need.on_disk,
        kv_cache=kv_cache,
        kv_tokens=kv_cache // need.kv_per_token,
        placement=EnginePlacement(
            cores=cores, threads=max(len(cores), 1), kv_cache_gib=kv_gib
        ),
        number=need.number,
    )


def _cpu_need(held: int, on_disk: int, kv_cache: int) -> int:
    """Return the memory, in bytes, of one CPU engine, which holds its weights as on disk as well while it repacks them."""
    return held + on_disk + kv_cache + int(CPU_OVERHEAD_GIB * GIB)


def lacking_for_one_more(
    machine: Machine, tier: TierSpec, placement: EnginePlacement
) -> str | None:
    """Return, in words, the memory that is missing for one more engine of a tier; None if there is enough.

    Args:
        machine: Its present state.
        tier: The tier, with a checkpoint.
        placement: The running engine's share of the machine; the new one gets the same.
    """
    if not placement.gpus:
        assert tier.checkpoint is not None
        on_disk, held = _checkpoint_bytes(tier.checkpoint, machine.instructions)
        needed_bytes = _cpu_need(held, on_disk, int(placement.kv_cache_gib * GIB))
        return _lacking(needed_bytes, machine.memory_available)
    gpus = {gpu.index: gpu for gpu in machine.gpus}
    for index in placement.gpus:
        if index not in gpus:
            return f"GPU {index} is not found"
        gpu = gpus[index]
        lacking = _lacking(int(placement.gpu_memory_fraction * gpu.total), gpu.free)
        if lacking is not None:
            return lacking
    return None


def _lacking(needed_bytes: int, free_bytes: int) -> str | None:
    if needed_bytes <= free_bytes:
        return None
    return f"one more engine needs {needed_bytes / GIB:.1f} GiB, {free_bytes / GIB:.1f} GiB are free"


def _share_cores(cores: tuple[int, ...], engines: int) -> list[tuple[int, ...]]:
    """Give each engine cores of its own and leave one for the router; if there are too few, all share all."""
    cores_each = (len(cores) - 1) // engines
    if cores_each < 1:
        return [()] * engines
    return [
        cores[first : first + cores_each]
        for first in range(1, 1 + engines * cores_each, cores_each)
    ]


def _gpus() -> list[Gpu]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = [
        "nvidia-smi",
        "--query-gpu=index,name,memory.total,memory.free",
        "--format=csv,noheader,nounits",
    ]
    answer = subprocess.run(
        query, capture_output=True, text=True, check=False, timeout=30
    )
    if answer.returncode != 0:
        return []
    gpus = []
    for line in answer.stdout.splitlines():
        index, name, total, free = (part.strip() for part in line.split(","))
        gpus.append(Gpu(int(index), name, total=int(total) << 20, free=int(free) << 20))
    return gpus
