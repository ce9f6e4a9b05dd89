"""The layout of the fleet: which tiers run here, with which checkpoint, tokenizer and port."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from classifier import EstimatingCounter, TokenCounter, TokenizerError
from router.deployment.layout import (
    HOST,
    LateCounter,
    elsewhere,
    make_counter,
    make_deployment,
    make_launches,
    named_counter,
    prepare_options,
    tier_spec,
)
from router.deployment.options import supervisor_options
from router.section import SettingsError
from router.settings import load_settings
from tests.unit.deployment.made_fleet import made, settings
from tests.unit.made_configs import model_folder, tier_folder
from tiers.errors import CheckpointError, EngineError, PlanError
from tiers.lifecycle.command import engine_environment
from tiers.spec import STANDARD_TIERS, UNKNOWN

FAST, BALANCED, PRECISE = STANDARD_TIERS
URL = "http://10.0.0.5:8000"

# The arguments for a template that shows no family.
HERMES = (
    "--enable-auto-tool-choice",
    "--tool-call-parser",
    "hermes",
    "--tool-strict-level",
    "parameter",
)


def test_a_url_goes_before_any_checkpoint(tmp_path: Path) -> None:
    """Then the folder of the settings, which has no digest, and then the prepared checkpoint with its own."""
    prepared = made(tmp_path)
    folder = tmp_path / "own"
    given = settings(
        tiers={
            "fast": {"urls": (URL,), "checkpoint": str(folder)},
            "balanced": {"checkpoint": str(folder)},
        }
    ).tiers
    elsewhere, folder_of, digest_of = (
        tier_spec(name, getattr(given, name), prepared, store=tmp_path)
        for name in STANDARD_TIERS
    )
    assert elsewhere.urls == (URL,)
    assert elsewhere.checkpoint is None
    assert elsewhere.digest is None
    assert folder_of.checkpoint == folder
    assert folder_of.digest is None
    assert digest_of.checkpoint == prepared[PRECISE].path
    assert digest_of.digest == prepared[PRECISE].manifest.weights_digest
    assert tier_spec(PRECISE, given.precise, {}, store=tmp_path).checkpoint is None
    of_the_hub = settings(tiers={"precise": {"checkpoint": "owner/Model-NVFP4"}}).tiers
    fetched = tier_spec(PRECISE, of_the_hub.precise, prepared, store=tmp_path)
    assert fetched.checkpoint == tmp_path / "hub" / "owner--Model-NVFP4"


def test_a_tiers_precision_is_that_of_its_checkpoint(tmp_path: Path) -> None:
    """Whatever the tier is called, and with what the engines' arguments make of it."""
    prepared = made(tmp_path)
    config = json.loads((prepared[PRECISE].path / "config.json").read_text())
    model_folder(prepared[PRECISE].path, {**config, "dtype": "bfloat16"})
    folder = tier_folder(tmp_path / "own", FAST)
    tiers = settings(tiers={"precise": {"checkpoint": str(folder)}}).tiers
    spec_of = partial(tier_spec, PRECISE, store=tmp_path)
    plain = settings().tiers.precise
    assert spec_of(tiers.precise, prepared).precision == "awq-int4"
    assert spec_of(plain, prepared).precision == "bf16"
    as_fp8 = spec_of(plain, prepared, args=("--quantization", "fp8"))
    assert as_fp8.precision == "fp8"
    assert spec_of(plain, {}).precision == UNKNOWN
    engine = {"python": Path(sys.executable), "extra_args": ("--dtype", "half")}
    deployment = make_deployment(settings(engine=engine), tuple(prepared.values()))
    assert [launch.tier.precision for launch in deployment.launches] == ["fp16"] * 3


def test_the_precision_of_engines_by_url_may_be_stated() -> None:
    """Until they are asked it is unknown, or as stated. For an engine that is started here it counts for nothing."""
    stating = {
        "fast": {"urls": (URL,), "precision": "fp8"},
        "precise": {"precision": "fp8"},
    }
    given = settings(tiers={**stating, "balanced": {"urls": (URL + "/b",)}}).tiers
    stated, unknown, here = (
        tier_spec(name, getattr(given, name), {}, store=Path("/none"))
        for name in STANDARD_TIERS
    )
    assert stated.precision == "fp8 (stated)"
    assert stated.stated_precision == "fp8"
    assert unknown.precision == UNKNOWN
    assert unknown.stated_precision is None
    assert here.precision == UNKNOWN
    assert here.stated_precision is None
    for wrong in ("FP 8", "a\r\nb: c", "f" * 33):
        with pytest.raises(SettingsError, match="precision"):
            settings(tiers={"fast": {"urls": (URL,), "precision": wrong}})


def test_engines_that_come_and_go_are_named_by_dns_and_a_file(tmp_path: Path) -> None:
    """A tier with a DNS name starts nothing here; what names them identifies its weights, unless it has addresses."""
    file = tmp_path / "fleet.json"
    given = {
        "fast": {"dns": "http://engines:8000", "precision": "fp8"},
        "balanced": {"urls": (URL,)},
    }
    deployment = make_deployment(
        settings(tiers=given, discovery={"file": file}), (), start_engines=False
    )
    fast, balanced, precise = deployment.specs
    assert [spec.replicas for spec in deployment.specs] == [0, 0, 0]
    assert fast.named_by == ("http://engines:8000", str(file))
    assert fast.stated_precision == "fp8"
    assert fast.identity == f"http://engines:8000 {file}"
    assert balanced.identity == URL
    assert precise.identity == str(file)
    options = supervisor_options(
        settings(tiers=given, discovery={"file": file, "interval_s": 1})
    ).discovery
    assert options.file == file
    assert options.names == {FAST: "http://engines:8000"}
    assert options.interval_s == 1


def test_a_router_in_front_of_nothing_is_refused() -> None:
    """A file or a DNS name is enough: engines may come."""
    with pytest.raises(PlanError, match=r"neither urls, dns nor discovery\.file"):
        make_deployment(settings(), (), start_engines=False)
    assert make_deployment(
        settings(tiers={"fast": {"dns": "http://engines"}}), (), start_engines=False
    ).specs


def test_engines_get_ports_and_keys_of_their_own(tmp_path: Path) -> None:
    """Ports follow one another from the first one, in the order of the tiers that run here."""
    prepared = made(tmp_path)
    given = settings(
        engine={
            "python": Path(sys.executable),
            "base_port": 9500,
            "extra_args": ("--a",),
        },
        tiers={"balanced": {"urls": (URL,)}},
    )
    deployment = make_deployment(given, tuple(prepared.values()))
    assert [(launch.tier.name, launch.port) for launch in deployment.launches] == [
        (FAST, 9500),
        (PRECISE, 9501),
    ]
    assert {launch.host for launch in deployment.launches} == {HOST}
    assert {launch.extra_args for launch in deployment.launches} == {(*HERMES, "--a")}
    keys = {launch.api_key for launch in deployment.launches}
    assert len(keys) == 2
    assert min(map(len, keys)) >= 24
    assert deployment.local == {FAST, PRECISE}
    assert deployment.missing == ()
    assert deployment.model == "m"
    assert deployment.counter.exact is True
    assert deployment.counter.count("a b a") == 3
    again = make_launches(deployment.specs, deployment.plan, given, model="m")
    assert keys.isdisjoint(launch.api_key for launch in again)


def test_a_tier_has_engines_here_and_elsewhere(tmp_path: Path) -> None:
    """Those here have the checkpoint, those elsewhere only what is stated; each has a port, a key and cores of its own."""
    prepared = made(tmp_path)
    given = settings(
        engine={"python": Path(sys.executable), "base_port": 9500},
        tiers={
            "fast": {"urls": (URL,), "replicas": 2, "precision": "int4"},
            "balanced": {"replicas": 0},
        },
    )
    deployment = make_deployment(given, tuple(prepared.values()))
    assert [(launch.tier.name, launch.port) for launch in deployment.launches] == [
        (FAST, 9500),
        (FAST, 9501),
        (PRECISE, 9502),
    ]
    assert len({launch.api_key for launch in deployment.launches}) == 3
    first, second, _ = (launch.tier for launch in deployment.launches)
    assert first == second
    assert first.urls == ()
    assert first.stated_precision is None
    there = elsewhere(deployment.specs[0])
    assert there.urls == (URL,)
    assert there.checkpoint is None
    assert there.digest is None
    assert there.precision == "int4 (stated)"
    assert deployment.local == {FAST, PRECISE}
    assert deployment.missing == ()


def test_checkpoints_of_tiers_that_are_left_out_are_not_made(tmp_path: Path) -> None:
    """One tier is enough; without any nothing can start."""
    one = {name: {"replicas": 0} for name in ("fast", "balanced")}
    deployment = make_deployment(settings(tiers=one), ())
    assert deployment.missing == (PRECISE,)
    assert [spec.replicas for spec in deployment.specs] == [0, 0, 1]
    with pytest.raises(PlanError, match="every tier is left out"):
        make_deployment(
            settings(tiers={**one, "precise": {"replicas": 0}}),
            tuple(made(tmp_path).values()),
        )


def test_the_gpus_of_one_engine_must_be_named_whole() -> None:
    with pytest.raises(
        SettingsError, match=r"tiers\.precise: gpus names 1, one engine takes .* = 2"
    ):
        settings(tiers={"precise": {"gpus": (0,), "tensor_parallel": 2}})
    with pytest.raises(SettingsError, match="0 is named more than once"):
        settings(tiers={"precise": {"gpus": (0, 0)}})
    with pytest.raises(
        SettingsError, match=r"set tiers\.<name>\.tensor_parallel instead"
    ):
        settings(tiers={"precise": {"engine_args": ("--tensor-parallel-size", "2")}})


def test_the_router_alone_starts_nothing() -> None:
    """Tiers without URLs are left out: no plan, no environment and no checkpoint are needed."""
    given = load_settings(
        None, {"engine": {"python": "/none"}, "tiers": {"fast": {"urls": (URL,)}}}
    )
    deployment = make_deployment(given, (), start_engines=False)
    assert deployment.launches == ()
    assert deployment.local == frozenset()
    assert deployment.missing == ()
    assert [bool(spec.urls) for spec in deployment.specs] == [True, False, False]
    assert not deployment.counter.exact


def test_missing_checkpoints_wait_for_the_model(tmp_path: Path) -> None:
    """Nothing is launched, and all tiers without URLs count as local; the counter can be replaced later."""
    deployment = make_deployment(settings(tiers={"precise": {"urls": (URL,)}}), ())
    assert deployment.missing == (FAST, BALANCED)
    assert deployment.launches == ()
    assert deployment.local == {FAST, BALANCED}
    assert isinstance(deployment.counter, LateCounter)


def test_a_model_that_cannot_be_found_ends_it() -> None:
    with pytest.raises(CheckpointError, match="neither a folder"):
        make_deployment(settings(model={"name": "no such model"}), ())


def test_engines_here_need_an_environment() -> None:
    """Named with the command that makes it, and the setting that names another."""
    with pytest.raises(EngineError, match=r"make engine-env.*engine\.python"):
        make_deployment(load_settings(None, {"engine": {"python": "/none"}}), ())


def test_tiers_with_different_tokenizers_are_refused(tmp_path: Path) -> None:
    prepared = made(tmp_path)
    (prepared[FAST].path / "tokenizer.json").write_text(json.dumps({"version": "2.0"}))
    with pytest.raises(CheckpointError):
        make_deployment(settings(), tuple(prepared.values()))


def test_how_checkpoints_are_made_comes_from_the_settings(tmp_path: Path) -> None:
    model = {"name": "a/b", "store": tmp_path, "calibration_samples": 3}
    options = prepare_options(settings(model=model, quantizer={"python": "/q"}))
    assert options.model == "a/b"
    assert options.store == tmp_path
    assert options.quantizer_python == Path("/q")
    assert options.calibration_samples == 3


@pytest.mark.parametrize(
    ("folder", "said"), [("none", "is no folder"), (".", "has no tokenizer.json")]
)
def test_a_named_tokenizer_must_be_there(
    tmp_path: Path, folder: str, said: str
) -> None:
    """An estimate in its place would go unnoticed; the same folder as a checkpoint only means an estimate."""
    with pytest.raises(TokenizerError, match=f"--tokenizer: .*{said}"):
        named_counter(tmp_path / folder)
    assert not make_counter(tmp_path / folder).exact
    assert not make_counter(None).exact


def test_a_late_counter_counts_as_its_present_one() -> None:
    """Both what it counts and whether that is exact change at once."""

    class Letters(TokenCounter):
        """Counts letters."""

        __slots__ = ()

        def __init__(self) -> None:
            pass

        exact = True

        def count(self, text: str) -> int:
            return len(text)

    late = LateCounter(EstimatingCounter())
    assert (late.exact, late.count("twelve chars")) != (True, 12)
    late.replace(Letters())
    assert late.exact is True
    assert late.count("twelve chars") == 12


def test_supervision_follows_the_settings(tmp_path: Path) -> None:
    """Each setting reaches the part that it is for."""
    given = settings(
        engine={
            "hang_s": 7,
            "max_restarts": 2,
            "api_key": "k",
            "drain_s": 3,
            "check_tolerance": 2,
        },
        policy={"profiles": tmp_path},
    )
    supervised = supervisor_options(given)
    assert supervised.watchdog.hang_s == 7
    assert supervised.watchdog.max_restarts == 2
    assert supervised.operations.drain_s == 3
    assert supervised.external_api_key == "k"
    assert supervised.canary is not None
    assert supervised.canary.path == tmp_path / "canary.json"
    assert supervised.canary.tolerance == 2


def test_each_tier_has_arguments_and_variables_of_its_own(tmp_path: Path) -> None:
    """Its arguments come after those of all engines; its variables over those of the environment."""
    given = settings(
        engine={"python": Path(sys.executable), "extra_args": ("--dtype", "half")},
        tiers={
            "fast": {
                "engine_args": ("--dtype", "float"),
                "env": {"VLLM_LOGGING_LEVEL": "DEBUG"},
            }
        },
    )
    launches = {
        launch.tier.name: launch
        for launch in make_deployment(given, tuple(made(tmp_path).values())).launches
    }
    assert launches[FAST].extra_args == (*HERMES, "--dtype", "half", "--dtype", "float")
    assert launches[PRECISE].extra_args == (*HERMES, "--dtype", "half")
    assert (
        engine_environment(launches[FAST], {"VLLM_LOGGING_LEVEL": "INFO"})[
            "VLLM_LOGGING_LEVEL"
        ]
        == "DEBUG"
    )
    assert (
        engine_environment(launches[PRECISE], {"VLLM_LOGGING_LEVEL": "INFO"})[
            "VLLM_LOGGING_LEVEL"
        ]
        == "INFO"
    )


@pytest.mark.parametrize(
    ("tier", "said"),
    [
        (
            {"engine_args": ("--port", "1")},
            "tiers.fast.engine_args: --port is QARR's own: set engine.base_port instead",
        ),
        (
            {"engine_args": ("--max_model_len=9",)},
            "set tiers.<name>.max_model_len instead",
        ),
        (
            {"env": {"QARR_KEY": "secret"}},
            "tiers.fast.env: QARR_KEY: variables of QARR's own do not reach engines",
        ),
        ({"env": {"VLLM_API_KEY": "secret"}}, "engines started here get a random key"),
        ({"env": {"A B": "secret"}}, "a name of letters, digits and underscores"),
    ],
)
def test_arguments_and_variables_are_checked(tier: dict[str, Any], said: str) -> None:
    """No value of a variable is in an error."""
    with pytest.raises(SettingsError) as error:
        settings(tiers={"fast": tier})
    assert said in str(error.value)
    assert "secret" not in str(error.value)
