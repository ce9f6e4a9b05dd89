"""An engine that is not verified is compared with a running one, before it gets requests or as soon as there is one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from router.policy.decision import PRIORITIES
from tests.fakes.engine import serving_all
from tests.unit.own_engines import own_engines
from tests.unit.tiers.verification.small_model import SmallModel
from tiers.errors import CanaryRefusedError
from tiers.fleet import Fleet
from tiers.lifecycle.canary import Canary, read_canary
from tiers.lifecycle.engine import Engine
from tiers.lifecycle.gate import PRIORITY, Gate, GateMode
from tiers.lifecycle.likelihood import score_engine
from tiers.lifecycle.watchdog import WatchdogOptions
from tiers.probe import EngineProbe
from tiers.replica import Replica
from tiers.spec import (
    STANDARD_TIERS,
    EngineBuild,
    ReplicaStatus,
    TierName,
    TierSpec,
    VerificationState,
)

FAST, BALANCED, PRECISE = STANDARD_TIERS
PRECISIONS = {FAST: "awq-int4", PRECISE: "bf16"}
QUANTIZED = 0.2  # noise of the logits

pytestmark = pytest.mark.anyio


def spec_of(tier: TierName, url: str) -> TierSpec:
    return TierSpec(
        tier,
        4096,
        max_num_seqs=16,
        max_in_flight=32,
        urls=(url,),
        replicas=0,
        precision=PRECISIONS[tier],
    )


@dataclass
class Gated:
    """A gate, and an engine of each of two tiers that run elsewhere.

    Attributes:
        fast: Not ready.
        precise: Not ready either.
    """

    gate: Gate
    canary: Canary
    client: httpx.AsyncClient
    fast: Engine
    precise: Engine

    async def start(self, engine: Engine) -> None:
        """Have an engine score the fixed texts and verified, and mark it ready unless it is held."""
        replica = engine.replica
        probe = EngineProbe(self.client, replica.url, "")
        replica.update(
            build=EngineBuild(await probe.version(), await probe.kv_cache_dtype())
        )
        engine.scores = await score_engine(probe, replica.model, timeout_s=60.0)
        await self.gate.check_start(engine)
        held = engine.held is not None
        replica.mark(ReplicaStatus.DRAINING if held else ReplicaStatus.READY)


@asynccontextmanager
async def gated(
    tmp_path: Path,
    fast: SmallModel,
    precise: SmallModel,
    mode: GateMode = GateMode.WARN,
) -> AsyncIterator[Gated]:
    async with (
        serving_all(fast.app, precise.app) as urls,
        httpx.AsyncClient(trust_env=False, timeout=60) as client,
    ):
        specs = tuple(
            spec_of(tier, url) for tier, url in zip((FAST, PRECISE), urls, strict=True)
        )
        fleet = Fleet(specs)
        engines = []
        for spec in specs:
            replica = Replica(
                f"{spec.name}-0", spec, spec.urls[0], api_key="", model="small"
            )
            engines.append(Engine(fleet.add(replica), None, WatchdogOptions()))
        canary = Canary(tmp_path / "canary.json")
        gate = Gate(
            mode,
            canary,
            fleet=fleet,
            engines=lambda: engines,
            probe_of=lambda replica: EngineProbe(client, replica.url, ""),
            log_path=lambda name: tmp_path / name,
        )
        yield Gated(gate, canary, client, *engines)


def verification(engine: Engine) -> VerificationState | None:
    return engine.replica.state.verification


async def test_a_sound_engine_is_verified_once(tmp_path: Path) -> None:
    """Against the highest precision, which it vouches for in turn; its next start is compared with the file only."""
    small = SmallModel(noise=QUANTIZED)
    async with gated(tmp_path, small, SmallModel()) as fleet:
        await fleet.start(fleet.precise)
        assert verification(fleet.precise) is VerificationState.REFERENCE
        assert read_canary(fleet.canary.path).records == ()
        await fleet.start(fleet.fast)
        assert verification(fleet.fast) is VerificationState.VERIFIED
        assert verification(fleet.precise) is VerificationState.VERIFIED
        detail = fleet.precise.replica.state.verification_detail
        assert detail == "fast-0 agrees with it"
        asked = len(small.requests)
        await fleet.start(fleet.fast)
        assert verification(fleet.fast) is VerificationState.VERIFIED
        again = len(small.requests) - asked
        assert again < asked / 2
        tiers = {record.tier for record in read_canary(fleet.canary.path).records}
        assert tiers == {FAST, PRECISE}


@pytest.mark.parametrize(
    "changed", [{"release": "0.33.0"}, {"cache_dtype": "fp8"}], ids=str
)
async def test_a_change_of_the_engine_starts_verification_anew(
    tmp_path: Path, changed: dict[str, str]
) -> None:
    """A broken new release is found, although the old one was verified at this address."""
    small = SmallModel(noise=QUANTIZED)
    async with gated(tmp_path, small, SmallModel()) as fleet:
        await fleet.start(fleet.precise)
        await fleet.start(fleet.fast)
        for name, value in changed.items():
            setattr(small, name, value)
        small.weights = 2
        with pytest.raises(CanaryRefusedError, match="nats a token from those of tier"):
            await fleet.start(fleet.fast)
        small.weights = 1
        await fleet.start(fleet.fast)
        assert verification(fleet.fast) is VerificationState.VERIFIED


async def test_a_broken_first_start_is_refused_and_is_no_norm(tmp_path: Path) -> None:
    """It is refused by the reference, and a mended engine is verified afterwards."""
    small = SmallModel(weights=2)
    async with gated(tmp_path, small, SmallModel()) as fleet:
        await fleet.start(fleet.precise)
        with pytest.raises(CanaryRefusedError):
            await fleet.start(fleet.fast)
        small.weights = 1
        await fleet.start(fleet.fast)
        assert verification(fleet.fast) is VerificationState.VERIFIED


async def test_an_engine_that_decodes_otherwise_than_it_prefills_is_refused(
    tmp_path: Path,
) -> None:
    """Without any reference, too."""
    small = SmallModel(decode_noise=3.0)
    async with gated(tmp_path, small, SmallModel()) as fleet:
        with pytest.raises(CanaryRefusedError, match="its decode steps or its KV"):
            await fleet.start(fleet.fast)


async def test_an_engine_that_was_ready_first_is_compared_later(tmp_path: Path) -> None:
    """It serves, and is compared once the highest precision is ready."""
    small = SmallModel(noise=QUANTIZED)
    async with gated(tmp_path, small, SmallModel()) as fleet:
        await fleet.start(fleet.fast)
        assert verification(fleet.fast) is VerificationState.PENDING
        assert fleet.fast.replica.state.status is ReplicaStatus.READY
        assert await fleet.gate.check_pending(fleet.fast) is False
        await fleet.start(fleet.precise)
        assert await fleet.gate.check_pending(fleet.fast) is True
        assert verification(fleet.fast) is VerificationState.VERIFIED


async def test_hold_keeps_an_engine_from_traffic_until_it_is_verified(
    tmp_path: Path,
) -> None:
    async with gated(
        tmp_path, SmallModel(noise=QUANTIZED), SmallModel(), GateMode.HOLD
    ) as fleet:
        await fleet.start(fleet.fast)
        held = fleet.fast.held or ""
        assert held.startswith("gets no requests (quality.gate = hold): no engine is")
        assert "It is compared as soon as an engine of the highest precision" in held
        assert "'qarr tiers resume fast-0' sends it requests all the same" in held
        await fleet.start(fleet.precise)
        assert fleet.precise.held is None
        await fleet.gate.check_pending(fleet.fast)
        assert fleet.fast.held is None


async def test_requests_of_callers_go_before_those_of_a_comparison(
    tmp_path: Path,
) -> None:
    """The reference serves meanwhile; an engine without priority scheduling would refuse a priority."""
    precise = SmallModel()
    fast = SmallModel(noise=QUANTIZED)
    async with gated(tmp_path, fast, precise) as fleet:
        await fleet.start(fleet.precise)
        assert fleet.precise.replica.takes_priority
        fleet.fast.replica.takes_priority = False
        precise.requests.clear()
        await fleet.start(fleet.fast)
        assert verification(fleet.fast) is VerificationState.VERIFIED
    asked = [body for path, body in precise.requests if path.startswith("/v1/")]
    assert {body.get("priority") for body in asked} == {PRIORITY}
    assert max(PRIORITIES.values()) < PRIORITY
    assert not any("priority" in body for _, body in fast.requests)


async def test_an_operator_decides_about_an_engine_that_is_held(tmp_path: Path) -> None:
    """What is resumed serves until its next start, and what is drained stays drained although it is verified."""
    small = SmallModel(noise=QUANTIZED, thinks=True)
    async with gated(tmp_path, small, SmallModel(), GateMode.HOLD) as fleet:
        await fleet.start(fleet.precise)
        await fleet.start(fleet.fast)
        assert "qarr tiers record fast, then start it again" in (fleet.fast.held or "")
        fleet.fast.held = None  # as 'qarr tiers resume' does
        await fleet.start(fleet.fast)
        assert "its reasoning differs" in (fleet.fast.held or "")
        fleet.fast.held = "drained by an operator"
        small.thinks = False
        await fleet.start(fleet.fast)
        assert verification(fleet.fast) is VerificationState.VERIFIED
        assert fleet.fast.held == "drained by an operator"


@pytest.mark.parametrize(
    ("fault", "subject"),
    [
        ({"mark": "<|turn|>"}, "chat template"),
        ({"drops": "b"}, "tool calls"),
        ({"temperature": 1.6}, "sampling defaults"),
        ({"thinks": True}, "reasoning"),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", [GateMode.WARN, GateMode.HOLD])
async def test_an_engine_that_treats_requests_otherwise_is_told(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fault: dict[str, str],
    subject: str,
    mode: GateMode,
) -> None:
    """It serves with a remark, or not at all, as configured; it does not count as verified, so it is compared again."""
    small = replace(SmallModel(noise=QUANTIZED), **fault)
    async with gated(tmp_path, small, SmallModel(), mode) as fleet:
        await fleet.start(fleet.precise)
        await fleet.start(fleet.fast)
        assert verification(fleet.fast) is VerificationState.DIFFERS
        assert f"its {subject} differs from that of precise-0" in caplog.text
        assert subject in (fleet.fast.remark or "")
        assert (fleet.fast.held is not None) == (mode is GateMode.HOLD)
        assert read_canary(fleet.canary.path).find(FAST, _key(fleet.fast)) is None


def _key(engine: Engine) -> object:
    assert engine.key is not None
    return engine.key


async def test_what_an_operator_accepts_is_not_compared(tmp_path: Path) -> None:
    small = SmallModel(weights=2)
    async with gated(tmp_path, small, SmallModel(), GateMode.HOLD) as fleet:
        await fleet.start(fleet.precise)
        fleet.canary.accept(FAST)
        await fleet.start(fleet.fast)
        assert verification(fleet.fast) is VerificationState.ACCEPTED
        assert fleet.fast.held is None


async def test_a_new_highest_precision_is_compared_with_verified_engines(
    tmp_path: Path,
) -> None:
    """A broken release of it does not become what sound engines are refused by."""
    small = SmallModel()
    async with gated(tmp_path, SmallModel(noise=QUANTIZED), small) as fleet:
        await fleet.start(fleet.precise)
        await fleet.start(fleet.fast)
        small.release = "0.33.0"
        small.weights = 2
        with pytest.raises(CanaryRefusedError, match="from those of tier fast"):
            await fleet.start(fleet.precise)
        assert fleet.precise.scores is not None
        fleet.gate.check_against_precise(fleet.fast, fleet.precise)


async def test_an_engine_that_cannot_be_compared_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An older release without log-probabilities, as the state says; nothing is refused for what is not known."""
    async with gated(tmp_path, SmallModel(), SmallModel()) as fleet:
        await fleet.start(fleet.precise)
        fleet.fast.scores = None
        await fleet.gate.check_start(fleet.fast)
        assert verification(fleet.fast) is VerificationState.CANNOT_TELL
        assert "no log-probabilities" in fleet.fast.replica.state.verification_detail


async def test_engines_that_start_together_in_hold_are_ready_once_they_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is ready first waits for its reference, and no operator need resume it."""
    canary = Canary(tmp_path / "canary.json")
    async with own_engines(
        tmp_path, monkeypatch, FAST, PRECISE, canary=canary, gate=GateMode.HOLD
    ) as own:
        states = {
            replica.id: replica.state.verification for replica in own.fleet.replicas
        }
        assert states["fast-0"] is VerificationState.VERIFIED
        assert states["precise-0"] is VerificationState.VERIFIED
        fast = own.supervisor.engine("fast-0")
        assert fast.key is not None
        assert "FakeLinearKernel" in fast.key.engine
        assert "vLLM 0.32.0, KV cache auto" in fast.key.engine


async def test_nothing_is_compared_with_the_gate_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = Canary(tmp_path / "canary.json")
    async with own_engines(
        tmp_path,
        monkeypatch,
        behaviour={"tells_ids": False},
        canary=canary,
        gate=GateMode.OFF,
    ) as own:
        assert own.first.state.verification is VerificationState.OFF
        assert read_canary(canary.path).records == ()
