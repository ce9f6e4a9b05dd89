"""Checkpoints on disk, their manifests and digests.

A finished checkpoint's folder holds ``qarr-manifest.json``. It is made in a folder of another name, which is renamed as
the last step, so interrupted work never looks finished. The folder's name holds a digest of the recipe: another
calibration set, number of samples or group size makes another folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from tiers.checkpoints.reference import ReferenceScores  # noqa: TC001  pydantic reads it
from tiers.errors import CheckpointError
from tiers.formats import FORMATS
from tiers.spec import PRECISIONS, TierName

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

MANIFEST = "qarr-manifest.json"
RECIPE_VERSION = 1  # raise it when quantize.py changes what it makes
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    # Models that read images have these.
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
MAX_HEADER = 100_000_000  # bytes, the format's own bound
FP8_DTYPES = {"F8_E4M3", "F8_E5M2"}  # as safetensors names them
PACKED = ".weight_packed"  # as compressed-tensors names 4-bit weights
LENGTH_BYTES = 8  # before a safetensors header; they hold its length
BLOCK_BYTES = 1 << 24  # read at once
# A fingerprint depends on so much of a file's start and end.
SAMPLE_BYTES = 1 << 20
FINGERPRINTED = {".safetensors", ".json", ".jinja", ".model", ".gguf"}
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)


def _number_format(name: str) -> str:
    if name not in FORMATS:
        raise ValueError(f"no number format is named {name!r}")
    return name


class Manifest(BaseModel):
    """What a checkpoint is, and what it was made from. Digests are SHA-256 in hexadecimal.

    Attributes:
        precision: Its number format.
        scheme: What it was made by; None in older manifests, and of a base.
        formats: How compressed-tensors names the formats of its weights.
        kept_in_16_bits: Patterns of the modules that were not quantized.
        base_digest: Of the base model's files.
        weights_digest: Of this checkpoint's weight files.
        tokenizer_digest: Of its tokenizer definition.
        chat_template_digest: Of its chat template.
        group_size: Weights per scale, where it was chosen by the model's widths.
        calibration_digest: Of the calibration prompts.
        calibration_samples: Number of calibration prompts.
        calibration_max_tokens: Most tokens used of each prompt.
        calibration_tokens: Of all calibration prompts together; None in older manifests.
        versions: Of the libraries that made it.
        reference: Log-probabilities that its engines are compared with; None: they could not be computed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe_version: int
    model: str
    precision: Annotated[str, AfterValidator(_number_format)]
    method: str
    scheme: str | None = None
    formats: tuple[str, ...] = ()
    kept_in_16_bits: tuple[str, ...] = ()
    base_digest: str
    weights_digest: str
    tokenizer_digest: str
    chat_template_digest: str
    group_size: int | None = None
    calibration_digest: str | None = None
    calibration_samples: int | None = None
    calibration_max_tokens: int | None = None
    calibration_tokens: int | None = None
    versions: dict[str, str]
    reference: ReferenceScores | None = None

    @property
    def is_scored(self) -> bool:
        """Tell whether the present fixed texts were scored, or it was found out that they cannot be."""
        if self.reference is None:
            return "reference" in self.model_fields_set
        return self.reference.is_current


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A finished checkpoint."""

    tier: TierName
    path: Path
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Identity:
    """What must be the same in all tiers: digests of tokenizer and chat template."""

    tokenizer_digest: str
    chat_template_digest: str


def read_checkpoint(tier: TierName, path: Path) -> Checkpoint | None:
    """Return the finished checkpoint in a folder, or None if there is none."""
    try:
        manifest = Manifest.model_validate_json((path / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValidationError):
        return None
    return Checkpoint(tier, path, manifest=manifest)


def identity(path: Path) -> Identity:
    """Compute the digests of a checkpoint's tokenizer and chat template.

    The tokenizer is digested as JSON with sorted keys, because libraries write the same definition differently.

    Raises:
        CheckpointError: The folder has no readable tokenizer.
    """
    definition = path / "tokenizer.json"
    try:
        source = definition if definition.is_file() else path / "tokenizer.model"
        if not source.is_file():
            raise CheckpointError(
                f"{path} has no tokenizer.json or tokenizer.model: not a model folder"
            )
        canonical = source.read_bytes()
        if source is definition:
            canonical = json.dumps(json.loads(canonical), sort_keys=True).encode()
    except (OSError, ValueError) as error:
        raise _unreadable_tokenizer(path, error) from error
    template = json.dumps(chat_template(path)).encode()
    return Identity(
        tokenizer_digest=_sha256(canonical), chat_template_digest=_sha256(template)
    )


def chat_template(path: Path) -> Any:
    """Return a checkpoint's chat template, or a list of several with their names; empty without one.

    Raises:
        CheckpointError: It cannot be read.
    """
    template = path / "chat_template.jinja"
    config = path / "tokenizer_config.json"
    try:
        if template.is_file():
            return template.read_text("utf-8")
        if not config.is_file():
            return ""
        return json.loads(config.read_bytes()).get("chat_template") or ""
    except (OSError, ValueError, AttributeError) as error:
        raise _unreadable_tokenizer(path, error) from error


def _unreadable_tokenizer(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"the tokenizer in {path} cannot be read ({error}): not a model folder"
    )


def weights_digest(folder: Path) -> str:
    """Digest all weight files of a checkpoint, which takes seconds to minutes."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()


def check_whole(folder: Path) -> None:
    """Check that each weight file is as long as its header says, and that no file of the index is missing.

    Raises:
        CheckpointError: A file is not, or there are no weights.
    """
    try:
        names = _weight_files(folder)
        if not names:
            raise CheckpointError(f"{folder} has no weights")
        for name in names:
            _check_length(folder / name)
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename} is missing") from error
    except UNREADABLE as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error


def _weight_files(folder: Path) -> list[str]:
    """Return the names of a checkpoint's weight files: those that are there, and those of its index."""
    names = {path.name for path in folder.glob("*.safetensors")}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names |= set(json.loads(index.read_bytes())["weight_map"].values())
    return sorted(names)


def _check_length(path: Path) -> None:
    """Check that a weight file is as long as its header says.

    Raises:
        CheckpointError: It is not.
    """
    size_bytes = path.stat().st_size
    header_bytes, tensors = _header(path)
    data_bytes = max(
        (tensor["data_offsets"][1] for tensor in tensors.values()), default=0
    )
    announced_bytes = LENGTH_BYTES + header_bytes + data_bytes
    if size_bytes != announced_bytes:
        raise CheckpointError(
            f"{path} has {size_bytes} bytes, its header says {announced_bytes}: incomplete"
        )


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return the length and the entries of a safetensors header, which follows the bytes with its length."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if header_bytes > MAX_HEADER:
            raise ValueError(f"{path} is no safetensors file")
        header: dict[str, Any] = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    return header_bytes, header


def quantized_bytes(folder: Path) -> int:
    """Return the number of bytes of a checkpoint's FP8 and packed 4-bit weights.

    Raises:
        CheckpointError: A weight file has no readable header.
    """
    quantized = 0
    for path in folder.glob("*.safetensors"):
        try:
            _, tensors = _header(path)
            for name, tensor in tensors.items():
                if tensor["dtype"] in FP8_DTYPES or name.endswith(PACKED):
                    first_byte, end_byte = tensor["data_offsets"]
                    quantized += end_byte - first_byte
        except UNREADABLE as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    return quantized


def fingerprint(folder: Path) -> str:
    """Digest the names, sizes and first and last MiB of a model's files, which is quick for any size."""
    digest = hashlib.sha256()
    paths = sorted(path for path in folder.iterdir() if path.suffix in FINGERPRINTED)
    for path in paths:
        size_bytes = path.stat().st_size
        digest.update(f"{path.name}\0{size_bytes}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(SAMPLE_BYTES))
            if size_bytes > 2 * SAMPLE_BYTES:
                file.seek(-SAMPLE_BYTES, os.SEEK_END)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def recipe_digest(method: str, options: Mapping[str, Any]) -> str:
    """Return eight hexadecimal digits that identify how a checkpoint is made."""
    recipe = {"version": RECIPE_VERSION, "method": method, **options}
    return _sha256(json.dumps(recipe, sort_keys=True).encode())[:8]


@contextmanager
def making(target: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes ``target`` if it was filled without an error; otherwise it is removed.

    Other processes that use ``making`` in the same parent folder wait.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            work = target.with_name(f"{target.name}.partial")
            shutil.rmtree(work, ignore_errors=True)  # left over by a killed process
            work.mkdir()
            try:
                yield work
                if not any(work.iterdir()):
                    return
                shutil.rmtree(target, ignore_errors=True)
                work.rename(target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"{target} cannot be made: {error.filename or 'writing'}: {error.strerror}; checkpoints are made in "
            f"model.store, which needs room and to be writable by this user: repair it, or set another folder"
        ) from error


def seal(
    folder: Path,
    tier: TierName,
    *,
    model: str,
    base_digest: str,
    made: Mapping[str, Any],
    precision: str | None = None,
) -> None:
    """Write the manifest of a checkpoint whose files are complete.

    Args:
        folder: The checkpoint.
        tier: Its tier.
        model: Name of the base model.
        base_digest: Digest of the base model.
        made: Method, options and library versions.
        precision: Its number format; None: the usual one of its tier.

    Raises:
        CheckpointError: The folder lacks weights or tokenizer.
    """
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} has no weights")
    own_identity = identity(folder)
    manifest = Manifest(
        recipe_version=RECIPE_VERSION,
        model=model,
        precision=precision or PRECISIONS[tier],
        base_digest=base_digest,
        weights_digest=weights_digest(folder),
        tokenizer_digest=own_identity.tokenizer_digest,
        chat_template_digest=own_identity.chat_template_digest,
        **made,
    )
    _write_manifest(folder, manifest)


def add_reference(
    checkpoint: Checkpoint, reference: ReferenceScores | None
) -> Checkpoint:
    """Write the scores of a finished checkpoint into its manifest; return the checkpoint with them.

    Raises:
        CheckpointError: The manifest cannot be written.
    """
    manifest = checkpoint.manifest.model_copy(update={"reference": reference})
    try:
        _write_manifest(checkpoint.path, manifest)
    except OSError as error:
        raise CheckpointError(
            f"{checkpoint.path / MANIFEST} cannot be written: {error.strerror}"
        ) from error
    return replace(checkpoint, manifest=manifest)


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace a checkpoint's manifest atomically. A reference of None, unlike none, says that it cannot be computed."""
    part = folder / f"{MANIFEST}.partial"
    part.write_text(
        manifest.model_dump_json(indent=2, exclude_unset=True) + "\n", "utf-8"
    )
    part.replace(folder / MANIFEST)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
