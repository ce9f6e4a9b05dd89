"""An engine is compared with what its checkpoint should compute, before it gets requests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from tests.unit.own_engines import own_engines
from tests.waiting import until
from tiers.checkpoints.checkpoint import MANIFEST, Manifest, weights_digest
from tiers.checkpoints.reference import (
    ReferenceScores,
    ScoredText,
    fixed_texts,
    texts_digest,
)
from tiers.errors import CanaryRefusedError, CheckpointError
from tiers.lifecycle.canary import (
    ACCEPTED_FOR,
    Canary,
    CanaryFile,
    EngineKey,
    read_canary,
    write_canary,
)
from tiers.lifecycle.likelihood import EngineScores
from tiers.spec import Precision, ReplicaStatus, TierName, TierSpec
from tiers.speed import SpeedModel

QARR = Path(sys.executable).with_name("qarr")
URL = "http://127.0.0.1:1"
SPEC = TierSpec(
    TierName.FAST,
    max_model_len=2048,
    max_num_seqs=16,
    max_in_flight=32,
    digest="d",
    precision="awq-int4",
)
PRECISE = replace(SPEC, name=TierName.PRECISE, precision="bf16")
ELSEWHERE = replace(SPEC, urls=(URL,))
KEY = EngineKey(weights="d", engine="vLLM 0.32.0")


def key_of(spec: TierSpec) -> EngineKey:
    return EngineKey(weights=URL, engine="vLLM 0.32.0") if spec.urls else KEY


def scores(
    logprob: float = -1.0,
    *,
    decode_gap: float = 0.0,
    chat_ids: tuple[int, ...] = (1, 2, 3),
) -> EngineScores:
    """Return the scores of an engine that gives every token the same log-probability."""
    texts = []
    for fixed in fixed_texts():
        token_ids = chat_ids if fixed.messages else (1, 2, 3)
        logprobs = (logprob,) * (len(token_ids) - 1)
        texts.append(
            ScoredText(name=fixed.name, token_ids=token_ids, logprobs=logprobs)
        )
    return EngineScores(texts=tuple(texts), decode_gap=decode_gap, token_ms=10.0)


def made(folder: Path, *, chat_is_dated: bool = False) -> TierSpec:
    """Make a checkpoint whose reference is ``scores()``; return its tier."""
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    manifest = Manifest(
        recipe_version=1,
        model="m",
        precision=Precision.AWQ_INT4,
        method="AWQ",
        base_digest="b",
        weights_digest=weights_digest(folder),
        tokenizer_digest="t",
        chat_template_digest="c",
        versions={},
        reference=ReferenceScores(
            texts_digest=texts_digest(),
            chat_is_dated=chat_is_dated,
            texts=scores().texts,
        ),
    )
    (folder / MANIFEST).write_text(manifest.model_dump_json())
    return replace(SPEC, checkpoint=folder)


@pytest.fixture
def canary(tmp_path: Path) -> Canary:
    return Canary(tmp_path / "canary.json")


@pytest.mark.anyio
async def test_a_sound_engine_of_a_checkpoint_made_here_passes(
    tmp_path: Path, canary: Canary
) -> None:
    """At its first start too, and nothing need be recorded."""
    spec = made(tmp_path / "made")
    await canary.check_scores(scores(-1.05), spec, KEY)
    assert read_canary(canary.path).records == ()


@pytest.mark.anyio
async def test_weights_quantized_while_loading_may_differ_by_what_that_loses(
    tmp_path: Path, canary: Canary
) -> None:
    """Their reference is the 16-bit checkpoint: rounding its weights counts as well, but no more than a scheme may lose."""
    spec = replace(made(tmp_path / "made"), name=TierName.BALANCED, precision="fp8")
    assert spec.checkpoint is not None
    manifest = spec.checkpoint / MANIFEST
    manifest.write_text(manifest.read_text().replace('"awq-int4"', '"bf16"'))
    await canary.check_scores(scores(-1.35), spec, KEY)
    with pytest.raises(CanaryRefusedError, match=r"at most 0\.40 is allowed for fp8"):
        await canary.check_scores(scores(-1.45), spec, KEY)
    as_it_is = replace(spec, name=TierName.PRECISE, precision="bf16")
    with pytest.raises(CanaryRefusedError, match=r"at most 0\.10 is allowed for bf16"):
        await canary.check_scores(scores(-1.35), as_it_is, KEY)


@pytest.mark.anyio
async def test_a_broken_first_start_is_refused(tmp_path: Path, canary: Canary) -> None:
    """Its numbers, what they should be, by text, and what to do: its files are as they were made."""
    spec = made(tmp_path / "made")
    with pytest.raises(CanaryRefusedError) as refused:
        await canary.check_scores(scores(-3.0), spec, KEY)
    assert (
        "2.00 nats a token from those that transformers computes with this checkpoint"
        in str(refused.value)
    )
    assert "at most 0.15 is allowed for awq-int4 weights" in str(refused.value)
    assert "(prose 2.00, code 2.00, digits 2.00, chat 2.00)" in str(refused.value)
    assert "as they were made, so a kernel computes wrongly: look for arguments" in str(
        refused.value
    )
    assert "qarr tiers record fast, then start it again" in str(refused.value)


@pytest.mark.anyio
async def test_changed_weights_are_told_from_a_broken_kernel(
    tmp_path: Path, canary: Canary
) -> None:
    spec = made(tmp_path / "made")
    (tmp_path / "made/model.safetensors").write_bytes(b"other")
    with pytest.raises(
        CanaryRefusedError,
        match=f"not those that were made. Make them again: remove {tmp_path}/made",
    ):
        await canary.check_scores(scores(-3.0), spec, KEY)


@pytest.mark.anyio
async def test_another_chat_template_is_refused(tmp_path: Path, canary: Canary) -> None:
    """Also where the text hardly becomes less likely by it; one that writes the date may differ by the date."""
    spec = made(tmp_path / "made")
    with pytest.raises(
        CanaryRefusedError,
        match=r"its chat template is not the one .* makes 4 tokens, 3 are expected",
    ):
        await canary.check_scores(scores(chat_ids=(7, 1, 2, 3)), spec, KEY)
    await canary.check_scores(
        scores(chat_ids=(7, 1, 2, 3)), made(tmp_path / "dated", chat_is_dated=True), KEY
    )


@pytest.mark.anyio
async def test_decode_must_agree_with_prefill(canary: Canary) -> None:
    with pytest.raises(
        CanaryRefusedError,
        match=r"generates have log-probabilities 0\.50 .* 0\.15 is allowed .* KV cache",
    ):
        await canary.check_scores(scores(decode_gap=0.5), SPEC, KEY)


@pytest.mark.anyio
async def test_the_tolerance_is_a_factor(tmp_path: Path) -> None:
    lenient = Canary(tmp_path / "canary.json", tolerance=30.0)
    await lenient.check_scores(scores(-3.0), made(tmp_path / "made"), KEY)


@pytest.mark.anyio
@pytest.mark.parametrize("spec", [SPEC, ELSEWHERE], ids=["here", "elsewhere"])
async def test_a_first_start_is_no_reference(canary: Canary, spec: TierSpec) -> None:
    """It may be broken: without a reference nothing is kept, and a sound engine that follows is not refused."""
    assert await canary.check_scores(scores(-3.0), spec, key_of(spec)) is None
    assert read_canary(canary.path).records == ()
    assert await canary.check_scores(scores(), spec, key_of(spec)) is None


@pytest.mark.anyio
@pytest.mark.parametrize("spec", [SPEC, ELSEWHERE], ids=["here", "elsewhere"])
async def test_what_was_verified_is_the_reference_of_later_starts(
    canary: Canary, spec: TierSpec
) -> None:
    """Of a checkpoint that was made by others, and of an engine given by URL."""
    canary.record_verified(scores(), spec, key_of(spec))
    record = await canary.check_scores(scores(-1.05), spec, key_of(spec))
    assert record is not None
    assert record.is_accepted is False
    assert record.texts == scores().texts
    assert record.identity == (URL if spec.urls else "d")
    with pytest.raises(
        CanaryRefusedError,
        match=r"0\.50 nats a token from those of 2.* UTC; at most 0\.15 is allowed",
    ):
        await canary.check_scores(scores(-1.5), spec, key_of(spec))


@pytest.mark.anyio
async def test_another_engine_of_the_same_weights_is_not_verified(
    canary: Canary,
) -> None:
    """A new release, KV cache or kernel: verification starts anew, and takes the place of the former."""
    canary.record_verified(scores(), SPEC, KEY)
    newer = KEY._replace(engine="vLLM 0.33.0")
    assert await canary.check_scores(scores(-3.0), SPEC, newer) is None
    canary.record_verified(scores(-3.0), SPEC, newer)
    assert await canary.check_scores(scores(-3.0), SPEC, newer) is not None
    assert await canary.check_scores(scores(), SPEC, KEY) is None


def test_a_running_engine_judges_those_that_have_no_reference(
    tmp_path: Path, canary: Canary
) -> None:
    """By as much as quantization explains."""

    def check(logprob: float, precision: str) -> None:
        canary.check_loss(
            scores(logprob),
            scores(),
            ELSEWHERE,
            precision=precision,
            judge=TierName.PRECISE,
        )

    check(-1.9, "awq-int4")
    with pytest.raises(
        CanaryRefusedError,
        match=r"1\.10 nats a token from those of tier precise; at most 1\.00",
    ):
        check(-2.1, "awq-int4")
    with pytest.raises(
        CanaryRefusedError,
        match=r"0\.90 nats .* at most 0\.40 is allowed for fp8 weights",
    ):
        check(-1.9, "fp8")


@pytest.mark.anyio
async def test_an_engine_is_verified_although_that_cannot_be_kept(
    canary: Canary, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk keeps no engine from serving; its next start is verified again, and the log says so."""

    def no_space(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkstemp", no_space)
    canary.record_verified(scores(), SPEC, KEY)
    assert "so its next start is verified again" in caplog.text
    assert await canary.check_scores(scores(-3.0), SPEC, KEY) is None


@pytest.mark.anyio
async def test_what_an_operator_accepts_is_the_reference(
    tmp_path: Path, canary: Canary
) -> None:
    """In the place of any other; every engine of the tier is recorded once, and compared from then on."""
    spec = made(tmp_path / "made")
    assert canary.accept(TierName.FAST) == 0
    await canary.check_scores(scores(-3.0), spec, KEY)
    await canary.check_scores(scores(-5.0), ELSEWHERE, key_of(ELSEWHERE))
    await canary.check_scores(scores(-3.0), spec, KEY)
    with pytest.raises(CanaryRefusedError):
        await canary.check_scores(scores(), spec, KEY)
    assert canary.accept(TierName.FAST) == 2


@pytest.mark.anyio
async def test_an_acceptance_ends_after_an_hour(tmp_path: Path, canary: Canary) -> None:
    """A checkpoint that is changed later is compared again."""
    canary.accept(TierName.FAST)
    file = read_canary(canary.path)
    (acceptance,) = file.acceptances
    old = acceptance.model_copy(
        update={"at": acceptance.at - ACCEPTED_FOR - timedelta(seconds=1)}
    )
    write_canary(canary.path, CanaryFile(acceptances=(old,)))
    with pytest.raises(CanaryRefusedError):
        await canary.check_scores(scores(-3.0), made(tmp_path / "made"), KEY)


@pytest.mark.anyio
async def test_other_tiers_are_not_accepted_with_it(
    tmp_path: Path, canary: Canary
) -> None:
    canary.record_verified(scores(), PRECISE, KEY)
    canary.accept(TierName.FAST)
    with pytest.raises(CanaryRefusedError):
        await canary.check_scores(scores(-3.0), PRECISE, KEY)


@pytest.mark.anyio
async def test_scores_of_other_texts_are_replaced(canary: Canary) -> None:
    """After a change of the texts the old scores tell nothing; other engines' records stay."""
    canary.record_verified(scores(), SPEC, KEY)
    canary.record_verified(scores(), PRECISE, KEY)
    fast, precise = read_canary(canary.path).records
    write_canary(
        canary.path,
        CanaryFile(records=(fast.model_copy(update={"texts_digest": "old"}), precise)),
    )
    assert await canary.check_scores(scores(-3.0), SPEC, KEY) is None
    canary.record_verified(scores(-3.0), SPEC, KEY)
    records = {record.tier: record for record in read_canary(canary.path).records}
    assert records[TierName.FAST].texts == scores(-3.0).texts
    assert records[TierName.PRECISE] == precise


@pytest.mark.parametrize("version", [1, 2])
def test_a_file_of_an_earlier_release_is_replaced(canary: Canary, version: int) -> None:
    """Greedy tokens cannot be compared, and first starts that nothing was compared with are no norm."""
    canary.path.write_text(
        f'{{"version": {version}, "records": [{{"tier": "fast", "tokens": [[1]]}}]}}'
    )
    assert read_canary(canary.path) == CanaryFile()
    canary.accept(TierName.FAST)
    assert len(read_canary(canary.path).acceptances) == 1


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"version": 4, "records": []}',
        '{"records": [{"tier": "fast"}]}',
        '{"other": 1}',
        "\x00",
    ],
)
def test_files_of_another_form_are_refused(canary: Canary, content: str) -> None:
    """Those of a later version too: nothing is guessed, nothing is overwritten, and the error says what to do."""
    canary.path.write_text(content)
    with pytest.raises(CheckpointError, match=r"cannot be used .* remove the file"):
        canary.accept(TierName.FAST)
    assert canary.path.read_text() == content


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    """The file that was there stays, and no part of the new one."""
    (tmp_path / "c.json").mkdir()
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_canary(tmp_path / "c.json", CanaryFile())
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]


@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can give a file to another user"
)
def test_root_accepts_for_the_routers_user(canary: Canary) -> None:
    """``sudo qarr tiers record``: the router, another user, still reads what it has recorded."""
    write_canary(canary.path, CanaryFile())
    os.chown(canary.path, 65534, 65534)
    canary.accept(TierName.FAST)
    found = canary.path.stat()
    assert found.st_uid == 65534
    assert found.st_gid == 65534


def test_a_much_slower_engine_is_refused(tmp_path: Path) -> None:
    """Idle, against the profile; without a profile, or within the bounds, it passes."""
    canary = Canary(tmp_path / "c.json", max_slowdown=3)
    canary.check_speed(SpeedModel(1, 1, 29), SpeedModel(1, 1, 10), SPEC)
    canary.check_speed(SpeedModel(1, 1, 1000), None, SPEC)
    with pytest.raises(
        CanaryRefusedError,
        match=r"50\.0 ms for a token while idle, 5\.0 times .* qarr profile latency",
    ):
        canary.check_speed(SpeedModel(1, 1, 50), SpeedModel(1, 1, 10), SPEC)


@pytest.mark.anyio
async def test_what_an_operator_accepted_is_compared_with_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, canary: Canary
) -> None:
    """Engines that compute alike are ready; another one is refused, and was never ready."""
    canary.accept(TierName.FAST)
    async with own_engines(tmp_path, monkeypatch, canary=canary):
        (record,) = read_canary(canary.path).records
        assert record.tier == TierName.FAST
        assert record.identity == "digest of fast"
        assert [text.name for text in record.texts] == [
            fixed.name for fixed in fixed_texts()
        ]
    async with own_engines(tmp_path, monkeypatch, canary=canary):
        assert read_canary(canary.path).records == (record,)
    async with own_engines(
        tmp_path, monkeypatch, ready=False, behaviour={"first_id": 5}, canary=canary
    ) as own:
        assert "its log-probabilities of fixed texts are 0.50 nats a token from" in (
            own.first.state.detail or ""
        )
        assert ReplicaStatus.READY not in {state for _, state, _ in own.seen}


@pytest.mark.anyio
async def test_an_engine_that_gives_no_scores_is_refused_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, canary: Canary
) -> None:
    """The vLLM that is installed here gives them; only engines elsewhere may be older."""
    async with own_engines(
        tmp_path,
        monkeypatch,
        ready=False,
        behaviour={"tells_ids": False},
        canary=canary,
    ) as own:
        assert "gives no log-probabilities" in (own.first.state.detail or "")


@pytest.mark.anyio
async def test_a_refused_engine_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, canary: Canary
) -> None:
    """A wrong checkpoint does not become right by starting it again, even where the engine was ready before."""
    canary.accept(TierName.FAST)
    async with own_engines(tmp_path, monkeypatch, canary=canary) as own:
        own.next_starts(first_id=5)
        assert own.first.state.pid is not None
        os.kill(own.first.state.pid, signal.SIGKILL)
        await until(lambda: own.first.state.status is ReplicaStatus.FAILED)
        assert "its log-probabilities of fixed texts are" in (
            own.first.state.detail or ""
        )
        assert (
            len(
                [
                    detail
                    for detail in own.details(ReplicaStatus.STARTING)
                    if "; in " in detail
                ]
            )
            == 1
        )


@pytest.mark.anyio
async def test_a_refused_engine_never_replaces_a_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, canary: Canary
) -> None:
    """Recycling onto an engine that computes something else fails, and the old one serves on."""
    canary.accept(TierName.FAST)
    async with own_engines(tmp_path, monkeypatch, canary=canary) as own:
        own.next_starts(first_id=5)
        operation = own.supervisor.operations.begin("recycle", "fast-0")
        await until(lambda: operation.state != "running")
        assert operation.state == "failed"
        assert "its log-probabilities of fixed texts are" in operation.detail
        assert [(r.id, r.state.status) for r in own.fleet.replicas] == [
            ("fast-0", ReplicaStatus.READY)
        ]


@pytest.mark.anyio
async def test_an_operator_accepts_by_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, canary: Canary
) -> None:
    """`qarr tiers record`; the next start passes and is the new measure."""
    monkeypatch.setenv("QARR_POLICY__PROFILES", str(tmp_path))
    canary.accept(TierName.FAST)
    async with own_engines(tmp_path, monkeypatch, canary=canary):
        pass
    done = subprocess.run(  # noqa: ASYNC221
        [QARR, "tiers", "record", "fast"],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert done.stdout == (
        f"fast: 1 records deleted in {canary.path}; starts and resumes of the next hour are accepted and recorded\n"
    )
    async with own_engines(
        tmp_path, monkeypatch, behaviour={"first_id": 5}, canary=canary
    ):
        (record,) = read_canary(canary.path).records
        assert record.is_accepted
        assert record.texts[0].logprobs[0] == pytest.approx(-0.6)


@pytest.mark.anyio
async def test_tier_precise_judges_engines_that_were_ready_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, canary: Canary
) -> None:
    """An engine without a reference is refused as soon as tier precise shows that it computes something else."""
    tiers = (TierName.FAST, TierName.PRECISE)
    async with own_engines(tmp_path, monkeypatch, *tiers, canary=canary) as own:
        own.next_starts(first_id=30)  # 3 nats a token
        precise = own.fleet.replicas[1]
        assert precise.state.pid is not None
        canary.accept(TierName.PRECISE)
        os.kill(precise.state.pid, signal.SIGKILL)
        await until(lambda: own.first.state.status is ReplicaStatus.FAILED)
        assert "3.00 nats a token from those of tier precise" in (
            own.first.state.detail or ""
        )


@pytest.mark.anyio
async def test_a_tier_that_is_much_slower_than_precise_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, canary: Canary
) -> None:
    """With the kernels that its log names, as soon as both are ready; it serves all the same."""
    monkeypatch.setattr("tiers.lifecycle.readiness.MUCH_SLOWER", 0.0)
    tiers = (TierName.FAST, TierName.PRECISE)
    async with own_engines(tmp_path, monkeypatch, *tiers, canary=canary) as own:
        await until(
            lambda: "slower a token than tier precise" in (own.first.state.detail or "")
        )
        assert (own.first.state.detail or "").endswith(
            "ms): its layers are computed by FakeLinearKernel"
        )
        assert own.first.state.status is ReplicaStatus.READY


@pytest.mark.anyio
async def test_a_warm_up_that_takes_long_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, canary: Canary
) -> None:
    monkeypatch.setattr("tiers.lifecycle.readiness.SLOW_WARM_UP_S", 0.2)
    async with own_engines(
        tmp_path, monkeypatch, behaviour={"delay_s": 0.1}, canary=canary
    ) as own:
        assert own.details(ReplicaStatus.WARMING) == [
            "its warm-up takes longer than 0.2 s: its layers are computed by FakeLinearKernel"
        ]
