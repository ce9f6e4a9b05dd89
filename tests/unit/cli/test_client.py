"""The client of a running router: what it sends, and what each failure says."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.cli.client import KEY_NEEDED, RouterApiClient, authorization, find_router
from router.section import SettingsError
from tests.unit.cli.stub_router import qarr, stub_router
from tiers.errors import OperationError


def test_it_sends_the_key_and_returns_the_object() -> None:
    """A slash at the end of the URL does not count; the method is GET unless another is given."""
    with stub_router(
        **{"GET /tiers": (200, {"model": "m"}), "POST /admin/x": (202, {"id": "1"})}
    ) as router:
        client = RouterApiClient(f"{router.url}/", "secret")
        assert client.ask("/tiers") == {"model": "m"}
        assert client.ask("/admin/x", "POST") == {"id": "1"}
    assert router.asked == ["GET /tiers", "POST /admin/x"]
    assert router.keys == ["Bearer secret", "Bearer secret"]


@pytest.mark.parametrize(
    ("args", "variables", "asked"),
    [
        ((), {"QARR_SERVER__PORT": "{0}"}, 0),
        (("--config", "{file}"), {"QARR_SERVER__HOST": "0.0.0.0"}, 1),
        ((), {"QARR_SERVER__PORT": "{0}", "QARR_URL": "http://127.0.0.1:{1}"}, 1),
        (
            ("--url", "http://127.0.0.1:{0}"),
            {"QARR_URL": "http://127.0.0.1:{1}", "QARR_SERVER__PORT": "1"},
            0,
        ),
    ],
)
@pytest.mark.parametrize(
    "command", [("reload",), ("adapters",), ("tiers", "drain", "x"), ("top",)]
)
def test_the_router_of_the_settings_is_asked(
    command: tuple[str, ...],
    args: tuple[str, ...],
    variables: dict[str, str],
    asked: int,
    tmp_path: Path,
) -> None:
    """``--url`` comes before ``QARR_URL``, which comes before the settings; the command names the router on standard error."""
    with stub_router() as first, stub_router() as second:
        ports = [router.url.rpartition(":")[2] for router in (first, second)]
        file = tmp_path / "qarr.toml"
        file.write_text(f"[server]\nport = {ports[1]}\n")
        result = qarr(
            *command,
            *(arg.format(*ports, file=file) for arg in args),
            **{name: value.format(*ports) for name, value in variables.items()},
        )
    assert [bool(router.asked) for router in (first, second)] == [
        asked == 0,
        asked == 1,
    ]
    assert f"router http://127.0.0.1:{ports[asked]}\n" in result.stderr


@pytest.mark.parametrize(
    ("answer", "why"),
    [(b"[]", "is this a router?"), ({}, "answered without 'changed'")],
)
def test_an_answer_of_another_form_is_no_traceback(
    answer: dict[str, object] | bytes, why: str
) -> None:
    """What is no object, and an object without what is shown, is said to be no answer of this release's router."""
    with stub_router(**{"POST /admin/reload": (200, answer)}) as router:
        result = qarr("reload", "--url", router.url)
    assert isinstance(result.exception, OperationError)
    assert why in str(result.exception)


def test_the_routers_address_is_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that is not known is asked for; an option before a subcommand, which would not get it, is refused."""
    for command in ("tiers", "adapters"):
        misplaced_option = qarr(
            command,
            "--url",
            "http://127.0.0.1:9",
            "drain" if command == "tiers" else "unload",
            "x",
        )
        assert misplaced_option.exit_code == 2
        assert "give --url after" in misplaced_option.stderr
    monkeypatch.setenv("QARR_SERVER__HOST", "::")
    assert find_router("") == ("http://[::1]:8080", True)
    monkeypatch.setenv("QARR_SERVER__PORT", "0")
    with pytest.raises(SettingsError, match=r"server\.port is 0.*--url or QARR_URL"):
        find_router("")


def test_without_a_key_no_header_is_sent() -> None:
    assert authorization("") == {}
    with stub_router(**{"GET /": (200, {})}) as router:
        RouterApiClient(router.url, "").ask("/")
    assert router.keys == [None]


@pytest.mark.parametrize(
    ("answer", "key", "said"),
    [
        ((401, {"detail": "no"}), "", KEY_NEEDED),
        ((401, {"detail": "not known"}), "k", "not known: give another with --key"),
        ((401, b"<html>"), "k", "the key is not valid here: give another"),
        ((404, {"detail": "no such replica"}), "", "no such replica"),
        ((409, {"detail": "it is busy"}), "", "it is busy"),
        ((503, {"error": "odd"}), "", "{'error': 'odd'}"),
        ((200, b"<html>"), "", "answered HTTP 200: is this a router?"),
        ((502, b""), "", "answered HTTP 502: is this a router?"),
    ],
)
def test_refusals_say_why(answer: tuple[int, object], key: str, said: str) -> None:
    """The router's own detail if there is one."""
    with (
        stub_router(**{"GET /x": answer}) as router,
        pytest.raises(OperationError) as caught,
    ):
        RouterApiClient(router.url, key).ask("/x")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9", "ftp://h", "http://", "http://h:port"]
)
def test_no_answer_names_the_address(url: str) -> None:
    """Whatever is wrong with the address, it is named with what to do."""
    with pytest.raises(OperationError, match="'make up' starts one") as caught:
        RouterApiClient(url, "").ask("/tiers")
    assert url.rstrip("/") in str(caught.value)


ENGINE = {"GET /version": (200, {"version": "0.11.0"})}


@pytest.mark.parametrize(
    "command",
    [
        ("tiers",),
        ("top", "--once"),
        ("adapters",),
        ("tiers", "drain", "x"),
        ("profile", "latency"),
    ],
)
def test_the_address_of_an_engine_is_told_as_one(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    """vLLM answers every path that it does not know in the same words, and has a version."""
    with stub_router(**ENGINE) as engine:
        engine.unknown = {"detail": "Not Found"}
        result = qarr(
            *command,
            "--url",
            engine.url,
            QARR_POLICY__PROFILES=str(tmp_path),
            QARR_CACHE_DIR=str(tmp_path),
        )
    expected_text = f"{engine.url} is an engine (vLLM 0.11.0), not a router: give the router's address with --url or QARR_URL"
    assert str(result.exception) == expected_text


def test_what_is_neither_router_nor_engine_is_asked_about(tmp_path: Path) -> None:
    """Any other server, and one whose version is no vLLM's."""
    for answers in (
        {},
        {"GET /version": (200, b"1.0")},
        {"GET /version": (200, {"v": 1})},
    ):
        with stub_router(**answers) as other:
            other.unknown = {"detail": "Not Found"}
            result = qarr(
                "profile",
                "latency",
                "--url",
                other.url,
                QARR_POLICY__PROFILES=str(tmp_path),
            )
            assert "/tiers answered HTTP 404: is this a router?" in str(
                result.exception
            )
            with pytest.raises(
                OperationError, match="/tiers answered HTTP 404: is this a router"
            ):
                RouterApiClient(other.url, "").ask("/tiers")
