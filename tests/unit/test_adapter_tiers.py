"""Tiers that settings of LoRA adapters name: every one of them is known."""

from __future__ import annotations

import pytest

from router.section import SettingsError
from router.settings import load_settings


@pytest.mark.parametrize("tiers", [["other", "precise"], ["precise", "other"]])
def test_each_tier_of_an_adapter_is_checked(tiers: list[str]) -> None:
    adapters = {"support": {"path": "/models/support", "tiers": tiers}}
    with pytest.raises(
        SettingsError, match=r"lora\.adapters\.support\.tiers"
    ) as refused:
        load_settings(overrides={"lora": {"adapters": adapters}})
    assert "there is no tier other" in str(refused.value)
