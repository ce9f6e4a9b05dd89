"""``qarr up`` with checkpoints missing: it serves with what is there, and says what is not."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from router.deployment.first_start import NICENESS
from tests.unit.first_up import MEMORY_BYTES, FirstUp, first_up
from tests.unit.own_router import QARR
from tests.waiting import until
from tiers.plan import group_room
from tiers.preparing import ENGINE_START_S, TYPICAL, WRITING_S, Preparations, about
from tiers.spec import STANDARD_TIERS, TierName

FAST, BALANCED, PRECISE = STANDARD_TIERS
GIB = 1 << 30


async def check_commands(up: FirstUp) -> None:
    """Check that the commands and ``/tiers`` tell how far the checkpoint of ``fast`` is."""
    url = ("--url", up.url)
    assert (
        "quantizing to AWQ int4, groups of 64 (3 of 31), ready in about"
        in await up.qarr("tiers", *url)
    )
    assert (
        "quantizing to AWQ int4, groups of 64 (3 of 31), ready in about"
        in await up.qarr("top", "--once", *url)
    )
    assert (
        "is being prepared: quantizing to AWQ int4, groups of 64 (3 of 31)"
        in await up.qarr("doctor", *url)
    )
    _, fleet = await up.get("/tiers")
    assert {t["tier"]: t["preparing"] is None for t in fleet["tiers"]} == {
        "fast": False, "balanced": True, "precise": True,
    }  # fmt: skip


@pytest.mark.anyio
async def test_each_tier_serves_as_soon_as_it_can(tmp_path: Path) -> None:
    """The router answers from the start; BF16, FP8 and AWQ follow one after another, and what is missing is told everywhere."""
    async with first_up(tmp_path) as up:
        body = await up.until_states(
            fast="preparing", balanced="preparing", precise="preparing"
        )
        assert not body["ready"]
        assert [(p["tier"], p["what"]) for p in body["preparing"][:2]] == [
            ("fast", "waits for the checkpoint of balanced"),
            ("balanced", "waits for the checkpoint of precise"),
        ]
        refused = await up.generate()
        assert refused.status_code == 503
        assert "precise is being prepared" in refused.json()["detail"]
        assert refused.headers["retry-after"] == "10"

        up.tell("bf16", "done")
        await up.until_states(precise="ready", balanced="preparing", fast="preparing")
        answer = await up.generate(stream=False)
        assert answer.status_code == 200
        assert answer.json()["tier"] == "precise"
        asked = await up.generate(stream=False, tier="fast")
        assert (
            "hint fast not taken: is being prepared" in asked.headers["x-qarr-reason"]
        )
        required = await up.generate(tier="fast", tier_policy="require")
        assert int(required.headers["retry-after"]) > 10
        route = await up.client.post(f"{up.url}/route", json={"prompt": "hi there"})
        assert route.json()["features"]["tokens"] == 2
        assert route.json()["features"]["tokens_exact"]

        up.tell("fp8", "done")
        await up.until_states(precise="ready", balanced="ready", fast="preparing")
        up.tell("awq", "3")
        body = {}
        while not body or body["preparing"][0]["done"] < 3:
            _, body = await up.get("/readyz")
        (fast,) = body["preparing"]
        assert fast.pop("remaining_s") >= ENGINE_START_S
        assert fast == {
            "tier": "fast",
            "what": "quantizing to AWQ int4, groups of 64",
            "done": 3,
            "total": 31,
        }
        pid, niceness = up.quantizer("awq")
        assert os.getpgid(pid) != os.getpgid(up.process.pid)
        # BF16 is made at this: there is nothing yet that it could yield to
        ours = os.getpriority(os.PRIO_PROCESS, 0)
        assert up.quantizer("bf16")[1] == ours
        assert niceness == min(ours + NICENESS, 19)
        await check_commands(up)

        up.tell("awq", "done")
        await up.until_states(precise="ready", balanced="ready", fast="ready")
        await until(lambda: "all tiers ready. Ctrl-C stops" in up.said())
        assert (await up.get("/readyz"))[1]["preparing"] == []
        assert (await up.generate(stream=False, tier="fast")).headers[
            "x-qarr-checkpoint"
        ]
        assert await up.end() == 0
        said = up.said()
    assert "with precise; to follow: balanced" in said
    order = [
        "precise: its checkpoint is made",
        "balanced: its checkpoint is made",
        "fast: its checkpoint is made",
    ]
    assert sorted(order, key=said.index) == order


@pytest.mark.anyio
async def test_a_checkpoint_that_cannot_be_made_leaves_the_rest_serving(
    tmp_path: Path,
) -> None:
    """The tier has failed, with the reason and what to do; the others serve, and the router stays."""
    async with first_up(tmp_path) as up:
        up.tell("bf16", "done")
        up.tell("fp8", "done")
        up.tell("awq", "fail")
        body = await up.until_states(precise="ready", balanced="ready", fast="failed")
        assert body["preparing"] == []
        await until(lambda: "all tiers ready but fast" in up.said())
        assert "No space left on device" in up.said()
        assert "qarr model prepare" in up.said()
        assert (await up.generate(stream=False)).status_code == 200
        required = await up.generate(tier="fast", tier_policy="require")
        assert required.status_code == 503
        assert "could not be made" in required.json()["detail"]
        assert "retry-after" not in required.headers
        assert "failed" in await up.qarr("tiers", "--url", up.url)
        assert "'qarr model prepare' makes it" in await up.qarr(
            "doctor", "--url", up.url
        )
        assert await up.end() == 0


@pytest.mark.parametrize("order", ["done", "fail"])
@pytest.mark.anyio
async def test_an_engine_waits_for_its_drafts_checkpoint(
    tmp_path: Path, order: str
) -> None:
    """It starts with the draft once that is made, and without it if it cannot be made."""
    async with first_up(tmp_path, QARR_TIERS__PRECISE__DRAFT="fast") as up:
        up.tell("bf16", "done")
        up.tell("fp8", "done")
        body = await up.until_states(
            balanced="ready", precise="preparing", fast="preparing"
        )
        waits = next(p["what"] for p in body["preparing"] if p["tier"] == "precise")
        assert waits == "waits for the other checkpoints"
        up.tell("awq", order)
        await up.until_states(
            balanced="ready",
            precise="ready",
            fast="ready" if order == "done" else "failed",
        )
        _, fleet = await up.get("/tiers")
        (replica,) = next(
            tier["replicas"] for tier in fleet["tiers"] if tier["tier"] == "precise"
        )
        drafts = "--speculative-config" in psutil.Process(replica["pid"]).cmdline()
        assert drafts == (order == "done")
        assert (
            "precise      starts without its draft, whose checkpoint could not be made"
            in up.said()
        ) != drafts
        assert await up.end() == 0


@pytest.mark.anyio
async def test_what_fits_is_started(tmp_path: Path) -> None:
    """At the first start, and at the next; a line says what is left out. A tier that is asked for is an error instead."""
    kv_cache_gib = f"{min(MEMORY_BYTES, group_room()) * 0.36 / GIB:.2f}"
    async with first_up(tmp_path, QARR_ENGINE__CPU_KV_CACHE_GIB=kv_cache_gib) as up:
        up.tell("bf16", "done")
        up.tell("fp8", "done")
        up.tell("awq", "done")
        await up.until_states(precise="ready", balanced="absent", fast="ready")
        await until(
            lambda: "all tiers ready (balanced left out). Ctrl-C stops" in up.said()
        )
        assert "left out: balanced. 3 CPU engines need about" in up.said()
        assert await up.end() == 0
        asked = {
            f"QARR_TIERS__{tier.upper()}__REPLICAS": "1" for tier in STANDARD_TIERS
        }
        argv = [QARR, "up", "--port", up.url.rpartition(":")[2]]
        again = await asyncio.to_thread(
            subprocess.run,
            argv,
            env={**up.env, **asked},
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        assert again.returncode == 2
        assert "3 CPU engines need about" in again.stderr


@pytest.mark.anyio
async def test_a_published_checkpoint_is_not_made(tmp_path: Path) -> None:
    """It serves before the others are made; the tiers say what they serve, and nothing is quantized for it."""
    balanced = tmp_path / "published"
    balanced.mkdir()
    async with first_up(
        tmp_path,
        QARR_TIERS__BALANCED__CHECKPOINT=str(balanced),
        made=lambda model: publish(model, balanced),
    ) as up:
        up.tell("bf16", "done")
        up.tell("awq", "done")
        await up.until_states(fast="ready", balanced="ready", precise="ready")
        assert f"balanced serves {balanced} as published, in gptq-int8" in up.said()
        assert up.quantizer("fp8") == (0, 0)
        assert up.quantizer("awq")[0]
        _, fleet = await up.get("/tiers")
        assert {tier["tier"]: tier["precision"] for tier in fleet["tiers"]}[
            "balanced"
        ] == "gptq-int8"
        assert await up.end() == 0


def publish(model: Path, target: Path) -> None:
    """Make a quantized checkpoint of a model, as somebody else publishes it."""
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 8}
    (target / "config.json").write_text(json.dumps(config))
    (target / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    (target / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")


@pytest.mark.anyio
async def test_without_any_checkpoint_there_is_nothing_to_serve(tmp_path: Path) -> None:
    """A BF16 checkpoint that cannot be made ends it, with the reason."""
    async with first_up(tmp_path) as up:
        up.tell("bf16", "fail")
        assert await asyncio.to_thread(up.process.wait, 30) == 2
        assert "No space left on device" in up.said()


@pytest.mark.parametrize("command", ["bf16", "awq"])
@pytest.mark.anyio
async def test_ending_ends_the_quantizer(tmp_path: Path, command: str) -> None:
    """Ctrl-C while a checkpoint is made leaves no process and nothing unfinished behind; what is finished is kept."""
    async with first_up(tmp_path) as up:
        await up.until_states(precise="preparing")
        if command == "awq":
            up.tell("bf16", "done")
            up.tell("fp8", "done")
        await until(lambda: up.quantizer(command)[0])
        pid, _ = up.quantizer(command)
        assert await up.end() == 0
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        kept = sorted(
            path.name.split("-")[0]
            for path in up.store.glob("model-*/*")
            if path.is_dir()
        )
        assert kept == (["bf16", "fp8"] if command == "awq" else [])
        assert "stopped" in up.said()
        assert "failed" not in up.said()


@dataclass(slots=True)
class Clock:
    """Seconds that a test sets."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def _left(preparations: Preparations, tier: TierName) -> float | None:
    found = preparations.of(tier)
    assert found is not None
    return found.remaining_s


def test_time_left_is_typical_first_and_then_by_the_pace() -> None:
    """Before parts are counted it is what is typical for the size; then the pace of the parts seen; always with the start."""
    clock = Clock()
    preparations = Preparations(clock)
    preparations.expect(STANDARD_TIERS, GIB)
    typical = {tier: sum(TYPICAL[tier]) for tier in STANDARD_TIERS}
    assert _left(preparations, FAST) == sum(typical.values()) + ENGINE_START_S
    clock.now = 2.0
    assert _left(preparations, PRECISE) == typical[PRECISE] - 2 + ENGINE_START_S
    preparations.made(PRECISE)
    preparations.starting(PRECISE)
    preparations.made(BALANCED)
    for layer in range(1, 5):
        clock.now = 10.0 * layer
        preparations.step("layers", layer, 31)
    clock.now = 43.0
    assert _left(preparations, FAST) == 27 * 10 - 3 + WRITING_S + ENGINE_START_S
    preparations.step("writing", 0, 0)
    assert _left(preparations, FAST) == WRITING_S + ENGINE_START_S
    assert preparations.coming == (PRECISE, BALANCED, FAST)
    preparations.settled(PRECISE)
    assert preparations.of(PRECISE) is None
    assert preparations.coming == (BALANCED, FAST)


def test_time_left_is_not_known_where_nothing_tells() -> None:
    """Neither for a model of unknown size, nor once a step takes longer than is typical."""
    clock = Clock()
    preparations = Preparations(clock)
    preparations.expect(STANDARD_TIERS, None)
    assert _left(preparations, PRECISE) is None
    preparations.sized(GIB)
    clock.now = 1e4
    assert _left(preparations, PRECISE) is None
    preparations.starting(PRECISE)
    assert preparations.fail("disk full") == (PRECISE, BALANCED, FAST)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "about 5 s"), (61, "about 65 s"), (120, "about 120 s"), (121, "about 2.5 min"), (200, "about 3.5 min"), (240, "about 4 min")],
)  # fmt: skip
def test_rough_times(seconds: float, text: str) -> None:
    """Rounded up: to five seconds, from two minutes on to half minutes."""
    assert about(seconds) == text
