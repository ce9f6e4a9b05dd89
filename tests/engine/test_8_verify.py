"""``qarr verify`` on real engines: tiers of the running fleet, and an engine with faults against a saved reference.

``benchmarks/verify_faults.py`` has more faults and many sound pairs; it takes an hour.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from router.deployment.layout import prepare_options
from router.settings import load_settings
from router.verification.verification import QUICK_NOTE
from tests.engine.conftest import QARR
from tests.engine.faults.checkpoints import (
    changed_checkpoint,
    raise_temperature,
    replace_template,
)
from tests.engine.faults.serving import DROPPING_PARSER, EngineRecipe, serving
from tests.engine.twins import model_store
from tiers.checkpoints.prepare import finished
from tiers.spec import TierName

if TYPE_CHECKING:
    from tests.engine.conftest import Up

QUESTIONS = {
    "What is the capital of France? Answer with its name.": "Paris",
    "What colour is the sky on a clear day? Answer in one word.": "(?i)blue",
    "Repeat this word: harbour": "(?i)harbour",
}
EXIT_STATUS = {"same": 0, "worse": 1, "cannot tell": 2}
LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Verified:
    """A finished ``qarr verify`` between two tiers.

    Attributes:
        process: Its status and output.
        report: The page.
        saved: The reference's file.
    """

    process: subprocess.CompletedProcess[str]
    report: Path
    saved: Path

    @property
    def findings(self) -> dict[str, Any]:
        """Return what it printed as JSON."""
        findings: dict[str, Any] = json.loads(self.process.stdout)
        return findings


def run_verify(*options: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a person does."""
    return subprocess.run(
        [str(QARR), "verify", *options],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.fixture(scope="module")
def verified(up: Up, tmp_path_factory: pytest.TempPathFactory) -> Verified:
    """Verify ``fast`` with ``precise`` as its reference, once for all tests here, in the quick form.

    The long texts of the usual form take minutes on two cores; ``benchmarks/verify_faults.py`` scores them.
    """
    folder = tmp_path_factory.mktemp("verify")
    tasks = folder / "tasks.jsonl"
    rows = [task_row(prompt, pattern) for prompt, pattern in QUESTIONS.items()]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = folder / "report.html"
    saved = folder / "precise.json"
    options = ["--reference", "precise", "--candidate", "fast", "--url", up.url]
    options += ["--tasks", str(tasks), "--json", "--quick"]
    options += ["--report", str(report), "--save", str(saved)]
    return Verified(run_verify(*options), report, saved)


def task_row(prompt: str, pattern: str) -> dict[str, Any]:
    """Return a task that a small model may solve."""
    return {
        "prompt": prompt,
        "class": "chat",
        "complexity": "trivial",
        "max_tokens": 12,
        "check": {"type": "regex", "pattern": pattern},
    }


def test_sound_tiers_raise_no_alarm(verified: Verified) -> None:
    """``fast`` and ``precise`` are one model and compute alike; the exit status is that of the verdict."""
    findings = verified.findings
    assert verified.process.returncode == EXIT_STATUS[findings["verdict"]], (
        verified.process.stderr
    )
    assert [
        difference
        for difference in findings["same_model"]["differences"]
        if difference["is_fault"]
    ] == []
    assert findings["likelihood"]["faults"] == []
    assert findings["likelihood"]["not_measured"] == [QUICK_NOTE]
    writers = {gap["writer"] for gap in findings["likelihood"]["by_kind"]}
    assert writers == {"reference", "candidate"}
    kinds = {gap["part"] for gap in findings["likelihood"]["by_kind"]}
    assert {"prose", "code", "long context"} <= kinds
    # the router has read it from the engines
    assert findings["reference"]["version"]
    assert findings["reference"]["kv_cache_dtype"]
    overall = findings["answers"]["overall"]
    counts = ("both_right", "worse", "better", "both_wrong", "not_measured")
    assert sum(overall[count] for count in counts) == len(QUESTIONS)
    # three tasks cannot show a loss of at most 2 of 100
    assert findings["verdict"] != "same"


def test_the_page_stands_alone(verified: Verified) -> None:
    """``--report`` writes the verdict, and nothing that is loaded from elsewhere."""
    page = verified.report.read_text("utf-8")
    assert "precise" in page
    assert "fast" in page
    assert verified.findings["verdict"] in page
    assert 'src="http' not in page
    assert "url(http" not in page


def test_faults_are_found_without_the_reference(
    verified: Verified, tmp_path: Path
) -> None:
    """A wrong template, a high temperature and a parser that drops an argument are told, by a saved reference; status 1."""
    recipe = EngineRecipe(
        tier=TierName.PRECISE,
        folder=changed_checkpoint(
            precise_folder(), "frontend", (replace_template, raise_temperature)
        ),
        arguments=DROPPING_PARSER,
    )
    python = load_settings(None, {}).engine.python
    with serving(recipe, python, tmp_path / "engine.log") as url:
        options = ["--reference", str(verified.saved), "--max-tasks", "0", "--quick"]
        process = run_verify(*options, "--candidate", url)
    assert process.returncode == 1, process.stderr
    for subject in ("chat template", "sampling defaults", "tool calls"):
        assert subject in process.stdout
    # the later stages have nothing to add
    assert "likelihood:" not in process.stderr
    assert "worse: not the same model" in process.stdout


def precise_folder() -> Path:
    """Return the checkpoint that the tier ``precise`` serves."""
    options = prepare_options(
        load_settings(None, {"model": {"store": str(model_store())}})
    )
    for checkpoint in finished(options):
        if checkpoint.tier is TierName.PRECISE:
            return checkpoint.path
    raise AssertionError("the session's checkpoints are not there")
