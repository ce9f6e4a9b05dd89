"""What ``qarr up`` prints of a start, ``qarr model`` and ``qarr settings``, and the list of commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from redis import Redis
from typer.testing import CliRunner

from router.cli.main import COMMANDS, SHOWN, make_app
from router.cli.serve import _show_memory_plan, _tiers_to_follow
from router.section import SettingsError
from tests.conftest import RedisServer
from tests.fakes import quantizer as fake_quantizer
from tests.unit.cli.stub_router import qarr
from tests.unit.made_checkpoints import model
from tiers.errors import TierError
from tiers.fleet import Fleet
from tiers.plan import GIB, EngineShare, MemoryPlan
from tiers.preparing import ENGINE_START_S
from tiers.spec import STANDARD_TIERS, EnginePlacement, TierName, TierSpec

FAST, BALANCED, PRECISE = STANDARD_TIERS


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QARR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("QARR_SERVER__RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("QARR_ENGINE__PYTHON", "/none")


def tier_spec(name: TierName, checkpoint: Path | None = None) -> TierSpec:
    return TierSpec(
        name,
        max_model_len=2048,
        max_num_seqs=16,
        max_in_flight=32,
        checkpoint=checkpoint,
    )


def memory_share(tier: TierName, *, weights: int, on_disk: int) -> EngineShare:
    return EngineShare(
        tier,
        weights=weights,
        on_disk=on_disk,
        kv_cache=GIB,
        kv_tokens=4096,
        placement=EnginePlacement(),
    )


def test_the_plan_says_what_is_measured_and_what_is_estimated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A checkpoint that is not made yet has an estimated size; one that grows in memory has both sizes."""
    made_tier = tier_spec(PRECISE, checkpoint=tmp_path)
    unmade = tier_spec(FAST)
    grown_share = memory_share(FAST, weights=2 * GIB, on_disk=GIB)
    plain_share = memory_share(PRECISE, weights=GIB // 2, on_disk=GIB // 2)
    memory_plan = MemoryPlan("CPU (2 cores)", (grown_share, plain_share))
    _show_memory_plan("m", memory_plan, (made_tier, unmade))
    head, grown, plain = capsys.readouterr().err.splitlines()
    assert head == "model m on CPU (2 cores)"
    assert (
        "fast     awq-int4  weights ~2.00 GiB (1.00 on disk, repacked for this CPU), KV cache  1.00 GiB"
        in grown
    )
    assert "weights  0.50 GiB, KV cache  1.00 GiB (4096 tokens), context 2048" in plain


def test_tiers_to_follow_have_a_time_where_it_is_known() -> None:
    """Before the model's size is known it is not."""
    fleet = Fleet(tuple(map(tier_spec, STANDARD_TIERS)))
    fleet.preparations.expect({FAST}, None)
    assert _tiers_to_follow(fleet) == "to follow: fast"
    fleet.preparations.made(FAST)
    fleet.preparations.starting(FAST)
    assert _tiers_to_follow(fleet) == f"to follow: fast in about {ENGINE_START_S:.0f} s"


def test_a_model_without_checkpoints_has_an_empty_list() -> None:
    """Nothing is made or downloaded by looking; one that cannot be prepared says why."""
    assert json.loads(qarr("model", "list", "--json").stdout) == []
    nothing = qarr("model", "list")
    assert nothing.stdout == ""
    assert "'qarr model prepare' makes them" in nothing.stderr
    assert isinstance(
        qarr("model", "prepare", "--model", "no such model").exception, TierError
    )
    assert isinstance(
        qarr("model", "list", QARR_MODEL__CALIBRATION_SAMPLES="-7").exception,
        SettingsError,
    )


@pytest.fixture
def small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the settings name a model whose checkpoints are made at once."""
    orders = tmp_path / "orders"
    python = tmp_path / "python"
    orders.mkdir()
    for command in ("bf16", "fp8", "awq", "nvfp4"):
        (orders / command).write_text("done")
    python.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(fake_quantizer.__file__)} "$@"\n'
    )
    python.chmod(0o755)
    for name, value in {
        "FAKE_QUANTIZER": orders, "QARR_MODEL__NAME": model(tmp_path / "model"), "QARR_MODEL__STORE": tmp_path / "store",
        "QARR_QUANTIZER__PYTHON": python,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))


@pytest.mark.usefixtures("small_model")
def test_finished_checkpoints_are_listed_with_their_folders() -> None:
    """A line each for people, and as JSON what scripts read."""
    made_tier = qarr("model", "prepare")
    assert made_tier.exit_code == 0, made_tier.output
    listed = qarr("model", "list").stdout.splitlines()
    rows = json.loads(qarr("model", "list", "--json").stdout)
    assert [row["tier"] for row in rows] == ["fast", "balanced", "precise"]
    for line, row in zip(listed, rows, strict=True):
        assert line.split()[0] == row["tier"]
        assert line.endswith(f" {row['path']}")
        assert row["weights_digest"][:16] in line
        assert Path(row["path"]).is_dir()


@pytest.mark.usefixtures("small_model")
def test_a_tier_gets_the_scheme_that_is_asked_for() -> None:
    """Its manifest has the scheme, and what the schemes are is said where there is no such one."""
    made_tier = qarr("model", "prepare", "--scheme", "fast=nvfp4")
    assert made_tier.exit_code == 0, made_tier.output
    assert "calibrating on 16 prompts of calibration.jsonl" in made_tier.stderr
    rows = json.loads(qarr("model", "list", "--json", "--scheme", "fast=nvfp4").stdout)
    assert [row["scheme"] for row in rows] == ["nvfp4", "fp8", None]
    assert [row["precision"] for row in rows] == ["nvfp4", "fp8", "bf16"]
    assert rows[0]["kept_in_16_bits"] == ["lm_head"]
    assert rows[0]["calibration_samples"] == 32
    usual = qarr("model", "list").stdout.splitlines()
    assert [line.split()[0] for line in usual] == ["balanced", "precise"]
    for argument, words in (
        ("nvfp4", "TIER=SCHEME is expected"),
        ("precise=fp8", "balanced and fast have a scheme"),
        ("fast=fp3", "awq-int4, gptq-int4, int4, nvfp4"),
    ):
        refused = qarr("model", "prepare", "--scheme", argument)
        assert refused.exit_code == 2
        assert words in " ".join(refused.stderr.replace("│", " ").split())


def test_settings_are_a_table_or_a_schema(tmp_path: Path) -> None:
    """After the file is checked: with a mistake in it neither is shown."""
    assert qarr("settings").stdout.split()[:5] == [
        "setting",
        "default",
        "reloads",
        "meaning",
        "server.host",
    ]
    assert (
        " tiers.*.max_model_len  fast 2048"
        in qarr("settings", "tiers.fast.max_model_len").stdout
    )
    assert (
        "here: server.port = 81"
        in qarr("settings", "server", QARR_SERVER__PORT="81").stdout
    )
    assert "there is no setting prot" in qarr("settings", "prot").stderr
    assert json.loads(qarr("settings", "--schema").stdout)["title"] == "Settings"
    (tmp_path / "qarr.toml").write_text("[server]\nprot = 1\n")
    result = qarr("settings", "--config", str(tmp_path / "qarr.toml"))
    assert type(result.exception) is SettingsError
    assert result.stdout == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_can_be_loaded_alone(name: str) -> None:
    """Only what it needs is imported for it; the help has a sentence on it."""
    result = CliRunner().invoke(
        make_app((name,)), [name, "--help"], env={"COLUMNS": "100"}
    )
    assert result.exit_code == 0
    assert "Usage: " in result.output


def test_the_other_name_of_serve_is_not_listed() -> None:
    """It works, and the help has one name for each command."""
    listed = CliRunner().invoke(make_app(), ["--help"], env={"COLUMNS": "200"}).output
    names = re.findall(r"^\W+(\w+)  ", listed, re.MULTILINE)
    assert sorted(set(names) & set(COMMANDS)) == sorted(set(COMMANDS) - {"router"})
    assert qarr("router", "--help").exit_code == 0


@pytest.mark.parametrize(
    "typed",
    ["tier", "key", "log", "rout", "server", "modle", "setting", "adapter", "profil"],
)
def test_a_mistyped_command_is_answered_with_commands_that_exist(typed: str) -> None:
    """Those of the help: not those that are kept for what a command was called elsewhere."""
    said = CliRunner().invoke(make_app(), [typed]).output
    suggested = re.findall(r"'([a-z]+)'", said)[1:]
    assert set(suggested) <= set(SHOWN)
    assert suggested or typed == "rout"


def test_a_redis_without_scripts_is_refused_in_one_line(own_redis: RedisServer) -> None:
    """Routers would each count alone, however many there are."""
    with Redis.from_url(own_redis.url) as operator:
        operator.execute_command("ACL", "SETUSER", "default", "-@scripting")
    result = subprocess.run(
        [
            Path(sys.executable).with_name("qarr"),
            "serve",
            "--fast",
            "http://127.0.0.1:1",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "QARR_STATE__REDIS_URL": own_redis.url},
    )
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(
        "error: state.redis_url: this Redis cannot count for routers ("
    )
    assert line.endswith("allow its user EVAL, or EVALSHA and SCRIPT LOAD")
