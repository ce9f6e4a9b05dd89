"""Tiers from published checkpoints: which are served, which are made, which are left out, and what is said of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.deployment.layout import make_deployment, model_name
from router.deployment.published import SettledTiers, settle_tiers
from router.settings import Settings
from tests.unit.deployment.made_fleet import TOKENIZER_OF_TWO_WORDS, made, settings
from tiers.checkpoints.hub import hub_folder
from tiers.errors import CheckpointError, ModelMismatchError, PlanError
from tiers.spec import STANDARD_TIERS, TierName

FAST, BALANCED, PRECISE = STANDARD_TIERS
GPT_OSS = (
    Path(__file__).parents[2] / "data" / "checkpoints_published" / "gpt-oss-20b.json"
)
MXFP4 = json.loads(GPT_OSS.read_bytes())["config"]["quantization_config"]
AWQ = {"quant_method": "awq", "bits": 4}


def base_model(
    folder: Path, template: str = "t", quantization: dict[str, Any] | None = None
) -> Path:
    """Make a folder with what gpt-oss-20b says of itself, and a tokenizer that counts. It has no weights."""
    folder.mkdir(parents=True)
    config = json.loads(GPT_OSS.read_bytes())["config"]
    config |= {"dtype": "bfloat16", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER_OF_TWO_WORDS))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def published(folder: Path, quantization: dict[str, Any], template: str = "t") -> str:
    """Make a quantized model folder; return its name as the settings have it."""
    return str(base_model(folder, template, quantization))


def settle(given: Settings) -> SettledTiers:
    return settle_tiers(given, lambda *_: None)


def with_settled(given: dict[str, Any], settled: SettledTiers) -> Settings:
    """Return settings to which is added what was settled."""
    tiers = {name: dict(values) for name, values in given.get("tiers", {}).items()}
    for name, values in settled.overrides.items():
        tiers.setdefault(name, {}).update(values)
    return settings(**{**given, "tiers": tiers})


def test_without_published_checkpoints_all_is_as_before(tmp_path: Path) -> None:
    """The built-in model, and a base in 16 bits, of which all three are made."""
    assert settle(settings()) == SettledTiers()
    base = str(base_model(tmp_path / "base"))
    assert settle(settings(model={"name": base})) == SettledTiers()


def test_what_is_named_is_served_and_the_rest_is_made(tmp_path: Path) -> None:
    fast = published(tmp_path / "fast", AWQ)
    given = {
        "model": {
            "name": str(base_model(tmp_path / "base")),
            "store": tmp_path / "store",
        },
        "tiers": {"fast": {"checkpoint": fast}},
    }
    settled = settle(settings(**given))
    assert settled.overrides == {}
    assert settled.folders == {FAST: Path(fast)}
    assert settled.notes == (f"fast serves {fast} as published, in awq-int4",)
    deployment = make_deployment(with_settled(given, settled), ())
    assert deployment.missing == (BALANCED, PRECISE)
    assert deployment.specs[0].checkpoint == Path(fast)
    assert deployment.specs[0].precision == "awq-int4"


def test_a_quantized_base_is_the_highest_precision_as_published(tmp_path: Path) -> None:
    """Under its own name; nothing is made of it, so that no quantizer is needed."""
    base = published(tmp_path / "Model-MXFP4", MXFP4)
    given: dict[str, Any] = {"model": {"name": base}}
    settled = settle(settings(**given))
    (note,) = settled.notes
    assert note == (
        f"{base} is published in mxfp4 and served as it is, as precise: losses count against it. Nothing lower is made of "
        "it: fast and balanced are left out (--fast or --balanced names a published checkpoint)"
    )
    deployment = make_deployment(with_settled(given, settled), ())
    assert deployment.missing == ()
    assert [launch.tier.name for launch in deployment.launches] == [PRECISE]
    assert [spec.absent for spec in deployment.specs] == [True, True, False]
    assert deployment.specs[-1].precision == "mxfp4"
    assert deployment.model == "model-mxfp4"


def test_a_quantized_base_stands_beside_a_published_checkpoint(tmp_path: Path) -> None:
    base = published(tmp_path / "base", MXFP4)
    fast = published(tmp_path / "fast", AWQ)
    given = {"model": {"name": base}, "tiers": {"fast": {"checkpoint": fast}}}
    settled = settle(settings(**given))
    assert settled.overrides == {
        "balanced": {"replicas": 0},
        "precise": {"checkpoint": base},
    }
    assert "balanced is left out (--balanced names" in settled.notes[0]
    assert settled.notes[1] == f"fast serves {fast} as published, in awq-int4"
    deployment = make_deployment(with_settled(given, settled), ())
    assert [launch.tier.precision for launch in deployment.launches] == [
        "awq-int4",
        "mxfp4",
    ]


def test_a_lower_tier_of_more_bits_is_noted(tmp_path: Path) -> None:
    """It may be a slip: the highest precision is what the others are measured against."""
    base = published(tmp_path / "base", MXFP4)
    balanced = str(base_model(tmp_path / "balanced"))
    settled = settle(
        settings(model={"name": base}, tiers={"balanced": {"checkpoint": balanced}})
    )
    assert settled.notes[-1].startswith(
        "balanced has more bits a weight (bf16) than precise (mxfp4), which losses"
    )


def test_a_tier_that_is_asked_for_is_not_left_out_silently(tmp_path: Path) -> None:
    """Engines of a tier were asked for, which nothing can be made for."""
    base = published(tmp_path / "base", MXFP4)
    given = settings(model={"name": base}, tiers={"balanced": {"replicas": 1}})
    with pytest.raises(
        CheckpointError,
        match=r"tiers\.balanced\.replicas asks for engines of balanced, but .* is published in mxfp4.*--balanced",
    ):
        settle(given)


def test_a_quantized_base_that_nobody_serves_is_said(tmp_path: Path) -> None:
    """A checkpoint for precise takes its place; the base may be a lower tier's."""
    base = published(tmp_path / "base", MXFP4)
    precise = str(base_model(tmp_path / "precise"))
    settled = settle(
        settings(model={"name": base}, tiers={"precise": {"checkpoint": precise}})
    )
    assert settled.overrides == {"fast": {"replicas": 0}, "balanced": {"replicas": 0}}
    assert "but precise has a checkpoint of its own: name it with" in settled.notes[0]


def test_a_format_that_is_not_known_is_quantized_all_the_same(tmp_path: Path) -> None:
    """Nothing is made of it either; older releases of ModelOpt write a file of their own."""
    base = published(tmp_path / "base", {"quant_method": "of tomorrow"})
    assert (
        "in a format that QARR does not know"
        in settle(settings(model={"name": base})).notes[0]
    )
    nvidia = base_model(tmp_path / "nvidia")
    (nvidia / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": "FP8"}})
    )
    settled = settle(settings(model={"name": str(nvidia)}))
    assert settled.overrides["precise"] == {"checkpoint": str(nvidia)}


def test_checkpoints_of_another_model_are_refused_before_anything_is_made(
    tmp_path: Path,
) -> None:
    """Unless it is meant: then tiers that read prompts differently can be told apart."""
    base = str(base_model(tmp_path / "base"))
    fast = published(tmp_path / "fast", AWQ, template="another")
    given: dict[str, Any] = {
        "model": {"name": base},
        "tiers": {"fast": {"checkpoint": fast}},
    }
    with pytest.raises(
        ModelMismatchError, match=r'fast: line 1 of the chat template is "another"'
    ):
        settle(settings(**given))
    given["model"]["allow_different"] = True
    given["tiers"]["precise"] = {"checkpoint": base}
    given["tiers"]["balanced"] = {"checkpoint": published(tmp_path / "b", MXFP4)}
    settled = settle(settings(**given))
    specs = make_deployment(with_settled(given, settled), ()).specs
    identities = {spec.name: spec.prompt_identity for spec in specs}
    assert identities[BALANCED] == identities[PRECISE] is not None
    assert identities[FAST] not in {None, identities[PRECISE]}


def test_checkpoints_of_one_model_need_no_identity(tmp_path: Path) -> None:
    specs = make_deployment(settings(), tuple(made(tmp_path).values())).specs
    assert {spec.prompt_identity for spec in specs} == {None}


@pytest.mark.parametrize("tier", STANDARD_TIERS)
def test_a_name_that_is_no_model_names_its_setting(
    tmp_path: Path, tier: TierName
) -> None:
    with pytest.raises(
        CheckpointError,
        match=rf"tiers\.{tier}\.checkpoint: '{tmp_path}' is neither a folder with config\.json nor",
    ):
        settle(settings(tiers={tier: {"checkpoint": str(tmp_path)}}))


def test_a_tier_without_engines_here_needs_no_checkpoint(tmp_path: Path) -> None:
    """Unless another tier drafts with it."""
    tier = {"checkpoint": "owner/Model", "urls": ("http://10.0.0.5:8000",)}
    base = published(tmp_path / "base", MXFP4)
    given: dict[str, Any] = {"model": {"name": base}, "tiers": {"fast": tier}}
    given["quantizer"] = {"python": "/none"}
    given["engine"] = {"python": "/none"}
    assert "fast" not in settle(settings(**given)).overrides
    given["tiers"]["precise"] = {"draft": "fast"}
    with pytest.raises(CheckpointError, match=r"tiers\.fast\.checkpoint: owner/Model"):
        settle(settings(**given))


def test_an_id_stands_for_a_folder_of_the_store(tmp_path: Path) -> None:
    """One that was fetched is not fetched again: neither a quantizer nor a network is needed."""
    store = tmp_path / "store"
    published(hub_folder("nvidia/Model-NVFP4", store), AWQ)
    base = str(base_model(tmp_path / "base"))
    tiers = {
        "fast": {"checkpoint": "nvidia/Model-NVFP4"},
        "precise": {"checkpoint": base},
        "balanced": {"replicas": 0},
    }
    given: dict[str, Any] = {"model": {"store": store}, "tiers": tiers}
    settled = settle(settings(**given, quantizer={"python": "/none"}))
    deployment = make_deployment(with_settled(given, settled), ())
    assert deployment.specs[0].checkpoint == hub_folder("nvidia/Model-NVFP4", store)
    assert deployment.model == "base"


@pytest.mark.parametrize(
    ("name", "precise", "shown"),
    [
        ("my-model", "/models/My Model", "my-model"),
        (None, "/models/My Model", "my-model"),
        (None, "openai/gpt-oss-20b", "gpt-oss-20b"),
        ("openai/gpt-oss-20b", "openai/gpt-oss-20b", "gpt-oss-20b"),
        ("Qwen/Qwen3-8B", None, "Qwen/Qwen3-8B"),
    ],
)
def test_a_model_is_called_by_its_name_or_by_its_highest_precision(
    name: str | None, precise: str | None, shown: str
) -> None:
    given = settings(model={"name": name}, tiers={"precise": {"checkpoint": precise}})
    assert model_name(given, {}) == shown


def test_an_empty_name_is_no_checkpoint() -> None:
    with pytest.raises(Exception, match=r"tiers\.fast\.checkpoint: a model folder or"):
        settings(tiers={"fast": {"checkpoint": " "}})


def test_all_left_out_is_nothing_to_serve(tmp_path: Path) -> None:
    base = published(tmp_path / "base", MXFP4)
    given: dict[str, Any] = {
        "model": {"name": base},
        "tiers": {"precise": {"replicas": 0}},
    }
    with pytest.raises(PlanError, match="every tier is left out"):
        make_deployment(with_settled(given, settle(settings(**given))), ())
