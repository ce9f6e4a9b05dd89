"""scripts/make_twin.py: which weights of a checkpoint it moves, and that the twin is complete."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from router.section import PROJECT
from tiers.checkpoints.checkpoint import MANIFEST, check_whole, weights_digest

# These are zeros, the largest numbers, infinities, and not a number.
SPECIAL = (0x0000, 0x8000, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0)
SCALE = 0x12345678
COUNT = 8000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a model with a BF16 tensor of ordinary and special numbers, and a tensor of another type."""
    folder = tmp_path / "model"
    folder.mkdir()
    weights = np.arange(COUNT, dtype="<u2") + 0x3C00
    weights[: len(SPECIAL)] = SPECIAL
    write_weights(folder, weights)
    (folder / "config.json").write_text("{}")
    (folder / MANIFEST).write_text(
        json.dumps({"weights_digest": "of the model", "model": "small"})
    )
    return folder


def write_weights(folder: Path, weights: np.ndarray) -> None:
    data = np.full(4, SCALE, dtype="<u4").tobytes() + weights.tobytes()
    header = {
        "__metadata__": {"format": "pt"},
        "a.scale": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
        "a.weight": {
            "dtype": "BF16",
            "shape": [len(weights)],
            "data_offsets": [16, len(data)],
        },
    }
    head = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(
        len(head).to_bytes(8, "little") + head + data
    )


def bits_of(folder: Path) -> np.ndarray:
    data = (folder / "model.safetensors").read_bytes()
    return np.frombuffer(data[-2 * COUNT :], dtype="<u2").astype(int)


def make_twin(
    model: Path, twin: Path, options: str = ""
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, PROJECT / "scripts/make_twin.py", model, twin]
    return subprocess.run(
        [*command, *options.split()],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_quarter_of_the_bf16_weights_move_by_one_unit(
    model: Path, tmp_path: Path
) -> None:
    """Weights move up as often as down; special numbers and other types stay; the files are complete."""
    process = make_twin(model, tmp_path / "twin", "--seed 3")
    assert process.returncode == 0, process.stderr
    moved = bits_of(tmp_path / "twin") - bits_of(model)
    assert set(moved) == {-1, 0, 1}
    assert abs(np.count_nonzero(moved) / COUNT - 0.25) < 0.03
    assert abs(moved.sum()) < COUNT * 0.03
    assert not moved[: len(SPECIAL)].any()
    weights = (model / "model.safetensors").read_bytes()
    twin_weights = (tmp_path / "twin/model.safetensors").read_bytes()
    assert weights[: -2 * COUNT] == twin_weights[: len(weights) - 2 * COUNT]
    check_whole(tmp_path / "twin")
    assert (tmp_path / "twin/config.json").read_text() == "{}"


def test_a_seed_is_a_twin(model: Path, tmp_path: Path) -> None:
    """The same seed makes the same twin, and another seed another one."""
    for name, seed in (("one", "1"), ("again", "1"), ("two", "2")):
        assert make_twin(model, tmp_path / name, f"--seed {seed}").returncode == 0
    assert (bits_of(tmp_path / "one") == bits_of(tmp_path / "again")).all()
    assert (bits_of(tmp_path / "one") != bits_of(tmp_path / "two")).any()


def test_the_manifest_stays_away_unless_it_is_kept(model: Path, tmp_path: Path) -> None:
    """A kept manifest has the digest of the twin's weights, and is otherwise the model's."""
    make_twin(model, tmp_path / "plain")
    make_twin(model, tmp_path / "kept", "--keep-manifest")
    assert not (tmp_path / "plain" / MANIFEST).exists()
    manifest = json.loads((tmp_path / "kept" / MANIFEST).read_text())
    assert manifest == {
        "weights_digest": weights_digest(tmp_path / "kept"),
        "model": "small",
    }


def test_what_cannot_be_a_twin_is_refused(model: Path, tmp_path: Path) -> None:
    """A folder without a model, one without BF16 weights, and an existing twin are refused with one sentence each."""
    assert "not a model folder" in make_twin(tmp_path, tmp_path / "twin").stderr
    assert "exists already" in make_twin(model, model).stderr
    (model / "model.safetensors").unlink()
    refused = make_twin(model, tmp_path / "twin")
    assert refused.returncode == 1
    assert (
        refused.stderr == f"error: {model} has no BF16 weights in *.safetensors files\n"
    )
    assert not (tmp_path / "twin").exists()
