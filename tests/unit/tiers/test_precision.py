"""What a checkpoint's precision is, as its own files say; never by its name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.unit.made_configs import (
    AWQ_RECIPE,
    CONFIGS,
    compressed,
    model_folder,
    tier_folder,
)
from tests.waiting import call_within
from tiers.checkpoints.config_files import MAX_CONFIG_BYTES
from tiers.checkpoints.precision import (
    checkpoint_precision,
    root_precision,
    told_precision,
)
from tiers.spec import PRECISIONS, STANDARD_TIERS, UNKNOWN, TierName

BF16 = CONFIGS[TierName.PRECISE]


def quantized(method: str, **fields: Any) -> dict[str, Any]:
    return {
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": method, **fields},
    }


@pytest.mark.parametrize("tier", STANDARD_TIERS)
def test_what_is_made_for_a_tier_says_so_itself(tmp_path: Path, tier: TierName) -> None:
    assert (
        checkpoint_precision(tier_folder(tmp_path / "any name", tier))
        == PRECISIONS[tier]
    )


@pytest.mark.parametrize(
    ("config", "precision"),
    [
        ({"torch_dtype": "bfloat16"}, "bf16"),
        ({"dtype": "float16"}, "fp16"),
        ({"dtype": None, "torch_dtype": "float16"}, "fp16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bf16"),
        ({"torch_dtype": "float32"}, UNKNOWN),
        ({}, UNKNOWN),
        (quantized("awq", bits=4, group_size=128), "awq-int4"),
        (quantized("awq", w_bit=4), "awq-int4"),
        (quantized("gptq", bits=8), "gptq-int8"),
        (quantized("gptq"), UNKNOWN),
        (quantized("fp8", activation_scheme="dynamic"), "fp8"),
        (quantized("FBGEMM_FP8"), "fp8"),
        (quantized("mxfp4"), "mxfp4"),
        (quantized("bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4"), "nf4"),
        (quantized("bitsandbytes", load_in_8bit=True), "int8"),
        (quantized("modelopt", quant_algo="NVFP4"), "nvfp4"),
        (quantized("modelopt", quant_algo="FP8"), "fp8"),
        (quantized("of tomorrow"), UNKNOWN),
        (compressed("float", 8, "float-quantized"), "fp8"),
        (compressed("int", 8, "int-quantized"), "int8"),
        (compressed("int", 4), "int4"),
        (compressed("float", 4, "nvfp4-pack-quantized"), "nvfp4"),
        (compressed("float", 4, "mxfp4-pack-quantized"), "mxfp4"),
        (compressed("other", 4), UNKNOWN),
        ({"text_config": quantized("awq", bits=4)}, "awq-int4"),
        ({"quantization_config": {"config_groups": ["no groups"], "quant_method": "compressed-tensors"}}, UNKNOWN),
    ],
)  # fmt: skip
def test_a_configuration_names_the_format(
    tmp_path: Path, config: object, precision: str
) -> None:
    """A quantized checkpoint's dtype is that of its activations, and a 32-bit one is cast by vLLM."""
    assert (
        checkpoint_precision(model_folder(tmp_path / "precise-bf16", config))
        == precision
    )


def test_layers_that_differ_are_all_named(tmp_path: Path) -> None:
    both = compressed("float", 8)
    both["quantization_config"]["config_groups"]["group_1"] = {
        "targets": ["re:.*mlp.*"],
        "weights": {"num_bits": 4, "type": "int"},
    }
    assert checkpoint_precision(model_folder(tmp_path, both)) == "fp8+int4"


@pytest.mark.parametrize(
    ("recipe", "precision"),
    [(AWQ_RECIPE, "awq-int4"), ("GPTQModifier:\n", "gptq-int4")],
)
def test_how_integer_weights_were_found_is_in_the_recipe(
    tmp_path: Path, recipe: str, precision: str
) -> None:
    assert (
        checkpoint_precision(model_folder(tmp_path, compressed("int", 4), recipe))
        == precision
    )


def test_a_separate_file_of_modelopt_counts(tmp_path: Path) -> None:
    """Older releases of NVIDIA ModelOpt leave config.json as it was."""
    (model_folder(tmp_path, BF16) / "hf_quant_config.json").write_text(
        '{"quantization": {"quant_algo": "FP8"}}'
    )
    assert checkpoint_precision(tmp_path) == "fp8"


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '"bf16"',
        "\x00",
        "[" * 100_000,
        " " * MAX_CONFIG_BYTES + '{"dtype": "bfloat16"}',
    ],
)
def test_what_is_no_configuration_is_unknown(tmp_path: Path, content: str) -> None:
    assert checkpoint_precision(model_folder(tmp_path, content)) == UNKNOWN


def test_a_folder_without_configuration_is_unknown(tmp_path: Path) -> None:
    """A pipe in its place is not waited for."""
    assert checkpoint_precision(tmp_path / "none") == UNKNOWN
    os.mkfifo(tmp_path / "config.json")
    assert checkpoint_precision(tmp_path) == UNKNOWN


@pytest.mark.parametrize(
    ("args", "precision"),
    [
        (("--dtype", "half"), "fp16"),
        (("--dtype=float32",), "fp32"),
        (("--dtype", "auto"), "bf16"),
        (("--quantization", "fp8"), "fp8"),
        (("-q", "nvfp4_per_token"), "nvfp4"),
        (("--quantization=torchao",), UNKNOWN),
        (("--quantization", "fp8", "--quantization=mxfp8"), "mxfp8"),
        (("--max-model-len", "64"), "bf16"),
        (("--dtype",), "bf16"),
    ],
)
def test_the_engines_arguments_may_change_it(
    tmp_path: Path, args: tuple[str, ...], precision: str
) -> None:
    """vLLM casts or quantizes a checkpoint while it loads; the last argument counts."""
    assert checkpoint_precision(model_folder(tmp_path, BF16), args) == precision


def test_a_quantized_checkpoint_stays_what_it_is(tmp_path: Path) -> None:
    """The dtype is that of its activations, and a method can only name the one that it has."""
    folder = tier_folder(tmp_path, TierName.FAST)
    assert (
        checkpoint_precision(
            folder, ("--dtype", "half", "--quantization", "compressed-tensors")
        )
        == "awq-int4"
    )


ELSEWHERE = "http://10.0.0.5:8000"


def cached(hub: Path, revision: str, config: object) -> None:
    """Put a revision of the model ``org/model`` into a cache of the Hugging Face hub."""
    model_folder(hub / "models--org--model" / "snapshots" / revision, config)


def test_a_model_of_the_hub_is_read_from_the_cache_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is not, its name tells nothing; nor does what is no model's id."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    cached(tmp_path / "hub", "a", quantized("awq", bits=4))
    assert root_precision(ELSEWHERE, "org/model") == "awq-int4"
    for root in (
        None,
        "",
        "org/other-FP8",
        "some-bf16",
        "../hub",
        "a/b/c",
        "s3://a/b",
        "org/\0",
    ):
        assert root_precision(ELSEWHERE, root) == UNKNOWN


def test_revisions_that_differ_leave_it_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine does not tell which of them it serves. Equal ones are known."""
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    cached(tmp_path / "hub", "a", BF16)
    cached(tmp_path / "hub", "b", BF16)
    assert root_precision(ELSEWHERE, "org/model") == "bf16"
    cached(tmp_path / "hub", "c", quantized("gptq", bits=4))
    assert root_precision(ELSEWHERE, "org/model") == UNKNOWN


def test_the_hubs_cache_is_where_its_library_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cached(tmp_path / "huggingface" / "hub", "a", BF16)
    assert root_precision(ELSEWHERE, "org/model") == "bf16"


@contextmanager
def listening(*args: str) -> Iterator[str]:
    """Run a process with these arguments that listens on a port; yield the URL."""
    code = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(call_within(process.stdout.readline, 'a port'))}"
    finally:
        process.kill()
        process.communicate(timeout=60)


def test_a_folder_counts_where_the_engine_is_a_process_here(tmp_path: Path) -> None:
    """Started with it, and with what its arguments make of it. By another address the folder may be another one."""
    folder = str(tier_folder(tmp_path / "x", TierName.PRECISE))
    with listening("--model", folder) as url:
        assert root_precision(url, folder) == "bf16"
        assert root_precision(url.replace("127.0.0.1", "localhost"), folder) == "bf16"
        assert root_precision(url.replace("127.0.0.1", "10.0.0.5"), folder) == UNKNOWN
        assert root_precision(ELSEWHERE, folder) == UNKNOWN
        assert root_precision("http://localhost:9", folder) == UNKNOWN
    with listening(f"--model={folder}", "--quantization", "fp8") as url:
        assert root_precision(url, folder) == "fp8"
    with listening("--config", "more.yaml", "--model", folder) as url:
        assert root_precision(url, folder) == UNKNOWN


def test_what_listens_here_may_be_a_tunnel(tmp_path: Path) -> None:
    """A process that was not started with the folder does not serve it, and what is behind it is another machine."""
    with listening("ssh", "-L", "8000:gpu:8000") as url:
        assert (
            root_precision(url, str(tier_folder(tmp_path / "x", TierName.PRECISE)))
            == UNKNOWN
        )


def test_an_engine_in_a_container_has_folders_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that shares this network, but not the file system, may have another checkpoint at the same path."""
    folder = str(tier_folder(tmp_path / "x", TierName.PRECISE))
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(
        "pathlib.Path.samefile",
        lambda path, other: bool(asked.append((str(path), other))),
    )
    with listening("--model", folder) as url:
        assert root_precision(url, folder) == UNKNOWN
    ((theirs, ours),) = asked
    assert theirs.startswith("/proc/")
    assert theirs.endswith("/root") is True
    assert ours == "/"


@pytest.mark.parametrize(
    ("read", "stated", "told"),
    [
        ("fp8", None, "fp8"),
        (UNKNOWN, None, UNKNOWN),
        (UNKNOWN, "fp8", "fp8 (stated)"),
        ("fp8", "fp8", "fp8"),
        ("bf16", "fp8", "fp8 (stated; its checkpoint is bf16)"),
    ],
)
def test_what_is_stated_is_shown_as_that(
    read: str, stated: str | None, told: str
) -> None:
    """It counts where the checkpoint says something else too: an engine may quantize while it loads."""
    assert told_precision(read, stated) == told
