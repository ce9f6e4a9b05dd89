"""The dashboards: what their script makes, and a real Prometheus answers every one of their queries."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.deploy.monitoring import monitoring
from tests.deploy.services import DEPLOY, ROOT, program
from tests.deploy.traffic import two_routers
from tests.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

GRAFANA = DEPLOY / "grafana"
DASHBOARDS = {path.stem: json.loads(path.read_bytes()) for path in sorted((GRAFANA / "dashboards").glob("*.json"))}


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def test_the_files_are_what_the_script_makes() -> None:
    """Nobody has changed the JSON by hand, or the script without it."""
    subprocess.run([program("python"), str(GRAFANA / "dashboards.py"), "--check"], check=True, timeout=100)
    assert set(DASHBOARDS) == {"qarr-overview", "qarr-engines", "qarr-quality", "qarr-usage"}


@pytest.mark.parametrize("name", sorted(DASHBOARDS))
def test_dashboards_are_well_formed(name: str) -> None:
    """Panels have ids and places of their own, a text, a unit, and the data source that provisioning makes."""
    dashboard = DASHBOARDS[name]
    assert dashboard["uid"] == name
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = set(
            itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"]))
        )
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    for panel in panels(dashboard):
        assert panel["description"].endswith("."), panel["title"]
        assert panel["targets"], panel["title"]
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert set(variables) == {"datasource", "job", "runbooks"}
    provisioned = yaml.safe_load((GRAFANA / "provisioning/datasources/qarr.yml").read_text("utf-8"))["datasources"]
    uids = {source["uid"] for source in provisioned}
    links = provisioned[0]["jsonData"]["exemplarTraceIdDestinations"]
    assert [(link["name"], link["datasourceUid"] in uids) for link in links] == [("trace_id", True)]


@pytest.mark.parametrize("name", sorted(DASHBOARDS))
def test_links_lead_to_runbooks(name: str) -> None:
    """Each dashboard to all of them, and the panels that alerts are about each to its section."""
    dashboard = DASHBOARDS[name]
    assert "${runbooks}" in [link.get("url") for link in dashboard["links"]]
    sections = set(re.findall(r"^## (\w+)$", (ROOT / "docs/runbooks.md").read_text("utf-8"), re.MULTILINE))
    for panel in panels(dashboard):
        for link in panel.get("links", []):
            alert = link["title"].removeprefix("Runbook: ")
            assert alert in sections
            assert link["url"] == f"${{runbooks}}#{alert.lower()}"


def test_every_alert_that_a_panel_can_show_is_linked() -> None:
    """But for that of the certificate, which no panel shows."""
    linked = {
        link["title"].removeprefix("Runbook: ")
        for dashboard in DASHBOARDS.values() for panel in panels(dashboard) for link in panel.get("links", [])
    }  # fmt: skip
    rules = yaml.safe_load((DEPLOY / "prometheus/rules/alerts.yml").read_text("utf-8"))["groups"]
    alerts = {rule["alert"] for group in rules for rule in group["rules"]}
    assert alerts - linked == {"QarrCertificateExpires"}


@pytest.mark.anyio
@pytest.mark.timeout(180)
async def test_no_panel_is_empty(tmp_path: Path) -> None:
    """After everything has happened to two routers, every query of every panel has something to show, of every tier."""
    async with two_routers(tmp_path) as routers, monitoring(tmp_path, routers) as found:
        await routers.ordinary()  # every series is there once before it grows: a rate needs two points
        await until(lambda: found.query("job:qarr_requests:sum > 0"))
        await routers.everything()
        asked = [
            (f"{name}: {panel['title']}", target["expr"].replace("$job", "qarr").replace("$__rate_interval", "2m"))
            for name, dashboard in DASHBOARDS.items()
            for panel in panels(dashboard)
            for target in panel["targets"]
        ]
        assert len(asked) > 50

        async def all_answered() -> bool:
            nonlocal empty
            empty = [(where, expr) for where, expr in asked if not await found.query(expr)]
            if empty:
                await routers.ordinary()
            return not empty

        empty = asked
        try:
            await until(all_answered)
        except AssertionError:
            raise AssertionError(empty) from None
        assert await found.query('sum(qarr_refusals_total{reason="too_long"}) > 0')
        told = {
            tier: {where for where, expr in asked if await found.tells_of(expr, tier)} for tier in ("balanced", "int8")
        }
        # The added tier's router checks no live answers.
        live = {"Live answers that differ", "Live regret", "Live answers checked"}
        unmeasured = {f"qarr-quality: {title}" for title in live}
        assert told["balanced"] - told["int8"] <= unmeasured, "a tier that the settings add is in every other panel"
        assert len(told["int8"]) > 15
        for rare in ("qarr_continuations_total", "qarr_live_differing_ratio"):
            assert await found.query(f"sum({rare}) > 0"), rare
