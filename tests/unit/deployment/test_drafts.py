"""Drafts of speculative decoding: where they come from, and that they fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.deployment.drafts import check_draft
from router.deployment.layout import make_deployment, speed_machine
from router.settings import load_settings
from tests.unit.deployment.made_fleet import made, settings
from tiers.errors import CheckpointError, PlanError, TokenizerMismatchError
from tiers.spec import NGRAM, STANDARD_TIERS, Draft, TierName, TierSpec

FAST, BALANCED, PRECISE = STANDARD_TIERS


def drafts(tmp_path: Path, tiers: dict[str, Any]) -> dict[TierName, Draft | None]:
    deployment = make_deployment(settings(tiers=tiers), tuple(made(tmp_path).values()))
    return {launch.tier.name: launch.tier.draft for launch in deployment.launches}


def test_a_draft_is_a_tier_a_folder_or_none(tmp_path: Path) -> None:
    """A tier's checkpoint serves as a draft even if its own engines run elsewhere, or do not run."""
    found = drafts(
        tmp_path, {"precise": {"draft": "fast"}, "balanced": {"draft": "ngram"}}
    )
    assert found[PRECISE] == Draft("fast", 4, tmp_path / f"made-{FAST}")
    assert found[BALANCED] == Draft(NGRAM, 4)
    assert found[FAST] is None
    found = drafts(
        tmp_path / "b", {"precise": {"draft": "fast"}, "fast": {"replicas": 0}}
    )
    assert found[PRECISE].checkpoint == tmp_path / "b" / f"made-{FAST}"  # type: ignore[union-attr]
    folder = str(made(tmp_path / "c")[FAST].path)
    assert (
        drafts(tmp_path / "d", {"precise": {"draft": folder}})[PRECISE].source == folder
    )  # type: ignore[union-attr]


def test_an_engine_waits_for_its_drafts_checkpoint(tmp_path: Path) -> None:
    """While that is made here; one that nobody makes is refused at once."""
    tiers = {"precise": {"draft": "fast"}}
    prepared = made(tmp_path)
    deployment = make_deployment(
        settings(tiers=tiers), (prepared[BALANCED], prepared[PRECISE])
    )
    assert deployment.missing == (FAST,)
    assert [spec.name for spec in deployment.specs if spec.startable] == [BALANCED]
    with pytest.raises(
        PlanError,
        match=r"tiers\.precise\.draft is fast, whose checkpoint is not made: run 'qarr model",
    ):
        make_deployment(
            settings(tiers={**tiers, "fast": {"replicas": 0}}),
            (prepared[BALANCED], prepared[PRECISE]),
        )


@pytest.mark.parametrize("tier", ["precise", "balanced"])
def test_a_draft_is_of_a_lower_precision(tmp_path: Path, tier: str) -> None:
    with pytest.raises(
        PlanError,
        match=rf"tiers\.balanced\.draft is {tier}: ngram, a tier of lower precision or a model",
    ):
        make_deployment(
            settings(tiers={"balanced": {"draft": tier}}),
            tuple(made(tmp_path).values()),
        )


def test_a_draft_that_is_no_model_folder_is_refused(tmp_path: Path) -> None:
    """By its setting or its folder, whatever it lacks."""
    prepared = tuple(made(tmp_path).values())
    empty = tmp_path / "empty"
    half = made(tmp_path / "half")[FAST].path
    empty.mkdir()
    (half / "config.json").unlink()
    for folder, said in (
        (empty, "not a model folder"),
        (half, r"tiers\.precise\.draft: .*config\.json is needed"),
    ):
        with pytest.raises(CheckpointError, match=said):
            make_deployment(
                settings(tiers={"precise": {"draft": str(folder)}}), prepared
            )


@pytest.mark.parametrize("part", ["tokenizer", "size"])
def test_a_draft_with_another_vocabulary_is_refused_with_both_digests(
    tmp_path: Path, part: str
) -> None:
    own = made(tmp_path)[PRECISE].path
    other = made(tmp_path / "other")[FAST].path
    if part == "tokenizer":
        definition = json.loads((other / "tokenizer.json").read_text())
        definition["model"]["vocab"]["c"] = 2
        (other / "tokenizer.json").write_text(json.dumps(definition))
    else:
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps({**config, "vocab_size": 99}))
    with pytest.raises(
        TokenizerMismatchError,
        match=r"precise .* digest [0-9a-f]{16}.*the draft .* digest [0-9a-f]{16}",
    ):
        make_deployment(
            settings(tiers={"precise": {"draft": str(other)}}),
            tuple(made(tmp_path / "b").values()),
        )
    check_draft(
        TierSpec(
            PRECISE,
            max_model_len=1,
            max_num_seqs=1,
            max_in_flight=1,
            checkpoint=own,
            draft=Draft(NGRAM, 4),
        )
    )


def test_speeds_belong_to_how_engines_run_too() -> None:
    """A profile that was measured without a draft says nothing about an engine with one."""
    plain = speed_machine(load_settings(None))
    tiers = {
        "precise": {"draft": "fast", "tensor_parallel": 2},
        "fast": {"urls": ("http://a",), "draft": "ngram"},
    }
    assert (
        speed_machine(load_settings(None, {"tiers": tiers}))
        == f"{plain}; precise: draft fast x 4, 2 GPUs (2 x 1)"
    )
