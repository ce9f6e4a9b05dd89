"""Makes a quality profile of runs of lm-evaluation-harness, one for each tier, whose samples were logged.

A run is a ``results_<date>.json`` with its ``samples_<task>_<date>.jsonl`` beside it. Samples are paired across tiers by
task, document and prompt.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from classifier import Complexity, EstimatingCounter, PromptClass, extract
from router.policy.profiles import (
    REFERENCE,
    Frozen,
    ProfileError,
    QualityProfile,
    first_fault,
)
from router.profiling.client import FleetState
from router.profiling.scoring import Judged, count
from tiers.spec import TierName

Run = tuple[TierName | None, Path]

SAMPLES = re.compile(r"samples_(.+)_(\d{4}-\d\d-\d\dT[\d.-]+)\.jsonl")
CLASSES = Path(__file__).with_name("lm_eval_classes.toml")
NAMED = 8  # tasks, at most, in a profile's description
HALF = 0.5  # above which a metric calls an answer right
# Metrics that tell whether an answer is right, the strictest first.
STRICT = "exact_match pass@1 pass_at_1 prompt_level_strict_acc acc em exact contains acc_norm"
GRADED = "score qa_f1_score classification_score retrieval_score count_score rouge_score code_sim_score"
RIGHT = (*STRICT.split(), *GRADED.split())


class Known(Frozen):
    """What a harness task's prompts are; without a complexity, the classifier judges each."""

    prompt_class: PromptClass = Field(alias="class")
    complexity: Complexity | None = None


class Sample(BaseModel):
    """A line of a log: one answer, judged; the metrics are further fields."""

    model_config = ConfigDict(extra="allow", frozen=True)
    doc_id: int | str
    doc_hash: str
    prompt_hash: str
    arguments: Any
    metrics: tuple[str, ...]
    filter: str = "none"

    @property
    def key(self) -> str:
        return f"{self.doc_id} {self.doc_hash} {self.prompt_hash}"

    @property
    def prompt(self) -> str:
        text = self.arguments["gen_args_0"]["arg_0"]
        if isinstance(text, str):
            return text
        return str(
            [
                message["content"]
                for message in json.loads(text[0])
                if message["role"] == "user"
            ][-1]
        )

    @property
    def right(self) -> bool | None:
        values = self.model_extra or {}
        for name in RIGHT:
            if name in self.metrics and isinstance(
                value := values.get(name), int | float
            ):
                return value > HALF
        # RULER's: -1 for all lengths but its own
        lengths = [values[name] for name in self.metrics if name.isdigit()]
        return max(lengths) > HALF if lengths else None


class Imported(NamedTuple):
    """A profile, and how many samples of each tier had no counterpart of the reference."""

    profile: QualityProfile
    unpaired: Mapping[TierName, int]


def import_runs(
    runs: Sequence[Run], known: Mapping[str, Known], fleet: FleetState
) -> Imported:
    """Make a profile of the fleet's tiers from the harness's logs.

    ``runs`` are folders with runs at any depth, and the tier that answered there; None: the model's name is the tier.
    ``known``: classes of tasks by pattern; the first that fits counts. ``ProfileError``: a log cannot be read, a task's
    class is not known, or there is nothing to compare.
    """
    answers = {
        (a.tier, a.task): a
        for tier, path in _newest(runs)
        for a in _judged(tier, path, known)
    }
    tiers = {tier for tier, _ in answers}
    if unknown := tiers - fleet.checkpoints.keys():
        raise ProfileError(
            f"the router has no tier {', '.join(sorted(unknown))}: give whose logs they are as TIER=DIR"
        )
    if REFERENCE not in tiers or len(tiers) == 1:
        found = ", ".join(sorted(tiers)) or "no tier"
        raise ProfileError(
            f"there are samples of {found}; give a run of {REFERENCE} and one of another tier at least"
        )
    unpaired: dict[TierName, int] = {}
    for tier in sorted(tiers - {REFERENCE}):
        paired = [(REFERENCE, task) in answers for one, task in answers if one is tier]
        unpaired[tier] = paired.count(False)
        if not any(paired):
            raise ProfileError(
                f"{tier} and {REFERENCE} answered no prompt in common: run both with the same options"
            )
    names = {task.split(" ")[0] for _, task in answers}
    profile = QualityProfile(
        created=datetime.now(UTC),
        model=fleet.model,
        checkpoints=dict(fleet.checkpoints),
        tasks=f"lm-evaluation-harness ({', '.join(sorted(names)) if len(names) <= NAMED else f'{len(names)} tasks'})",
        counts=count(answers.values(), unpaired),
    )
    return Imported(profile, unpaired)


def read_classes(path: Path) -> dict[str, Known]:
    """Read classes of tasks by pattern, JSON or TOML: each a class, or a table of class and complexity."""
    try:
        text = path.read_text("utf-8")
        rows = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        made = {
            name: {"class": row} if isinstance(row, str) else row
            for name, row in dict(rows).items()
        }
        return TypeAdapter(dict[str, Known]).validate_python(made)
    except ValidationError as error:
        raise ProfileError(f"{path}: {first_fault(error)}") from None
    except (OSError, ValueError, TypeError) as error:
        raise ProfileError(f"the classes {path} cannot be read: {error}") from error


def _newest(runs: Sequence[Run]) -> Iterator[tuple[TierName, Path]]:
    found: dict[tuple[TierName, str], tuple[str, Path]] = {}
    for given, folder in runs:
        logs = [
            (match, path)
            for path in folder.rglob("*.jsonl")
            if (match := SAMPLES.fullmatch(path.name))
        ]
        if not logs:
            raise ProfileError(
                f"{folder} has no samples_*.jsonl: run the harness with --log_samples and --output_path"
            )
        for match, path in logs:
            task, date = match.groups()
            key = given or _tier(path.with_name(f"results_{date}.json")), task
            found[key] = max(found.get(key, ("", path)), (date, path))
    for (tier, _), (_, path) in found.items():
        yield tier, path


def _tier(results: Path) -> TierName:
    try:
        return TierName(json.loads(results.read_text("utf-8"))["model_name"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProfileError(
            f"{results} does not tell which tier answered ({error}): give it as TIER=DIR"
        ) from error


def _judged(tier: TierName, path: Path, known: Mapping[str, Known]) -> Iterator[Judged]:
    task, first = path.name.removeprefix("samples_").rpartition("_")[0], None
    kind = next(
        (known[pattern] for pattern in known if fnmatchcase(task, pattern)), None
    )
    if kind is None:
        raise ProfileError(
            f'the class of the task {task} is not known: give a file with {task} = "chat" as --classes'
        )
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                sample = Sample.model_validate_json(line)
                complexity = (
                    kind.complexity
                    or extract(sample.prompt, EstimatingCounter()).complexity
                )
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise ProfileError(
                    f"{path} line {number} is no logged sample: {error}"
                ) from error
            first = first or sample.filter
            if sample.filter != first:
                continue
            if (right := sample.right) is None:
                raise ProfileError(
                    f"{path}: none of {', '.join(sample.metrics)} tells whether an answer is right"
                )
            yield Judged(
                task=f"{task} {sample.key}",
                prompt_class=kind.prompt_class,
                complexity=complexity or Complexity.MODERATE,
                tier=tier,
                right=right,
            )
