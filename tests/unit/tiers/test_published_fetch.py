"""Fetching published checkpoints with the hub's own library, from a hub on loopback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.hub import FakeHub, fake_hub
from tests.unit.made_checkpoints import model
from tiers.checkpoints.contents import read_contents
from tiers.checkpoints.hub import hub_folder
from tiers.checkpoints.prepare import PrepareOptions
from tiers.checkpoints.published import CheckpointFetcher, PublishedCheckpoint
from tiers.errors import CheckpointError

NAME = "nvidia/Model-NVFP4"
FAST = PublishedCheckpoint("tiers.fast.checkpoint", NAME)
WEIGHTS = b"\x02\0\0\0\0\0\0\0{}" + bytes(5 << 20)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    folder = model(tmp_path / "model")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files |= {"model.safetensors": WEIGHTS, "README.md": b"# Model"}
    files["hf_quant_config.json"] = b'{"quantization": {"quant_algo": "NVFP4"}}'
    with fake_hub({NAME: files, "owner/gguf": {"model.gguf": b"GGUF"}}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        yield hub


class Told:
    """Collects the progress that is told."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int, int]] = []

    def __call__(self, message: str, done: int, total: int) -> None:
        self.steps.append((message, done, total))


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def fetcher(tmp_path: Path, told: Told) -> CheckpointFetcher:
    """Return a fetcher in this environment, which has the hub's library and nothing else of a quantizer's."""
    options = PrepareOptions(
        "none", tmp_path / "store", quantizer_python=Path(sys.executable)
    )
    return CheckpointFetcher(options, told)


def test_small_files_come_first_and_weights_follow(
    tmp_path: Path, served: FakeHub, fetcher: CheckpointFetcher, told: Told
) -> None:
    """Only what is served is fetched, and only once."""
    small = fetcher.small_files(FAST)
    assert "model.safetensors" not in served.fetched
    assert read_contents(small).is_quantized
    assert not (hub_folder(NAME, tmp_path / "store") / "config.json").exists()
    folder = fetcher.fetch(FAST)
    assert folder == hub_folder(NAME, tmp_path / "store")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert (folder / "chat_template.jinja").read_text() == "t"
    assert not (folder / "README.md").exists()
    assert not small.exists()
    assert told.steps[0] == (f"downloading {NAME}", 0, 0)
    before = list(served.fetched)
    assert fetcher.fetch(FAST) == fetcher.small_files(FAST) == folder
    assert served.fetched == before


def test_a_model_that_is_not_there_is_said(
    served: FakeHub, fetcher: CheckpointFetcher
) -> None:
    del served
    missing = PublishedCheckpoint("tiers.fast.checkpoint", "nvidia/Modle")
    with pytest.raises(
        CheckpointError,
        match=r"tiers\.fast\.checkpoint: nvidia/Modle cannot be fetched .*RepositoryNotFoundError.*check the id",
    ):
        fetcher.small_files(missing)


def test_a_gated_model_wants_an_agreement(
    served: FakeHub, fetcher: CheckpointFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.gated.add(NAME)
    with pytest.raises(
        CheckpointError, match=r"GatedRepoError.*accept it on the model's page"
    ):
        fetcher.small_files(FAST)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert (fetcher.small_files(FAST) / "config.json").is_file()


def test_a_model_that_does_not_fit_is_not_begun(
    served: FakeHub, fetcher: CheckpointFetcher
) -> None:
    served.claimed_bytes["model.safetensors"] = 1 << 60
    with pytest.raises(
        CheckpointError,
        match=r"NoRoomError: it needs 1073741824\.0 GiB, and .* GiB are free.*model\.store",
    ):
        fetcher.fetch(FAST)
    assert served.fetched == []


def test_an_interrupted_download_goes_on(
    tmp_path: Path, served: FakeHub, fetcher: CheckpointFetcher
) -> None:
    """Files that are there are not fetched again; until all are, no folder looks finished."""
    served.broken.add("model.safetensors")
    with pytest.raises(CheckpointError, match=r"cannot be fetched .*what came is kept"):
        fetcher.fetch(FAST)
    assert "config.json" in served.fetched
    assert not hub_folder(NAME, tmp_path / "store").exists()
    served.broken.clear()
    folder = fetcher.fetch(FAST)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert served.fetched.count("config.json") == 1


def test_a_hub_that_does_not_answer_is_said(
    served: FakeHub, fetcher: CheckpointFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    del served
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        CheckpointError, match=r"ConnectError.*check the network, HF_ENDPOINT"
    ):
        fetcher.small_files(FAST)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match=r"OfflineModeIsEnabled.*HF_HUB_OFFLINE"):
        fetcher.small_files(FAST)


def test_what_is_no_model_of_transformers_is_refused(
    tmp_path: Path, served: FakeHub, fetcher: CheckpointFetcher
) -> None:
    del served
    gguf = PublishedCheckpoint("tiers.fast.checkpoint", "owner/gguf")
    with pytest.raises(CheckpointError, match=r"owner/gguf has no config\.json"):
        fetcher.small_files(gguf)
    assert not list((tmp_path / "store" / "hub").glob("owner*"))
