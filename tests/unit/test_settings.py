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
from tiers.spec import TierName

# These rooms read another room's section. No pair may be added.
FOREIGN = {
    ("accounting", "policy"),
    ("auth", "tls"),
    ("profiling", "policy"),
    ("api", "engine"),
    ("api", "server"),
    ("api", "telemetry"),
    ("api", "tiers"),
}


def test_defaults_need_no_file() -> None:
    """Without a file the contract's bounds hold, and the router listens on loopback."""
    settings = load_settings()
    assert settings.server.host == "127.0.0.1"
    assert settings.server.port == 8080
    limits = settings.limits
    assert limits.max_prompt_chars == 16000
    assert limits.max_prompt_words == 5000
    assert limits.max_tokens == 4096
    assert settings.tiers.fast.max_model_len == 2048
    assert settings.tiers.balanced.max_model_len == 4096
    assert settings.tiers.precise.max_model_len == 8192


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
    assert settings.server.port == 2222
    assert settings.server.host == "127.0.0.2"
    assert settings.tiers.fast.replicas == 2
    assert settings.tiers.fast.max_in_flight == 7
    assert settings.tiers.fast.max_num_seqs == 3
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
    """The error quotes the wrong value, but not a password or a key."""
    file = tmp_path / "qarr.toml"
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load_settings(file)
    assert "cret" not in str(caught.value)


def test_addresses_that_can_be_used(tmp_path: Path) -> None:
    """Addresses may have a path before the API's, a name or IPv6; Redis may be reached over a Unix socket."""
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
    "variable",
    [
        "QARR_SERVER__PROT=1",
        "QARR_SEVER__PORT=1",
        "QARR_PORT=1",
        "QARR_SERVER_PORT=8081",
        "QARR_SERVER_HOST=0.0.0.0",
        "QARR_SERVICE=qarr",
        "QARR_STATE_REDIS_URL=redis://h:6379",
        "QARR_TELEMETRY_PORT=http:",
        "QARR_PORT_8080_TCP=8080",
    ],
)
def test_mistyped_variable_is_an_error(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """A variable with our prefix that sets nothing is refused, not ignored."""
    name, _, value = variable.partition("=")
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
    set_by_kubernetes = {
        "SERVICE_HOST": ip,
        "SERVICE_PORT": "8080",
        "SERVICE_PORT_HTTP_2": "8080",
        "PORT": address,
        "PORT_8080_TCP": address,
        "PORT_8080_TCP_PROTO": "tcp",
        "PORT_8080_TCP_PORT": "8080",
        "PORT_8080_TCP_ADDR": ip,
        "PORT_53_UDP": f"udp://{ip}:53",
    }
    for name, value in set_by_kubernetes.items():
        monkeypatch.setenv(f"{service}_{name}", value)
    assert load_settings().server == ServerSettings()


def test_an_empty_variable_is_not_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An empty variable, also of a section, leaves the file's value or the default, and never means the current folder."""
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
    ("variable", "message"),
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
    monkeypatch: pytest.MonkeyPatch, variable: str, message: str
) -> None:
    """Lists and tables are JSON in the environment; for other text the error names the setting."""
    name, _, value = variable.partition("=")
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=re.escape(message)):
        load_settings()


def test_the_file_may_come_from_a_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file on the command line is read in place of the variable's, and an empty variable names none."""
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
    """A variable may hold a whole list or table as JSON."""
    monkeypatch.setenv("QARR_TIERS__FAST__URLS", '["http://h:1", "http://h:2"]')
    monkeypatch.setenv("QARR_OPENAI__ALIASES", '{"gpt-4o": "auto"}')
    settings = load_settings()
    assert settings.tiers.fast.urls == ("http://h:1", "http://h:2")
    assert settings.openai.aliases == {"gpt-4o": "auto"}


@pytest.mark.parametrize("value", [{"fast": 5}, 5, [], {"fast": {"max_model_len": 0}}])
def test_tiers_of_another_form_are_errors(value: object) -> None:
    """A value of another form is reported as a mistake, not as a crash."""
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
    """Each setting has one row, empty values read "none", and nothing of this machine is shown."""
    defaults = {name: default for name, default, *_ in rows()}
    assert (
        defaults["tiers.*.max_model_len"]
        == "fast `2048`, balanced `4096`, precise `8192`"
    )
    assert defaults["engine.log_dir"] == "`<cache>/logs`"
    assert defaults["server.runtime_dir"] == "`<runtime>`"
    assert defaults["engine.python"] == "`<project>/.venv-engine/bin/python`"
    for key in ("tiers.*.urls", "state.redis_url", "policy.prices"):
        assert defaults[key] == "none", key
    assert not [
        row for row in rows() if str(PROJECT) in str(row) or "SecretStr" in str(row)
    ]


def test_the_schema_allows_what_the_settings_allow() -> None:
    sections = Settings.model_json_schema()["$defs"]
    server = sections["ServerSettings"]
    assert server["additionalProperties"] is False
    assert server["properties"]["port"]["minimum"] == 0
    assert server["properties"]["port"]["maximum"] == 65535
    max_slowdown = sections["PolicySettings"]["properties"]["max_slowdown"]
    assert max_slowdown["exclusiveMinimum"] == 1


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
    """Neither an error nor the settings as text show the key; a key that no header can hold is refused."""
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
    """Without a name of its own, the overflow is named by its host; without an address there is no overflow."""
    for url, name, shown in (
        ("https://api.example.com/v1/", "", "api.example.com"),
        ("http://127.0.0.1:8000/v1", "spare", "spare"),
        ("http://[::1]:8000/v1", "", "::1"),
        ("", "spare", ""),
    ):
        options = load_settings(
            None, {"overflow": {"url": url, "model": "m", "name": name}}
        ).overflow
        assert options.shown_name == shown
        assert not options.url.endswith("/")


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
    foreign = set()
    read = set()
    for name, tree in trees.items():
        room = name.split(".")[1]
        attributes = [
            node for node in ast.walk(tree) if isinstance(node, ast.Attribute)
        ]
        if room_of(name) != "settings":
            read |= {attribute.attr for attribute in attributes}
        if room not in {"app", "deployment", "cli", "settings"}:
            for attribute in attributes:
                owner = ast.unparse(attribute.value).rpartition(".")[2]
                section = attribute.attr
                is_section = owner in {"settings", "_settings"} and section in sections
                if is_section and room not in sections[section]:
                    foreign.add((room, section))
    # These two are read by the name of a priority.
    by_name = {"interactive", "standard"}
    assert {key[-1] for key, _, _ in leaves(Settings)} - read == by_name
    assert foreign <= FOREIGN
