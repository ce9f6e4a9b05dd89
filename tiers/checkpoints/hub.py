"""Names of checkpoints: a folder, or an id of the Hugging Face hub, which stands for a folder of the store."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tiers.errors import CheckpointError

HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
CONFIG = "config.json"
MAX_HUB_ERROR_CHARS = 400
# What to do, by the error of the hub's library that is the first word of what went wrong.
_REMEDIES = {
    "RepositoryNotFoundError": "there is no such folder here and no such model there, or it is private: check the id, or "
    "set HF_TOKEN to a token that may read it",
    "GatedRepoError": "its owner wants an agreement first: accept it on the model's page, and set HF_TOKEN to a token of "
    "that account",
    "NoRoomError": "free some room, or set model.store to a folder on another disk",
    "OSError": "see to the disk of model.store: it needs room, and to be writable by this user",
    **dict.fromkeys(
        (
            "LocalEntryNotFoundError",
            "OfflineModeIsEnabled",
            "ConnectError",
            "ConnectTimeout",
            "ReadTimeout",
        ),
        "the hub cannot be reached: check the network, HF_ENDPOINT and HF_HUB_OFFLINE, and start again (what came is kept); "
        "or give a model folder",
    ),
}
_USUAL_REMEDY = (
    "check the id and the network, set HF_TOKEN if it is gated, or give a model folder"
)


def hub_folder(model: str, store: Path) -> Path:
    """Return the folder of a model that is fetched from the hub."""
    return store / "hub" / model.replace("/", "--")


def checkpoint_folder(checkpoint: str, store: Path) -> Path:
    """Return the folder of a checkpoint, which need not be there yet.

    Args:
        checkpoint: A folder, or an id of the hub. A folder that is there goes before an id of the same form.
        store: Folder of all checkpoints.
    """
    folder = Path(os.path.expanduser(checkpoint))  # noqa: PTH111  pathlib's fails without a home folder
    if (folder / CONFIG).is_file() or not HUB_ID.match(checkpoint):
        return folder
    return hub_folder(checkpoint, store)


def hub_error(key: str, model: str, failure: str) -> CheckpointError:
    """Return the error of a model that could not be fetched, which says what to do.

    Args:
        key: The setting that names the model.
        model: Its id.
        failure: What went wrong; its last line begins with the error's name.
    """
    line = failure.strip().splitlines()[-1][:MAX_HUB_ERROR_CHARS]
    remedy = _REMEDIES.get(line.partition(":")[0], _USUAL_REMEDY)
    return CheckpointError(
        f"{key}: {model} cannot be fetched from the Hugging Face hub: {line}; {remedy}"
    )
