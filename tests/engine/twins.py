"""The checkpoints that the tests' engines serve: the model's own, or those of a twin.

On another processor near-ties are decided differently, and no test may depend on them. A twin of the model (see
``scripts/make_twin.py``) shows that on this processor. ``QARR_TEST_TWIN`` chooses it: a seed, ``day`` for the number of days
since 1970, so that each day's run has another model, or ``0``, the default, for the model itself.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

from router.deployment.layout import prepare_options
from router.section import PROJECT
from router.settings import load_settings
from tests.conftest import CHOSEN_TWIN
from tiers.checkpoints.prepare import finished
from tiers.spec import STANDARD_TIERS

STORE_VARIABLE = "QARR_MODEL__STORE"
SEED_VARIABLE = "QARR_TEST_TWIN"
DAY_S = 86_400
# A twin shares these folders of a store, which are for base models, with the model.
SOURCES = ("gguf", "hub")


def _seed(chosen: str) -> int:
    if chosen == "day":
        return int(time.time()) // DAY_S
    return int(chosen or 0)


TWIN_SEED = _seed(CHOSEN_TWIN)
# The developer's settings are read now: each test removes them from the environment.
OWN_STORE = load_settings().model.store.absolute()


def describe() -> str:
    """Say which model the engines serve, and how to serve it again."""
    if TWIN_SEED == 0:
        return f"Engines serve the model itself ({SEED_VARIABLE}=day: a twin of it)."
    return f"Engines serve twin {TWIN_SEED} of the model; {SEED_VARIABLE}={TWIN_SEED} repeats it, 0 is the model itself."


@cache
def model_store() -> Path:
    """Return the folder of the engines' checkpoints; a twin's is made first, and removed when the tests have ended."""
    if TWIN_SEED == 0:
        return OWN_STORE
    OWN_STORE.parent.mkdir(parents=True, exist_ok=True)
    # /tmp may be in memory, and not large enough.
    folder = Path(tempfile.mkdtemp(prefix="twin-", dir=OWN_STORE.parent))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _fill(folder)
    return folder


def _fill(folder: Path) -> None:
    """Make the twins of all three checkpoints, in the places where ``qarr up`` looks for finished ones."""
    options = prepare_options(load_settings(None, {"model": {"store": str(OWN_STORE)}}))
    if len(finished(options)) < len(STANDARD_TIERS):
        environment = {**os.environ, STORE_VARIABLE: str(OWN_STORE)}
        subprocess.run(
            [Path(sys.executable).with_name("qarr"), "model", "prepare"],
            env=environment,
            check=True,
            timeout=1500,
        )
    for checkpoint in finished(options):
        twin = folder / checkpoint.path.relative_to(OWN_STORE)
        command = [sys.executable, PROJECT / "scripts/make_twin.py"]
        command += [checkpoint.path, twin, "--keep-manifest", "--seed", str(TWIN_SEED)]
        subprocess.run(command, check=True, timeout=300)
    for name in SOURCES:
        if (OWN_STORE / name).is_dir():
            (folder / name).symlink_to(OWN_STORE / name)
