"""The stages of a verification, against fake engines whose models are wrong at a known rate."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.profiling.answering import ThinkingMode
from router.profiling.tasks import read_tasks
from router.verification.answers import AnswersOptions
from router.verification.findings import Verification
from router.verification.participants import LiveEngine, Reference, ThinkingWish
from router.verification.recording import record
from router.verification.saved import (
    SavedReference,
    SavedReferenceError,
    read_reference,
    write_reference,
)
from router.verification.verification import VerificationPlan, Verifier
from router.verification.wording import Stage, StageFinding
from tests.fakes.model_engine import ModelEngine
from tests.unit.verification.engine_pair import (
    MANY,
    knowing_engine,
    serving_pair,
    write_tasks,
)
from tiers.errors import ProbeError
from tiers.verification.engine import ComparedEngine
from tiers.verification.findings import Verdict

pytestmark = pytest.mark.anyio


@dataclass
class Heard:
    """A listener that keeps what it is told."""

    begun: list[Stage] = field(default_factory=list)
    finished: list[Stage] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def begin(self, stage: Stage) -> None:
        self.begun.append(stage)

    def advance(
        self,
        done: int,
        total: int | None,
        detail: str,
        remaining_s: float | None = None,
    ) -> None:
        assert detail
        assert remaining_s is None or remaining_s >= 0
        assert total is None or done <= total
        self.steps.append(done)

    def finish(self, stage: Stage, finding: StageFinding | None) -> None:
        assert (finding is None) is (stage is Stage.RECORDING)
        self.finished.append(stage)


@dataclass
class Bench:
    """Two engines that are connected, and tasks that a reference without faults solves."""

    reference: LiveEngine
    candidate: LiveEngine
    tasks: Path
    heard: Heard = field(default_factory=Heard)

    def plan(self, **more: Any) -> VerificationPlan:
        usual: dict[str, Any] = {
            "tasks": read_tasks(self.tasks),
            "answers": AnswersOptions(parallel=8),
            "thinking": ThinkingWish(),
        }
        return VerificationPlan(**usual | more)

    async def verify(
        self, reference: Reference | None = None, **more: Any
    ) -> Verification:
        """Verify the candidate, by default with the reference that runs."""
        verifier = Verifier(
            reference or self.reference, self.candidate, self.plan(**more), self.heard
        )
        return await verifier.run()

    async def save(self, path: Path) -> SavedReference:
        """Record the reference in a file, and read it."""
        tasks = read_tasks(self.tasks)
        await record(self.reference, tasks, ThinkingWish(), self.heard, parallel=8)
        write_reference(path, self.reference.as_saved("made tasks"))
        return read_reference(path)


@asynccontextmanager
async def bench(
    folder: Path, reference: ModelEngine, candidate: ModelEngine
) -> AsyncIterator[Bench]:
    async with (
        serving_pair(reference, candidate) as (reference_url, candidate_url),
        httpx.AsyncClient(trust_env=False, timeout=30) as client,
    ):
        yield Bench(
            reference=LiveEngine(
                await ComparedEngine.connect(client, reference_url, "")
            ),
            candidate=LiveEngine(
                await ComparedEngine.connect(client, candidate_url, "")
            ),
            tasks=write_tasks(folder),
        )


async def test_equal_engines_are_the_same_before_all_tasks_are_asked(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path, knowing_engine(), knowing_engine()) as made:
        found = await made.verify()
    assert found.verdict is Verdict.SAME
    assert found.answers is not None
    assert found.answers.overall.both_right < MANY
    assert made.heard.finished == [Stage.SAME_MODEL, Stage.LIKELIHOOD, Stage.ANSWERS]
    assert made.heard.begun == made.heard.finished


async def test_a_candidate_with_wrong_answers_is_worse(tmp_path: Path) -> None:
    candidate = knowing_engine(wrong_share=0.2)
    async with bench(tmp_path, knowing_engine(), candidate) as made:
        found = await made.verify()
    assert found.verdict is Verdict.WORSE
    assert found.likelihood is not None
    assert found.likelihood.verdict is Verdict.SAME
    assert found.answers is not None
    assert found.answers.overall.low > 0.02
    assert found.answers.overall.better == 0
    assert found.answers.worse_answers


async def test_a_fault_in_the_first_stage_ends_the_verification(tmp_path: Path) -> None:
    """Its later stages would tell nothing, and the user waits for them in vain."""
    candidate = knowing_engine(has_switch=True)
    async with bench(tmp_path, knowing_engine(), candidate) as made:
        found = await made.verify()
        assert found.verdict is Verdict.WORSE
        assert found.likelihood is None
        assert found.answers is None
        assert made.heard.finished == [Stage.SAME_MODEL]


async def test_all_stages_run_if_that_is_wanted(tmp_path: Path) -> None:
    candidate = knowing_engine(has_switch=True)
    async with bench(tmp_path, knowing_engine(), candidate) as made:
        found = await made.verify(goes_on_after_fault=True)
    assert found.verdict is Verdict.WORSE
    assert found.answers is not None
    assert found.answers.verdict is Verdict.SAME


async def test_other_probabilities_are_a_fault_of_likelihood(tmp_path: Path) -> None:
    candidate = knowing_engine()
    candidate.behaviour.first_id = 40
    async with bench(tmp_path, knowing_engine(), candidate) as made:
        found = await made.verify()
    assert found.likelihood is not None
    assert found.likelihood.verdict is Verdict.WORSE
    assert found.answers is None


async def test_without_probabilities_the_answers_are_compared_all_the_same(
    tmp_path: Path,
) -> None:
    """Other servers, and older releases of vLLM, tell no token ids."""
    candidate = knowing_engine()
    candidate.behaviour.tells_ids = False
    async with bench(tmp_path, knowing_engine(), candidate) as made:
        found = await made.verify()
    assert found.likelihood is not None
    assert found.likelihood.not_measured
    assert found.verdict is Verdict.SAME


async def test_without_tasks_no_answers_are_compared(tmp_path: Path) -> None:
    async with bench(tmp_path, knowing_engine(), knowing_engine()) as made:
        found = await made.verify(tasks=())
    assert found.answers is None
    assert found.verdict is Verdict.CANNOT_TELL


async def test_thinking_is_measured_in_the_mode_that_is_asked_for(
    tmp_path: Path,
) -> None:
    """Each report names the mode that it did not measure."""
    switch: dict[str, Any] = {
        "has_switch": True,
        "thinks_by_default": False,
        "thought": "So.",
    }

    def engine() -> ModelEngine:
        return knowing_engine(**switch, reasoning_field="reasoning")

    async with bench(tmp_path, engine(), engine()) as made:
        by_default = await made.verify()
        thinking = await made.verify(thinking=ThinkingWish(ThinkingMode.ON, 64))
    assert by_default.verdict is Verdict.SAME
    assert by_default.answers is not None
    assert "--thinking on measures that" in by_default.answers.not_measured[-1]
    assert thinking.verdict is Verdict.SAME
    assert thinking.answers is not None
    assert "--thinking off measures that" in thinking.answers.not_measured[-1]


async def test_an_engine_that_fails_before_any_answer_ends_the_verification(
    tmp_path: Path,
) -> None:
    candidate = knowing_engine()
    async with bench(tmp_path, knowing_engine(), candidate) as made:
        candidate.behaviour.instead = {"/v1/chat/completions": "nonsense"}
        with pytest.raises(ProbeError, match="does not answer JSON"):
            await made.verify()


async def test_a_saved_reference_finds_the_same_losses_as_one_that_runs(
    tmp_path: Path,
) -> None:
    candidate = knowing_engine(wrong_share=0.2)
    async with bench(tmp_path, knowing_engine(), candidate) as made:
        running = await made.verify()
        saved = await made.save(tmp_path / "saved.json")
        found = await made.verify(saved)
    assert found.verdict is Verdict.WORSE
    assert found.answers is not None
    assert running.answers is not None
    assert found.answers.overall == running.answers.overall
    assert found.likelihood is not None
    assert {gap.writer for gap in found.likelihood.by_kind} == {"reference"}


async def test_recording_asks_what_the_verification_has_not_asked(
    tmp_path: Path,
) -> None:
    reference = knowing_engine()
    async with bench(tmp_path, reference, knowing_engine(wrong_share=0.5)) as made:
        await made.verify()
        saved = await made.save(tmp_path / "saved.json")
    asked = [
        request["messages"][0]["content"]
        for request in reference.behaviour.requests
        if "Say the number" in str(request.get("messages"))
    ]
    assert len(saved.answers) == MANY
    assert len(set(asked)) == MANY


async def test_a_saved_reference_that_knows_none_of_the_tasks_is_refused(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path, knowing_engine(), knowing_engine()) as made:
        saved = await made.save(tmp_path / "saved.json")
    changed = made.tasks.read_text().replace("Say the", "Tell the")
    made.tasks.write_text(changed)
    with pytest.raises(SavedReferenceError, match="made tasks"):
        saved.knows(read_tasks(made.tasks))


async def test_texts_beyond_a_candidates_context_are_left_out_and_told(
    tmp_path: Path,
) -> None:
    candidate = knowing_engine()
    candidate.behaviour.max_model_len = 2048
    async with bench(tmp_path, knowing_engine(), candidate) as made:
        saved = await made.save(tmp_path / "saved.json")
        found = await made.verify(saved, tasks=())
    assert found.likelihood is not None
    assert "has no room for" in found.likelihood.not_measured[0]
    kinds = {gap.part for gap in found.likelihood.by_kind}
    assert "long context" not in kinds
    assert "code" in kinds
