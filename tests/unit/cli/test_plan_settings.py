"""Settings that do not enter a plan: none is forgotten."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

import pytest

from router.cli.plan_settings import (
    ENTERS,
    IGNORED,
    IGNORED_ON_GPUS,
    UNRELATED,
    ignored_settings,
)
from router.settings import Settings, leaves, load_settings

SORTS = {
    "enters": ENTERS,
    "left out": IGNORED,
    "left out on GPUs": IGNORED_ON_GPUS,
    "unrelated": UNRELATED,
}


def matches(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def test_of_every_setting_it_is_known_whether_it_enters() -> None:
    """A new setting fails this test until somebody says so."""
    for path, _, _ in leaves(Settings):
        key = ".".join(path)
        sorts = [name for name, patterns in SORTS.items() if matches(key, patterns)]
        assert len(sorts) == 1, f"{key}: {sorts}"


def test_every_pattern_names_a_setting() -> None:
    keys = [".".join(path) for path, _, _ in leaves(Settings)]
    for patterns in SORTS.values():
        for pattern in patterns:
            assert fnmatch.filter(keys, pattern), pattern


@pytest.mark.parametrize("on_gpus", [True, False])
def test_defaults_are_not_named(*, on_gpus: bool) -> None:
    assert ignored_settings(load_settings(), on_gpus=on_gpus) == []


def test_processors_and_gpus_differ() -> None:
    """A context counts on a processor, where the KV cache follows from it."""
    own = {
        "fast": {"max_model_len": 1000, "max_num_seqs": 4},
        "precise": {"max_num_seqs": 4},
    }
    settings = load_settings(None, {"tiers": own, "engine": {"cpu_kv_cache_gib": 2}})
    on_gpus = {each.setting for each in ignored_settings(settings, on_gpus=True)}
    on_a_processor = {
        each.setting for each in ignored_settings(settings, on_gpus=False)
    }
    assert on_a_processor == {"tiers.fast.max_num_seqs"}
    assert on_gpus == {
        *(
            "tiers.fast.max_model_len",
            "tiers.fast.max_num_seqs",
            "tiers.precise.max_num_seqs",
            "engine.cpu_kv_cache_gib",
        ),
    }
