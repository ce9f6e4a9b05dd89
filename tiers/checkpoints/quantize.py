"""Make checkpoints: import a GGUF file, fetch from a hub, quantize by a recipe; score fixed texts with them.

This file is a program of its own. It runs in the quantizer's environment (llm-compressor pins other versions of
transformers and compressed-tensors than the engine does) and so imports nothing else of this project. It writes one JSON
object a line to standard output: ``{"event": "progress", "message": ..., "done": n, "total": m}`` while it works and
``{"event": "done", ...}`` at the end. Everything the libraries print goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import sys
import threading
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
EXPERTS_NDIM = 3  # A tensor with the matrices of all experts has so many dimensions.
SMOOTHING = 0.8  # share of the outliers that moves from activations to weights, as in llm-compressor's example
GRID = 10  # scale ratios tried a layer; the paper tries 20 at twice the time
DIGITS = 4  # Log-probabilities are kept with so many decimal places.
FP32_BITS = 32
GIB = 1 << 30
DOWNLOAD_POLL_S = 1.0  # between two looks at how much of a download is on the disk
VERSIONED = ("llmcompressor", "compressed-tensors", "transformers", "torch", "gguf")
# The default model's GGUF file says ``tokenizer.ggml.pre = smollm``: numbers are split into single digits before the
# byte-level stage, as in training. transformers' conversion loses the Digits stage, which changes the ids of every number.
SMOLLM_PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
    ],
}


class Reporter:
    """Writes events for the parent process, and keeps library output off its channel."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def event(self, event: str, **fields: Any) -> None:
        """Write one event as a JSON line."""
        self._out.write(json.dumps({"event": event, **fields}) + "\n")
        self._out.flush()

    def progress(self, message: str, done: int = 0, total: int = 0) -> None:
        """Report a step: ``done`` of ``total`` parts (0 of 0 where the step cannot be counted)."""
        self.event("progress", message=message, done=done, total=total)


def import_gguf(args: argparse.Namespace, report: Reporter) -> dict[str, Any]:
    """Turn one GGUF file into a BF16 checkpoint with the tokenizer that the file's metadata describes.

    Raises:
        ValueError: The file's pre-tokenizer is one whose split this importer does not know how to restore.
    """
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = Path(args.source)
    pre_tokenizer = GGUFReader(source).fields["tokenizer.ggml.pre"].contents()
    if pre_tokenizer != "smollm":
        raise ValueError(
            f"{source.name}: tokenizer.ggml.pre is {pre_tokenizer!r}, only 'smollm' can be imported; give a folder"
        )
    report.progress("reading the GGUF file")
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    report.progress("writing the BF16 checkpoint")
    model.save_pretrained(args.target)
    tokenizer.save_pretrained(args.target)
    path = Path(args.target, "tokenizer.json")
    definition = json.loads(path.read_text())
    definition["pre_tokenizer"] = SMOLLM_PRE_TOKENIZER
    path.write_text(json.dumps(definition, ensure_ascii=False))
    return {}


def fetch_hub(args: argparse.Namespace, report: Reporter) -> dict[str, Any]:
    """Download a model from the Hugging Face hub, or with ``--without-weights`` what it says of itself."""
    from huggingface_hub import HfApi, snapshot_download

    report.progress(f"downloading {args.source}")
    wanted_files = ["*.json", "*.jinja", "*.model", "recipe.yaml", "LICENSE*"]
    if not args.without_weights:
        wanted_files.append("*.safetensors")
    ignored_files = ["original/*", "consolidated*"]
    try:
        with _Download(args.target, args.source, report) as download:
            files = HfApi().model_info(args.source, files_metadata=True).siblings or []
            download.announce(_sizes(files, wanted_files, ignored_files))
            snapshot_download(
                args.source,
                local_dir=args.target,
                allow_patterns=wanted_files,
                ignore_patterns=ignored_files,
            )
    except Exception as error:  # noqa: BLE001  of this library, of its client, or of the disk
        # The last line of the log is shown to people, so the error has one line.
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")
    return {}


def _sizes(files: Sequence[Any], wanted: Sequence[str], ignored: Sequence[str]) -> int:
    """Return the bytes of a model's files that are downloaded; a file whose size the hub does not tell counts as empty."""
    return sum(
        file.size or 0
        for file in files
        if _matches(file.rfilename, wanted) and not _matches(file.rfilename, ignored)
    )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether a file's name matches a pattern, as the hub's library understands it."""
    return any(fnmatch(name, pattern) for pattern in patterns)


class NoRoomError(OSError):
    """A download would not fit on the disk."""


class _Download:
    """Reports how much of a download is on the disk, which libraries of any release and transport write to."""

    def __init__(self, target: str, model: str, report: Reporter) -> None:
        self._target = Path(target)
        self._model = model
        self._report = report
        self._total_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def announce(self, total_bytes: int) -> None:
        """Begin to report. Raise ``NoRoomError`` if the disk has no room for it."""
        free_bytes = shutil.disk_usage(self._target).free
        # An earlier attempt may have left some of it.
        missing_bytes = total_bytes - self._bytes_on_disk()
        if missing_bytes > free_bytes:
            raise NoRoomError(
                f"it needs {missing_bytes / GIB:.1f} GiB, and {free_bytes / GIB:.1f} GiB are free in {self._target.parent}"
            )
        self._total_bytes = total_bytes
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(DOWNLOAD_POLL_S):
            self._report.progress(
                f"downloading {self._model}, in MiB",
                min(self._bytes_on_disk(), self._total_bytes) >> 20,
                self._total_bytes >> 20,
            )

    def _bytes_on_disk(self) -> int:
        size_bytes = 0
        for path in self._target.rglob("*"):
            # A file that is complete is renamed.
            with contextlib.suppress(FileNotFoundError):
                size_bytes += path.stat().st_blocks * 512
        return size_bytes


def cast_bf16(args: argparse.Namespace, report: Reporter) -> dict[str, Any]:
    """Save the base model with BF16 weights."""
    model = _load(args.source, report)
    _save(model, args.target, report)
    return {}


def quantize(args: argparse.Namespace, report: Reporter) -> dict[str, Any]:
    """Quantize as a recipe says, with prompts where it needs them.

    Layers are done one after another. Each scale that AWQ finds is kept in the folder ``args.kept`` at once; those that an
    interrupted run left there are taken as they are, and only the prompts run through their layers again.

    Raises:
        ValueError: The model's widths, or its experts, do not allow this scheme.
    """
    from llmcompressor import oneshot

    recipe = json.loads(args.recipe)
    model = _load(args.source, report)
    _take_experts_apart(model)
    _check_widths(model, recipe)
    group_size = _group_size(
        model, recipe, args.group_size, prefer_small=args.prefer_small_groups
    )
    facts: dict[str, Any] = {}
    if group_size is not None:
        facts["group_size"] = group_size
    modifiers = _modifiers(recipe, group_size)
    message = _words_of(recipe, group_size)
    if recipe["algorithm"] == "rtn":
        report.progress(message)
        oneshot(model=model, recipe=modifiers)
    else:
        facts |= _calibrate(model, modifiers, args, report=report, message=message)
    if not _has_quantized_layers(model):
        raise ValueError(
            f"no layer of this {recipe['architecture']} can be quantized: none is a linear layer outside of {recipe['keep']}"
        )
    _save(model, args.target, report)
    _keep_patterns(Path(args.target), recipe["keep"])
    facts["formats"] = _written_formats(Path(args.target))
    return facts


def _calibrate(
    model: Any,
    modifiers: list[Any],
    args: argparse.Namespace,
    *,
    report: Reporter,
    message: str,
) -> dict[str, Any]:
    """Run prompts through the model while it is quantized; return how many, and their tokens."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.source)
    rows = [
        _calibration_row(tokenizer, prompt, args.max_tokens)
        for prompt in _calibration_prompts(Path(args.calibration), args.samples)
    ]
    _without_pinned_memory()
    with _Layers(report, message) as layers:
        if args.kept:
            _keep_scales(Path(args.kept), layers)
        oneshot(
            model=model,
            dataset=Dataset.from_list(rows),
            recipe=modifiers,
            # The rows are tokens already. Without it a processor of images would be looked for.
            processor=tokenizer,
            max_seq_length=args.max_tokens,
            num_calibration_samples=len(rows),
            shuffle_calibration_samples=False,  # sums are rounded by their order
        )
    return {
        "calibration_samples": len(rows),
        "calibration_tokens": sum(len(row["input_ids"]) for row in rows),
    }


def _modifiers(recipe: dict[str, Any], group_size: int | None) -> list[Any]:
    """Return what llm-compressor does with the model, in this order."""
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    what = {"ignore": recipe["keep"], **_scheme_arguments(recipe, group_size)}
    if recipe["algorithm"] == "awq":
        mappings = _awq_mappings(recipe)
        return [
            AWQModifier(n_grid=GRID, mappings=mappings),
            QuantizationModifier(**what),
        ]
    if recipe["algorithm"] == "gptq":
        smoothing = []
        if recipe["smooths"]:
            smoothing = [SmoothQuantModifier(smoothing_strength=SMOOTHING)]
        return [*smoothing, GPTQModifier(**what)]
    return [QuantizationModifier(**what)]


def _scheme_arguments(recipe: dict[str, Any], group_size: int | None) -> dict[str, Any]:
    """Return a scheme as a modifier takes it: a preset, or its weights with other groups."""
    from compressed_tensors.quantization import preset_name_to_scheme

    if group_size is None:
        return {"targets": ["Linear"], "scheme": recipe["preset"]}
    preset = preset_name_to_scheme(recipe["preset"], ["Linear"])
    weights = {
        "num_bits": preset.weights.num_bits,
        "type": preset.weights.type,
        "symmetric": preset.weights.symmetric,
        "strategy": "group",
        "group_size": group_size,
    }
    return {"config_groups": {"linear": {"targets": ["Linear"], "weights": weights}}}


def _awq_mappings(recipe: dict[str, Any]) -> list[Any] | None:
    """Return which layers AWQ scales against which; None: what llm-compressor has for the model's own class."""
    from llmcompressor.modifiers.transform.awq import AWQMapping
    from llmcompressor.modifiers.transform.awq.mappings import AWQ_MAPPING_REGISTRY

    name = recipe["awq_mappings_of"] or recipe["architecture"]
    mappings = AWQ_MAPPING_REGISTRY.get(name)
    if mappings is None and not recipe["text_in"]:
        return None
    if mappings is None:
        mappings = AWQ_MAPPING_REGISTRY["LlamaForCausalLM"]
    within = recipe["text_in"]
    if not within:
        return mappings if recipe["awq_mappings_of"] else None
    return [
        AWQMapping(
            _within(mapping.smooth_layer, within),
            [_within(layer, within) for layer in mapping.balance_layers],
        )
        for mapping in mappings
    ]


def _within(pattern: str, module: str) -> str:
    """Return a pattern that matches in one module only."""
    if module in pattern:
        return pattern
    return pattern.replace("re:.*", f"re:.*{module}.*", 1)


def _words_of(recipe: dict[str, Any], group_size: int | None) -> str:
    """Return what is being done, for people."""
    names = {"awq-int4": "AWQ int4", "fp8": "FP8"}
    name = names.get(recipe["scheme"], recipe["scheme"])
    if group_size is None:
        return f"quantizing to {name}"
    return f"quantizing to {name}, groups of {group_size}"


def _take_experts_apart(model: Any) -> None:
    """Make each expert's matrices modules of their own: transformers holds all experts of a layer in one tensor.

    Raises:
        ValueError: llm-compressor cannot, and they would stay as they are.
    """
    from llmcompressor.modeling.moe.linearize import linearize_moe

    linearize_moe(model)
    joined = [
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim == EXPERTS_NDIM and "experts" in name
    ]
    if joined:
        raise ValueError(
            f"the experts of a {type(model).__name__} stay in 16 bits ({joined[0]} holds all of a layer): llm-compressor "
            f"{metadata.version('llmcompressor')} cannot take them apart. Serve a published checkpoint instead "
            f"(tiers.NAME.checkpoint)"
        )


def _linear_layers(model: Any, keep: Sequence[str]) -> dict[str, Any]:
    """Return the layers that are quantized: linear ones outside of what is kept."""
    from compressed_tensors.utils import match_named_modules

    return dict(match_named_modules(model, ["Linear"], keep))


def _check_widths(model: Any, recipe: dict[str, Any]) -> None:
    """Check that groups or blocks of weights fit into each quantized layer.

    Raises:
        ValueError: One is too narrow, or its width is no multiple.
    """
    for name, layer in _linear_layers(model, recipe["keep"]).items():
        for width, divisor, side in (
            (layer.in_features, recipe["divisor"], "input"),
            (layer.out_features, recipe["output_divisor"], "output"),
        ):
            if width % divisor:
                raise ValueError(
                    f"{recipe['scheme']} needs {side} widths that are multiples of {divisor}, and {name} has {width}: take "
                    f"another scheme, such as fp8 or int8-w8a8, which have no groups"
                )


def _has_quantized_layers(model: Any) -> bool:
    """Tell whether llm-compressor has quantized anything."""
    schemes = (
        getattr(module, "quantization_scheme", None) for module in model.modules()
    )
    return any(scheme is not None and scheme.weights is not None for scheme in schemes)


def _written_formats(folder: Path) -> list[str]:
    """Return how compressed-tensors names the formats of a checkpoint's weights."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    quantization = config["quantization_config"]
    return sorted(
        {
            group.get("format") or quantization["format"]
            for group in quantization["config_groups"].values()
        }
    )


def _keep_patterns(folder: Path, keep: Sequence[str]) -> None:
    """Add the recipe's patterns to the modules that the configuration lists as left alone.

    llm-compressor lists the modules by their names in this version of transformers. Engines, and other versions, name the
    modules of a vision tower otherwise, and would take them for quantized.
    """
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8"))
    ignored = config["quantization_config"]["ignore"]
    patterns = [
        pattern
        for pattern in keep
        if pattern.startswith("re:") and pattern not in ignored
    ]
    if patterns:
        ignored += patterns
        path.write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def _calibration_prompts(path: Path, count: int) -> list[str]:
    """Return as many prompts of a calibration file (0 = all) as are to be used."""
    lines = path.read_text("utf-8").splitlines()
    filled_lines = [line for line in lines if line.strip()]
    return [json.loads(line)["text"] for line in evenly(filled_lines, count)]


def evenly(lines: Sequence[str], count: int) -> Sequence[str]:
    """Choose ``count`` lines (0 = all) at even distances, each from the middle of its share.

    Calibration files list their prompts class by class, so each class keeps its share; the same file and count always
    give the same lines.
    """
    if not 0 < count < len(lines):
        return lines
    middles = [(2 * share + 1) * len(lines) // (2 * count) for share in range(count)]
    return [lines[middle] for middle in middles]


def score(args: argparse.Namespace, report: Reporter) -> dict[str, Any]:
    """Compute the log-probabilities of the fixed texts with a checkpoint that was made before."""
    folder = args.source
    return {"reference": score_texts(folder, folder, args.texts, report=report)}


def score_texts(
    folder: str, tokenizer_folder: str, texts: str, *, report: Reporter
) -> dict[str, Any] | None:
    """Compute the log-probabilities of fixed texts with a finished checkpoint, in FP32 where it fits into memory.

    The weights are read back as they were written, so that a checkpoint that was written wrongly does not pass.

    Args:
        folder: The checkpoint.
        tokenizer_folder: Where its tokenizer is.
        texts: JSON file of the texts.
        report: Told of the progress.

    Returns:
        Token ids and log-probabilities of each text; None: this version of transformers cannot run the checkpoint.
    """
    from transformers import AutoTokenizer

    report.progress("computing what its engines are compared with")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    try:
        model = _read_back(folder)
        scored_texts = [
            _scored(model, tokenizer, fixed_text)
            for fixed_text in json.loads(Path(texts).read_text("utf-8"))
        ]
    except Exception as error:  # noqa: BLE001  a checkpoint that vLLM serves need not run in transformers
        print(
            f"the fixed texts are not scored: {type(error).__name__}: {error}",
            file=sys.stderr,
        )
        report.progress(
            "its engines will be compared with the highest precision: transformers cannot run it"
        )
        return None
    is_dated = "strftime_now" in str(tokenizer.chat_template or "")
    return {
        "chat_is_dated": is_dated,
        "texts": [text for text in scored_texts if text is not None],
    }


def _read_back(folder: str) -> Any:
    """Return the model of a finished checkpoint.

    Raises:
        ValueError: Some of its weights would be made up: this version of transformers does not know their names.
    """
    import torch

    config = Path(folder, "config.json").read_text("utf-8")
    is_unpacked_to_bf16 = re.search("fp4-pack-quantized|mxfp8", config) is not None
    dtype = torch.float32
    # What has scales of powers of two, or is packed as FP4, is unpacked to BF16, whatever the rest has.
    if is_unpacked_to_bf16 or not _fits_in_fp32(Path(folder)):
        dtype = torch.bfloat16
    model, loading = _model_class(folder).from_pretrained(
        folder, dtype=dtype, device_map=_device(), output_loading_info=True
    )
    missing = sorted(loading["missing_keys"])
    if missing:
        raise ValueError(f"{len(missing)} tensors are not found, such as {missing[0]}")
    return model.eval()


def _scored(
    model: Any, tokenizer: Any, fixed_text: dict[str, Any]
) -> dict[str, Any] | None:
    """Score one text; None: it is a chat, and the model has no chat template."""
    if "messages" not in fixed_text:
        token_ids = tokenizer(fixed_text["text"])["input_ids"]
    elif tokenizer.chat_template:
        rendered = tokenizer.apply_chat_template(
            fixed_text["messages"], tokenize=False, add_generation_prompt=True
        )
        token_ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    else:
        return None
    return {
        "name": fixed_text["name"],
        "token_ids": token_ids,
        "logprobs": _logprobs(model, token_ids),
    }


def _logprobs(model: Any, token_ids: list[int]) -> list[float]:
    """Return the log-probability of each token but the first, given those before it, in nats."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([token_ids], device=model.device)).logits[0].float()
    all_logprobs = torch.log_softmax(logits, dim=-1)
    return [
        round(all_logprobs[position, token_id].item(), DIGITS)
        for position, token_id in enumerate(token_ids[1:])
    ]


def _fits_in_fp32(folder: Path) -> bool:
    """Tell whether a checkpoint's weights take at most half of the free memory in FP32."""
    stored_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    is_packed = "pack-quantized" in (folder / "config.json").read_text("utf-8")
    bits_a_weight = 4 if is_packed else 8  # or more
    return stored_bytes * FP32_BITS / bits_a_weight < _free_bytes() / 2


def _free_bytes() -> int:
    """Return the free memory of the GPU, else of the machine; 0: it is not known."""
    import torch

    if torch.cuda.is_available():
        free: int = torch.cuda.mem_get_info()[0]
        return free
    meminfo = Path("/proc/meminfo").read_text("utf-8")
    available_kib = re.search(r"MemAvailable: *(\d+)", meminfo)
    if available_kib is None:
        return 0
    return 1024 * int(available_kib[1])


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _model_class(folder: str) -> Any:
    """Return the class that a model's configuration names.

    For some that read images, AutoModelForCausalLM takes a class without the vision tower.
    """
    import transformers

    config = json.loads(Path(folder, "config.json").read_text("utf-8"))
    names = config.get("architectures") or [""]
    return getattr(transformers, names[0], transformers.AutoModelForCausalLM)


def _load(source: str, report: Reporter) -> Any:
    import torch

    report.progress("loading the base model")
    device = _device()
    dtype = torch.bfloat16
    # CPUs without bf16 instructions emulate them: the same calibration takes four times as long as in float32.
    if device == "cpu" and not torch.cpu._is_avx512_bf16_supported():
        dtype = torch.float32
    return _model_class(source).from_pretrained(source, dtype=dtype, device_map=device)


def _save(model: Any, target: str, report: Reporter) -> None:
    """Write weights and configuration; the tokenizer's files are copied from the base by the caller."""
    import torch

    report.progress("writing the checkpoint")
    model.to(torch.bfloat16)
    for config in (model.config, *_parts_of(model.config)):
        config.dtype = torch.bfloat16
    model.save_pretrained(target, save_compressed=True)


def _parts_of(config: Any) -> list[Any]:
    """Return the configurations of a model's parts, such as its language model and its vision tower."""
    return [
        getattr(config, name) for name in config.sub_configs if getattr(config, name)
    ]


def _group_size(
    model: Any, recipe: dict[str, Any], requested_size: int, *, prefer_small: bool
) -> int | None:
    """Return the largest usable group size, or the requested one (0 = choose) if the model's dimensions allow it.

    None: the scheme's groups are fixed.
    """
    sizes: list[int] = recipe["groups"]
    if not sizes:
        return None
    layers = _linear_layers(model, recipe["keep"])
    widths = {layer.in_features for layer in layers.values()}
    if requested_size:
        sizes = [requested_size]
    elif prefer_small:
        sizes = sizes[1:]
    for size in sizes:
        if all(width % size == 0 for width in widths):
            return size
    raise ValueError(
        f"no group size of {sizes} divides every layer width of {sorted(widths)}"
    )


def _calibration_row(
    tokenizer: Any, text: str, max_tokens: int
) -> dict[str, list[int]]:
    """Render a prompt as the engine will see it and cut it to ``max_tokens`` tokens."""
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            tokenize=False,
            add_generation_prompt=True,
        )
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][:max_tokens]
    return {"input_ids": ids, "attention_mask": [1] * len(ids)}


def _without_pinned_memory() -> None:
    """Skip pinning of cached activations where no accelerator could copy from them: torch raises there."""
    import torch
    from llmcompressor.pipelines.cache import IntermediatesCache

    if not torch.accelerator.is_available():
        IntermediatesCache.pin_memory = lambda *_args, **_kwargs: None


def _keep_scales(folder: Path, layers: _Layers) -> None:
    """Let AWQ keep the scales that it finds, one file each, and take those that are kept instead of searching again.

    The search is nearly all of the work. Scales and the order of prompts being the same, so is the result.
    """
    import torch
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    kept_scales = _kept_scales(folder)
    layers.going_over = bool(kept_scales)
    search_scale = AWQModifier._compute_best_scale
    run_all_samples = AWQModifier._run_samples

    def best_scale(self: Any, mapping: Any, outputs: Any, weights: Any) -> Any:
        """Return the kept scales of a layer, else search and keep them."""
        if mapping.smooth_name in kept_scales:
            return kept_scales[mapping.smooth_name]
        layers.searching()
        scales = search_scale(self, mapping, outputs, weights)
        path = folder / f"{mapping.smooth_name}.safetensors"
        save_file({"scales": scales.contiguous()}, path.with_suffix(".partial"))
        path.with_suffix(".partial").replace(path)
        return scales

    def run_samples(self: Any, module: Any) -> Any:
        """Skip the outputs that a search would compare with."""
        needed_scales = {
            mapping.smooth_name
            for mapping in self._resolved_mappings
            if mapping.parent is module
        }
        if kept_scales.keys() >= needed_scales:
            return [torch.zeros(1)]
        return run_all_samples(self, module)

    AWQModifier._compute_best_scale = best_scale
    AWQModifier._run_samples = run_samples


def _kept_scales(folder: Path) -> dict[str, Any]:
    """Return the scales that are kept in a folder, by layer."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    scales = {}
    for path in folder.glob("*.safetensors"):
        # A file that a full disk has cut short is skipped: the scales of its layer are then searched again.
        with contextlib.suppress(SafetensorError, KeyError):
            scales[path.stem] = load_file(path)["scales"]
    return scales


class _Layers:
    """Turns llm-compressor's ``(3/31): Calibrating`` bars on standard error into progress events: 2 of 31 are done.

    Attributes:
        going_over: The present layer may be one whose scales were kept. This is told, since such layers take far less time.
    """

    def __init__(self, report: Reporter, message: str) -> None:
        self._report = report
        self._message = message
        self._done: int | None = None
        self._total = 0
        self.going_over = False

    def __enter__(self) -> Self:
        self._stderr = sys.stderr
        sys.stderr = _Tee(sys.stderr, self._read_bar)
        return self

    def searching(self) -> None:
        """Note that scales are searched, as they are from now on."""
        if self.going_over:
            self.going_over = False
            self._tell()

    def _read_bar(self, text: str) -> None:
        bar = re.search(r"\((\d+)/(\d+)\)", text)
        if bar is None:
            return
        done = int(bar[1]) - 1
        if done != self._done:
            self._done = done
            self._total = int(bar[2])
            self._tell()

    def _tell(self) -> None:
        message = self._message
        if self.going_over:
            message = "going over the layers that are quantized already"
        self._report.progress(message, self._done or 0, self._total)

    def __exit__(self, *_exc: object) -> None:
        sys.stderr = self._stderr


class _Tee:
    """A stream that also shows a function what is written to it."""

    def __init__(self, stream: TextIO, on_write: Callable[[str], None]) -> None:
        self._stream = stream
        self._on_write = on_write

    def write(self, text: str) -> int:
        self._on_write(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _versions() -> Iterator[tuple[str, str]]:
    for name in VERSIONED:
        # An engine's environment, which can download as well, has not all of them.
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)


COMMANDS: dict[str, Callable[[argparse.Namespace, Reporter], dict[str, Any]]] = {
    "import-gguf": import_gguf,
    "fetch-hub": fetch_hub,
    "bf16": cast_bf16,
    "quantize": quantize,
    "score": score,
}


def main() -> None:
    """Run one command and report how it went; the exit status is 0 only for a finished target folder."""
    args = _parse_args()
    # This process ends with the one that started it.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    report = Reporter(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)  # whatever a library prints must not be read as an event
    result = COMMANDS[args.command](args, report)
    if args.texts and args.target:
        has_tokenizer = Path(args.target, "tokenizer_config.json").is_file()
        tokenizer_folder = args.target if has_tokenizer else args.source
        result["reference"] = score_texts(
            args.target, tokenizer_folder, args.texts, report=report
        )
    report.event("done", versions=dict(_versions()), **result)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=sorted(COMMANDS))
    parser.add_argument("source", help="model folder, GGUF file or hub id")
    parser.add_argument(
        "target", nargs="?", help="folder to write; an existing one is written over"
    )
    parser.add_argument(
        "--recipe", help="how to quantize, as JSON (tiers/checkpoints/recipes.py)"
    )
    parser.add_argument("--calibration", help='JSON lines with a "text" field')
    parser.add_argument(
        "--samples",
        type=int,
        default=0,
        help="calibration prompts, chosen evenly; 0 = all",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=256,
        help="tokens taken of each calibration prompt",
    )
    parser.add_argument(
        "--kept",
        help="folder of scales found so far, for work that is interrupted (awq)",
    )
    parser.add_argument(
        "--group-size", type=int, default=0, help="weights a scale; 0 = choose"
    )
    parser.add_argument(
        "--prefer-small-groups",
        action="store_true",
        help="choose 64 even where 128 would divide",
    )
    parser.add_argument(
        "--texts", help="JSON file of texts to score with the finished checkpoint"
    )
    parser.add_argument(
        "--without-weights",
        action="store_true",
        help="download the configuration and the tokenizer only (fetch-hub)",
    )
    args = parser.parse_args()
    if args.target is None and args.command != "score":
        parser.error("a target folder is needed")
    if args.recipe is None and args.command == "quantize":
        parser.error("--recipe is needed")
    if args.texts is None and args.command == "score":
        parser.error("--texts is needed")
    return args


if __name__ == "__main__":
    main()
