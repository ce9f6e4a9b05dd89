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
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from tiers.checkpoints.checkpoint import quantized_bytes
from tiers.checkpoints.precision import checkpoint_precision
from tiers.errors import CheckpointError, NoRoomError, PlanError
from tiers.kernels import InstructionSet, Kernel, added_bytes, choose_kernel, instruction_set
from tiers.sizing.architecture import kv_bytes_per_token
from tiers.spec import NGRAM, PRECISIONS, STANDARD_TIERS, Placement, Precision, TierName, TierSpec

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

FAST, BALANCED, PRECISE = STANDARD_TIERS
GIB = 1 << 30
# Of a GPU's memory, left for the CUDA contexts of three processes and fragmentation.
GPU_RESERVE = 0.06
# Per engine, besides weights and KV cache: activations of a full prefill batch and captured CUDA graphs.
GPU_OVERHEAD_GIB = 2.0
# Per CPU engine, besides weights and KV cache: two processes that share what they have imported, torch most of it. Of three
# engines with a 135M model (vLLM 0.32), each had 1.0 to 1.3 GiB.
CPU_OVERHEAD_GIB = 1.3
USUAL_TOKENS = 512  # of a request, prompt and output
CPUINFO = Path("/proc/cpuinfo")
SMALLEST_GROUP = 32  # 4-bit weights that share a scale of 16 bits and a zero point of 4
# Bytes per weight of a linear layer, without scales and zero points, and with them.
WEIGHT_BYTES = {Precision.BF16: 2.0, Precision.FP8: 1.0, Precision.AWQ_INT4: 0.5}
LINEAR_BYTES = {**WEIGHT_BYTES, Precision.AWQ_INT4: 0.5 + (16 + 4) / 8 / SMALLEST_GROUP}


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
        instructions: The processor's widest; None: vLLM's CPU build cannot run on it.
    """

    cores: tuple[int, ...]
    memory_available: int
    gpus: tuple[Gpu, ...]
    instructions: InstructionSet | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """One engine's share. Memory in bytes, of all its GPUs together.

    Attributes:
        weights: Size in the engine's memory.
        on_disk: Size in the checkpoint.
        kv_tokens: Tokens that fit into ``kv_cache``.
        number: Of the engine among those of its tier that are started here.
    """

    tier: TierName
    weights: int
    on_disk: int
    kv_cache: int
    kv_tokens: int
    placement: Placement
    number: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """How the machine is shared.

    Attributes:
        left_out: Tiers for whose engines there is no memory.
        lacking: What all of them would need, for people; empty: they are there.
    """

    device: str
    shares: tuple[Share, ...]
    left_out: tuple[TierName, ...] = ()
    lacking: str = ""

    def placement(self, tier: TierName, number: int = 0) -> Placement:
        """Return the share of the machine of one of a tier's engines."""
        return next(share.placement for share in self.shares if (share.tier, share.number) == (tier, number))


def read_machine() -> Machine:
    """Read this machine's usable cores, free memory, CUDA devices (with ``nvidia-smi``) and instructions."""
    memory = min(psutil.virtual_memory().available, group_room())
    return Machine(_cores(), memory, tuple(_gpus()), instruction_set(cpu_flags()))


def group_room(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the bytes that this process' control group, or one above it, leaves; files in memory give way, as elsewhere."""
    room = sys.maxsize
    for line in own.read_text("utf-8").splitlines() if own.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers not in {"", "memory"}:  # of version 2, of version 1
            continue
        limit, used = ("limit_in_bytes", "usage_in_bytes") if controllers else ("max", "current")
        group = Path(path.lstrip("/"))
        for folder in (groups / controllers / each for each in (group, *group.parents)):
            with suppress(OSError, ValueError):  # the topmost has no limit
                most, now = (int((folder / f"memory.{name}").read_text()) for name in (limit, used))
                stat = dict(entry.split() for entry in (folder / "memory.stat").read_text().splitlines())
                room = min(room, most - now + int(stat["total_inactive_file" if controllers else "inactive_file"]))
    return max(room, 0)


def cpu_flags(cpuinfo: Path = CPUINFO) -> set[str]:
    """Return the processor's instruction sets, as Linux names them."""
    return set(_cpuinfo("flags", cpuinfo).split())


def machine_name() -> str:
    """Return the names of the machine's processors, to which measured speeds belong."""
    cpus = f"{_cpuinfo('model name') or 'CPU'} ({len(_cores())} cores)"
    return ", ".join([cpus, *(gpu.name for gpu in _gpus())])


def _cores() -> tuple[int, ...]:
    """Return the cores that this process may use: all, where the system knows no such limit."""
    return tuple(sorted(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)))


def _cpuinfo(name: str, cpuinfo: Path = CPUINFO) -> str:
    """Return a field of the first processor's entry; empty if it is missing."""
    try:
        lines = cpuinfo.read_text("utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def weight_bytes(checkpoint: Path) -> int:
    """Return the size of a checkpoint's weight files, in bytes."""
    return sum(p.stat().st_size for p in checkpoint.glob("*.safetensors"))


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
    group_size = _group_size(checkpoint) if kernel is Kernel.VLLM_INT4 else SMALLEST_GROUP
    if kernel is Kernel.QARR_BF16:  # in float32
        return 2 * weight_bytes(checkpoint)
    return weight_bytes(checkpoint) + added_bytes(kernel, quantized, group_size, instructions)


def _group_size(checkpoint: Path) -> int:
    """Return how many weights of a checkpoint share a scale; the fewest possible if its configuration does not say."""
    quantization = model_config(checkpoint).get("quantization_config")
    groups = quantization.get("config_groups", {}) if isinstance(quantization, dict) else {}
    sizes = [(group.get("weights") or {}).get("group_size") for group in groups.values()]
    return min((size for size in sizes if isinstance(size, int) and size > 0), default=SMALLEST_GROUP)


def expected_bytes(base: Path, precision: Precision, instructions: InstructionSet | None) -> tuple[int, int]:
    """Estimate the size, in bytes, of weights to be made from a BF16 checkpoint: on disk and in an engine's memory.

    Embeddings and output head, whose size follows from the vocabulary's, stay in BF16.
    """
    base_bytes = weight_bytes(base)
    kept = min(_unquantized_bytes(base), base_bytes)
    weights = (base_bytes - kept) / WEIGHT_BYTES[Precision.BF16]
    on_disk = kept + int(weights * LINEAR_BYTES[precision])
    kernel = choose_kernel(precision, instructions)
    if precision is Precision.BF16:
        return on_disk, 2 * on_disk if kernel is Kernel.QARR_BF16 else on_disk
    quantized = int(weights * WEIGHT_BYTES[precision])
    return on_disk, on_disk + added_bytes(kernel, quantized, SMALLEST_GROUP, instructions)


def _unquantized_bytes(base: Path) -> int:
    """Return the size, in bytes, of a model's embeddings and output head in BF16; 0 if it is not known."""
    config = model_config(base)
    vocabulary = config.get("vocab_size")
    width = config.get("hidden_size")
    if not isinstance(vocabulary, int) or not isinstance(width, int):
        return 0
    embeddings = 2 * vocabulary * width
    return embeddings if config.get("tie_word_embeddings") else 2 * embeddings


def model_config(checkpoint: Path) -> dict[str, object]:
    """Read a checkpoint's ``config.json``, or the text part of a multimodal model's."""
    config: dict[str, object] = json.loads((checkpoint / "config.json").read_bytes())
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


# What is left out, the first that helps: the base model serves every request, and loss is measured against it. Beside it the
# tier that differs most from it leaves most to choose, and takes the least memory.
LEFT_OUT = ((), (BALANCED,), (FAST,), (BALANCED, FAST), (PRECISE,), (BALANCED, PRECISE), (FAST, PRECISE))


def make_plan(
    machine: Machine,
    tiers: Sequence[TierSpec],
    *,
    kv_cache_gib: float | None = None,
    base: Path | None = None,
    optional: Collection[TierName] = (),
) -> Plan:
    """Share the machine between engines started here: GPUs if there are any, else the CPU.

    Args:
        machine: The resources.
        tiers: Each with a checkpoint, or with one that will be made from ``base``, and with its number of replicas.
        kv_cache_gib: KV cache of each CPU engine, in GiB; None: ``usual_kv_cache_gib``.
        base: BF16 checkpoint.
        optional: Tiers that are left out where memory does not suffice, but for one.

    Raises:
        PlanError: It does not fit; the text has the arithmetic.
    """
    needs = [_need(tier, base, machine.instructions) for tier in tiers]
    if not any(need.tier.replicas for need in needs):
        return Plan("none", ())
    lacking: list[NoRoomError] = []
    for out in LEFT_OUT:
        kept = [need for need in needs if need.tier.name not in out]
        if kept and len(needs) - len(kept) == len(out) and set(out) <= set(optional):
            try:
                plan = _shared(machine, kept, kv_cache_gib)
            except NoRoomError as error:
                lacking.append(error)
            else:
                return replace(plan, left_out=out, lacking=str(lacking[0]) if out else "")
    raise lacking[-1]


def _shared(machine: Machine, needs: Sequence[_Need], kv_cache_gib: float | None) -> Plan:
    each = [need._replace(number=number) for need in needs for number in range(need.tier.replicas)]
    return _gpu_plan(machine.gpus, each) if machine.gpus else _cpu_plan(machine, each, kv_cache_gib)


class _Need(NamedTuple):
    """What an engine needs, in bytes: weights on disk, weights in a CPU engine's memory, KV cache per token on each GPU."""

    tier: TierSpec
    on_disk: int
    held: int
    kv_per_token: int
    number: int = 0

    @property
    def weights_each(self) -> int:
        """Return the weights on each GPU, in bytes."""
        return -(-self.on_disk // self.tier.world_size)

    @property
    def largest_batch(self) -> int:
        """Return the tokens of the largest batch of the longest sequences."""
        return self.tier.max_model_len * self.tier.max_num_seqs


def _need(tier: TierSpec, base: Path | None, instructions: InstructionSet | None) -> _Need:
    """Return what one engine of a tier needs; a draft model adds its weights and a KV cache of its own."""
    if tier.checkpoint is not None:
        on_disk, held = weight_bytes(tier.checkpoint), held_bytes(tier.checkpoint, instructions)
        per_token = _kv_per_token(tier, tier.checkpoint)
    else:
        assert base is not None
        on_disk, held = expected_bytes(base, PRECISIONS[tier.name], instructions)
        per_token = _kv_per_token(tier, base)
    if tier.draft is None or tier.draft.source == NGRAM:
        return _Need(tier, on_disk, held, per_token)
    if tier.draft.checkpoint is not None:
        draft = tier.draft.checkpoint
        beside, beside_held = weight_bytes(draft), held_bytes(draft, instructions)
        return _Need(tier, on_disk + beside, held + beside_held, per_token + _kv_per_token(tier, draft))
    assert base is not None
    beside, beside_held = expected_bytes(base, PRECISIONS[TierName(tier.draft.source)], instructions)
    return _Need(tier, on_disk + beside, held + beside_held, 2 * per_token)


def kv_per_token(tier: TierSpec) -> int:
    """Return the bytes of KV cache that a token takes in one of a tier's engines, on each of its GPUs.

    Args:
        tier: With all that its engines are started from.
    """
    assert tier.checkpoint is not None
    draft = None if tier.draft is None else tier.draft.checkpoint
    return _kv_per_token(tier, tier.checkpoint) + (0 if draft is None else _kv_per_token(tier, draft))


def _kv_per_token(tier: TierSpec, checkpoint: Path) -> int:
    whole = kv_bytes_per_token(model_config(checkpoint), gpus=tier.tensor_parallel)
    return -(-whole // tier.pipeline_parallel)


def _gpu_plan(gpus: Sequence[Gpu], needs: Sequence[_Need]) -> Plan:
    """Place the engines on GPUs, and share what their weights leave by the tokens of each engine's largest batch.

    An engine on several GPUs gets the same fraction of each, so the smallest of its shares counts.
    """
    places = _places(gpus, needs)
    shares = [_gpu_share(n, needs, places) for n in range(len(needs))]
    used = [gpu for gpu in gpus if any(gpu in place for place in places)]
    names = ", ".join(dict.fromkeys(gpu.name for gpu in used))
    return Plan(f"GPU{'s' * (len(used) > 1)} {', '.join(str(gpu.index) for gpu in used)} ({names})", tuple(shares))


def _places(gpus: Sequence[Gpu], needs: Sequence[_Need]) -> list[tuple[Gpu, ...]]:
    """Choose each engine's GPUs: those of its tier's setting in turn, else those with most memory left; largest first."""
    left = {gpu.index: gpu.free for gpu in gpus}
    places: list[tuple[Gpu, ...]] = [()] * len(needs)
    for n, need in sorted(enumerate(needs), key=lambda each: -each[1].on_disk):
        tier = need.tier
        if tier.gpus:
            chosen = [tier.gpus[(need.number * tier.world_size + k) % len(tier.gpus)] for k in range(tier.world_size)]
        else:
            chosen = sorted(left, key=lambda index: -left[index])[: tier.world_size]
        for index in chosen:
            if index not in left:
                raise PlanError(f"tiers.{tier.name}.gpus names GPU {index}: there are {', '.join(map(str, left))}")
        if len(set(chosen)) < tier.world_size:
            raise PlanError(
                f"an engine of tier {tier.name} takes {tier.world_size} GPUs, {len(set(chosen))} can be used: lower "
                f"tiers.{tier.name}.tensor_parallel or pipeline_parallel{', or name more gpus' if tier.gpus else ''}"
            )
        for index in chosen:
            left[index] -= need.weights_each + int(GPU_OVERHEAD_GIB * GIB)
        places[n] = tuple(gpu for index in sorted(chosen) for gpu in gpus if gpu.index == index)
    return places


def _gpu_share(n: int, needs: Sequence[_Need], places: Sequence[tuple[Gpu, ...]]) -> Share:
    need, overhead = needs[n], int(GPU_OVERHEAD_GIB * GIB)
    tier, fractions, caches = need.tier, [], []
    for gpu in places[n]:
        beside = [other for other, place in zip(needs, places, strict=True) if gpu in place]
        weights = sum(other.weights_each for other in beside)
        left = gpu.free - int(GPU_RESERVE * gpu.total) - weights - overhead * len(beside)
        kv_cache = left * need.largest_batch // sum(other.largest_batch for other in beside)
        needed = need.kv_per_token * tier.max_model_len
        if kv_cache < needed:
            engines = "1 engine" if len(beside) == 1 else f"{len(beside)} engines"
            raise NoRoomError(
                f"GPU {gpu.index} ({gpu.name}) has {gpu.free / GIB:.1f} GiB free. Weights take {weights / GIB:.1f} GiB and "
                f"{engines} {overhead * len(beside) / GIB:.1f} GiB more, which leaves tier {tier.name} "
                f"{max(kv_cache, 0) / GIB:.2f} GiB of KV cache; one request of {tier.max_model_len} tokens needs "
                f"{needed / GIB:.2f} GiB. Take a smaller model, lower tiers.{tier.name}.max_model_len, raise "
                f"tiers.{tier.name}.tensor_parallel, or run a tier elsewhere with tiers.{tier.name}.urls"
            )
        fractions.append((need.weights_each + overhead + kv_cache) / gpu.total)
        caches.append(kv_cache)
    placement = Placement(gpus=tuple(gpu.index for gpu in places[n]), gpu_memory_fraction=min(fractions))
    tokens, world = min(caches) // need.kv_per_token, tier.world_size
    return Share(tier.name, need.on_disk, need.on_disk, min(caches) * world, tokens, placement, need.number)


def usual_kv_cache_gib(per_token: int, context: int, sequences: int) -> float:
    """Return a CPU engine's KV cache, in quarters of a GiB, by the bytes that a token takes.

    It holds two of the longest requests, or as many of ``USUAL_TOKENS`` as are computed together; above 1 GiB, one request.
    """
    wanted = max(2 * context, USUAL_TOKENS * sequences) * per_token
    return math.ceil(4 * min(wanted, max(context * per_token, GIB)) / GIB) / 4


def _cpu_plan(machine: Machine, needs: Sequence[_Need], kv_cache_gib: float | None) -> Plan:
    need, shares = 0, []
    for each, cores in zip(needs, _share_cores(machine.cores, len(needs)), strict=True):
        tier, on_disk, held, per_token, number = each
        if tier.world_size > 1 or tier.gpus:
            raise PlanError(
                f"tier {tier.name} is to have {tier.world_size} GPU{'s' * (tier.world_size > 1)} for each engine, and this "
                f"machine has none: leave out tiers.{tier.name}.gpus, tensor_parallel and pipeline_parallel, or run the "
                f"tier elsewhere with tiers.{tier.name}.urls"
            )
        kv_gib = kv_cache_gib or usual_kv_cache_gib(per_token, tier.max_model_len, tier.max_num_seqs)
        kv_cache = int(kv_gib * GIB)
        if kv_cache < per_token * tier.max_model_len:
            raise PlanError(
                f"tier {tier.name} needs {per_token * tier.max_model_len / GIB:.2f} GiB of KV cache for one request of "
                f"{tier.max_model_len} tokens, engine.cpu_kv_cache_gib is {kv_cache_gib}: raise it"
            )
        need += _cpu_need(held, on_disk, kv_cache)
        placement = Placement(cores=cores, threads=max(len(cores), 1), kv_cache_gib=kv_gib)
        shares.append(Share(tier.name, held, on_disk, kv_cache, kv_cache // per_token, placement, number))
    if need > machine.memory_available:
        engines = "1 CPU engine needs" if len(needs) == 1 else f"{len(needs)} CPU engines need"
        raise NoRoomError(
            f"{engines} about {need / GIB:.1f} GiB of memory, {machine.memory_available / GIB:.1f} GiB are available: "
            f"free memory, take a smaller model, or run a tier elsewhere with tiers.<name>.urls"
        )
    return Plan(f"CPU ({len(machine.cores)} cores)", tuple(shares))


def _cpu_need(held: int, on_disk: int, kv_cache: int) -> int:
    """Return the memory, in bytes, of one CPU engine, which holds its weights as on disk as well while it repacks them."""
    return held + on_disk + kv_cache + int(CPU_OVERHEAD_GIB * GIB)


def lacking_for_one_more(machine: Machine, tier: TierSpec, placement: Placement) -> str | None:
    """Return, in words, the memory that is missing for one more engine of a tier; None if there is enough.

    Args:
        machine: Its present state.
        tier: With a checkpoint.
        placement: Of the running engine; the new one gets the same.
    """
    if not placement.gpus:
        assert tier.checkpoint is not None
        held, on_disk = held_bytes(tier.checkpoint, machine.instructions), weight_bytes(tier.checkpoint)
        need, free = _cpu_need(held, on_disk, int(placement.kv_cache_gib * GIB)), machine.memory_available
        return _lacking(need, free)
    for index in placement.gpus:
        gpu = next((gpu for gpu in machine.gpus if gpu.index == index), None)
        if gpu is None:
            return f"GPU {index} is not found"
        lacking = _lacking(int(placement.gpu_memory_fraction * gpu.total), gpu.free)
        if lacking is not None:
            return lacking
    return None


def _lacking(need: int, free: int) -> str | None:
    return None if need <= free else f"one more engine needs {need / GIB:.1f} GiB, {free / GIB:.1f} GiB are free"


def _share_cores(cores: tuple[int, ...], engines: int) -> list[tuple[int, ...]]:
    """Give each engine cores of its own and leave one for the router; if there are too few, all share all."""
    each = (len(cores) - 1) // engines
    if each < 1:
        return [()] * engines
    return [cores[1 + i * each : 1 + (i + 1) * each] for i in range(engines)]


def _gpus() -> list[Gpu]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=index,name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode != 0:
        return []
    gpus = []
    for line in done.stdout.splitlines():
        index, name, total, free = (part.strip() for part in line.split(","))
        gpus.append(Gpu(int(index), name, int(total) << 20, int(free) << 20))
    return gpus
