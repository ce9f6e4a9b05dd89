"""Settings: defaults, file, environment, and errors that name the key."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from router.cli.show_settings import rows
from router.policy.settings import LikeTier
from router.section import PROJECT, SettingsError, cache_dir, config_dir, runtime_dir
from router.server.settings import ServerSettings
from router.settings import GONE, PREFIX, Settings, leaves, load_settings
from router.telemetry.settings import TelemetrySettings
from tests.imports import modules, room_of
from tiers.spec import STANDARD_TIERS, TierName

# Rooms that read another's section; only goes down.
FOREIGN = {
    ("accounting", "policy"),
    ("auth", "tls"),
    ("profiling", "policy"),
    *(("api", s) for s in ("engine", "server", "telemetry", "tiers")),
}


def test_defaults_need_no_file() -> None:
    """Without a file the contract's bounds hold, and the router listens on loopback."""
    settings = load_settings()
    assert (settings.server.host, settings.server.port) == ("127.0.0.1", 8080)
    limits = settings.limits
    assert (limits.max_prompt_chars, limits.max_prompt_words, limits.max_tokens) == (
        16000,
        5000,
        4096,
    )
    assert [getattr(settings.tiers, n).max_model_len for n in STANDARD_TIERS] == [
        2048,
        4096,
        8192,
    ]


def test_file_then_environment_then_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each source overrides the one before, key by key."""
    file = tmp_path / "qarr.toml"
    file.write_text(
        "[server]\nport = 1111\nhost = '0.0.0.0'\n[tiers.fast]\nmax_in_flight = 7\n"
    )
    monkeypatch.setenv("QARR_SERVER__PORT", "2222")
    monkeypatch.setenv("QARR_TIERS__FAST__MAX_NUM_SEQS", "3")
    settings = load_settings(
        file,
        {
            "server": {"host": "127.0.0.2", "port": None},
            "tiers": {"fast": {"replicas": 2}},
        },
    )
    assert (
        settings.server.port,
        settings.server.host,
        settings.tiers.fast.replicas,
    ) == (2222, "127.0.0.2", 2)
    assert (settings.tiers.fast.max_in_flight, settings.tiers.fast.max_num_seqs) == (
        7,
        3,
    )
    assert settings.tiers.fast.max_model_len == 2048


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[server]\nprot = 1", "server.prot: there is no such setting"),
        ("[server]\nport = 70000", "server.port"),
        ("[tiers.fast]\nmax_model_len = 'long'", "tiers.fast.max_model_len"),
        ("[tiers.huge]\nmax_model_len = 1", "tiers.huge"),
        ("[policy.max_loss]\npoetry = 0.1", "policy.max_loss.poetry"),
        ("[policy]\nmax_slowdown = 1", "policy.max_slowdown"),
        (
            "[telemetry]\ntrace_url = 'http://viewer/trace/'",
            "telemetry.trace_url: an address that begins with http",
        ),
        ("not toml", "is not TOML"),
        (
            "[tiers.fast]\nurls = ['notaurl']",
            "tiers.fast.urls.0: not an address with http",
        ),
        (
            "[tiers.fast]\nurls = ['ftp://h']",
            "tiers.fast.urls.0: not an address with http",
        ),
        (
            "[tiers.fast]\nurls = ['http://h:99999']",
            "tiers.fast.urls.0: not an address",
        ),
        (
            "[tiers.fast]\nurls = ['http://h:0']",
            "tiers.fast.urls.0: not an address with http",
        ),
        (
            "[tiers.fast]\nurls = ['http://h:8000/v1']",
            "tiers.fast.urls.0: the address ends with /v1",
        ),
        (
            "[tiers.fast]\nurls = ['http://h:8000/?x']",
            "tiers.fast.urls.0: it may not have a query",
        ),
        ("[tiers.fast]\nurls = ['http://a b']", "tiers.fast.urls.0: not an address"),
        (
            "[tiers.fast]\nurls = ['http://h:1', 'http://H:1/']",
            "tiers.fast.urls: http://h:1 is named more than once",
        ),
        (
            "[tiers.fast]\nurls = ['http://h:1']\n[tiers.precise]\nurls = ['http://h:1/']",
            "tiers.fast.urls and tiers.precise.urls both name http://h:1/",
        ),
        (
            "[tiers.fast]\ndns = 'https://h:1'",
            "tiers.fast.dns: engines are reached by their addresses, which no certificate",
        ),
        ("[tiers.fast]\ndns = 'h:1'", "tiers.fast.dns: not an address with http"),
        (
            "[tiers.fast]\ndns = 'http://h:1'\nurls = ['http://h:1']",
            "tiers.fast.urls and tiers.fast.dns both name http://h:1",
        ),
        (
            "[discovery]\ninterval_s = 0",
            "discovery.interval_s: Input should be greater than or equal to 0.1",
        ),
        (
            "[openai]\nembeddings_urls = ['h:1']",
            "openai.embeddings_urls.0: not an address",
        ),
        ("[engine]\napi_key = 'a b'", "engine.api_key: a key of printable ASCII"),
        (
            "[overflow]\nurl = 'https://h/v1'",
            "overflow: url needs model: the name of the model to ask it for",
        ),
        (
            "[overflow]\nurl = 'h/v1'\nmodel = 'm'",
            "overflow.url: not an address with http",
        ),
        (
            "[overflow]\nurl = 'http://h/v1'\nmodel = 'm'",
            "https:// is allowed, or http:// of this machine",
        ),
        (
            "[overflow]\nurl = 'https://h/v1?a'\nmodel = 'm'",
            "overflow.url: it may not have a query",
        ),
        (
            "[overflow]\nurl = 'https://u:p@h/v1'\nmodel = 'm'",
            "overflow.url: user and password do not belong here",
        ),
        (
            "[overflow]\nurl = 'https://h/v1/chat/completions'\nmodel = 'm'",
            "overflow.url: the path of an endpoint",
        ),
        (
            "[overflow]\nurl = 'https://h\u00fc/v1'\nmodel = 'm'",
            "overflow.url: a host's name is written in ASCII",
        ),
        ("[overflow]\nname = 'a b'", "overflow.name: String should match pattern"),
        (
            "[overflow]\nurl = 'https://h/v1'\nmodel = 'm'\n[tiers.overflow]\nurls = ['http://h:1']",
            "overflow.url: a tier is named overflow",
        ),
        (
            "[state]\nredis_url = 'http://h'",
            "state.redis_url: an address that begins with redis://",
        ),
        (
            "[state]\nredis_url = 'redis://h:port'",
            "state.redis_url: an address that begins with redis://",
        ),
    ],
)
def test_mistakes_in_the_file_name_the_key(
    tmp_path: Path, text: str, named: str
) -> None:
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
    with pytest.raises(SettingsError, match="No such file"):
        load_settings(tmp_path / "none.toml")


@pytest.mark.parametrize(
    "given",
    [
        "QARR_SERVER__PROT=1", "QARR_SEVER__PORT=1", "QARR_PORT=1", "QARR_SERVER_PORT=8081", "QARR_SERVER_HOST=0.0.0.0",
        "QARR_SERVICE=qarr", "QARR_STATE_REDIS_URL=redis://h:6379", "QARR_TELEMETRY_PORT=http:", "QARR_PORT_8080_TCP=8080",
    ],
)  # fmt: skip
def test_mistyped_variable_is_an_error(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """A variable with our prefix that sets nothing is refused, not ignored."""
    name, _, value = given.partition("=")
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=name):
        load_settings()


@pytest.mark.parametrize("name", sorted(GONE))
def test_a_variable_of_a_setting_that_is_gone_is_ignored_aloud(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """A variable that is left over in a deployment does not keep a new release from starting."""
    variable = PREFIX + name.upper().replace(".", "__")
    monkeypatch.setenv(variable, "0")
    monkeypatch.setenv("QARR_ENGINE__LOG_DIR", "/srv/log")
    assert load_settings().engine.log_dir == Path("/srv/log")
    assert f"{variable} is ignored" in caplog.text


@pytest.mark.parametrize(
    "service",
    ["QARR", "QARR_ROUTER", "QARR_SERVER", "QARR_SERVICE_PORT", "QARR_2_TIERS"],
)
@pytest.mark.parametrize("ip", ["10.0.3.7", "fd00::a:7"])
def test_what_kubernetes_sets_for_a_service_is_no_setting(
    monkeypatch: pytest.MonkeyPatch, service: str, ip: str
) -> None:
    """Every pod gets variables of each Service of its namespace, whose name may begin like ours."""
    address = f"tcp://[{ip}]:8080" if ":" in ip else f"tcp://{ip}:8080"
    set_by_it = {
        "SERVICE_HOST": ip,
        "SERVICE_PORT": "8080",
        "SERVICE_PORT_HTTP_2": "8080",
        "PORT": address,
    }
    set_by_it |= {
        "PORT_8080_TCP": address,
        "PORT_8080_TCP_PROTO": "tcp",
        "PORT_8080_TCP_PORT": "8080",
    }
    for name, value in {
        **set_by_it,
        "PORT_8080_TCP_ADDR": ip,
        "PORT_53_UDP": f"udp://{ip}:53",
    }.items():
        monkeypatch.setenv(f"{service}_{name}", value)
    assert load_settings().server == ServerSettings()


def test_an_empty_variable_is_not_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever it names, a section too: the file's value counts, else the default, and never the current folder."""
    file = tmp_path / "qarr.toml"
    file.write_text(
        "[server]\nport = 1111\nnotice = 'hello'\n[engine]\nlog_dir = '/srv/log'\n"
    )
    for name in [
        name for name in os.environ if name.startswith("QARR_") and "__" in name
    ]:
        monkeypatch.delenv(name)
    expected = load_settings(file)
    names = ["__".join(path).replace("*", "fast") for path, _, _ in leaves(Settings)]
    for name in [
        *names,
        *Settings.model_fields,
        "tiers__fast",
        "policy__prices__fast",
        "no_such_setting",
    ]:
        monkeypatch.setenv(f"QARR_{name.upper()}", "")
    assert load_settings(file) == expected
    assert load_settings().engine.log_dir == cache_dir() / "logs"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            "QARR_SERVER=hello",
            'server: a table is needed; an environment variable holds it as JSON, as in {"a": 1}',
        ),
        (
            "QARR_TIERS__FAST__URLS=http://h:1",
            "tiers.fast.urls: a list is needed; an environment variable holds it as JSON",
        ),
        ("QARR_TIERS__FAST={", "tiers.fast: a table is needed"),
        ("QARR_OPENAI__ALIASES=gpt-4o", "openai.aliases: a table is needed"),
        ("QARR_OPENAI__ALIASES=[1]", "openai.aliases: a table is needed"),
        ("QARR_SERVER__CORS_ORIGINS=*", "server.cors_origins: a list is needed"),
    ],
)
def test_a_variable_that_is_not_json_is_named(
    monkeypatch: pytest.MonkeyPatch, given: str, says: str
) -> None:
    """Lists and tables are JSON in the environment; other text is told with its setting, not with a traceback."""
    name, _, value = given.partition("=")
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=re.escape(says)):
        load_settings()


def test_the_file_may_come_from_a_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file that is named on the command line is read in its place, and an empty variable names none."""
    (tmp_path / "a.toml").write_text("[server]\nport = 1\n")
    (tmp_path / "b.toml").write_text("[server]\nport = 2\n")
    monkeypatch.setenv("QARR_CONFIG", str(tmp_path / "a.toml"))
    assert load_settings().server.port == 1
    assert load_settings(tmp_path / "b.toml").server.port == 2
    monkeypatch.setenv("QARR_CONFIG", "")
    assert load_settings().server.port == 8080


def test_every_mistake_is_named_at_once(tmp_path: Path) -> None:
    file = tmp_path / "qarr.toml"
    file.write_text("[server]\nport = -1\nprot = 2\n[policy]\nmax_slowdown = 'high'\n")
    with pytest.raises(SettingsError) as caught:
        load_settings(file)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert any(
        line.startswith("server.port: ") and line.endswith("(got -1)") for line in lines
    )
    assert any("(got 'high')" in line for line in lines)


def test_variables_hold_lists_and_tables_as_json(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside them a variable may set one key of a table."""
    monkeypatch.setenv("QARR_TIERS__FAST__URLS", '["http://h:1", "http://h:2"]')
    monkeypatch.setenv("QARR_OPENAI__ALIASES", '{"gpt-4o": "auto"}')
    settings = load_settings()
    assert settings.tiers.fast.urls == ("http://h:1", "http://h:2")
    assert settings.openai.aliases == {"gpt-4o": "auto"}


@pytest.mark.parametrize("value", [{"fast": 5}, 5, [], {"fast": {"max_model_len": 0}}])
def test_tiers_of_another_form_are_errors(value: object) -> None:
    """Whatever stands there, it is told as a mistake, not as a crash."""
    with pytest.raises(SettingsError, match="tiers"):
        load_settings(None, {"tiers": value})


def test_settings_do_not_change_after_the_start() -> None:
    settings = load_settings()
    with pytest.raises(ValidationError):
        settings.server.port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("variables", "folders"),
    [
        ({}, ("home/.cache/qarr", "home/.cache/qarr/run", "home/.config/qarr")),
        (
            {"XDG_CACHE_HOME": "x", "XDG_RUNTIME_DIR": "r", "XDG_CONFIG_HOME": "c"},
            ("x/qarr", "r/qarr", "c/qarr"),
        ),
        (
            {"XDG_CACHE_HOME": "x", "QARR_CACHE_DIR": "q"},
            ("q", "q/run", "home/.config/qarr"),
        ),
    ],
)
def test_folders_follow_the_environment(
    variables: dict[str, str],
    folders: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """QARR's own variable, then the desktop's, then the home folder."""
    for name in (
        "XDG_CACHE_HOME",
        "XDG_RUNTIME_DIR",
        "XDG_CONFIG_HOME",
        "QARR_CACHE_DIR",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    assert [cache_dir(), runtime_dir(), config_dir()] == [
        tmp_path / folder for folder in folders
    ]
    monkeypatch.setenv("QARR_CACHE_DIR", "~/own")
    assert cache_dir() == tmp_path / "home/own"


def test_the_address_of_a_trace() -> None:
    """None while no viewer is known; an address without a placeholder is refused by the settings."""
    with_viewer = TelemetrySettings(trace_url="http://viewer/{trace_id}/x")
    assert with_viewer.trace_address("ab") == "http://viewer/ab/x"
    assert TelemetrySettings().trace_address("ab") is None


def test_the_table_names_folders_and_no_paths() -> None:
    """One row a setting; what is empty is none; nothing of this machine is in it."""
    defaults = {name: default for name, default, *_ in rows()}
    assert (
        defaults["tiers.*.max_model_len"]
        == "fast `2048`, balanced `4096`, precise `8192`"
    )
    assert defaults["engine.log_dir"] == "`<cache>/logs`"
    assert defaults["server.runtime_dir"] == "`<runtime>`"
    assert defaults["engine.python"] == "`<project>/.venv-engine/bin/python`"
    assert {
        defaults[key] for key in ("tiers.*.urls", "state.redis_url", "policy.prices")
    } == {"none"}
    assert not [
        row for row in rows() if str(PROJECT) in str(row) or "SecretStr" in str(row)
    ]


def test_the_schema_allows_what_the_settings_allow() -> None:
    found = Settings.model_json_schema()
    server = found["$defs"]["ServerSettings"]
    assert server["additionalProperties"] is False
    assert (
        server["properties"]["port"]["minimum"],
        server["properties"]["port"]["maximum"],
    ) == (0, 65535)
    assert (
        found["$defs"]["PolicySettings"]["properties"]["max_slowdown"][
            "exclusiveMinimum"
        ]
        == 1
    )


@pytest.mark.parametrize("value", ["2", "-0.1", '"balanced"', '{ like = "precise" }'])
def test_a_wrong_loss_budget_says_what_is_allowed(tmp_path: Path, value: str) -> None:
    path = tmp_path / "qarr.toml"
    path.write_text(f"[policy]\nloss_budget = {value}\n")
    with pytest.raises(SettingsError) as caught:
        load_settings(path)
    assert str(caught.value).count("policy.loss_budget") == 1
    assert (
        'a number from 0 to 1, { like = "fast" } or { like = "balanced" } is needed'
        in str(caught.value)
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [("0.05", 0.05), ("0", 0.0), ('{ like = "fast" }', LikeTier(like=TierName.FAST))],
)
def test_a_loss_budget_is_a_number_or_a_comparison(
    tmp_path: Path, value: str, expected: object
) -> None:
    """Without one, nothing may be lost beyond what FP8 would lose everywhere."""
    path = tmp_path / "qarr.toml"
    path.write_text(f"[policy]\nloss_budget = {value}\n")
    assert load_settings(path).policy.loss_budget == expected
    assert load_settings(None).policy.loss_budget == LikeTier(like=TierName.BALANCED)


@pytest.mark.parametrize("key", ["sk secret", "sk-sécret"])
def test_the_overflows_key_is_never_shown(tmp_path: Path, key: str) -> None:
    """Neither in an error, nor in the settings as text; a key that a header cannot have is refused."""
    file = tmp_path / "qarr.toml"
    file.write_text(f"[overflow]\napi_key = '{key}'")
    with pytest.raises(
        SettingsError, match=r"^overflow\.api_key: a key of printable ASCII"
    ) as wrong:
        load_settings(file)
    assert key not in str(wrong.value)
    settings = load_settings(None, {"overflow": {"api_key": "sk-outside"}})
    assert "sk-outside" not in repr(settings) + settings.model_dump_json()


def test_an_overflow_is_named_by_its_host() -> None:
    """Unless it has a name; without an address there is none. Addresses of this machine may do without TLS."""
    for url, name, shown in (
        ("https://api.example.com/v1/", "", "api.example.com"),
        ("http://127.0.0.1:8000/v1", "spare", "spare"),
        ("http://[::1]:8000/v1", "", "::1"),
        ("", "spare", ""),
    ):
        options = load_settings(
            None, {"overflow": {"url": url, "model": "m", "name": name}}
        ).overflow
        assert (options.shown_name, options.url.endswith("/")) == (shown, False)


def test_a_section_is_read_by_its_own_room() -> None:
    """Each setting is read somewhere; rooms that wire, start and show see all sections, others their own and a few."""
    known = modules()
    trees = {
        name: ast.parse(path.read_text("utf-8"))
        for name, path in known.items()
        if name.startswith("router.")
    }
    sections = {
        name: field.annotation.__module__
        for name, field in Settings.model_fields.items()
    }  # type: ignore[union-attr]
    foreign, read = set(), set()
    for name, tree in trees.items():
        room = name.split(".")[1]
        own = {node for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        read |= {node.attr for node in own if room_of(name) != "settings"}
        if room not in {"app", "deployment", "cli", "settings"}:
            named = {
                node.attr
                for node in own
                if ast.unparse(node.value).rpartition(".")[2]
                in {"settings", "_settings"}
            }
            foreign |= {
                (room, section)
                for section in named & sections.keys()
                if room not in sections[section]
            }
    assert {key[-1] for key, _, _ in leaves(Settings)} - read == {
        "interactive",
        "standard",
    }  # by the name of a priority
    assert foreign <= FOREIGN
