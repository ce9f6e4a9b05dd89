"""The sample settings are valid, and start what they say."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING

import pytest

from router.deployment.layout import make_deployment
from router.settings import load_settings
from tests.deploy.services import DEPLOY

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES = sorted((DEPLOY / "settings").glob("*.toml"))


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_samples_are_settings(path: Path) -> None:
    """Every key is a setting, every value is allowed, and no secret is in the file."""
    settings = load_settings(path)
    text = path.read_text("utf-8")
    # The file says how it is used.
    assert f"--config {path.name}" in text
    for section, keys in tomllib.loads(text).items():
        for key in keys:
            assert hasattr(getattr(settings, section), key)
    assert not settings.state.redis_url.get_secret_value()
    assert not settings.engine.api_key


def test_every_sample_is_there() -> None:
    assert [path.stem for path in SAMPLES] == ["laptop", "routers-redis", "single-gpu"]


def test_the_routers_sample_needs_no_engine_here() -> None:
    """Its tiers are on other machines, so no engine is started."""
    settings = load_settings(DEPLOY / "settings/routers-redis.toml")
    deployment = make_deployment(settings, (), start_engines=False)
    assert deployment.launches == ()
    assert [len(spec.urls) for spec in deployment.specs] == [2, 1, 1]


def test_secrets_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that the sample names are read."""
    monkeypatch.setenv("QARR_STATE__REDIS_URL", "redis://user:password@redis:6379/0")
    monkeypatch.setenv("QARR_ENGINE__API_KEY", "k")
    settings = load_settings(DEPLOY / "settings/routers-redis.toml")
    assert settings.state.redis_url.get_secret_value().endswith("@redis:6379/0")
    assert settings.engine.api_key == "k"
    assert "password" not in repr(settings)
