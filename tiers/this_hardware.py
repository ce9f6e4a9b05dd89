"""What this machine computes engines with, as the table of schemes tells hardware apart."""

from __future__ import annotations

import shutil
import subprocess

from tiers.checkpoints.schemes import (
    CpuHardware,
    GpuHardware,
    Hardware,
    parse_capability,
)
from tiers.plan import cpu_flags

NVIDIA_SMI = ("nvidia-smi", "--query-gpu=index,compute_cap", "--format=csv,noheader")
TIMEOUT_S = 30


def read_hardware() -> Hardware:
    """Return this machine's GPUs, the least able one where they differ; without GPUs its processor.

    The engines of every tier may run on any of the GPUs.
    """
    if shutil.which("nvidia-smi") is None:
        return _this_cpu()
    answer = subprocess.run(
        NVIDIA_SMI, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    if answer.returncode != 0:
        # A driver that is not loaded, or one from before CUDA 11, which does not know the field.
        return GpuHardware(None) if _has_gpus() else _this_cpu()
    return parse_gpus(answer.stdout)


def parse_gpus(report: str) -> GpuHardware:
    """Return the least able of the GPUs that ``nvidia-smi`` lists, as "0, 9.0" in each line."""
    capabilities = []
    for line in report.splitlines():
        capability = parse_capability(line.rpartition(",")[2])
        if capability is None:
            return GpuHardware(None)
        capabilities.append(capability)
    return GpuHardware(min(capabilities, default=None))


def _has_gpus() -> bool:
    listed = subprocess.run(
        ["nvidia-smi", "--list-gpus"],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    return listed.returncode == 0 and bool(listed.stdout.strip())


def _this_cpu() -> CpuHardware:
    return CpuHardware(frozenset(cpu_flags()))
