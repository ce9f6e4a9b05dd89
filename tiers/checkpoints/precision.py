"""The precision of a checkpoint, as its own files say. Nothing is guessed from a name.

What an engine makes of a checkpoint is known only where its arguments are: they may quantize or cast it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil

from tiers.checkpoints.config_files import read_json
from tiers.checkpoints.contents import read_contents
from tiers.checkpoints.quantization_rules import configured_dtype
from tiers.kv_precision import with_kv_cache
from tiers.spec import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Sequence

AUTO = "auto"
HTTP_PORT = 80
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# As config.json and vLLM's --dtype name them. vLLM casts 32-bit checkpoints to a format that it chooses by the machine.
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
_FORCED = {**_DTYPES, "float32": "fp32", "float": "fp32"}
# vLLM's names of what it can make of a checkpoint while it loads (vllm/config/quantization.py, release 0.32). The last two
# are for experts only: the other linear layers stay as they are.
_ONLINE_METHODS = {
    "fp8": "fp8",
    "fp8_per_tensor": "fp8",
    "fp8_per_channel": "fp8",
    "fp8_per_block": "fp8-block",
    "mxfp8": "mxfp8",
    "mxfp4": "mxfp4",
    "int8_per_channel_weight_only": "int8",
    "nvfp4_per_token": "nvfp4",
}


def checkpoint_precision(folder: Path, args: Sequence[str] = ()) -> str:
    """Return the precision that vLLM serves a checkpoint at, such as ``awq-int4``; ``unknown`` if that cannot be told.

    Args:
        folder: The checkpoint.
        args: Arguments of vLLM that may change it; the last one counts.
    """
    contents = read_contents(folder)
    if contents.is_quantized:
        kv_cache_dtype = _option(args, "--kv-cache-dtype")
        if contents.kv_cache is None or kv_cache_dtype in {None, AUTO}:
            return contents.precision
        return with_kv_cache(contents.precision, kv_cache_dtype)
    # It names a file with more arguments.
    if _option(args, "--config") is not None:
        return UNKNOWN
    method = _option(args, "--quantization", "-q")
    if method is not None:
        return _ONLINE_METHODS.get(method, UNKNOWN)
    forced_dtype = _option(args, "--dtype")
    if forced_dtype in _FORCED:
        return _FORCED[forced_dtype]
    config = read_json(folder / "config.json")
    return _DTYPES.get(configured_dtype(config), UNKNOWN)


def root_precision(url: str, root: str | None) -> str:
    """Return the precision of the checkpoint that an engine given by URL names, if it can be read here; else ``unknown``.

    A folder counts only where the engine is a process of this machine with this file system: in a container, a folder of
    the same name is another one. A model of the Hugging Face hub counts if the cache here has it, and all its revisions
    there have one precision, because the engine does not tell its revision.

    Args:
        url: The engine's address.
        root: As ``/v1/models`` has it: a folder or an id of the hub; None: it has none.
    """
    if root is None:
        return UNKNOWN
    args = _own_command(url, root)
    if root.startswith("/"):
        return UNKNOWN if args is None else checkpoint_precision(Path(root), args)
    if not _HUB_ID.fullmatch(root):
        return UNKNOWN
    snapshots = hub_cache() / f"models--{root.replace('/', '--')}" / "snapshots"
    precisions = {
        checkpoint_precision(config.parent, args or ())
        for config in snapshots.glob("*/config.json")
    }
    if len(precisions) != 1:
        return UNKNOWN
    return precisions.pop()


def told_precision(read: str, stated: str | None) -> str:
    """Return the precision of an engine given by URL, for people: what its checkpoint says, else what is stated.

    Args:
        read: Of its checkpoint; see ``root_precision``.
        stated: In the settings; it is shown as that. An engine may quantize while it loads, so it counts even against
            the checkpoint.
    """
    if stated is None or stated == read:
        return read
    if read == UNKNOWN:
        return f"{stated} (stated)"
    return f"{stated} (stated; its checkpoint is {read})"


def _own_command(url: str, root: str) -> Sequence[str] | None:
    """Return the command line of the process that serves a model at a loopback address of this machine; None: there is none.

    The process must see this file system, and its command line must name the model: it may be a proxy, or a tunnel.
    """
    parts = urlsplit(url)
    if not _is_loopback(parts.hostname or ""):
        return None
    for process in psutil.process_iter():
        # A process may end meanwhile or belong to another user, and an address may have no such port.
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            command = process.cmdline()
            names_model = root in command or f"--model={root}" in command
            if not names_model:
                continue
            port = parts.port or HTTP_PORT
            if _listens(process, port) and _sees_our_files(process):
                return command
    return None


def _listens(process: psutil.Process, port: int) -> bool:
    return any(
        connection.laddr.port == port
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    )


def _sees_our_files(process: psutil.Process) -> bool:
    """Tell whether a process has this file system: one in a container has another."""
    return Path(f"/proc/{process.pid}/root").samefile("/")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def hub_cache() -> Path:
    """Return the cache of the Hugging Face hub, as its library finds it."""
    environ = os.environ
    user_cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = environ.get("HF_HOME") or f"{user_cache}/huggingface"
    cache = environ.get("HF_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expanduser(cache))  # noqa: PTH111  pathlib's may fail


def _option(args: Sequence[str], *names: str) -> str | None:
    """Return the value of the last of these options; None: there is none."""
    last_value = None
    for number, arg in enumerate(args):
        name, separator, value = arg.partition("=")
        if name in names and separator:
            last_value = value
        elif name in names:
            last_value = next(iter(args[number + 1 :]), None)
    return last_value
