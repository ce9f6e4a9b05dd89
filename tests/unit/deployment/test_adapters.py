"""LoRA adapters of the settings: which engines load them, and with what arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.deployment.layout import make_deployment, speed_machine
from router.section import SettingsError
from router.settings import load_settings
from tests.unit.deployment.made_fleet import made, settings
from tiers.errors import PlanError
from tiers.lifecycle.command import LOAD_AT_RUN_TIME, engine_argv, engine_environment
from tiers.spec import STANDARD_TIERS, EngineLaunch, TierName

FAST, BALANCED, PRECISE = STANDARD_TIERS


def adapter(folder: Path, rank: int = 4, kind: str = "LORA") -> str:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": kind, "r": rank})
    )
    return str(folder)


def launches(
    tmp_path: Path, lora: dict[str, Any], **more: Any
) -> dict[TierName, EngineLaunch]:
    own = settings(lora=lora, **more)
    return {
        launch.tier.name: launch
        for launch in make_deployment(own, tuple(made(tmp_path).values())).launches
    }


def given(launch: EngineLaunch, name: str) -> list[str]:
    argv = engine_argv(launch)
    rest = argv[argv.index(name) + 1 :] if name in argv else []
    return rest[
        : next((n for n, value in enumerate(rest) if value.startswith("--")), len(rest))
    ]


def test_engines_load_the_adapters_named_for_their_tier(tmp_path: Path) -> None:
    """With the rank that the largest one needs, as vLLM counts ranks, and space for all in one batch."""
    one = adapter(tmp_path / "one", 4)
    two = adapter(tmp_path / "two", 20)
    lora = {"adapters": {"b": {"path": two}, "a": {"path": one, "tiers": ["fast"]}}}
    found = launches(tmp_path / "made", lora)
    assert [found[tier].tier.adapters for tier in STANDARD_TIERS] == [
        ("a", "b"),
        ("b",),
        ("b",),
    ]
    loaded = [json.loads(value) for value in given(found[FAST], "--lora-modules")]
    assert loaded == [{"name": "a", "path": one}, {"name": "b", "path": two}]
    assert given(found[FAST], "--max-loras") == ["2"]
    assert given(found[FAST], "--max-lora-rank") == ["32"]
    assert LOAD_AT_RUN_TIME not in engine_environment(found[FAST], {})
    assert "LoRA" in speed_machine(settings(lora=lora))


def test_engines_are_prepared_for_more_at_run_time(tmp_path: Path) -> None:
    found = launches(tmp_path, {"at_run_time": True, "max_rank": 64})[PRECISE]
    assert given(found, "--max-lora-rank") == ["64"]
    assert given(found, "--lora-modules") == []
    assert engine_environment(found, {})[LOAD_AT_RUN_TIME] == "1"


def test_without_adapters_engines_know_nothing_of_lora(tmp_path: Path) -> None:
    assert not any(
        "lora" in argument for argument in engine_argv(launches(tmp_path, {})[FAST])
    )


def test_what_cannot_be_loaded_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    """By the name of its setting, with what is wrong."""
    with pytest.raises(
        PlanError, match=r"lora\.adapters\.a\.path is .*empty: .*adapter_config\.json"
    ):
        (tmp_path / "empty").mkdir()
        launches(tmp_path / "1", {"adapters": {"a": {"path": str(tmp_path / "empty")}}})
    with pytest.raises(
        PlanError, match="of kind IA3 and rank 4; LORA of rank 1 to 512"
    ):
        launches(
            tmp_path / "2",
            {"adapters": {"a": {"path": adapter(tmp_path / "ia3", kind="IA3")}}},
        )
    with pytest.raises(
        PlanError,
        match=r"lora\.adapters\.a\.tiers names fast, which has no engines here",
    ):
        lora = {
            "adapters": {"a": {"path": adapter(tmp_path / "fine"), "tiers": ["fast"]}}
        }
        launches(tmp_path / "3", lora, tiers={"fast": {"replicas": 0}})


@pytest.mark.parametrize("name", ["auto", "fast", "a b", "", "-x"])
def test_names_that_requests_could_not_use_are_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=r"lora\.adapters"):
        load_settings(None, {"lora": {"adapters": {name: {"path": "/x"}}}})


def test_an_alias_and_an_adapter_have_different_names() -> None:
    with pytest.raises(SettingsError, match=r"openai\.aliases"):
        load_settings(
            None,
            {
                "lora": {"adapters": {"a": {"path": "/x"}}},
                "openai": {"aliases": {"a": "fast"}},
            },
        )
