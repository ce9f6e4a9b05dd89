"""Check vLLM's arguments that a person gave, before an engine is started with them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tiers.errors import EngineError
from tiers.lifecycle.command import without_ours

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tiers.spec import TierName

ARGS_MAIN = Path(__file__).with_name("args_main.py")
TIMEOUT_S = 120  # the first import of vLLM on a slow disk
# What QARR gives to every engine itself, and where it is set instead.
OWN = {
    "--model": "model.name",
    "--tokenizer": "model.name",
    "--served-model-name": "model.name",
    "--max-model-len": "tiers.<name>.max_model_len",
    "--max-num-seqs": "tiers.<name>.max_num_seqs",
    "--tensor-parallel-size": "tiers.<name>.tensor_parallel",
    "--pipeline-parallel-size": "tiers.<name>.pipeline_parallel",
    "--host": None,
    "--port": "engine.base_port",
    "--uds": None,
    "--root-path": None,
    "--api-key": None,
    "--otlp-traces-endpoint": "OTEL_EXPORTER_OTLP_ENDPOINT",
    "--scheduling-policy": None,
    "--ssl-keyfile": None,
    "--ssl-certfile": None,
}
SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size"}


def check_own(args: Sequence[str]) -> None:
    """Check that arguments leave alone what QARR itself gives to engines.

    Raises:
        ValueError: One does not; the text says where that is set.
    """
    for arg in args:
        given = arg.partition("=")[0]
        name = SHORT.get(given, "--" + given.removeprefix("--").replace("_", "-"))
        if arg.startswith("-") and name in OWN:
            instead = OWN[name]
            raise ValueError(
                f"{name} is QARR's own: "
                + (f"set {instead} instead" if instead else "it cannot be changed")
            )


def check_engine_args(
    python: Path,
    given: Mapping[TierName, Sequence[str]],
    known: Path,
    asking: Callable[[], None] = lambda: None,
) -> None:
    """Ask the installed vLLM whether it takes the arguments of each tier. Takes seconds, but only for new ones.

    Args:
        python: The engines' interpreter.
        given: By tier; without arguments nothing is asked.
        known: Folder of files that stand for what was accepted before.
        asking: Called before vLLM is asked, if it is.

    Raises:
        EngineError: It does not; the text has its own words.
    """
    new = {
        tier: tuple(args)
        for tier, args in given.items()
        if args and not _mark(python, args, known).exists()
    }
    if not new:
        return
    asking()
    try:
        done = subprocess.run(
            [python, ARGS_MAIN],
            input=json.dumps([list(args) for args in new.values()]),
            capture_output=True,
            text=True,
            check=True,
            timeout=TIMEOUT_S,
            env={**without_ours(os.environ), "VLLM_NO_USAGE_STATS": "1"},
        )
        refusals = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        # an environment in which vLLM cannot be imported is told by its engines' start, and by qarr doctor
        return
    for (tier, args), refusal in zip(new.items(), refusals, strict=True):
        if refusal is not None:
            raise EngineError(
                f"vLLM does not take the arguments of tier {tier}, {' '.join(args)}: {refusal}. "
                f"See engine.extra_args and tiers.{tier}.engine_args"
            )
        with suppress(OSError):
            known.mkdir(mode=0o700, parents=True, exist_ok=True)
            _mark(python, args, known).touch()


def _mark(python: Path, args: Sequence[str], known: Path) -> Path:
    """Return the file that stands for accepted arguments of one installation of vLLM."""
    versions = sorted(
        path.name
        for path in python.parent.parent.glob(
            "lib/python*/site-packages/vllm*.dist-info"
        )
    )
    key = json.dumps([str(python), versions, list(args)])
    return known / hashlib.sha256(key.encode()).hexdigest()[:24]
