"""Kinds of GPU, and their prices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tiers.errors import PlanError
from tiers.sizing.hardware import known_gpus, read_prices
from tiers.sizing.named_gpus import parse_gpus

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "kind", "count"),
    [
        ("H100", "H100", None),
        ("2xH100", "H100", 2),
        ("16 x a100-40gb", "A100-40GB", 16),
        ("8*NVIDIA H100 80GB HBM3", "H100", 8),
        ("l40s", "L40S", None),
        ("2 H100", "H100", 2),
        (" 4  rtx 4090 ", "RTX-4090", 4),
        ("a100-80", "A100", None),
        ("NVIDIA B200", "B200", None),
        ("4xgb300", "GB300", 4),
        ("NVIDIA GeForce RTX 5090", "RTX-5090", None),
        ("rtx pro 6000", "RTX-PRO-6000", None),
        (
            "2xNVIDIA RTX PRO 6000 Blackwell Workstation Edition",
            "RTX-PRO-6000",
            2,
        ),
        (
            "NVIDIA RTX PRO 6000 Blackwell Server Edition",
            "RTX-PRO-6000-Server",
            None,
        ),
        ("AMD Instinct MI355X", "MI355X", None),
    ],
)
def test_gpus_are_named_as_people_and_drivers_do(
    text: str, kind: str, count: int | None
) -> None:
    parsed_kind, parsed_count = parse_gpus(text)
    assert parsed_kind.name == kind
    assert parsed_count == count


@pytest.mark.parametrize("text", ["", "2x", "0xH100", "TPU", "-1xH100", "2xH100x2"])
def test_unknown_gpus_are_refused(text: str) -> None:
    with pytest.raises(
        PlanError,
        match=r"Known are, most similar first: |the number of GPUs must be from 1",
    ):
        parse_gpus(text)


def test_no_name_is_used_twice() -> None:
    for kind in known_gpus():
        for name in (kind.name, *kind.also):
            called = [gpu.name for gpu in known_gpus() if gpu.is_called(name)]
            assert called == [kind.name]


def test_prices_are_of_known_gpus() -> None:
    prices = read_prices()
    for name in prices.per_gpu_hour:
        kind, _ = parse_gpus(name)
        assert kind.name == name


def test_units_of_fewer_bits_are_faster() -> None:
    for kind in known_gpus():
        assert kind.fp8_tflops is None or kind.fp8_tflops > kind.bf16_tflops
        if kind.fp4_tflops is not None:
            assert kind.fp8_tflops is not None
            assert kind.fp4_tflops > kind.fp8_tflops


def test_units_are_those_of_a_gpus_generation() -> None:
    """FP8 came with compute capability 8.9, FP4 with 10.0."""
    for kind in known_gpus():
        capability = kind.compute_capability
        if capability is not None:
            assert (kind.fp8_tflops is not None) == (capability >= (8, 9)), kind.name
            assert (kind.fp4_tflops is not None) == (capability >= (10, 0)), kind.name
            assert kind.machete == (capability == (9, 0)), kind.name


@pytest.mark.parametrize(
    ("content", "error_text"),
    [
        ("{", "not JSON"),
        ("[]", "the file: .*per_gpu_hour"),
        ('{"per_gpu_hour": {"H100": -1}}', "per_gpu_hour.H100"),
        ('{"per_gpu_hour": {"H100": NaN}}', "per_gpu_hour.H100"),
        ('{"per_gpu_hour": {}, "per_hour": 1}', "per_hour"),
    ],
)
def test_a_file_of_prices_is_checked(
    tmp_path: Path, content: str, error_text: str
) -> None:
    (tmp_path / "prices.json").write_text(content)
    with pytest.raises(PlanError, match=error_text):
        read_prices(tmp_path / "prices.json")


def test_own_prices(tmp_path: Path) -> None:
    (tmp_path / "prices.json").write_text(
        '{"currency": "EUR", "per_gpu_hour": {"NVIDIA H100 80GB HBM3": 2}}'
    )
    prices = read_prices(tmp_path / "prices.json")
    h100, _ = parse_gpus("H100")
    l4, _ = parse_gpus("L4")
    assert prices.currency == "EUR"
    assert prices.of(h100) == 2.0
    assert prices.of(l4) is None
    with pytest.raises(PlanError, match="cannot be read"):
        read_prices(tmp_path / "none.json")
