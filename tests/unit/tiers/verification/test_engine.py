"""A server is asked once what it serves; what cannot be verified is an error that says what to do."""

from __future__ import annotations

import httpx
import pytest

from tests.fakes.engine import serving
from tests.unit.tiers.verification.small_model import SmallModel
from tiers.errors import ProbeError
from tiers.verification.engine import ComparedEngine

pytestmark = pytest.mark.anyio


async def test_an_engine_says_what_it_is() -> None:
    small = SmallModel(context=1234, release="0.31.1", cache_dtype="fp8")
    async with serving(small.app) as url, httpx.AsyncClient() as client:
        engine = await ComparedEngine.connect(client, f"{url}/v1/", "")
        assert engine.model == "small"
        assert engine.identity.name == url
        assert engine.identity.max_model_len == 1234
        assert engine.identity.version == "0.31.1"
        assert engine.identity.kv_cache_dtype == "fp8"


async def test_what_a_server_does_not_tell_is_none() -> None:
    small = SmallModel(release="", cache_dtype="")
    async with serving(small.app) as url, httpx.AsyncClient() as client:
        engine = await ComparedEngine.connect(client, url, "", name="fast")
        assert engine.identity.name == "fast"
        assert engine.identity.version is None
        assert engine.identity.kv_cache_dtype is None


async def test_one_of_several_models_is_chosen_by_name() -> None:
    small = SmallModel(names=("auto", "fast", "precise"))
    async with serving(small.app) as url, httpx.AsyncClient() as client:
        engine = await ComparedEngine.connect(client, url, "", model="precise")
        assert engine.model == "precise"
        with pytest.raises(ProbeError, match="serves 3 models: name one of them"):
            await ComparedEngine.connect(client, url, "")
        with pytest.raises(
            ProbeError, match=r"no model 'exact'\. It serves: auto, fast, precise"
        ):
            await ComparedEngine.connect(client, url, "", model="exact")


async def test_a_password_in_the_url_is_refused_and_not_repeated() -> None:
    async with httpx.AsyncClient() as client:
        with pytest.raises(
            ProbeError, match="leave user name and password out"
        ) as error:
            await ComparedEngine.connect(client, "http://me:secret@host:8000", "")
    assert "secret" not in str(error.value)
