"""Checks of the machine: Python, processors, memory, GPU, disk, limits, clock."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from router.cli.doctor.findings import Check, Finding, local_engines, local_specs, local_tiers, ok, problem, warning
from router.server.http_protocol import FILES_BESIDES
from tiers.errors import PlanError, PortInUse
from tiers.lifecycle.process import check_port_free
from tiers.plan import GIB, cpu_flags, make_plan, read_machine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from router.cli.doctor.findings import CheckContext

GROUP = "machine"
OLDEST_PYTHON = (3, 11)
LITTLE_DISK, SCANT_DISK = 2 * GIB, 10 * GIB
LITTLE_MEMORY = 8 * GIB  # three engines of a small model, on a CPU
BUILT = 1_767_225_600  # 2026-01-01: no clock is right before it
TIME_ERROR = 5  # <sys/timex.h>: the clock is not synchronised
FP8_COMPUTE, BF16_COMPUTE = 8.9, 8.0
NVIDIA_TIMEOUT_S = 30
INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "amx_bf16": "AMX BF16",
    "amx_int8": "AMX int8",
}


def python(_context: CheckContext) -> Iterator[Finding]:
    """Check the interpreter."""
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < OLDEST_PYTHON:
        yield problem(found, "QARR needs 3.11 or newer: set PYTHON and run 'make router-env' again")
    else:
        yield ok(found)


def system(_context: CheckContext) -> Iterator[Finding]:
    """Check operating system and architecture."""
    kernel, architecture = platform.system(), platform.machine()
    found = f"{kernel} {platform.release()} on {architecture}"
    if kernel != "Linux":
        yield problem(found, "QARR runs on Linux: use a Linux machine, container or virtual machine")
    elif architecture != "x86_64":
        yield warning(found, "only x86-64 is tested: run engines elsewhere and give their URLs")
    else:
        yield ok(found)


def cores(context: CheckContext) -> Iterator[Finding]:
    """Check the number of usable cores against the engines that run here."""
    usable, quota = len(os.sched_getaffinity(0)), _cpu_quota()
    limited = f", limited to {quota:g} by the container" if quota else ""
    found = f"{usable} usable of {os.cpu_count() or 1}{limited}"
    engines = 0 if read_machine().gpus else local_engines(context)
    if engines and min(usable, quota or usable) < engines + 1:
        yield warning(
            f"{found}: fewer than one for each of {engines} engines and one for the router, so all share them",
            "a busy tier slows the others: serve fewer tiers here, or give the machine more cores",
        )
    else:
        yield ok(found)


def cpu_features(context: CheckContext) -> Iterator[Finding]:
    """Report what the processor's instructions mean for each tier, if engines run on it."""
    if not read_machine().gpus:
        yield judge_cpu(cpu_flags(), engines_here=bool(local_tiers(context)))


def judge_cpu(flags: set[str], *, engines_here: bool) -> Finding:
    """Return what a processor's instructions mean.

    Args:
        flags: As Linux names them.
        engines_here: Whether any engine runs on it.
    """
    there = ", ".join(shown for flag, shown in INSTRUCTIONS.items() if flag in flags) or "none that matter"
    if not engines_here:
        return ok(f"{there}; no engine runs here")
    if "avx2" not in flags:
        return problem(f"{there}: vLLM's CPU build needs AVX2", "run engines elsewhere: tiers.<name>.urls")
    if "amx_bf16" in flags:
        return ok(f"{there}: vLLM's own kernels for fast and balanced, BF16 in hardware")
    bf16 = ", BF16 in hardware" if "avx512_bf16" in flags else "; all tiers compute BF16 in FP32 steps"
    return ok(f"{there}: QARR's kernels for fast and balanced{bf16}")


def gpu(context: CheckContext) -> Iterator[Finding]:
    """Check driver and compute capability."""
    if shutil.which("nvidia-smi") is None:
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


def open_files(context: CheckContext) -> Iterator[Finding]:
    """Check the limit of open files against the most connections."""
    connections = context.settings.server.max_connections
    needed = 2 * connections + FILES_BESIDES
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    if not unlimited and hard < needed:
        fitting = max((hard - FILES_BESIDES) // 2, 1)
        yield warning(
            f"at most {hard}, {needed} are needed for server.max_connections = {connections}",
            f"raise it ('ulimit -Hn {needed}', LimitNOFILE in systemd), or set server.max_connections to {fitting}",
        )
    else:
        yield ok(f"{'unlimited' if unlimited else hard}, {needed} needed")


def clock(_context: CheckContext) -> Iterator[Finding]:
    """Check that the clock is plausible and synchronised."""
    shown, state = time.strftime("%Y-%m-%d %H:%M:%S %Z"), _clock_state()
    if time.time() < BUILT:
        then = "set the clock: certificates, keys and quotas depend on it"
        yield problem(f"{shown} is before this version was made", then)
    elif state == TIME_ERROR:
        then = "run an NTP client (chrony, systemd-timesyncd): traces of several machines depend on it"
        yield warning(f"{shown}, not synchronised", then)
    else:
        yield ok(f"{shown}{', synchronised' if state is not None else ''}")


def _is_free(port: int) -> bool:
    try:
        check_port_free("127.0.0.1", port)
    except PortInUse:
        return False
    return True


def _cpu_quota() -> float | None:
    """Return the cores that a container may use at once; None if it is not limited."""
    try:
        quota, _, period = Path("/sys/fs/cgroup/cpu.max").read_text("utf-8").partition(" ")
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _clock_state() -> int | None:
    """Return the kernel's state of the clock (``adjtimex``); None if the kernel does not report one."""
    try:
        return int(ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512)))
    except (OSError, AttributeError):
        return None


WITHOUT_SETTINGS: tuple[Check, ...] = ((GROUP, "Python", python), (GROUP, "system", system), (GROUP, "clock", clock))
CHECKS: tuple[Check, ...] = (
    *WITHOUT_SETTINGS[:2],
    (GROUP, "cores", cores),
    (GROUP, "CPU features", cpu_features),
    (GROUP, "GPU", gpu),
    (GROUP, "memory", memory),
    (GROUP, "disk", disk),
    (GROUP, "open files", open_files),
    WITHOUT_SETTINGS[2],
)
