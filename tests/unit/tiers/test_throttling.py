"""What slows processors down: what is read of the kernel and of nvidia-smi, and how long it is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.own_engines import own_engines
from tests.waiting import until
from tiers.lifecycle import processors
from tiers.lifecycle.engine import THROTTLED_S, Engine
from tiers.lifecycle.watchdog import WatchdogOptions
from tiers.replica import Replica
from tiers.spec import EnginePlacement, ReplicaStatus, TierName, TierSpec
from tiers.throttling import GPU_REASONS, CpuReading, gpu_reasons, read_cpu, read_gpus

LISTED = """0, Not Active, Not Active, Not Active
1, Active, Active, Not Active
2, Not Active, Not Active, Active
3, [N/A], [N/A], [N/A]
"""


def test_each_gpu_has_the_first_of_its_reasons() -> None:
    """Those that the driver does not tell are not taken for active."""
    assert gpu_reasons(LISTED) == {
        1: "GPU 1 is throttled: it is too hot",
        2: "GPU 2 is throttled: its power supply asks it to slow down",
    }
    assert gpu_reasons("") == gpu_reasons("No devices were found\n") == {}


def test_a_cpu_is_slow_by_its_counters() -> None:
    """Heat goes before the quota; little waiting for the quota is no matter."""
    before = CpuReading(hot=5, held_back_s=100)
    assert CpuReading(5, 101).slower_than(before, 10) is None
    assert "CPU quota of this control group holds it back (0.4 s a second)" in str(
        CpuReading(5, 104).slower_than(before, 10)
    )
    assert (
        CpuReading(6, 104).slower_than(before, 10) == "the CPU is throttled: it is hot"
    )


def test_this_machines_counters_only_grow() -> None:
    first = read_cpu()
    second = read_cpu()
    assert second.hot >= first.hot >= 0
    assert second.held_back_s >= first.held_back_s >= 0


def test_what_was_seen_is_told_for_a_while() -> None:
    """It comes and goes with the load; and it stands beside what else is to be said."""
    spec = TierSpec(TierName.FAST, 1, max_num_seqs=1, max_in_flight=1)
    engine = Engine(
        Replica("fast-0", spec, "u", "", "m"),
        None,
        WatchdogOptions(),
        less="started with less: x",
    )
    engine.note_throttled("it is hot", 100.0)
    assert engine.remark == "started with less: x; slower: it is hot"
    engine.note_throttled(None, 100.0 + THROTTLED_S)
    assert engine.throttled == "it is hot"
    engine.note_throttled(None, 100.1 + THROTTLED_S)
    assert engine.remark == "started with less: x"


@pytest.mark.anyio
async def test_a_throttled_gpu_is_seen_at_its_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay ready, with the reason; engines on other GPUs are not concerned."""
    monkeypatch.setattr(processors, "POLL_S", 0.02)
    async with own_engines(
        tmp_path, monkeypatch, TierName.FAST, TierName.BALANCED
    ) as own:
        for gpu, engine in enumerate(own.supervisor.engines):
            assert engine.launch is not None
            object.__setattr__(
                engine.launch,
                "placement",
                EnginePlacement(gpus=(gpu,), gpu_memory_fraction=0.5),
            )
        script = tmp_path / "nvidia-smi"
        script.write_text(f"#!/bin/sh\necho '{LISTED}'\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert set(read_gpus()) == {1, 2}
        fast, balanced = own.fleet.replicas
        await until(
            lambda: balanced.state.detail == "slower: GPU 1 is throttled: it is too hot"
        )
        assert balanced.state.status == ReplicaStatus.READY
        assert fast.state.status == ReplicaStatus.READY
        assert fast.state.detail is None
        script.write_text("#!/bin/sh\nexit 9\n")
        assert read_gpus() == {}


def test_nvidia_smi_is_asked_for_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert read_gpus() == {}
    assert (
        f"--query-gpu=index,{','.join(GPU_REASONS)}" in (tmp_path / "asked").read_text()
    )
