"""GPUs as people name them: known ones, ones with the figures of their data sheet, and files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tiers.errors import PlanError
from tiers.sizing.hardware import GpuKind, read_prices
from tiers.sizing.named_gpus import (
    FIELDS,
    given_figures,
    is_as_built_in,
    known_gpus,
    parse_all_gpus,
    parse_gpus,
    unknown_gpu,
)

if TYPE_CHECKING:
    from pathlib import Path

MINE = GpuKind(name="Mine", memory_gb=96, bandwidth_gb_s=1792, bf16_tflops=500)
FULL = MINE.model_copy(
    update={
        "compute_capability": (12, 1),
        "fp8_tflops": 1000.0,
        "fp4_tflops": 2000.0,
        "int8_tops": 1000.0,
        "int4_tops": 2000.0,
        "price_per_hour": 1.9,
    }
)


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("Mine:96GB,1792GB/s,500TF", {MINE: None}),
        ("2xMine:96GB,1792GB/s,500TF", {MINE: 2}),
        ("2 x Mine: 96 GB, 1.792 TB/s, 0.5 PFLOPS", {MINE: 2}),
        ("Mine:bf16=500,memory=96,bandwidth=1792gbps", {MINE: None}),
        (
            "Mine:500tflops,96gb,1792gb/s,fp8=1000TF,fp4=2PF,int8=1000TOPS,int4=2000TOPS,capability=12.1,price=1.9/h",
            {FULL: None},
        ),
    ],
)
def test_figures_have_units_and_any_order(
    text: str, gpus: dict[GpuKind, int | None]
) -> None:
    assert parse_all_gpus(text) == gpus


def test_gibibytes_are_larger() -> None:
    assert parse_gpus("Mine:96GiB,1792GB/s,500TF")[0].memory_gb == pytest.approx(
        103.08, abs=0.01
    )


def test_figures_of_one_gpu_and_other_gpus_are_told_apart() -> None:
    text = "2xMine:96GB,1792GB/s,500TF,4xL4,H100,8xL40S:price=0.9,A100"
    counts = {kind.name: count for kind, count in parse_all_gpus(text).items()}
    assert counts == {"Mine": 2, "L4": 4, "H100": None, "L40S": 8, "A100": None}
    assert list(counts) == ["Mine", "L4", "H100", "L40S", "A100"]


def test_a_known_gpu_keeps_what_is_not_given() -> None:
    """A price alone leaves its figures as built in; it takes the place of the list's."""
    kind, count = parse_gpus("2xl40s:price=0.9")
    assert kind.name == "L40S"
    assert count == 2
    assert kind.bandwidth_gb_s == 864
    assert is_as_built_in(kind)
    assert read_prices().of(kind) == 0.9


def test_a_known_gpu_takes_what_is_given() -> None:
    larger, _ = parse_gpus("H100:94GB")
    assert larger.memory_gb == 94
    assert larger.fp8_tflops == 1979
    assert not is_as_built_in(larger)
    assert given_figures(larger).startswith(
        "H100 with other figures than those built in: 94 GB, 3,350 GB/s, 989 TFLOP/s"
    )


def test_what_is_assumed_of_formats_without_a_figure() -> None:
    without = given_figures(MINE)
    assert (
        "weights in FP4 are computed in BF16: if its data sheet has a line for FP4, add fp4="
        in without
    )
    assert "FP8 weights are computed in BF16" in without
    given = given_figures(FULL)
    assert "1,000 in FP8, 2,000 in FP4, 1,000 TOP/s in INT8; integer 4-bit" in given
    assert given.endswith("so int4 is not in the plan")


@pytest.mark.parametrize(
    ("text", "error_text"),
    [
        ("Mine:96GB", "lacks bandwidth as 1792GB/s, bf16 as 500TF"),
        ("Mine:96GB,1792GB/s", "lacks bf16 as 500TF"),
        ("Mine:", "an empty figure cannot be read; allowed are 96GB"),
        ("H100x2", "Write 2xH100 for 2 of them"),
        ("H100:2", "2 has no unit; allowed are .* Write 2xH100 for two GPUs"),
        ("Mine:96MB,1792GB/s,500TF", "96MB cannot be read; allowed are 96GB, 1792GB/s"),
        ("Mine:96GB,1792GB/s,500TF,1000TF", r"bf16 is given twice; .*fp8=1000TF"),
        (
            "Mine:96GB,1792GB/s,0.5TF",
            "bf16 is 0.5TF; 1 to 100,000 TF is allowed: is the unit right",
        ),
        ("Mine:96000GB,1792GB/s,500TF", "memory is 96000GB; 1 to 10,000 GB is allowed"),
        (
            "Mine:96GB,1792GB/s,500TF,fp8=fast",
            "fp8 is fast; a value like 1000TF is allowed",
        ),
        (
            "Mine:96GB,1792GB/s,500TF,fp8=100GB",
            "fp8 is 100GB; a value like 1000TF is allowed",
        ),
        (
            "Mine:96GB,1792GB/s,500TF,fp8=400TF",
            "fp8 is 400TF, less than bf16's 500TF; as much or more is allowed",
        ),
        (
            "Mine:96GB,1792GB/s,500TF,fp4=400TF",
            "fp4 is 400TF, less than bf16's 500TF; .* a GPU without FP4 units",
        ),
        (
            "Mine:96GB,1792GB/s,500TF,capability=120",
            "capability is 120; 3 to 30 is allowed",
        ),
        (
            "Mine:96GB,1792GB/s,500TF,capability=sm_120",
            "capability is sm_120; a value like 12.0 is allowed",
        ),
        ("Mine:96GB,1792GB/s,500TF,power=400", "there is no figure power; allowed are"),
        (
            "Mine:96GB,1792GB/s,500TF,price=-1",
            "price is -1; a value like 1.9 is allowed",
        ),
        ("0xMine:96GB,1792GB/s,500TF", "the number of GPUs must be from 1"),
        ("M\ny:96GB,1792GB/s,500TF", "a GPU's name of up to 64 letters"),
        ("Mine:96GB,1792GB/s,500TF,mine:96GB,1792GB/s,500TF", "mine is named twice"),
        ("L40S:price=1,2xL40S", "L40S is named twice"),
    ],
)
def test_faults_name_the_figure_and_what_is_allowed(text: str, error_text: str) -> None:
    with pytest.raises(PlanError, match=error_text) as error:
        parse_all_gpus(text)
    assert str(error.value).startswith("--gpus ")


@pytest.mark.parametrize(
    ("name", "most_similar"),
    [
        ("RTX6000", "A6000"),
        ("H100-SXM5", "H100"),
        ("l4os", "L40S"),
        ("rtx 4090 ti", "RTX-4090"),
    ],
)
def test_an_unknown_gpu_is_told_the_similar_ones_and_where_to_look(
    name: str, most_similar: str
) -> None:
    text = unknown_gpu(name)
    assert f"Known are, most similar first: {most_similar}, " in text
    for kind in known_gpus():
        assert kind.name in text
    assert '"GPU memory"' in text
    assert '"Memory bandwidth"' in text
    assert '"BF16 Tensor Core"' in text
    assert "with sparsity" in text


@pytest.mark.parametrize("name", ["RTX6000", "H100-SXM5", "l4os", "rtx 4090 ti"])
def test_what_the_error_says_to_write_is_understood(name: str) -> None:
    text = unknown_gpu(name)
    _, _, from_example = text.partition("--gpus '")
    example, _, _ = from_example.partition("'")
    _, count = parse_gpus(example)
    assert count == 2


def test_a_file_has_the_same_fields(tmp_path: Path) -> None:
    file = tmp_path / "gpus.toml"
    file.write_text(
        '[Mine]\ncount = 2\nmemory = "96GB"\nbandwidth = "1.792TB/s"\nbf16 = 500\nfp8 = "1000TF"\nfp4 = "2000TF"\n'
        'int8 = 1000\ncapability = 12.1\nint4 = "2000TOPS"\nprice = 1.9\n[L4]\n'
    )
    assert parse_all_gpus(str(file)) == {FULL: 2, parse_gpus("L4")[0]: None}


@pytest.mark.parametrize(
    ("content", "error_text"),
    [
        ("", r"it names no GPU; it has the form \[NAME\]"),
        ("[Mine", "not TOML"),
        ("Mine = 3", "Mine: a table for each kind of GPU is needed"),
        (
            "[Mine]\nmemory_gb = 96",
            r"\[Mine\]: there is no field memory_gb; allowed are count, memory, bandwidth",
        ),
        ("[Mine]\nmemory = true", r'\[Mine\]: memory is True; "96GB" is allowed'),
        ('[L4]\ncount = "2"', r"\[L4\]: count is '2'; a whole number is allowed"),
        ("[L4]\ncount = 0", r"\[L4\]: the number of GPUs must be from 1"),
        (
            '[Mine]\nmemory = "96GB"',
            r"\[Mine\]: Mine is not known here, and lacks bandwidth",
        ),
        ("[L5]", r"\[L5\]: L5 is no GPU that is known here"),
        ("[L4]\n[l4]", "l4 is named|L4 is named twice"),
    ],
)
def test_faults_of_a_file(content: str, error_text: str, tmp_path: Path) -> None:
    file = tmp_path / "gpus.toml"
    file.write_text(content)
    with pytest.raises(PlanError, match=error_text):
        parse_all_gpus(str(file))


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(
        PlanError,
        match=r"--gpus /none/gpus\.toml: the file cannot be read: No such file",
    ):
        parse_all_gpus("/none/gpus.toml")


def test_examples_are_allowed() -> None:
    """What errors give as an example of each field can be written."""
    for name, figure in FIELDS.items():
        figures = f"{name}={figure.example}"
        if name in {"fp8", "fp4"}:
            # They must not be lower than bf16.
            figures += ",bf16=400TF"
        kind, _ = parse_gpus(f"H100:{figures}")
        assert getattr(kind, figure.attribute) is not None
