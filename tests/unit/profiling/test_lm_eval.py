"""Profiles of lm-evaluation-harness's logs. Those in ``lm_eval_logs`` are its own, of 8 questions to three tiers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from classifier import Complexity, PromptClass
from router.policy.profiles import ProfileError
from router.profiling.lm_eval import (
    CLASSES,
    HarnessRun,
    ImportedProfile,
    LoggedSample,
    TaskKind,
    import_runs,
    read_classes,
)
from router.profiling.measuring_client import FleetState
from tiers.spec import STANDARD_TIERS, TierName

LOGS = Path(__file__).with_name("lm_eval_logs")
FAST, BALANCED, PRECISE = STANDARD_TIERS
DIGESTS: dict[TierName, str | None] = {FAST: "a", BALANCED: "b", PRECISE: "c"}
FLEET = FleetState(model="m", machine="a machine", checkpoints=DIGESTS, tiers={})
USUAL = read_classes(CLASSES)


def imported(*folders: Path, known: dict[str, TaskKind] = USUAL) -> ImportedProfile:
    return import_runs([HarnessRun(None, folder) for folder in folders], known, FLEET)


def flips(imported_profile: ImportedProfile) -> dict[TierName, tuple[int, int, int]]:
    return {tier: flips_of(imported_profile, tier) for tier in (FAST, BALANCED)}


def flips_of(imported_profile: ImportedProfile, tier: TierName) -> tuple[int, int, int]:
    """Return a tier's answers, and of these those worse and better, of all kinds together."""
    by_kind = [count.flips for count in imported_profile.profile.of(tier)]
    return (
        sum(flips.answers for flips in by_kind),
        sum(flips.worse for flips in by_kind),
        sum(flips.better for flips in by_kind),
    )


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return Path(shutil.copytree(LOGS, tmp_path / "logs"))


def change(
    folder: Path, make: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
) -> None:
    (path,) = folder.glob("samples_*.jsonl")
    rows = make([json.loads(line) for line in path.read_text("utf-8").splitlines()])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def test_one_folder_with_a_run_of_each_tier_is_a_profile_of_the_fleet() -> None:
    """Right: precise and balanced 5 of 8, fast 2 others; each answer once, though two filters judged it."""
    imported_profile = imported(LOGS)
    assert flips(imported_profile) == {FAST: (7, 5, 2), BALANCED: (5, 0, 0)}
    assert {
        (count.prompt_class, count.answered > 0)
        for count in imported_profile.profile.counts
    } == {(PromptClass.MATH, True)}
    assert sum(count.asked for count in imported_profile.profile.of(FAST)) == 8
    assert imported_profile.profile.checkpoints == DIGESTS
    assert imported_profile.profile.model == "m"
    assert set(imported_profile.unpaired.values()) == {0}
    assert imported_profile.profile.tasks == "lm-evaluation-harness (gsm_short)"


def test_only_equal_prompts_are_paired(logs: Path) -> None:
    """Of the same document, with the same few-shot examples."""

    def with_other_prompts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for row in rows:
            if row["doc_id"] < 3:
                row["prompt_hash"] = "other"
        return rows

    change(logs / "fast", with_other_prompts)
    imported_profile = imported(logs)
    assert imported_profile.unpaired == {BALANCED: 0, FAST: 3}
    assert sum(count.answered for count in imported_profile.profile.of(FAST)) == 5
    change(logs / "fast", lambda rows: [{**row, "doc_hash": "other"} for row in rows])
    with pytest.raises(
        ProfileError, match="fast and precise answered no prompt in common"
    ):
        imported(logs)


def test_the_newest_run_counts_and_a_tier_may_be_said(logs: Path) -> None:
    """Of the model's name and what was said, the latter."""
    (path,) = (logs / "balanced").glob("samples_*.jsonl")
    shutil.copy(
        path, logs / "fast" / "samples_gsm_short_2999-01-01T00-00-00.000000.jsonl"
    )
    with pytest.raises(ProfileError, match="give it as TIER=DIR"):
        imported(logs)
    runs = [HarnessRun(FAST, logs / "fast"), HarnessRun(PRECISE, logs / "precise")]
    assert flips(import_runs(runs, USUAL, FLEET))[FAST] == (5, 0, 0)


def test_classes_of_tasks_are_read(tmp_path: Path) -> None:
    """JSON or TOML; an own pattern before the usual ones; a fault names the file and the place."""
    (toml := tmp_path / "own.toml").write_text(
        '"gsm_*" = { class = "chat", complexity = "complex" }'
    )
    imported_profile = imported(LOGS, known={**read_classes(toml), **USUAL})
    assert {
        (count.prompt_class, count.complexity)
        for count in imported_profile.profile.counts
    } == {(PromptClass.CHAT, Complexity.COMPLEX)}
    (own := tmp_path / "own.json").write_text('{"a": "code", "b": "poems"}')
    with pytest.raises(ProfileError, match=r"own\.json: b\.class"):
        read_classes(own)
    own.write_text('{"a": "code"}')
    assert read_classes(own)["a"].prompt_class is PromptClass.CODE
    with pytest.raises(
        ProfileError, match=r"class of the task gsm_short is not known.*--classes"
    ):
        imported(LOGS, known={})


def sample(arg: Any = "What?", **metrics: Any) -> LoggedSample:
    base = {
        "doc_id": 0,
        "doc_hash": "d",
        "prompt_hash": "p",
        "arguments": {"gen_args_0": {"arg_0": arg}},
    }
    return LoggedSample.model_validate({**base, "metrics": list(metrics), **metrics})


@pytest.mark.parametrize(
    ("metrics", "right"),
    [
        ({"exact_match": 1.0, "f1": 0.2}, True),
        ({"acc_norm": 1.0, "acc": 0.0}, False),
        ({"pass@1": 1}, True),
        (
            {"prompt_level_strict_acc": False, "inst_level_strict_acc": [True, False]},
            False,
        ),
        ({"4096": 1.0, "8192": -1.0}, True),
        ({"bleu": 3.1}, None),
    ],
)
def test_the_strictest_metric_tells_what_is_right(
    metrics: dict[str, Any], right: object
) -> None:
    assert sample(**metrics).right is right


def test_the_prompt_of_a_chat_is_its_last_user_message() -> None:
    """Few-shot examples are turns before it; a completion's prompt is whole."""
    turns = [
        {"role": role, "content": text}
        for role, text in (("user", "1+1?"), ("assistant", "2"), ("user", "2+2?"))
    ]
    assert sample([json.dumps(turns)]).prompt == "2+2?"
    assert sample("Q: 1+1?\nA:").prompt == "Q: 1+1?\nA:"


def test_what_cannot_be_compared_is_refused(logs: Path) -> None:
    with pytest.raises(ProfileError, match="has no samples_"):
        imported(logs / "fast" / "nothing")
    with pytest.raises(ProfileError, match="samples of fast; give a run of precise"):
        imported(logs / "fast")
    with pytest.raises(ProfileError, match="the router has no tier medium"):
        import_runs(
            [HarnessRun(TierName("medium"), logs / "fast"), HarnessRun(None, logs)],
            USUAL,
            FLEET,
        )
    change(logs / "fast", lambda rows: [{**rows[0], "metrics": ["bleu"]}])
    with pytest.raises(ProfileError, match="none of bleu tells"):
        imported(logs)
    change(logs / "fast", lambda rows: [{**rows[0], "arguments": {}}])
    with pytest.raises(ProfileError, match="line 1 is no logged sample"):
        imported(logs)
