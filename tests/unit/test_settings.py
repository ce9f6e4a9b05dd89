"""Settings: defaults, file, environment, and errors that name the key."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from classifier import PromptClass
from router.policy.table import policy_table
from router.settings import SettingsError, load_settings
from tiers.spec import TierName

if TYPE_CHECKING:
    from pathlib import Path


def test_defaults_need_no_file() -> None:
    """Without a file the contract's bounds hold, and the router listens on loopback."""
    settings = load_settings()
    assert (settings.server.host, settings.server.port) == ("127.0.0.1", 8080)
    assert (settings.limits.max_prompt_chars, settings.limits.max_prompt_words, settings.limits.max_tokens) == (
        16000,
        5000,
        4096,
    )
    assert [getattr(settings.tiers, n.value).max_model_len for n in TierName] == [2048, 4096, 8192]


def test_file_then_environment_then_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each source overrides the one before, key by key."""
    file = tmp_path / "qarr.toml"
    file.write_text("[server]\nport = 1111\nhost = '0.0.0.0'\n[tiers.fast]\nmax_in_flight = 7\n")
    monkeypatch.setenv("QARR_SERVER__PORT", "2222")
    monkeypatch.setenv("QARR_TIERS__FAST__MAX_NUM_SEQS", "3")
    settings = load_settings(file, {"server": {"host": "127.0.0.2", "port": None}})
    assert (settings.server.port, settings.server.host) == (2222, "127.0.0.2")
    assert (settings.tiers.fast.max_in_flight, settings.tiers.fast.max_num_seqs) == (7, 3)
    assert settings.tiers.fast.max_model_len == 2048


def test_a_class_can_be_changed_alone(tmp_path: Path) -> None:
    """One row of the class table can be set without repeating the others."""
    file = tmp_path / "qarr.toml"
    file.write_text("[policy.class_floor]\ncode = 'fast'\n")
    table = policy_table(load_settings(file).policy)
    assert table.class_floor[PromptClass.CODE] is TierName.FAST
    assert table.class_floor[PromptClass.MATH] is TierName.BALANCED


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[server]\nprot = 1", "server.prot: there is no such setting"),
        ("[server]\nport = 70000", "server.port"),
        ("[tiers.fast]\nmax_model_len = 'long'", "tiers.fast.max_model_len"),
        ("[tiers.huge]\nmax_model_len = 1", "tiers.huge"),
        ("[policy.class_floor]\npoetry = 'fast'", "policy.class_floor.poetry"),
        ("[policy]\nmin_confidence = 2", "policy.min_confidence"),
        ("[telemetry]\ntrace_url = 'http://viewer/trace/'", "telemetry.trace_url: an address that begins with http"),
        ("not toml", "is not TOML"),
        ("[tiers.fast]\nurls = ['notaurl']", "tiers.fast.urls.0: this is no address that begins with http"),
        ("[tiers.fast]\nurls = ['ftp://h']", "tiers.fast.urls.0: this is no address that begins with http"),
        ("[tiers.fast]\nurls = ['http://h:99999']", "tiers.fast.urls.0: this is no address"),
        ("[tiers.fast]\nurls = ['http://h:0']", "tiers.fast.urls.0: this is no address that begins with http"),
        ("[tiers.fast]\nurls = ['http://h:8000/v1']", "tiers.fast.urls.0: the address ends with /v1"),
        ("[tiers.fast]\nurls = ['http://h:8000/?x']", "tiers.fast.urls.0: a query or a fragment"),
        ("[tiers.fast]\nurls = ['http://a b']", "tiers.fast.urls.0: this is no address"),
        ("[tiers.fast]\nurls = ['http://h:1', 'http://H:1/']", "tiers.fast.urls: http://h:1 is named more than once"),
        (
            "[tiers.fast]\nurls = ['http://h:1']\n[tiers.precise]\nurls = ['http://h:1/']",
            "tiers.fast.urls and tiers.precise.urls both name http://h:1/",
        ),
        ("[openai]\nembeddings_urls = ['h:1']", "openai.embeddings_urls.0: this is no address"),
        ("[engine]\napi_key = 'a b'", "engine.api_key: a key of printable ASCII"),
        ("[state]\nredis_url = 'http://h'", "state.redis_url: an address that begins with redis://"),
        ("[state]\nredis_url = 'redis://h:port'", "state.redis_url: an address that begins with redis://"),
    ],
)
def test_mistakes_in_the_file_name_the_key(tmp_path: Path, text: str, named: str) -> None:
    """A wrong key or value ends the start with the key's name."""
    file = tmp_path / "qarr.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=re.escape(named)):
        load_settings(file)


@pytest.mark.parametrize(
    "text",
    [
        "[state]\nredis_url = 'http://user:se@cret@h'",
        "[tiers.fast]\nurls = ['http://user:se@cret@h']",
        "[openai]\nembeddings_urls = ['http://user:se@cret@h']",
        "[engine]\napi_key = 'se cret'",
    ],
)
def test_a_mistake_shows_no_secret(tmp_path: Path, text: str) -> None:
    """What was given is in the error, but not a password or a key."""
    file = tmp_path / "qarr.toml"
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load_settings(file)
    assert "cret" not in str(caught.value)


def test_addresses_that_can_be_used(tmp_path: Path) -> None:
    """With a path before the API's, by name, by IPv6; Redis with TLS, and over a Unix socket."""
    file = tmp_path / "qarr.toml"
    file.write_text(
        "[tiers.fast]\nurls = ['http://gateway/fast', 'https://[::1]:8000/']\n"
        "[openai]\nembeddings_urls = ['http://embedder:8000/']\n"
        "[state]\nredis_url = 'unix:///run/redis.sock'\n"
    )
    settings = load_settings(file)
    assert settings.tiers.fast.urls == ("http://gateway/fast", "https://[::1]:8000/")
    assert settings.openai.embeddings_urls == ("http://embedder:8000",)
    assert settings.state.redis_url.get_secret_value() == "unix:///run/redis.sock"


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    """A file that was named must be there."""
    with pytest.raises(SettingsError, match="No such file"):
        load_settings(tmp_path / "none.toml")


@pytest.mark.parametrize("name", ["QARR_SERVER__PROT", "QARR_SEVER__PORT", "QARR_PORT"])
def test_mistyped_variable_is_an_error(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A variable with our prefix that sets nothing is refused, not ignored."""
    monkeypatch.setenv(name, "1")
    with pytest.raises(SettingsError, match=name):
        load_settings()


def test_the_command_line_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Highest first: command line, environment, file, defaults."""
    file = tmp_path / "qarr.toml"
    file.write_text("[server]\nport = 1\nmax_body_bytes = 5000\n[limits]\nmax_tokens = 7\n")
    monkeypatch.setenv("QARR_SERVER__PORT", "2")
    monkeypatch.setenv("QARR_SERVER__MAX_BODY_BYTES", "6000")
    settings = load_settings(file, {"server": {"port": 3}})
    assert (settings.server.port, settings.server.max_body_bytes, settings.limits.max_tokens) == (3, 6000, 7)
