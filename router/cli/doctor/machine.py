"""Checks of the machine: GPU, memory, disk."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import psutil

from router.cli.doctor.findings import Check, Finding, local_engines, local_specs, local_tiers, ok, problem, warning
from tiers.errors import PlanError, PortInUse
from tiers.lifecycle.process import check_port_free
from tiers.plan import GIB, cpu_flags, make_plan, read_machine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from router.cli.doctor.findings import CheckContext

GROUP = "machine"
LITTLE_DISK, SCANT_DISK = 2 * GIB, 10 * GIB
LITTLE_MEMORY = 8 * GIB  # three engines of a small model, on a CPU
FP8_COMPUTE, BF16_COMPUTE = 8.9, 8.0
NVIDIA_TIMEOUT_S = 30


def gpu(context: CheckContext) -> Iterator[Finding]:
    if shutil.which("nvidia-smi") is None:
        if local_tiers(context) and "avx2" not in cpu_flags():
            yield problem(
                "vLLM's CPU build needs AVX2, which this CPU lacks", "run engines elsewhere: tiers.<name>.urls"
            )
        where = "engines run on the CPU" if local_tiers(context) else "no engine runs here"
        yield ok(f"none (no nvidia-smi): {where}")
        return
    fields = "index,name,driver_version,compute_cap,memory.total,memory.free"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=NVIDIA_TIMEOUT_S)
    if done.returncode != 0:
        said = (done.stdout or done.stderr).strip().splitlines()
        then = "repair the driver, or remove it: engines are planned for the CPU"
        yield warning(f"nvidia-smi fails: {said[0] if said else done.returncode}", then)
        return
    for line in done.stdout.splitlines():
        yield judge_gpu([part.strip() for part in line.split(",")])


def judge_gpu(parts: list[str]) -> Finding:
    """Return what a GPU can compute.

    Args:
        parts: Index, name, driver, compute capability, MiB of memory, MiB free.
    """
    index, name, driver, compute, total, free = parts
    memory_free = f"{int(free) / 1024:.1f} of {int(total) / 1024:.1f} GiB free"
    found = f"{index}: {name}, driver {driver}, compute capability {compute}, {memory_free}"
    capability = float(compute) if compute.replace(".", "").isdigit() else 0.0
    if capability < BF16_COMPUTE:
        return warning(found, "BF16 needs compute capability 8.0: precise will not start, run it elsewhere")
    if capability < FP8_COMPUTE:
        return warning(found, "FP8 in hardware needs 8.9: balanced keeps FP8 weights, but computes in 16 bits")
    return ok(found)


def memory(context: CheckContext) -> Iterator[Finding]:
    """Check memory against the plan for the configured model."""
    machine, engine = read_machine(), context.settings.engine
    available, total = machine.memory_available, psutil.virtual_memory().total
    found = f"{available / GIB:.1f} of {total / GIB:.1f} GiB available"
    local, specs = local_tiers(context), local_specs(context)
    if not local:
        yield ok(f"{found}; no engine runs here")
    elif any(not _is_free(engine.base_port + n) for n in range(local_engines(context))):
        yield ok(f"{found}, with engines running")
    elif len(specs) == len(local):
        try:
            plan = make_plan(machine, specs, kv_cache_gib=engine.cpu_kv_cache_gib)
        except PlanError as error:
            text, _, then = str(error).rpartition(": ")
            yield problem(text or str(error), then or "take a smaller model")
            return
        shares = ", ".join(f"{s.tier} {s.weights / GIB:.1f} + {s.kv_cache / GIB:.1f}" for s in plan.shares)
        yield ok(f"{found}; {plan.device}: {shares} GiB (weights as held + KV cache)")
    elif machine.gpus or available > LITTLE_MEMORY:
        yield ok(f"{found}; planned for the model once its checkpoints are made")
    else:
        needed = f"engines of a small model need about {LITTLE_MEMORY / GIB:.0f} GiB"
        yield warning(found, f"{needed}: end what else runs here")


def disk(context: CheckContext) -> Iterator[Finding]:
    """Check free space for checkpoints and logs, once for each file system."""
    seen: set[int] = set()
    for name, folder in (("checkpoints", context.settings.model.store), ("logs", context.settings.engine.log_dir)):
        there = next(p for p in (folder, *folder.parents) if p.exists())
        device = there.stat().st_dev
        if device in seen:
            continue
        seen.add(device)
        free = shutil.disk_usage(there).free
        found = f"{free / GIB:.1f} GiB free for {name} ({folder})"
        if not os.access(there, os.W_OK):
            then = f"let this user write to it, or set another folder for {name}"
            yield problem(f"{there} cannot be written to", then)
        elif free < LITTLE_DISK:
            yield problem(found, "free some space: engines and checkpoints fail in odd ways on a full disk")
        elif free < SCANT_DISK:
            then = "enough for a small model; its three checkpoints take about 3.5 bytes a parameter"
            yield warning(found, then)
        else:
            yield ok(found)


def _is_free(port: int) -> bool:
    try:
        check_port_free("127.0.0.1", port)
    except PortInUse:
        return False
    return True


CHECKS: tuple[Check, ...] = (
    (GROUP, "GPU", gpu),
    (GROUP, "memory", memory),
    (GROUP, "disk", disk),
)
