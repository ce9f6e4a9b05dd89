"""``qarr verify``: what it prints, what it writes, and its exit status, which scripts act on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from click.testing import Result

from router.cli.verify_targets import TargetError, TargetKind, parse_target
from router.policy.decision import PRIORITIES
from router.profiling.model_answer import ModelAnswer
from tests.fakes.engine import Behaviour
from tests.fakes.model_engine import ModelEngine
from tests.unit.cli.stub_router import qarr
from tests.unit.router_stack import router_stack
from tests.unit.verification.engine_pair import (
    MANY,
    knowing_engine,
    serving_pair,
    write_tasks,
)
from tests.waiting import until
from tiers.spec import EngineBuild, ReplicaStatus, TierName

pytestmark = pytest.mark.anyio
NOBODY = "http://127.0.0.1:9"


@asynccontextmanager
async def pair_of(
    candidate: ModelEngine, reference: ModelEngine | None = None
) -> AsyncIterator[tuple[str, str]]:
    """Serve a reference without faults and a candidate, and yield the options that name them."""
    async with serving_pair(reference or knowing_engine(), candidate) as urls:
        reference_url, candidate_url = urls
        yield f"--reference={reference_url}", f"--candidate={candidate_url}"


async def verify(*args: str, **env: str) -> Result:
    """Run the command beside the fakes."""
    return await asyncio.to_thread(qarr, "verify", *args, **env)


async def test_the_same_exits_with_0_and_says_what_may_be_lost(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path)
    async with pair_of(knowing_engine()) as pair:
        result = await verify(*pair, f"--tasks={tasks}")
    assert result.exit_code == 0
    last_line = result.stdout.splitlines()[-1]
    assert last_line.startswith("same: at most ")
    assert "of 100 answers lost (2 tolerated)" in last_line


async def test_worse_exits_with_1_and_the_last_line_is_the_verdict(
    tmp_path: Path,
) -> None:
    tasks = write_tasks(tmp_path)
    async with pair_of(knowing_engine(wrong_share=0.3)) as pair:
        result = await verify(*pair, f"--tasks={tasks}")
    assert result.exit_code == 1
    last_line = result.stdout.splitlines()[-1]
    assert last_line.startswith("worse: ")
    assert "of 100 answers lost (" in last_line
    assert "--report FILE.html" in last_line


async def test_each_stage_has_a_line_with_its_verdict_and_time(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path)
    async with pair_of(knowing_engine(wrong_share=0.3)) as pair:
        result = await verify(*pair, f"--tasks={tasks}")
    stages = [line.split("  ")[0].strip() for line in result.stdout.splitlines()[3:6]]
    assert stages == ["same model", "likelihood", "answers"]
    for line in result.stdout.splitlines()[3:6]:
        assert " s " in line
    for heading in ("Likelihood of the words", "By position", "By kind", "Answers"):
        assert heading in result.stdout


async def test_too_few_tasks_exit_with_2_and_say_how_many_it_would_take(
    tmp_path: Path,
) -> None:
    tasks = write_tasks(tmp_path, count=20)
    async with pair_of(knowing_engine()) as pair:
        result = await verify(*pair, f"--tasks={tasks}")
    assert result.exit_code == 2
    last_line = result.stdout.splitlines()[-1]
    assert last_line.startswith("cannot tell: between ")
    assert "would need about" in last_line
    assert "0.0 ±" not in result.stdout


async def test_a_higher_tolerance_needs_fewer_tasks(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path, count=100)
    async with pair_of(knowing_engine()) as pair:
        strict = await verify(*pair, f"--tasks={tasks}")
        lenient = await verify(*pair, f"--tasks={tasks}", "--tolerate=10")
    assert strict.exit_code == 2
    assert lenient.exit_code == 0


async def test_no_answers_are_compared_with_0_tasks() -> None:
    async with pair_of(knowing_engine()) as pair:
        result = await verify(*pair, "--max-tasks=0")
    assert result.exit_code == 2
    assert "no answers were compared" in result.stdout


async def test_json_is_all_that_standard_output_has(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path)
    async with pair_of(knowing_engine(wrong_share=0.3)) as pair:
        result = await verify(*pair, f"--tasks={tasks}", "--json")
    found = json.loads(result.stdout)
    assert found["verdict"] == "worse"
    assert found["sentence"].startswith("worse: ")
    assert found["next_step"]
    assert found["same_model"]["verdict"] == "same"
    assert found["likelihood"]["verdict"] == "same"
    assert found["answers"]["verdict"] == "worse"
    assert found["answers"]["overall"]["loss"] > 0
    assert "worse: " in result.stderr


async def test_the_page_is_written(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path)
    page = tmp_path / "report.html"
    async with pair_of(knowing_engine(wrong_share=0.3)) as pair:
        result = await verify(*pair, f"--tasks={tasks}", f"--report={page}")
    assert result.exit_code == 1
    assert "worse" in page.read_text("utf-8")
    assert str(page) in result.stderr


async def test_a_reference_is_saved_and_need_not_run_again(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path)
    saved = tmp_path / "reference.json"
    async with pair_of(knowing_engine(wrong_share=0.3)) as (reference, candidate):
        saving = await verify(reference, f"--tasks={tasks}", f"--save={saved}")
        verifying = await verify(f"--reference={saved}", candidate, f"--tasks={tasks}")
    assert saving.exit_code == 0
    assert saved.exists()
    assert verifying.exit_code == 1
    assert verifying.stdout.splitlines()[-1].startswith("worse: ")


async def test_saving_goes_on_after_a_verdict(tmp_path: Path) -> None:
    """A later candidate may need more tasks than this one."""
    tasks = write_tasks(tmp_path, count=60)
    saved = tmp_path / "reference.json"
    async with pair_of(knowing_engine(wrong_share=0.9)) as pair:
        result = await verify(*pair, f"--tasks={tasks}", f"--save={saved}")
    assert result.exit_code == 1
    assert len(json.loads(saved.read_text())["answers"]) == 60


async def test_keys_are_taken_from_variables_and_not_shown(tmp_path: Path) -> None:
    engine = knowing_engine()
    tasks = write_tasks(tmp_path, count=5)
    async with pair_of(engine) as pair:
        result = await verify(
            *pair, f"--tasks={tasks}", QARR_CANDIDATE_KEY="secret-of-candidate"
        )
    sent = engine.behaviour.heads["/v1/chat/completions"]["authorization"]
    assert sent == "Bearer secret-of-candidate"
    assert "secret" not in result.output


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ("--reference", NOBODY, "--candidate", NOBODY),
            "Is the engine running, and is this its address?",
        ),
        (("--reference", NOBODY), "--candidate"),
        (
            ("--reference", "localhost:8000", "--candidate", NOBODY),
            "http://localhost:8000",
        ),
        (("--reference", "no.tier", "--candidate", NOBODY), "no tier's name"),
        (("--reference", "./saved.json", "--candidate", NOBODY), "cannot be read"),
        (("--reference", NOBODY, "--candidate", "./saved.json"), "only a reference"),
        (
            ("--reference", "./saved.json", "--candidate", NOBODY, "--speed"),
            "leave --speed out",
        ),
        (
            ("--reference", "./saved.json", "--candidate", NOBODY, "--save", "x.json"),
            "leave --save out",
        ),
        (
            ("--reference", NOBODY, "--candidate", NOBODY, "--save", "/no/where.json"),
            "--save /no/where.json cannot be written",
        ),
        (
            ("--reference", "fast", "--candidate", NOBODY, "--reference-model", "m"),
            "leave --reference-model out",
        ),
        (
            ("--reference", "fast", "--candidate", NOBODY, "--url", NOBODY),
            "Is the router running?",
        ),
    ],
)
def test_what_cannot_run_exits_with_3_and_says_what_to_do(
    args: tuple[str, ...], said: str
) -> None:
    result = qarr("verify", *args)
    assert result.exit_code == 3
    assert said in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    "args",
    [
        ("--tolerate", "many"),
        ("--tolerate", "-1"),
        ("--confidence", "101"),
        ("--max-tasks", "-1"),
        ("--nonsense",),
    ],
)
def test_an_option_that_is_wrong_is_no_verdict(args: tuple[str, ...]) -> None:
    """Typer's own status for it, 2, means "cannot tell" here."""
    result = qarr("verify", "--reference", NOBODY, "--candidate", NOBODY, *args)
    assert result.exit_code == 3
    assert args[0] in result.stderr


def test_without_options_nothing_is_verified() -> None:
    result = qarr("verify")
    assert result.exit_code == 3
    assert "--reference" in result.stderr


async def test_an_engine_that_dies_is_no_verdict(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path, count=20)
    candidate = knowing_engine()
    candidate.behaviour.instead = {"/v1/completions": "nonsense"}
    async with pair_of(candidate) as pair:
        result = await verify(*pair, f"--tasks={tasks}")
    assert result.exit_code == 3
    assert "could not run:" in result.stderr


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("http://127.0.0.1:8000", TargetKind.URL),
        ("https://host/v1", TargetKind.URL),
        ("precise", TargetKind.TIER),
        ("saved.json", TargetKind.FILE),
        ("folder/saved", TargetKind.FILE),
    ],
)
def test_targets_are_told_apart(text: str, kind: TargetKind) -> None:
    target = parse_target("--reference", text, model="", key_variable="")
    assert target.kind is kind


def test_a_host_without_a_scheme_is_no_tier() -> None:
    with pytest.raises(TargetError, match="http://engine-1:8000/v1"):
        parse_target("--candidate", "engine-1:8000/v1", model="", key_variable="")


async def test_the_quick_form_writes_a_few_texts_and_says_what_it_cannot_find(
    tmp_path: Path,
) -> None:
    async with pair_of(knowing_engine()) as pair:
        result = await verify(*pair, "--max-tasks=0", "--quick", "--json")
    likelihood = json.loads(result.stdout)["likelihood"]
    kinds = {gap["part"] for gap in likelihood["by_kind"]}
    assert "long context" in kinds
    assert "long output" not in kinds
    (note,) = likelihood["not_measured"]
    assert "--quick compares a few short answers" in note


async def test_a_reference_that_was_saved_quickly_is_for_quick_verifications(
    tmp_path: Path,
) -> None:
    """One that was saved with all texts is for both."""
    quick = tmp_path / "quick.json"
    whole = tmp_path / "whole.json"
    async with pair_of(knowing_engine()) as (reference, candidate):
        await verify(reference, f"--save={quick}", "--max-tasks=0", "--quick")
        await verify(reference, f"--save={whole}", "--max-tasks=0")
        options = (candidate, "--max-tasks=0", "--json")
        refused = await verify(f"--reference={quick}", *options)
        both_quick = await verify(f"--reference={quick}", *options, "--quick")
        of_all_texts = await verify(f"--reference={whole}", *options, "--quick")
    assert refused.exit_code == 3
    assert "was saved with --quick: give --quick, or save it again" in " ".join(
        refused.stderr.split()
    )
    gaps = [
        json.loads(result.stdout)["likelihood"]["by_kind"]
        for result in (both_quick, of_all_texts)
    ]
    assert gaps[0]
    assert {gap["part"] for gap in gaps[0]} == {gap["part"] for gap in gaps[1]}


async def test_tiers_of_a_running_router_are_compared_with_each_other(
    tmp_path: Path,
) -> None:
    """Each tier is asked itself, also for its tokens: here ``fast`` has another tokenizer."""
    async with router_stack(tmp_path) as stack:
        # the router itself refuses such a tier when it starts
        stack.engines[TierName.FAST].vocabulary = 100
        pair = ("--reference=precise", "--url", stack.url, "--max-tasks=0")
        same = await verify(*pair, "--candidate=precise")
        other = await verify(*pair, "--candidate=fast")
    assert "nothing differs" in same.stdout
    assert same.exit_code == 2
    assert "worse: not the same model: tokenizer" in other.stdout
    assert other.exit_code == 1
    assert same.stderr.count(f"router {stack.url}") == 1


async def test_releases_and_kv_caches_of_tiers_are_compared(tmp_path: Path) -> None:
    """The router's engines tell them to the router, which shows them; they are no fault by themselves."""
    newer = Behaviour(version="0.33.0", kv_cache_dtype="fp8")
    async with router_stack(tmp_path, fast=newer) as stack:
        result = await verify(
            "--reference=precise",
            "--candidate=fast",
            "--url",
            stack.url,
            "--max-tasks=0",
            "--json",
        )
    found = json.loads(result.stdout)
    assert found["reference"]["version"] == "0.32.0"
    assert found["reference"]["kv_cache_dtype"] == "auto"
    differences = {
        difference["subject"]: (difference["reference"], difference["candidate"])
        for difference in found["same_model"]["differences"]
    }
    assert differences["release of vLLM"] == ("0.32.0", "0.33.0")
    assert differences["type of the KV cache"] == ("auto", "fp8")
    assert found["same_model"]["verdict"] == "same"
    assert "does not tell" not in " ".join(found["same_model"]["not_checked"])


async def test_replicas_of_a_tier_may_have_several_releases(tmp_path: Path) -> None:
    """All are named; a replica that is not ready says nothing of what answers now."""
    newer = Behaviour(version="0.33.0", kv_cache_dtype=None)
    async with router_stack(tmp_path, twin=newer) as stack:
        options = ("--reference=fast", "--candidate=precise", "--url", stack.url)
        both = await verify(*options, "--max-tasks=0", "--json")
        newer.alive = False
        (replica,) = [
            replica
            for replica in stack.fleet.replicas
            if replica.state.build == EngineBuild("0.33.0", None)
        ]
        await until(lambda: replica.state.status is ReplicaStatus.UNREACHABLE)
        one = await verify(*options, "--max-tasks=0", "--json")
    assert json.loads(both.stdout)["reference"]["version"] == "0.32.0 and 0.33.0"
    assert json.loads(both.stdout)["reference"]["kv_cache_dtype"] == "auto"
    assert json.loads(one.stdout)["reference"]["version"] == "0.32.0"


async def test_verifying_tiers_yields_to_the_requests_of_users(tmp_path: Path) -> None:
    """What a tier of the router is asked has the lowest priority, and no other tier answers for it."""
    tasks = write_tasks(tmp_path, count=3)
    async with router_stack(tmp_path) as stack:
        await verify(
            "--reference=precise",
            "--candidate=fast",
            "--url",
            stack.url,
            f"--tasks={tasks}",
        )
        priorities = {
            request.get("priority")
            for name in (TierName.FAST, TierName.PRECISE)
            for request in stack.engines[name].requests
            if "messages" in request
        }
        assert not stack.engines[TierName.BALANCED].requests
    (priority,) = priorities
    assert priority == PRIORITIES["batch"]


async def test_an_engine_that_is_compared_with_itself_is_noted(tmp_path: Path) -> None:
    """Whoever gives the same address twice by mistake would read "same"."""
    tasks = write_tasks(tmp_path)
    async with pair_of(knowing_engine()) as (reference, _):
        url = reference.removeprefix("--reference=")
        result = await verify(
            reference, f"--candidate={url}/v1", f"--tasks={tasks}", "--json"
        )
    assert "note: Both options name the same engine" in result.stderr
    notes = json.loads(result.stdout)["same_model"]["not_checked"]
    assert any(note.startswith("Both options name the same engine") for note in notes)


async def test_two_engines_and_a_saved_reference_are_not_taken_for_one(
    tmp_path: Path,
) -> None:
    """Before an upgrade, the reference was served at the candidate's address."""
    saved = tmp_path / "reference.json"
    async with pair_of(knowing_engine()) as (reference, candidate):
        two = await verify(reference, candidate, "--max-tasks=0", f"--save={saved}")
        url = reference.removeprefix("--reference=")
        upgraded = await verify(
            f"--reference={saved}", f"--candidate={url}", "--max-tasks=0"
        )
    assert upgraded.exit_code == 2
    assert "same engine" not in two.output + upgraded.output


@pytest.mark.parametrize("path", ["/nothing-here", "/health"])
async def test_a_page_that_is_not_vllms_is_said_in_a_line(path: str) -> None:
    async with pair_of(knowing_engine()) as (reference, candidate):
        result = await verify(f"{reference}{path}", candidate)
    assert result.exit_code == 3
    assert "give the URL up to the port" in " ".join(result.stderr.split())


async def test_a_server_of_files_is_no_engine() -> None:
    """Its page is not printed: it says nothing."""

    class NoEngine(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_args: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), NoEngine) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        result = await verify(f"--reference={url}", f"--candidate={NOBODY}")
        server.shutdown()
    assert result.exit_code == 3
    assert "HTTP 404" in result.stderr
    assert "This is no vLLM server" in " ".join(result.stderr.split())
    assert "<html" not in result.stderr


async def test_tasks_that_a_limit_left_out_are_what_to_raise(tmp_path: Path) -> None:
    """More tasks of one's own are not needed while there are others."""
    tasks = write_tasks(tmp_path)
    async with pair_of(knowing_engine()) as pair:
        result = await verify(*pair, f"--tasks={tasks}", "--max-tasks=20")
    last_line = result.stdout.splitlines()[-1]
    assert last_line.endswith("Not asked: 380 tasks; raise --minutes or --max-tasks.")


async def test_saving_ends_with_the_time_and_says_what_is_missing(
    tmp_path: Path,
) -> None:
    tasks = write_tasks(tmp_path)
    saved = tmp_path / "reference.json"
    engine = knowing_engine()
    known_answer = engine.model.answer_to

    def hang_from_now_on(body: Mapping[str, Any]) -> ModelAnswer:
        if "Say the number" in str(body["messages"]):
            engine.behaviour.hung = {"/v1/chat/completions"}
        return known_answer(body)

    engine.model.answer_to = hang_from_now_on
    async with pair_of(knowing_engine(), engine) as (reference, candidate):
        saving = await verify(
            reference,
            f"--tasks={tasks}",
            f"--save={saved}",
            "--minutes=0.1",
            "--parallel=1",
        )
        answers = json.loads(saved.read_text())["answers"]
        verifying = await verify(f"--reference={saved}", candidate, f"--tasks={tasks}")
    missing = MANY - len(answers)
    assert 0 < missing < MANY
    assert f"The time was used up: {missing} tasks of 400" in saving.stderr
    assert f"Left out: {missing} tasks to which the saved" in verifying.stdout
