"""Makes a quality profile of runs of lm-evaluation-harness, one for each tier, whose samples were logged.

A run is a ``results_<date>.json`` with its ``samples_<task>_<date>.jsonl`` beside it. Samples are paired across tiers by
task, document and prompt.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from router.profiling.measuring_client import FleetState
from router.profiling.scoring import JudgedAnswer, count_answers
from tiers.spec import TierName

SAMPLES_FILE = re.compile(r"samples_(.+)_(\d{4}-\d\d-\d\dT[\d.-]+)\.jsonl")
CLASSES = Path(__file__).with_name("lm_eval_classes.toml")
# The description of a profile names its tasks if they are no more than this; otherwise it says only how many there are.
MAX_NAMED_TASKS = 8
HALF = 0.5  # a metric above it calls an answer right
# Metrics that tell whether an answer is right, the strictest first.
STRICT = "exact_match pass@1 pass_at_1 prompt_level_strict_acc acc em exact contains acc_norm"
GRADED = "score qa_f1_score classification_score retrieval_score count_score rouge_score code_sim_score"
RIGHTNESS_METRICS = (*STRICT.split(), *GRADED.split())


class HarnessRun(NamedTuple):
    """A folder with runs at any depth, and the tier that answered there.

    Attributes:
        tier: The tier; None: the model's name in a run's results is the tier.
        folder: The folder.
    """

    tier: TierName | None
    folder: Path


class TaskKind(Frozen):
    """What a harness task's prompts are; without a complexity, the classifier judges each."""

    prompt_class: PromptClass = Field(alias="class")
    complexity: Complexity | None = None


class LoggedSample(BaseModel):
    """A line of a log: one answer, judged; the metrics are further fields."""

    # The title is what pydantic's messages call it.
    model_config = ConfigDict(extra="allow", frozen=True, title="Sample")
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
        """Return the prompt; of a conversation, the last message of the user."""
        prompt = self.arguments["gen_args_0"]["arg_0"]
        if isinstance(prompt, str):
            return prompt
        messages = json.loads(prompt[0])
        user_texts = [
            message["content"] for message in messages if message["role"] == "user"
        ]
        return str(user_texts[-1])

    @property
    def right(self) -> bool | None:
        """Tell whether the answer is right; None: no metric tells."""
        values = self.model_extra or {}
        for metric in RIGHTNESS_METRICS:
            value = values.get(metric)
            if metric in self.metrics and isinstance(value, int | float):
                return value > HALF
        # RULER's metrics are the lengths of its contexts, and -1 for all lengths but the sample's own.
        scores = [values[metric] for metric in self.metrics if metric.isdigit()]
        if not scores:
            return None
        return bool(max(scores) > HALF)


class ImportedProfile(NamedTuple):
    """A profile, and how many samples of each tier had no counterpart of the reference."""

    profile: QualityProfile
    unpaired: Mapping[TierName, int]


class SamplesLog(NamedTuple):
    """The samples that a tier logged of a task.

    Attributes:
        tier: The tier that answered.
        task: The harness's name of the task.
        date: When the run ended; later dates are greater texts.
        path: The file.
    """

    tier: TierName
    task: str
    date: str
    path: Path


AnswersByTask = Mapping[tuple[TierName, str], JudgedAnswer]


def import_runs(
    runs: Sequence[HarnessRun], task_kinds: Mapping[str, TaskKind], fleet: FleetState
) -> ImportedProfile:
    """Make a profile of the fleet's tiers from the harness's logs.

    Args:
        runs: The folders of the logs.
        task_kinds: Kinds of tasks by pattern; the first that fits counts.
        fleet: The tiers.

    Raises:
        ProfileError: A log cannot be read, a task's class is not known, or there is nothing to compare.
    """
    answers: dict[tuple[TierName, str], JudgedAnswer] = {}
    for log in _newest_logs(runs):
        for answer in _judged_answers(log, task_kinds):
            answers[answer.tier, answer.task] = answer
    tiers = {tier for tier, _ in answers}
    _check_tiers(tiers, fleet)
    unpaired = {
        tier: _count_unpaired(tier, answers) for tier in sorted(tiers - {REFERENCE})
    }
    profile = QualityProfile(
        created=datetime.now(UTC),
        model=fleet.model,
        checkpoints=dict(fleet.checkpoints),
        builds=dict(fleet.builds),
        tasks=f"lm-evaluation-harness ({_describe_tasks(answers)})",
        counts=count_answers(answers.values(), unpaired),
    )
    return ImportedProfile(profile, unpaired)


def _check_tiers(tiers: set[TierName], fleet: FleetState) -> None:
    """Raise ``ProfileError`` unless the tiers are the fleet's, and the reference and another one are among them."""
    unknown = tiers - fleet.checkpoints.keys()
    if unknown:
        raise ProfileError(
            f"the router has no tier {', '.join(sorted(unknown))}: give whose logs they are as TIER=DIR"
        )
    if REFERENCE not in tiers or len(tiers) == 1:
        tier_names = ", ".join(sorted(tiers)) or "no tier"
        raise ProfileError(
            f"there are samples of {tier_names}; give a run of {REFERENCE} and one of another tier at least"
        )


def _count_unpaired(tier: TierName, answers: AnswersByTask) -> int:
    """Count a tier's answers to what the reference did not answer; ``ProfileError``: all are."""
    own_tasks = [task for own_tier, task in answers if own_tier is tier]
    unpaired = sum((REFERENCE, task) not in answers for task in own_tasks)
    if unpaired == len(own_tasks):
        raise ProfileError(
            f"{tier} and {REFERENCE} answered no prompt in common: run both with the same options"
        )
    return unpaired


def _describe_tasks(answers: Iterable[tuple[TierName, str]]) -> str:
    """Name the harness tasks that were answered, or say how many if they are many."""
    task_names = {task.split(" ")[0] for _, task in answers}
    if len(task_names) > MAX_NAMED_TASKS:
        return f"{len(task_names)} tasks"
    return ", ".join(sorted(task_names))


def read_classes(path: Path) -> dict[str, TaskKind]:
    """Read classes of tasks by pattern, JSON or TOML: each a class, or a table of class and complexity."""
    try:
        text = path.read_text("utf-8")
        rows = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        tables: dict[str, Any] = {}
        for pattern, row in dict(rows).items():
            tables[pattern] = {"class": row} if isinstance(row, str) else row
        return TypeAdapter(dict[str, TaskKind]).validate_python(tables)
    except ValidationError as error:
        raise ProfileError(f"{path}: {first_fault(error)}") from None
    except (OSError, ValueError, TypeError) as error:
        raise ProfileError(f"the classes {path} cannot be read: {error}") from error


def _newest_logs(runs: Sequence[HarnessRun]) -> list[SamplesLog]:
    """Return the newest log of each tier and task."""
    newest: dict[tuple[TierName, str], SamplesLog] = {}
    for run in runs:
        for log in _logs_of(run):
            key = log.tier, log.task
            if key not in newest or _age_order(log) > _age_order(newest[key]):
                newest[key] = log
    return list(newest.values())


def _age_order(log: SamplesLog) -> tuple[str, Path]:
    return log.date, log.path


def _logs_of(run: HarnessRun) -> Iterator[SamplesLog]:
    """Yield the logs in a run's folder; ``ProfileError``: there are none, or it is not known which tier answered."""
    has_logs = False
    for path in list(run.folder.rglob("*.jsonl")):
        file_name = SAMPLES_FILE.fullmatch(path.name)
        if file_name is not None:
            has_logs = True
            task, date = file_name.groups()
            results = path.with_name(f"results_{date}.json")
            tier = run.tier or _tier_of_results(results)
            yield SamplesLog(tier, task, date=date, path=path)
    if not has_logs:
        raise ProfileError(
            f"{run.folder} has no samples_*.jsonl: run the harness with --log_samples and --output_path"
        )


def _tier_of_results(results: Path) -> TierName:
    try:
        return TierName(json.loads(results.read_text("utf-8"))["model_name"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProfileError(
            f"{results} does not tell which tier answered ({error}): give it as TIER=DIR"
        ) from error


def _judged_answers(
    log: SamplesLog, task_kinds: Mapping[str, TaskKind]
) -> Iterator[JudgedAnswer]:
    """Yield the answers of a log; of several filters of the harness, those of the first."""
    task_kind = _kind_of_task(log.task, task_kinds)
    first_filter = None
    with log.path.open(encoding="utf-8") as lines:
        for line_number, line in enumerate(lines, 1):
            try:
                sample = LoggedSample.model_validate_json(line)
                complexity = task_kind.complexity or _judge_complexity(sample.prompt)
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise ProfileError(
                    f"{log.path} line {line_number} is no logged sample: {error}"
                ) from error
            first_filter = first_filter or sample.filter
            if sample.filter == first_filter:
                yield JudgedAnswer(
                    task=f"{log.task} {sample.key}",
                    prompt_class=task_kind.prompt_class,
                    complexity=complexity,
                    tier=log.tier,
                    right=_is_right(sample, log.path),
                )


def _kind_of_task(task: str, task_kinds: Mapping[str, TaskKind]) -> TaskKind:
    for pattern, task_kind in task_kinds.items():
        if fnmatchcase(task, pattern):
            return task_kind
    raise ProfileError(
        f'the class of the task {task} is not known: give a file with {task} = "chat" as --classes'
    )


def _judge_complexity(prompt: str) -> Complexity:
    features = extract(prompt, EstimatingCounter())
    return features.complexity or Complexity.MODERATE


def _is_right(sample: LoggedSample, path: Path) -> bool:
    """Tell whether an answer is right; ``ProfileError``: no metric tells."""
    is_right = sample.right
    if is_right is None:
        raise ProfileError(
            f"{path}: none of {', '.join(sample.metrics)} tells whether an answer is right"
        )
    return is_right
