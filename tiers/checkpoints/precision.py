"""The number format of a checkpoint's weights, as its own configuration says. Nothing is guessed from a name.

What an engine makes of a checkpoint is known only where its arguments are: they may quantize or cast it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil

from tiers.spec import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_CONFIG_BYTES = 4 << 20
FOUR_BITS = 4
HTTP_PORT = 80
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# As config.json and vLLM's --dtype name them. vLLM casts 32-bit checkpoints to a format that it chooses by the machine.
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
_FORCED = {**_DTYPES, "float32": "fp32", "float": "fp32"}
# vLLM's names of quantization methods (vllm/model_executor/layers/quantization, release 0.32).
_METHODS = {
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "deepseek_v4_fp8": "fp8",
    "mxfp8": "mxfp8",
    "mxfp4": "mxfp4",
    "gpt_oss_mxfp4": "mxfp4",
    "fp8_per_tensor": "fp8",
    "fp8_per_block": "fp8",
    "fp8_per_channel": "fp8",
    "int8_per_channel_weight_only": "int8",
    "nvfp4_per_token": "nvfp4",
}
_AWQ = {"awq", "auto_awq", "awq_marlin"}
_GPTQ = {"gptq", "auto_gptq", "gptq_marlin"}
# NVIDIA ModelOpt's ``quant_algo``.
_ALGORITHMS = {
    "FP8": "fp8",
    "NVFP4": "nvfp4",
    "W4A16_AWQ": "awq-int4",
    "W4A8_AWQ": "awq-int4",
    "MXFP8": "mxfp8",
}
# 4-bit floats, by the ``format`` of compressed-tensors.
_FLOAT4 = {"nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4"}


def checkpoint_precision(folder: Path, args: Sequence[str] = ()) -> str:
    """Return the precision that vLLM serves a checkpoint at, such as ``awq-int4``; ``unknown`` if that cannot be told.

    Args:
        folder: The checkpoint.
        args: Arguments of vLLM that may change it; the last one counts.
    """
    config = _read(folder / "config.json")
    quantization = _quantization(folder, config)
    if quantization:
        return _quantized(folder, quantization)
    # It names a file with more arguments.
    if _option(args, "--config") is not None:
        return UNKNOWN
    method = _option(args, "--quantization", "-q")
    if method is not None:
        return _METHODS.get(method, UNKNOWN)
    forced_dtype = _option(args, "--dtype")
    if forced_dtype in _FORCED:
        return _FORCED[forced_dtype]
    return _DTYPES.get(_configured_dtype(config), UNKNOWN)


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


def _quantization(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return how a checkpoint is quantized; empty: it is not."""
    for source in (config, _mapping(config.get("text_config"))):
        quantization = _mapping(
            source.get("quantization_config") or source.get("compression_config")
        )
        if quantization:
            return quantization
    # ModelOpt up to 0.29 writes a file of its own.
    return _mapping(_read(folder / "hf_quant_config.json").get("quantization"))


def _quantized(folder: Path, quantization: Mapping[str, Any]) -> str:
    """Return the format of a quantized checkpoint's weights."""
    method = str(quantization.get("quant_method", "")).lower()
    bits = quantization.get("bits", quantization.get("w_bit"))
    if method in _AWQ and isinstance(bits, int):
        return f"awq-int{bits}"
    if method in _GPTQ and isinstance(bits, int):
        return f"gptq-int{bits}"
    if method == "compressed-tensors":
        return _compressed(folder, quantization)
    if method == "bitsandbytes":
        return _bitsandbytes(quantization)
    if method in _METHODS:
        return _METHODS[method]
    return _ALGORITHMS.get(str(quantization.get("quant_algo")), UNKNOWN)


def _bitsandbytes(quantization: Mapping[str, Any]) -> str:
    if quantization.get("load_in_4bit"):
        return str(quantization.get("bnb_4bit_quant_type", "fp4"))
    if quantization.get("load_in_8bit"):
        return "int8"
    return UNKNOWN


def _compressed(folder: Path, quantization: Mapping[str, Any]) -> str:
    """Return the format of a compressed-tensors checkpoint; of groups that differ, all."""
    groups = _mapping(quantization.get("config_groups"))
    formats = set()
    for group in map(_mapping, groups.values()):
        weights = _mapping(group.get("weights"))
        kind = weights.get("type")
        bits = weights.get("num_bits")
        packing = str(group.get("format") or quantization.get("format"))
        if kind == "int":
            formats.add(f"{_calibration(folder)}int{bits}")
        elif kind == "float" and bits == FOUR_BITS:
            formats.add(_FLOAT4.get(packing, "fp4"))
        elif kind == "float":
            formats.add(f"fp{bits}")
    return "+".join(sorted(formats)) or UNKNOWN


def _calibration(folder: Path) -> str:
    """Return how integer weights were found, as llm-compressor's own record says; empty: there is none."""
    recipe = _text(folder / "recipe.yaml")
    if "AWQModifier" in recipe:
        return "awq-"
    if "GPTQModifier" in recipe:
        return "gptq-"
    return ""


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


def _configured_dtype(config: Mapping[str, Any]) -> str:
    """Return the number format that a configuration names; empty: none."""
    for source in (config, _mapping(config.get("text_config"))):
        for name in ("dtype", "torch_dtype"):
            if source.get(name):
                return str(source[name])
    return ""


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _read(path: Path) -> Mapping[str, Any]:
    """Return a JSON object; an empty one if there is none."""
    try:
        return _mapping(json.loads(_text(path)))
    except (ValueError, RecursionError):
        return {}


def _text(path: Path) -> str:
    try:
        # What an engine names need not be a checkpoint.
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            return file.read(MAX_CONFIG_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""
