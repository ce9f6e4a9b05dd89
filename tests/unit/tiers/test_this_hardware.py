"""What this machine computes engines with: its GPUs as the driver tells them, else its processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiers.checkpoints.schemes import CpuHardware, GpuHardware, Hardware
from tiers.plan import cpu_flags
from tiers.this_hardware import parse_gpus, read_hardware


def test_the_least_able_gpu_counts() -> None:
    assert parse_gpus("0, 9.0\n1, 8.0\n2, 12.0\n") == GpuHardware((8, 0))
    assert parse_gpus("0, 9.0\n1, [N/A]\n") == GpuHardware(None)
    assert parse_gpus("") == GpuHardware(None)


OLD_DRIVER = """
case "$1" in --list-gpus) echo 'GPU 0: Tesla';; *) echo 'not a valid field'; exit 2;; esac
"""


@pytest.mark.parametrize(
    ("script", "hardware"),
    [
        ("echo '0, 10.3'", GpuHardware((10, 3))),
        (OLD_DRIVER, GpuHardware(None)),
        ("exit 9", CpuHardware(frozenset(cpu_flags()))),
    ],
    ids=["GPU", "driver without the field", "no driver"],
)
def test_gpus_are_read_from_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, hardware: Hardware
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_hardware() == hardware


def test_a_machine_without_gpus_is_its_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_hardware() == CpuHardware(frozenset(cpu_flags()))
