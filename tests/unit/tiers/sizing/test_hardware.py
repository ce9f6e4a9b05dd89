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
    ],
)
def test_gpus_are_named_as_people_and_drivers_do(
    text: str, kind: str, count: int | None
) -> None:
    found = parse_gpus(text)
    assert (found[0].name, found[1]) == (kind, count)


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
            assert [other.name for other in known_gpus() if other.is_called(name)] == [
                kind.name
            ]


def test_prices_are_of_known_gpus() -> None:
    prices = read_prices()
    assert {parse_gpus(name)[0].name for name in prices.per_gpu_hour} == set(
        prices.per_gpu_hour
    )
    assert all(
        kind.fp8_tflops is None or kind.fp8_tflops > kind.bf16_tflops
        for kind in known_gpus()
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not JSON"),
        ("[]", "the file: .*per_gpu_hour"),
        ('{"per_gpu_hour": {"H100": -1}}', "per_gpu_hour.H100"),
        ('{"per_gpu_hour": {"H100": NaN}}', "per_gpu_hour.H100"),
        ('{"per_gpu_hour": {}, "per_hour": 1}', "per_hour"),
    ],
)
def test_a_file_of_prices_is_checked(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "prices.json").write_text(content)
    with pytest.raises(PlanError, match=said):
        read_prices(tmp_path / "prices.json")


def test_own_prices(tmp_path: Path) -> None:
    (tmp_path / "prices.json").write_text(
        '{"currency": "EUR", "per_gpu_hour": {"NVIDIA H100 80GB HBM3": 2}}'
    )
    prices = read_prices(tmp_path / "prices.json")
    assert (
        prices.currency,
        prices.of(parse_gpus("H100")[0]),
        prices.of(parse_gpus("L4")[0]),
    ) == ("EUR", 2.0, None)
    with pytest.raises(PlanError, match="cannot be read"):
        read_prices(tmp_path / "none.json")
