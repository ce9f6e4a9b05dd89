"""Checkpoints: finished or not, alike or not, and the machine's plan."""

from __future__ import annotations

import hashlib
import json
import struct
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.made_checkpoints import LLAMA_8B, model
from tiers.checkpoints.checkpoint import (
    MANIFEST,
    Checkpoint,
    check_whole,
    fingerprint,
    identity,
    making,
    quantized_bytes,
    read_checkpoint,
    recipe_digest,
    seal,
    weights_digest,
)
from tiers.checkpoints.prepare import (
    DEFAULT_CALIBRATION,
    PrepareOptions,
    check_calibration,
    find,
    finished,
    prepare,
)
from tiers.checkpoints.quantize import evenly
from tiers.errors import CheckpointError
from tiers.spec import STANDARD_TIERS, Precision

FAST, BALANCED, PRECISE = STANDARD_TIERS


def test_interrupted_work_is_not_finished_work(tmp_path: Path) -> None:
    """An error while a checkpoint is made leaves nothing behind, and what an earlier kill left is swept away."""
    target = tmp_path / "store" / "awq-1"
    (tmp_path / "store" / "awq-1.partial").mkdir(parents=True)
    with pytest.raises(RuntimeError), making(target) as work:
        (work / "model.safetensors").write_bytes(b"half")
        raise RuntimeError
    assert read_checkpoint(FAST, target) is None
    assert [p.name for p in target.parent.iterdir()] == [".lock"]
    with (
        pytest.raises(CheckpointError, match=r"/proc/no: .* model\.store"),
        making(Path("/proc/no/awq-1")),
    ):
        pass


def test_folder_without_manifest_is_made_again(tmp_path: Path) -> None:
    """Weights alone do not make a checkpoint: a folder without a manifest, or with a broken one, is not taken."""
    folder = model(tmp_path / "a")
    assert read_checkpoint(FAST, folder) is None
    (folder / MANIFEST).write_text('{"half": ')
    assert read_checkpoint(FAST, folder) is None


def test_sealed_checkpoint_reads_back(tmp_path: Path) -> None:
    """The manifest says what it is made from, and digests what is there."""
    target = tmp_path / "fp8-1"
    with making(target) as work:
        model(work)
        seal(
            work,
            BALANCED,
            model="m",
            base_digest="b",
            made={"method": "FP8", "versions": {"torch": "2"}},
        )
    checkpoint = read_checkpoint(BALANCED, target)
    assert checkpoint is not None
    assert checkpoint.manifest.precision == Precision.FP8
    assert checkpoint.manifest.tokenizer_digest == identity(target).tokenizer_digest


def test_recipe_and_fingerprint_follow_content(tmp_path: Path) -> None:
    """Another option is another recipe; another byte is another base."""
    assert recipe_digest("awq", {"group_size": 64}) != recipe_digest(
        "awq", {"group_size": 128}
    )
    folder = model(tmp_path / "a", size=5_000_000)
    before = fingerprint(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    assert fingerprint(folder) != before


def test_default_calibration_is_varied() -> None:
    """The project's own set is large enough, and code does not dominate it."""
    calibration = check_calibration(DEFAULT_CALIBRATION)
    assert calibration.prompts >= 128
    assert 0.1 < calibration.code_share < 0.5
    rows = [
        json.loads(line) for line in DEFAULT_CALIBRATION.read_text("utf-8").splitlines()
    ]
    assert len({row["category"] for row in rows}) >= 7
    assert len({row["text"] for row in rows}) == len(rows)


def test_samples_are_chosen_evenly() -> None:
    """Each category of the project's own set keeps its share, and the same prompts are chosen every time."""
    lines = DEFAULT_CALIBRATION.read_text("utf-8").splitlines()
    chosen = evenly(lines, 32)
    assert len(set(chosen)) == 32
    assert chosen == evenly(lines, 32)
    all_categories = Counter(json.loads(line)["category"] for line in lines)
    chosen_categories = Counter(json.loads(line)["category"] for line in chosen)
    for category, count in all_categories.items():
        fair_share = count * 32 / len(lines)
        assert abs(chosen_categories[category] - fair_share) <= 1
    for count in (0, len(lines), len(lines) + 1):
        assert evenly(lines, count) == lines
    assert len(evenly(lines, len(lines) - 1)) == len(lines) - 1


def test_samples_are_part_of_the_recipe(tmp_path: Path) -> None:
    """Another number of samples or tokens is another checkpoint; all samples by number or by 0 are one and the same."""

    def has_awq(samples: int, tokens: int) -> bool:
        asked = replace(options, calibration_samples=samples, calibration_tokens=tokens)
        return FAST in {checkpoint.tier for checkpoint in finished(asked)}

    options = PrepareOptions(
        str(model(tmp_path / "base")), tmp_path / "store", tmp_path / "no-python"
    )
    with pytest.raises(CheckpointError, match="make quantizer-env"):
        prepare(options, lambda *_: None)
    home = next((tmp_path / "store").glob("base-*"))
    digest = check_calibration(DEFAULT_CALIBRATION).digest
    before = {
        "calibration": digest,
        "group_size": 0,
        "max_tokens": 128,
        "prefer_small_groups": False,
    }
    # as made by releases without these settings
    with making(home / f"awq-{recipe_digest('awq', before)}") as work:
        model(work)
        seal(
            work,
            FAST,
            model="m",
            base_digest="b",
            made={"method": "AWQ", "versions": {}},
        )
    assert has_awq(0, 128)
    assert has_awq(160, 128)
    assert not has_awq(32, 128)
    assert not has_awq(0, 256)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("", "has 0 prompts"), ('{"text": "a"}\n' * 127, "has 127 prompts"), ("nonsense\n", "line 1"), ('{"prompt": "a"}\n', "line 1"),
     ('{"text": "ok"}\n{"text": ""}\n', "line 2")],
)  # fmt: skip
def test_bad_calibration_names_the_line(
    tmp_path: Path, text: str, problem: str
) -> None:
    """A calibration file that cannot be used is refused before anything is made."""
    file = tmp_path / "c.jsonl"
    file.write_text(text)
    with pytest.raises(CheckpointError, match=problem):
        check_calibration(file)


def test_unknown_model_and_missing_quantizer_say_what_to_do(tmp_path: Path) -> None:
    """Neither a folder nor a hub id is an error that names the choices; no quantizer names the command that makes it."""
    options = PrepareOptions("no model", tmp_path, tmp_path / "python")
    with pytest.raises(CheckpointError, match="neither a folder"):
        prepare(options, lambda *_: None)
    folder = model(tmp_path / "base")
    (folder / "config.json").write_text(json.dumps({**LLAMA_8B, "dtype": "float16"}))
    with pytest.raises(CheckpointError, match="make quantizer-env"):
        prepare(
            PrepareOptions(str(folder), tmp_path / "s", tmp_path / "python"),
            lambda *_: None,
        )
    assert (
        find(PrepareOptions(str(folder), tmp_path / "s", tmp_path / "python")) is None
    )


def test_each_checkpoint_is_handed_over_as_soon_as_it_is_finished(
    tmp_path: Path,
) -> None:
    """BF16 is made and handed over first, then FP8, and AWQ last: a failure there takes nothing back."""
    options = PrepareOptions(
        str(model(tmp_path / "base")), tmp_path / "store", tmp_path / "no-python"
    )
    made: list[Checkpoint] = []
    # FP8 needs the quantizer, which is missing; then FP8 is there and AWQ needs it
    for handed_over in (1, 3):
        with pytest.raises(CheckpointError, match="make quantizer-env"):
            prepare(options, lambda *_: None, made.append)
        assert len(made) == handed_over
        with making(made[0].path.with_name(f"fp8-{recipe_digest('fp8', {})}")) as work:
            model(work)
            seal(
                work,
                BALANCED,
                model="m",
                base_digest="b",
                made={"method": "FP8", "versions": {}},
            )
    assert [checkpoint.tier for checkpoint in made] == [PRECISE, PRECISE, BALANCED]
    assert [checkpoint.tier for checkpoint in finished(options)] == [BALANCED, PRECISE]


def weights(
    folder: Path, tensors: dict[str, tuple[str, int]], name: str = "model.safetensors"
) -> Path:
    """Write a weight file of tensors, each with its type and size in bytes."""
    header = {}
    end = 0
    for tensor, (dtype, size) in tensors.items():
        header[tensor] = {
            "dtype": dtype,
            "shape": [size],
            "data_offsets": [end, end + size],
        }
        end += size
    raw = json.dumps(header).encode()
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(end))
    return folder / name


def test_recipes_keep_their_folders() -> None:
    """A changed digest would make every checkpoint of every user anew; raise RECIPE_VERSION where that is meant."""
    assert recipe_digest("bf16", {}) == "538cd899"
    assert recipe_digest("fp8", {}) == "ab8fdbdd"
    awq = {
        "calibration": "c",
        "group_size": 0,
        "max_tokens": 256,
        "prefer_small_groups": False,
        "samples": 16,
    }
    assert (
        recipe_digest("awq", awq)
        == recipe_digest("awq", dict(reversed(awq.items())))
        == "e2b84966"
    )


def test_whole_weights_pass(tmp_path: Path) -> None:
    """With and without an index; an empty file of tensors is whole as well."""
    weights(tmp_path, {"a": ("BF16", 20), "b": ("BF16", 0)}, "model-1.safetensors")
    weights(tmp_path, {}, "model-2.safetensors")
    check_whole(tmp_path)
    index = {"weight_map": {"a": "model-1.safetensors", "c": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check_whole(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "its header says"),
        (lambda file: file.write_bytes(file.read_bytes() + b"x"), "its header says"),
        (lambda file: file.write_bytes(b"\xff" * 20), "is no safetensors file"),
        (lambda file: file.write_bytes(b""), "cannot be read"),
        (lambda file: file.write_bytes(struct.pack("<Q", 2) + b"[]"), "cannot be read"),
        (lambda file: file.rename(file.with_name("other")), "has no weights"),
        (
            lambda file: file.with_name("model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "gone"}}'
            ),
            "gone is missing",
        ),
        (
            lambda file: file.with_name("model.safetensors.index.json").write_text(
                "{}"
            ),
            "cannot be read",
        ),
    ],
    ids=[
        "cut",
        "longer",
        "not safetensors",
        "empty",
        "no object",
        "none",
        "a file of the index",
        "no index",
    ],
)
def test_weights_that_are_not_whole_are_told(
    tmp_path: Path, change: Any, said: str
) -> None:
    """Each is a CheckpointError that names the file or the folder, whatever is wrong."""
    change(weights(tmp_path, {"a": ("BF16", 20)}))
    with pytest.raises(CheckpointError, match=said) as caught:
        check_whole(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_quantized_weights_are_counted(tmp_path: Path) -> None:
    """FP8 of either kind, and packed 4-bit words by their name; scales and BF16 are not among them."""
    weights(
        tmp_path,
        {"a.weight": ("F8_E4M3", 8), "a.weight_scale": ("BF16", 2)},
        "1.safetensors",
    )
    weights(
        tmp_path,
        {
            "b.weight": ("F8_E5M2", 16),
            "c.weight_packed": ("I32", 32),
            "d": ("BF16", 64),
        },
        "2.safetensors",
    )
    assert quantized_bytes(tmp_path) == 8 + 16 + 32
    weights(tmp_path, {}, "3.safetensors").write_bytes(b"\xff" * 9)
    with pytest.raises(CheckpointError, match=r"3\.safetensors cannot be read"):
        quantized_bytes(tmp_path)


def test_weights_are_digested_in_the_order_of_their_names(tmp_path: Path) -> None:
    """All of them, and nothing else of the folder."""
    (tmp_path / "b.safetensors").write_bytes(b"world")
    (tmp_path / "a.safetensors").write_bytes(b"hello ")
    (tmp_path / "config.json").write_bytes(b"{}")
    assert weights_digest(tmp_path) == hashlib.sha256(b"hello world").hexdigest()


def test_a_sentencepiece_tokenizer_and_a_template_in_the_configuration(
    tmp_path: Path,
) -> None:
    """Folders without tokenizer.json are known by their tokenizer.model; templates by either file."""
    (tmp_path / "tokenizer.model").write_bytes(b"pieces")
    assert identity(tmp_path).tokenizer_digest == hashlib.sha256(b"pieces").hexdigest()
    without = identity(tmp_path).chat_template_digest
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "t"}')
    inside = identity(tmp_path).chat_template_digest
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert identity(tmp_path).chat_template_digest == without != inside
    (tmp_path / "chat_template.jinja").write_text("t")
    assert identity(tmp_path).chat_template_digest == inside


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "has no tokenizer.json or tokenizer.model"),
        ({"tokenizer.json": "{"}, "cannot be read"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "[]"}, "cannot be read"),
    ],
)
def test_folders_without_a_tokenizer_are_no_models(
    tmp_path: Path, files: dict[str, str], said: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=said):
        identity(tmp_path)


def test_two_that_make_in_one_store_take_turns(tmp_path: Path) -> None:
    """The second begins when the first has finished, and sees what it made."""
    seen = []
    begun = threading.Event()

    def second() -> None:
        begun.set()
        with making(tmp_path / "b"):
            seen.append((tmp_path / "a" / "x").exists())

    with making(tmp_path / "a") as work:
        thread = threading.Thread(target=second)
        thread.start()
        assert begun.wait(10)
        (work / "x").touch()
        assert not seen
    thread.join(10)
    assert seen == [True]
