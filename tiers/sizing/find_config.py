"""Find the ``config.json`` of a model: on disk, in the cache of the Hugging Face hub, or on the hub. No weights are read."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import httpx

from tiers.checkpoints.precision import hub_cache
from tiers.errors import PlanError, TrustError
from tiers.trust import client_context

HUB = "https://huggingface.co"
TIMEOUT_S = 20
MAX_BYTES = 4 << 20
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def find_config(model: str) -> dict[str, Any]:
    """Return a model's configuration.

    ``HF_ENDPOINT``, ``HF_TOKEN`` and ``HF_HUB_OFFLINE`` mean what they mean to the hub's own library.

    Args:
        model: A ``config.json``, a folder with one, or an id of the hub, as ``Qwen/Qwen3-30B-A3B``.

    Raises:
        PlanError: There is none, or it cannot be had; the text says what to do.
    """
    path = Path(os.path.expanduser(model))  # noqa: PTH111  pathlib's fails without a home folder
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        return _parse_config(path.read_bytes(), str(path))
    if not _ID.fullmatch(model) or path.suffix == ".json":
        raise PlanError(
            f"--model {model}: there is no such file or folder, and it is not an id such as owner/name"
        )
    cached_file = _newest_cached_config(model)
    if cached_file is not None:
        return _parse_config(cached_file.read_bytes(), model)
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        raise PlanError(
            f"--model {model}: it is not in the hub's cache, and HF_HUB_OFFLINE is set; give its config.json"
        )
    return _parse_config(_download(model), model)


def _newest_cached_config(model: str) -> Path | None:
    snapshots = hub_cache() / f"models--{model.replace('/', '--')}" / "snapshots"
    # The order decides between files of the same time.
    cached_files = sorted(snapshots.glob("*/config.json"))
    return max(cached_files, key=lambda file: file.stat().st_mtime, default=None)


def _download(model: str) -> bytes:
    hub = os.environ.get("HF_ENDPOINT", HUB).rstrip("/")
    url = f"{hub}/{model}/resolve/main/config.json"
    headers: dict[str, str] = {}
    token = os.environ.get("HF_TOKEN")
    if token:
        headers["authorization"] = f"Bearer {token}"
    try:
        answer = httpx.get(
            url,
            headers=headers,
            timeout=TIMEOUT_S,
            follow_redirects=True,
            verify=client_context(),
        )
    except TrustError as error:
        raise PlanError(f"--model {model}: {url} cannot be asked: {error}") from error
    except httpx.HTTPError as error:
        raise PlanError(
            f"--model {model}: {url} cannot be reached ({error}); give the model's config.json"
        ) from error
    if answer.status_code in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
        raise PlanError(
            f"--model {model}: the hub wants a token that may read it in HF_TOKEN; or give its config.json"
        )
    if answer.status_code != httpx.codes.OK:
        raise PlanError(
            f"--model {model}: {url} answered {answer.status_code}; check the id, or give its config.json"
        )
    return answer.content


def _parse_config(content: bytes, model: str) -> dict[str, Any]:
    try:
        config = json.loads(content[:MAX_BYTES])
    except (ValueError, RecursionError) as error:
        raise PlanError(
            f"--model {model}: its config.json is not JSON: {error}"
        ) from error
    if not isinstance(config, dict):
        raise PlanError(f"--model {model}: its config.json must be a JSON object")
    return config
