"""Parts of ``qarr doctor`` that need no running router: the order of checks, machine, files, network, and the report."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

import pytest

from router.cli.doctor import files, machine, network
from router.cli.doctor.command import examine
from router.cli.doctor.findings import CheckContext, Finding, Health, local_specs, local_tiers
from router.settings import load_settings
from tests.unit.cli.stub_router import qarr, stub_router
from tests.unit.cli.test_doctor import checkpoint
from tiers.spec import STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

OK, WARNING, PROBLEM = Health.OK, Health.WARNING, Health.PROBLEM
URLS = {name: {"urls": (f"http://h:{number}",)} for number, name in enumerate(STANDARD_TIERS, 1)}


@pytest.fixture(autouse=True)
def _no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QARR_CACHE_DIR", str(tmp_path / "cache"))


def context(overrides: dict[str, Any] | None = None, url: str = "http://127.0.0.1:9", key: str = "") -> CheckContext:
    return CheckContext(load_settings(None, overrides), url=url, key=key)


def one(check: Callable[[CheckContext], Iterable[Finding]], given: CheckContext | None = None) -> tuple[Health, str]:
    """Return the only finding of a check; what is not right says what to do."""
    (finding,) = check(given or context())
    assert bool(finding.then) is (finding.health is not OK)
    return finding.health, finding.found


def test_a_check_that_breaks_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name, with the first line of the error; the checks after it are made."""
    monkeypatch.setattr("router.cli.doctor.machine.shutil.disk_usage", lambda _: 1 / 0)
    findings = {f.check: f for f in examine(None, url="http://127.0.0.1:9", key="")}
    assert findings["disk"].health is WARNING
    assert "could not be checked: ZeroDivisionError" in findings["disk"].found
    assert "router port" in findings


def test_the_report_as_text_and_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same findings; a problem gives status 1, and JSON has its keys in a fixed order."""
    monkeypatch.setenv("QARR_SERVER__PROT", "1")
    text, data = qarr("doctor"), qarr("doctor", "--json")
    assert (text.exit_code, data.exit_code) == (1, 1)
    report = json.loads(data.stdout)
    assert list(report) == ["problems", "warnings", "checks"]
    assert list(report["checks"][0]) == ["group", "check", "health", "found", "then"]
    assert report["problems"] == 1
    lines = text.stdout.splitlines()
    assert lines[0] == "Settings"
    assert lines[1].split()[:2] == ["problem", "settings"]
    assert lines[2].strip().startswith("-> 'qarr settings' lists every setting")
    assert lines[-1].startswith("1 checks: 1 problems")


def test_tiers_with_urls_are_not_local() -> None:
    """Nothing is needed here for them: no checkpoint, no environment, no port, no memory."""
    elsewhere = context({"tiers": URLS})
    assert local_tiers(elsewhere) == []
    assert local_specs(elsewhere) == ()
    assert local_tiers(context({"tiers": {"fast": URLS["fast"]}})) == [TierName.BALANCED, TierName.PRECISE]
    assert one(files.checkpoints, elsewhere) == (OK, "none needed: every tier runs elsewhere")
    assert one(files.engine_environment, context({"tiers": URLS, "engine": {"python": "/none"}})) == (
        OK,
        "none, and none needed",
    )
    assert list(network.engine_ports(elsewhere)) == []
    assert one(machine.memory, elsewhere)[1].endswith("; no engine runs here")


def test_a_checkpoint_of_the_settings_needs_no_manifest(tmp_path: Path) -> None:
    """Its folder is its identity; it is whole or not; and there is nothing to compare it with."""
    folder = checkpoint(tmp_path / "own")
    given = context({"tiers": {"fast": {"checkpoint": folder}}})
    (spec,) = local_specs(given)
    assert (spec.name, spec.checkpoint, spec.digest) == (TierName.FAST, folder, None)
    missing, own = files.checkpoints(given)
    assert missing.health is WARNING
    assert missing.found.startswith("balanced, precise of ")
    assert (own.check, own.health, own.found) == ("checkpoint fast", OK, "own: unknown, files complete, no manifest")
    (folder / "model.safetensors").write_bytes(b"cut off")
    broken = list(files.checkpoints(given))[1]
    assert broken.health is PROBLEM
    assert "tiers.fast.checkpoint" in broken.then


def test_no_keys_on_purpose() -> None:
    """On an address that others reach that has to be said."""
    assert one(files.keys, context({"server": {"host": "0.0.0.0"}}))[0] is PROBLEM
    assert one(files.keys, context({"server": {"host": "0.0.0.0"}, "auth": {"allow_keyless": True}}))[0] is OK


def test_the_port_of_a_router_is_not_a_problem() -> None:
    """A router that listens there is recognised by its answer; any other server is not, and port 0 is always free."""
    for body, health in ((b'{"status":"alive"}', OK), (b"<html>", PROBLEM)):
        with stub_router(**{"GET /healthz": (200, body)}) as router:
            port = int(router.url.rpartition(":")[2])
            assert one(network.router_port, context({"server": {"port": port}}))[0] is health
        assert router.keys == [None], "the key was given to whatever holds the port"
    assert one(network.router_port, context({"server": {"port": 0}})) == (OK, "any free one")


def test_engine_ports_of_the_running_router_are_no_problem() -> None:
    """Those that its fleet names; another program's port is one."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        tiers = {name: {**URLS[name]} for name in ("fast", "balanced")}
        overrides = {"tiers": tiers, "engine": {"base_port": port}}
        for url, health in ((f"http://127.0.0.1:{port}", OK), (None, PROBLEM)):
            with stub_router(**{"GET /tiers": (200, {"tiers": [{"replicas": [{"url": url}]}]})}) as router:
                assert one(network.engine_ports, context(overrides, router.url))[0] is health
        with stub_router(**{"GET /tiers": (401, {"detail": "no"})}) as router:
            assert one(network.engine_ports, context(overrides, router.url))[0] is PROBLEM


PROFILING = {"state": "off", "what": None, "total": 0, "done": 0, "detail": "", "measured": {}, "pointless": {}}
FLEET = {"tiers": [], "profiling": PROFILING}
SLOW = {"tiers": [], "profiling": PROFILING | {"pointless": {"balanced": "balanced is slower: leave it out"}}}


@pytest.mark.parametrize(
    ("answers", "healths"),
    [
        ({"GET /healthz": (500, {})}, [PROBLEM]),
        ({"GET /healthz": (200, {}), "GET /readyz": (503, {}), "GET /tiers": (200, FLEET)}, [PROBLEM, OK]),
        ({"GET /healthz": (200, {}), "GET /readyz": (200, {}), "GET /tiers": (401, {})}, [OK, WARNING]),
        ({"GET /healthz": (200, {}), "GET /readyz": (200, {}), "GET /tiers": (200, FLEET)}, [OK, OK]),
        ({"GET /healthz": (200, {}), "GET /readyz": (200, {}), "GET /tiers": (200, SLOW)}, [OK, OK, WARNING]),
    ],
)
def test_what_runs(answers: dict[str, tuple[int, Any]], healths: list[Health]) -> None:
    """No router, one that is not ready, one that wants a key, one that is well; only the fleet is asked for with the key."""
    with stub_router(**answers) as router:
        assert [f.health for f in network.running_router(context(None, router.url, "secret"))] == healths
    sent = dict(zip(router.asked, router.keys, strict=True))
    assert sent.get("GET /tiers", "Bearer secret") == "Bearer secret"


def test_tiers_without_an_engine() -> None:
    """Left out on purpose, being prepared, or failed with its reason; a drained replica can be resumed."""
    preparing = {"what": "quantizing", "done": 0, "total": 0, "remaining_s": None, "failed": None}
    none = {"replicas": [], "detail": None}
    tiers = [
        {"tier": "fast", "state": "left_out", "preparing": None, **none},
        {"tier": "fast", "state": "waiting", "preparing": None, **none},
        {"tier": "balanced", "state": "preparing", "preparing": preparing, **none},
        {
            "tier": "precise",
            "state": "failed",
            "preparing": {**preparing, "failed": "disk full"},
            "replicas": [],
            "detail": "disk full\nmore",
        },
    ]
    left_out, waiting, prepared_, failed = network.judge_fleet({"tiers": tiers})
    assert (left_out.health, left_out.check) == (OK, "tier fast")
    assert (waiting.health, waiting.found) == (WARNING, "none of its engines is known yet")
    assert (prepared_.health, prepared_.found) == (WARNING, "is being prepared: quantizing")
    assert (failed.health, failed.found) == (PROBLEM, "has no checkpoint: disk full")
    drained = {"id": "fast-0", "state": "draining", "detail": None, "breaker": "closed", "served": 0, "failed": 0}
    (finding,) = network.judge_fleet({"tiers": [{"tier": "fast", "replicas": [drained]}]})
    assert "qarr tiers resume" in finding.then
