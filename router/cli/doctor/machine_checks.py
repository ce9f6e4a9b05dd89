"""The checks of the machine: GPUs, kernels, and disk."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from router.cli.doctor.findings import CheckContext, Finding, ok, problem, warning
from router.cli.doctor.tier_checks import local_checkpoints, local_tiers
from tiers.checkpoints.checkpoint import Checkpoint
from tiers.checkpoints.schemes import GpuHardware, parse_capability, schemes_for
from tiers.kernels import InstructionSet, choose_kernel, describe_kernel
from tiers.plan import GIB, cpu_flags, read_machine
from tiers.spec import PRECISIONS, TierSpec

LITTLE_DISK_BYTES = 2 * GIB
SCANT_DISK_BYTES = 10 * GIB
BF16_CAPABILITY = (8, 0)  # GPUs have BF16 from this compute capability on
COMMAND_TIMEOUT_S = 60
NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=index,name,driver_version,compute_cap,memory.total,memory.free",
    "--format=csv,noheader,nounits",
)


def check_gpus(context: CheckContext) -> Iterator[Finding]:
    """Check each GPU, or where there is none whether vLLM can run on the processor."""
    if shutil.which("nvidia-smi") is None:
        yield from _check_processor(context)
        return
    report = subprocess.run(
        NVIDIA_SMI,
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_TIMEOUT_S,
    )
    if report.returncode != 0:
        error_lines = (report.stdout or report.stderr).strip().splitlines()
        why = error_lines[0] if error_lines else report.returncode
        yield warning(
            f"nvidia-smi fails: {why}",
            "repair the driver, or remove it: engines are planned for the CPU",
        )
        return
    for line in report.stdout.splitlines():
        yield judge_gpu([part.strip() for part in line.split(",")])


def _check_processor(context: CheckContext) -> Iterator[Finding]:
    has_engines = bool(local_tiers(context))
    if has_engines and "avx2" not in cpu_flags():
        yield problem(
            "vLLM's CPU build needs AVX2, which this CPU lacks",
            "run engines elsewhere: tiers.<name>.urls",
        )
    where = "engines run on the CPU" if has_engines else "no engine runs here"
    yield ok(f"none (no nvidia-smi): {where}")


def judge_gpu(parts: list[str]) -> Finding:
    """Judge a GPU by its index, name, driver, compute capability, MiB of memory, and MiB free."""
    index, name, driver, capability, total_mib, free_mib = parts
    text = (
        f"{index}: {name}, driver {driver}, compute capability {capability}, "
        f"{int(free_mib) / 1024:.1f} of {int(total_mib) / 1024:.1f} GiB free"
    )
    parsed = parse_capability(capability)
    if parsed is None or parsed < BF16_CAPABILITY:
        return warning(
            text,
            "BF16 needs compute capability 8.0: precise will not start, run it elsewhere",
        )
    schemes = schemes_for(GpuHardware(parsed)).items()
    suited = ", ".join(f"{tier} {scheme.number_format}" for tier, scheme in schemes)
    return ok(f"{text}; it suits {suited}")


def check_kernels(context: CheckContext) -> Iterator[Finding]:
    """Say what will compute each tier's layers here."""
    if not local_tiers(context):
        yield ok("none needed: every tier runs elsewhere")
        return
    machine = read_machine()
    if machine.gpus:
        yield ok("vLLM chooses them by the GPU")
        return
    if machine.instructions is None:
        # No engine can run on such a processor, as the check of GPUs says.
        return
    specs, made = local_checkpoints(context)
    descriptions = [
        _kernel_of(spec, made.get(spec.name), machine.instructions) for spec in specs
    ]
    yield ok("; ".join(descriptions))


def _kernel_of(
    spec: TierSpec, made: Checkpoint | None, instructions: InstructionSet
) -> str:
    """Return a tier's name, and in words what will compute it."""
    if spec.checkpoint is None:
        precision = spec.expected_precision or PRECISIONS[spec.name]
        return f"{spec.name}: {describe_kernel(precision, instructions)}"
    description = f"{spec.name}: {describe_kernel(spec.precision, instructions)}"
    is_as_made = (
        made is not None
        and made.path == spec.checkpoint
        and spec.precision == PRECISIONS[spec.name]
    )
    if is_as_made or not choose_kernel(spec.precision, instructions).is_of_qarr:
        return description
    return f"{description}, or vLLM's for layers that it does not take"


def check_disk(context: CheckContext) -> Iterator[Finding]:
    """Check the disk that has the checkpoints, and the disk that has the logs if it is another one."""
    store = context.settings.model.store
    store_parent = _existing_parent(store)
    yield _judge_disk(store_parent, "checkpoints", store, key="model.store")
    log_folder = context.settings.engine.log_dir
    log_parent = _existing_parent(log_folder)
    if log_parent.stat().st_dev != store_parent.stat().st_dev:
        yield _judge_disk(log_parent, "logs", log_folder, key="engine.log_dir")


def _existing_parent(folder: Path) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def _judge_disk(existing: Path, content: str, folder: Path, *, key: str) -> Finding:
    """Judge the disk that a folder is on, or will be.

    Args:
        existing: The folder, or the nearest one above it that exists.
        content: What the folder is for.
        folder: As the settings name it.
        key: The folder's setting.
    """
    free_bytes = shutil.disk_usage(existing).free
    text = f"{free_bytes / GIB:.1f} GiB free for {content} ({folder})"
    if not os.access(existing, os.W_OK):
        return problem(
            f"{existing} cannot be written to",
            f"let this user write to it, or set {key} to another folder",
        )
    if free_bytes < LITTLE_DISK_BYTES:
        return problem(
            text,
            "free some space: engines and checkpoints fail in odd ways on a full disk",
        )
    if free_bytes < SCANT_DISK_BYTES:
        return warning(
            text,
            "enough for a small model; its three checkpoints take about 3.5 bytes a parameter",
        )
    return ok(text)
