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

from router.cli.doctor.findings import Check, Finding, local_specs, local_tiers, ok, problem, warning
from router.server.http_protocol import FILES_BESIDES
from tiers.plan import GIB, cpu_flags, make_plan, read_machine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from router.cli.doctor.findings import Question

GROUP = "machine"
OLDEST_PYTHON = (3, 11)
LITTLE_DISK, SCANT_DISK = 2 * GIB, 10 * GIB
LITTLE_MEMORY = 8 * GIB  # three engines of a small model, on a CPU
BUILT = 1_767_225_600  # 2026-01-01: no clock is right before it
TIME_ERROR = 5  # <sys/timex.h>: the clock is not synchronised
FP8_COMPUTE, BF16_COMPUTE = 8.9, 8.0
NVIDIA_TIMEOUT_S = 30


def python(_question: Question) -> Iterator[Finding]:
    """Check the interpreter."""
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < OLDEST_PYTHON:
        yield problem(GROUP, "Python", found, "QARR needs 3.11 or newer: set PYTHON and run 'make router-env' again")
    else:
        yield ok(GROUP, "Python", found)


def system(_question: Question) -> Iterator[Finding]:
    """Check operating system and architecture."""
    kernel, architecture = platform.system(), platform.machine()
    found = f"{kernel} {platform.release()} on {architecture}"
    if kernel != "Linux":
        yield problem(GROUP, "system", found, "QARR runs on Linux: use a Linux machine, container or virtual machine")
    elif architecture != "x86_64":
        yield warning(GROUP, "system", found, "only x86-64 is tested: run engines elsewhere and give their URLs")
    else:
        yield ok(GROUP, "system", found)


def cores(question: Question) -> Iterator[Finding]:
    """Check how many cores may be used, against the engines that run here."""
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = _cpu_quota()
    found = f"{usable} usable of {there}" + (f", limited to {quota:g} by the container" if quota else "")
    local = [] if read_machine().gpus else local_tiers(question)
    most = min(usable, quota) if quota else usable
    if local and most < len(local) + 1:
        yield warning(
            GROUP,
            "cores",
            f"{found}: fewer than one for each of {len(local)} engines and one for the router, so all share them",
            "a busy tier slows the others: serve fewer tiers here, or give the machine more cores",
        )
    else:
        yield ok(GROUP, "cores", found)


def cpu_features(question: Question) -> Iterator[Finding]:
    """Say what the processor's instructions mean for each tier, where engines run on it."""
    if read_machine().gpus:
        return
    yield judge_cpu(cpu_flags(), engines_here=bool(local_tiers(question)))


def judge_cpu(flags: set[str], *, engines_here: bool) -> Finding:
    """Return what a processor's instructions mean.

    Args:
        flags: As Linux names them.
        engines_here: Whether any engine runs on it.
    """
    names = {
        "avx2": "AVX2",
        "avx512f": "AVX-512",
        "avx512_vnni": "VNNI",
        "avx512_bf16": "AVX-512 BF16",
        "amx_bf16": "AMX BF16",
        "amx_int8": "AMX int8",
    }
    there = ", ".join(shown for flag, shown in names.items() if flag in flags) or "none that matter"
    if not engines_here:
        return ok(GROUP, "CPU features", f"{there}; no engine runs here")
    if "avx2" not in flags:
        return problem(
            GROUP, "CPU features", f"{there}: vLLM's CPU build needs AVX2", "run engines elsewhere: tiers.<name>.urls"
        )
    if "amx_bf16" in flags:
        return ok(GROUP, "CPU features", f"{there}: vLLM's own kernels for fast and balanced, BF16 in hardware")
    ours = "QARR's kernels for fast and balanced"
    if "avx512_bf16" not in flags:
        return ok(GROUP, "CPU features", f"{there}: {ours}; all tiers compute BF16 in FP32 steps")
    return ok(GROUP, "CPU features", f"{there}: {ours}, BF16 in hardware")


def gpu(question: Question) -> Iterator[Finding]:
    """Check driver and compute capability."""
    if shutil.which("nvidia-smi") is None:
        where = "engines run on the CPU" if local_tiers(question) else "no engine runs here"
        yield ok(GROUP, "GPU", f"none (no nvidia-smi): {where}")
        return
    query = [
        "nvidia-smi",
        "--query-gpu=index,name,driver_version,compute_cap,memory.total,memory.free",
        "--format=csv,noheader,nounits",
    ]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=NVIDIA_TIMEOUT_S)
    if done.returncode != 0:
        said = (done.stdout or done.stderr).strip().splitlines()
        yield warning(
            GROUP,
            "GPU",
            f"nvidia-smi fails: {said[0] if said else done.returncode}",
            "mend the driver, or remove it: engines are planned for the CPU",
        )
        return
    for line in done.stdout.splitlines():
        yield judge_gpu([part.strip() for part in line.split(",")])


def judge_gpu(parts: list[str]) -> Finding:
    """Return what a GPU means.

    Args:
        parts: Index, name, driver, compute capability, MiB of memory, MiB free.
    """
    index, name, driver, compute, total, free = parts
    room = f"{int(free) / 1024:.1f} of {int(total) / 1024:.1f} GiB free"
    found = f"{index}: {name}, driver {driver}, compute capability {compute}, {room}"
    capability = float(compute) if compute.replace(".", "").isdigit() else 0.0
    if capability < BF16_COMPUTE:
        return warning(
            GROUP, "GPU", found, "BF16 takes compute capability 8.0: precise will not start, run it elsewhere"
        )
    if capability < FP8_COMPUTE:
        return warning(
            GROUP, "GPU", found, "FP8 in hardware takes 8.9: balanced keeps FP8 weights, but computes in 16 bits"
        )
    return ok(GROUP, "GPU", found)


def memory(question: Question) -> Iterator[Finding]:
    """Check memory against the plan for the configured model."""
    machine = read_machine()
    available, total = machine.memory_available, psutil.virtual_memory().total
    found = f"{available / GIB:.1f} of {total / GIB:.1f} GiB available"
    local = local_tiers(question)
    specs = local_specs(question)
    if not local:
        yield ok(GROUP, "memory", f"{found}; no engine runs here")
    elif any(_taken(question.settings.engine.base_port + n) for n in range(len(local))):
        yield ok(GROUP, "memory", f"{found}, with engines running")
    elif len(specs) < len(local):
        if machine.gpus or available > LITTLE_MEMORY:
            yield ok(GROUP, "memory", f"{found}; planned for the model once its checkpoints are made")
        else:
            yield warning(
                GROUP,
                "memory",
                found,
                f"engines of a small model need about {LITTLE_MEMORY / GIB:.0f} GiB: end what else runs here",
            )
    else:
        plan = make_plan(machine, specs, kv_cache_gib=question.settings.engine.cpu_kv_cache_gib)
        shares = ", ".join(f"{s.tier} {s.weights / GIB:.1f} + {s.kv_cache / GIB:.1f}" for s in plan.shares)
        yield ok(GROUP, "memory", f"{found}; {plan.device}: {shares} GiB (weights as held + KV cache)")


def planned_memory(question: Question) -> Iterator[Finding]:
    """Check memory; a plan that does not fit is a problem."""
    from tiers.errors import PlanError  # noqa: PLC0415

    try:
        yield from memory(question)
    except PlanError as error:
        text, _, then = str(error).rpartition(": ")
        yield problem(GROUP, "memory", text or str(error), then or "take a smaller model")


def disk(question: Question) -> Iterator[Finding]:
    """Check free space where checkpoints and logs go."""
    seen: set[int] = set()
    for name, folder in (("checkpoints", question.settings.model.store), ("logs", question.settings.engine.log_dir)):
        there = next(p for p in (folder, *folder.parents) if p.exists())
        if there.stat().st_dev in seen:
            continue
        seen.add(there.stat().st_dev)
        free = shutil.disk_usage(there).free
        found = f"{free / GIB:.1f} GiB free for {name} ({folder})"
        if not os.access(there, os.W_OK):
            yield problem(
                GROUP,
                "disk",
                f"{there} cannot be written to",
                f"let this user write to it, or set another folder for {name}",
            )
        elif free < LITTLE_DISK:
            yield problem(GROUP, "disk", found, "make room: engines and checkpoints fail in odd ways on a full disk")
        elif free < SCANT_DISK:
            yield warning(
                GROUP, "disk", found, "enough for a small model; its three checkpoints take about 3.5 bytes a parameter"
            )
        else:
            yield ok(GROUP, "disk", found)


def open_files(question: Question) -> Iterator[Finding]:
    """Check the limit of open files against the connections that are let in."""
    connections = question.settings.server.max_connections
    needed = 2 * connections + FILES_BESIDES
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fitting = max((hard - FILES_BESIDES) // 2, 1)
    if hard != resource.RLIM_INFINITY and hard < needed:
        yield warning(
            GROUP,
            "open files",
            f"at most {hard}, {needed} are needed for server.max_connections = {connections}",
            f"raise it ('ulimit -Hn {needed}', LimitNOFILE in systemd), or set server.max_connections to {fitting}",
        )
    else:
        yield ok(GROUP, "open files", f"{'unlimited' if hard == resource.RLIM_INFINITY else hard}, {needed} needed")


def clock(_question: Question) -> Iterator[Finding]:
    """Check that the clock is plausible, and that something keeps it right."""
    now = time.time()
    shown = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    if now < BUILT:
        yield problem(
            GROUP,
            "clock",
            f"{shown} is before this version was made",
            "set the clock: certificates, keys and quotas go by it",
        )
        return
    state = _clock_state()
    if state == TIME_ERROR:
        yield warning(
            GROUP,
            "clock",
            f"{shown}, not synchronised",
            "run an NTP client (chrony, systemd-timesyncd): traces of several machines go by it",
        )
    else:
        yield ok(GROUP, "clock", f"{shown}{', synchronised' if state is not None else ''}")


def _taken(port: int) -> bool:
    import socket  # noqa: PLC0415

    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _cpu_quota() -> float | None:
    """Return the cores that a container may use at once; None where it is not limited."""
    try:
        quota, _, period = Path("/sys/fs/cgroup/cpu.max").read_text("utf-8").partition(" ")
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _clock_state() -> int | None:
    """Return what the kernel says of the clock (``adjtimex``); None where it does not say."""
    try:
        return int(ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512)))
    except (OSError, AttributeError):
        return None


WITHOUT_SETTINGS: tuple[Check, ...] = ((GROUP, "Python", python), (GROUP, "system", system), (GROUP, "clock", clock))
CHECKS: tuple[Check, ...] = (
    (GROUP, "Python", python),
    (GROUP, "system", system),
    (GROUP, "cores", cores),
    (GROUP, "CPU features", cpu_features),
    (GROUP, "GPU", gpu),
    (GROUP, "memory", planned_memory),
    (GROUP, "disk", disk),
    (GROUP, "open files", open_files),
    (GROUP, "clock", clock),
)
