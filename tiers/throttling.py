"""What slows this machine's processors down from outside: heat, power limits, a quota of CPU time."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# nvidia-smi's fields, and what they mean to a person. ``sw_power_cap`` is not among them: at full load it is the usual
# state of a card, and its profile was measured so.
GPU_REASONS = {
    "clocks_event_reasons.hw_thermal_slowdown": "it is too hot",
    "clocks_event_reasons.sw_thermal_slowdown": "it is hot",
    "clocks_event_reasons.hw_power_brake_slowdown": "its power supply asks it to slow down",
}
GPU_TIMEOUT_S = 10.0
QUOTA_SHARE = 0.25  # a quota of CPU time counts once it takes this share of the time
CPUS = Path("/sys/devices/system/cpu")
CGROUP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class CpuReading:
    """What the kernel has counted since it started.

    Attributes:
        hot: Times that a core was slowed down because of its temperature.
        held_back_s: Seconds that this control group waited for its quota of CPU time.
    """

    hot: int = 0
    held_back_s: float = 0.0

    def slower_than(self, earlier: CpuReading, seconds: float) -> str | None:
        """Return, in words, why the processors were slow between two readings; None: they were not.

        Args:
            earlier: Taken that many seconds before.
            seconds: Above 0.
        """
        if self.hot > earlier.hot:
            return "the CPU is throttled: it is hot"
        share = (self.held_back_s - earlier.held_back_s) / seconds
        if share >= QUOTA_SHARE:
            return f"the CPU quota of this control group holds it back ({share:.1f} s a second)"
        return None


def read_cpu() -> CpuReading:
    """Read the kernel's counters; those that it does not have stay 0."""
    hot = sum(
        _number(path)
        for path in CPUS.glob("cpu[0-9]*/thermal_throttle/core_throttle_count")
    )
    held_back_us = 0
    for line in _text(CGROUP).splitlines():
        if not line.startswith("0::"):  # the first hierarchy's groups count otherwise
            continue
        group = line.removeprefix("0::")
        for stat in _text(CGROUPS / group.lstrip("/") / "cpu.stat").splitlines():
            name, _, value = stat.partition(" ")
            if name == "throttled_usec" and value.isdigit():
                held_back_us += int(value)
    return CpuReading(hot, held_back_us / 1e6)


def read_gpus() -> dict[int, str]:
    """Return, in words, why GPUs are slowed down, by index; those that are not are left out."""
    if shutil.which("nvidia-smi") is None:
        return {}
    query = [
        "nvidia-smi",
        f"--query-gpu=index,{','.join(GPU_REASONS)}",
        "--format=csv,noheader",
    ]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, check=False, timeout=GPU_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    if done.returncode != 0:
        return {}
    return dict(gpu_reasons(done.stdout))


def gpu_reasons(listed: str) -> Mapping[int, str]:
    """Read nvidia-smi's answer: an index and ``Active`` or ``Not Active`` for each of ``GPU_REASONS``, a line a GPU."""
    reasons = {}
    for line in listed.splitlines():
        index, *states = (part.strip() for part in line.split(","))
        active = [
            why
            for why, state in zip(GPU_REASONS.values(), states, strict=False)
            if state == "Active"
        ]
        if active and index.isdigit():
            reasons[int(index)] = f"GPU {index} is throttled: {active[0]}"
    return reasons


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _text(path).strip()
    return int(text) if text.isdigit() else 0
