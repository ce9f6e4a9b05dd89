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

MAX_BYTES = 4 << 20  # of a configuration file
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
# compressed-tensors' ``format``
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
    method, dtype = _option(args, "--quantization", "-q"), _option(args, "--dtype")
    if _option(args, "--config") is not None:  # a file with more arguments
        return UNKNOWN
    if method is not None:
        return _METHODS.get(method, UNKNOWN)
    if dtype in _FORCED:
        return _FORCED[dtype]
    return _DTYPES.get(_first(config, "dtype", "torch_dtype"), UNKNOWN)


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
    cached = (hub_cache() / f"models--{root.replace('/', '--')}" / "snapshots").glob(
        "*/config.json"
    )
    found = {checkpoint_precision(path.parent, args or ()) for path in cached}
    return found.pop() if len(found) == 1 else UNKNOWN


def told_precision(read: str, stated: str | None) -> str:
    """Return the precision of an engine given by URL, for people: what its checkpoint says, else what is stated.

    Args:
        read: Of its checkpoint; see ``root_precision``.
        stated: In the settings; it is shown as that. An engine may quantize while it loads, so it counts even against
            the checkpoint.
    """
    if stated is None or stated == read:
        return read
    return (
        f"{stated} (stated)"
        if read == UNKNOWN
        else f"{stated} (stated; its checkpoint is {read})"
    )


def _own_command(url: str, root: str) -> Sequence[str] | None:
    """Return the command line of the process that serves a model at a loopback address of this machine; None: there is none.

    The process must see this file system, and its command line must name the model: it may be a proxy, or a tunnel.
    """
    parts = urlsplit(url)
    if not _is_loopback(parts.hostname or ""):
        return None
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            command = process.cmdline()
            if root not in command and f"--model={root}" not in command:
                continue
            listens = (
                at.laddr.port
                for at in process.net_connections("tcp")
                if at.status == psutil.CONN_LISTEN
            )
            if (parts.port or 80) in listens and Path(
                f"/proc/{process.pid}/root"
            ).samefile("/"):
                return command
    return None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _quantization(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return how a checkpoint is quantized; empty: it is not."""
    for found in (config, _mapping(config.get("text_config"))):
        if named := _mapping(
            found.get("quantization_config") or found.get("compression_config")
        ):
            return named
    # ModelOpt up to 0.29
    return _mapping(_read(folder / "hf_quant_config.json").get("quantization"))


def _quantized(folder: Path, quantization: Mapping[str, Any]) -> str:
    method = str(quantization.get("quant_method", "")).lower()
    bits = quantization.get("bits", quantization.get("w_bit"))
    if method in _AWQ | _GPTQ and isinstance(bits, int):
        return f"{'awq' if method in _AWQ else 'gptq'}-int{bits}"
    if method == "compressed-tensors":
        return _compressed(folder, quantization)
    if method == "bitsandbytes":
        kind = str(quantization.get("bnb_4bit_quant_type", "fp4"))
        return (
            kind
            if quantization.get("load_in_4bit")
            else "int8"
            if quantization.get("load_in_8bit")
            else UNKNOWN
        )
    return _METHODS.get(method) or _ALGORITHMS.get(
        str(quantization.get("quant_algo")), UNKNOWN
    )


def _compressed(folder: Path, quantization: Mapping[str, Any]) -> str:
    """Return the format of a compressed-tensors checkpoint; of groups that differ, all."""
    found = set()
    for group in map(_mapping, _mapping(quantization.get("config_groups")).values()):
        weights, packing = (
            _mapping(group.get("weights")),
            group.get("format") or quantization.get("format"),
        )
        kind, bits = weights.get("type"), weights.get("num_bits")
        if kind == "int":
            found.add(f"{_calibration(folder)}int{bits}")
        elif kind == "float":
            found.add(_FLOAT4.get(str(packing), "fp4") if bits == 4 else f"fp{bits}")  # noqa: PLR2004  bits
    return "+".join(sorted(found)) or UNKNOWN


def _calibration(folder: Path) -> str:
    """Return how integer weights were found, as llm-compressor's own record says; empty: there is none."""
    recipe = _text(folder / "recipe.yaml")
    return (
        "awq-"
        if "AWQModifier" in recipe
        else "gptq-"
        if "GPTQModifier" in recipe
        else ""
    )


def hub_cache() -> Path:
    """Return the cache of the Hugging Face hub, as its library finds it."""
    given = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{given}/huggingface"
    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or f"{home}/hub"))  # noqa: PTH111  pathlib's may fail


def _option(args: Sequence[str], *names: str) -> str | None:
    """Return the value of the last of these options; None: there is none."""
    found = None
    for number, arg in enumerate(args):
        name, given, value = arg.partition("=")
        if name in names:
            found = value if given else next(iter(args[number + 1 :]), None)
    return found


def _first(config: Mapping[str, Any], *names: str) -> str:
    sources = (config, _mapping(config.get("text_config")))
    return next(
        (str(source[name]) for source in sources for name in names if source.get(name)),
        "",
    )


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
        if not path.is_file():  # what an engine names need not be a checkpoint
            return ""
        with path.open("rb") as file:
            return file.read(MAX_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""
