"""The dashboards that their script makes can be drawn, and a real Prometheus answers each of their queries."""

from __future__ import annotations

import itertools
import re
import subprocess
from html import escape
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.deploy.monitoring import monitoring
from tests.deploy.panel_drawing import Drawn, Window, draw_dashboard, draw_panel
from tests.deploy.panels import (
    DASHBOARDS,
    PLACEHOLDER,
    UNNAMED,
    panels_of,
    series_of,
    unit_text,
)
from tests.deploy.services import DEPLOY, ROOT, program
from tests.deploy.traffic import two_routers
from tests.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.deploy.panels import Query, Series

GRAFANA = DEPLOY / "grafana"
WINDOW = Window(start=0.0, end=60.0, step=15.0)


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def test_the_files_are_what_the_script_makes() -> None:
    """The JSON files are what the script makes now."""
    subprocess.run(
        [program("python"), str(GRAFANA / "dashboards.py"), "--check"],
        check=True,
        timeout=100,
    )
    assert set(DASHBOARDS) == {
        "qarr-overview",
        "qarr-engines",
        "qarr-quality",
        "qarr-usage",
    }


@pytest.mark.parametrize("name", sorted(DASHBOARDS))
def test_dashboards_are_well_formed(name: str) -> None:
    """Panels have ids and places of their own, a text, a unit, and the data source that provisioning makes."""
    dashboard = DASHBOARDS[name]
    assert dashboard["uid"] == name
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    covered: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = set(
            itertools.product(
                range(place["x"], place["x"] + place["w"]),
                range(place["y"], place["y"] + place["h"]),
            )
        )
        assert not cells & covered, panel["title"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        covered |= cells
    for panel in panels(dashboard):
        assert panel["description"].endswith("."), panel["title"]
        assert panel["targets"], panel["title"]
    variables = {
        variable["name"]: variable for variable in dashboard["templating"]["list"]
    }
    assert set(variables) == {"datasource", "job", "runbooks"}
    text = (GRAFANA / "provisioning/datasources/qarr.yml").read_text("utf-8")
    provisioned = yaml.safe_load(text)["datasources"]
    (link,) = provisioned[0]["jsonData"]["exemplarTraceIdDestinations"]
    assert link["name"] == "trace_id"
    assert link["datasourceUid"] in {source["uid"] for source in provisioned}


@pytest.mark.parametrize("name", sorted(DASHBOARDS))
def test_links_lead_to_runbooks(name: str) -> None:
    """Each dashboard links to the runbooks, and a panel that an alert is about to the alert's section."""
    dashboard = DASHBOARDS[name]
    assert "${runbooks}" in [link.get("url") for link in dashboard["links"]]
    text = (ROOT / "docs/runbooks.md").read_text("utf-8")
    sections = set(re.findall(r"^## (\w+)$", text, re.MULTILINE))
    for panel in panels(dashboard):
        for link in panel.get("links", []):
            alert = link["title"].removeprefix("Runbook: ")
            assert alert in sections
            assert link["url"] == f"${{runbooks}}#{alert.lower()}"


def test_every_alert_that_a_panel_can_show_is_linked() -> None:
    """Every alert but that of the certificate, which no panel shows, is linked from a panel."""
    linked = set()
    for dashboard in DASHBOARDS.values():
        for panel in panels(dashboard):
            titles = [link["title"] for link in panel.get("links", [])]
            linked |= {title.removeprefix("Runbook: ") for title in titles}
    text = (DEPLOY / "prometheus/rules/alerts.yml").read_text("utf-8")
    alerts = set()
    for group in yaml.safe_load(text)["groups"]:
        alerts |= {rule["alert"] for rule in group["rules"]}
    assert alerts - linked == {"QarrCertificateExpires"}


@pytest.mark.parametrize("name", sorted(DASHBOARDS))
def test_every_panel_can_be_drawn(name: str) -> None:
    """Variables are replaced, units are known, legends name their series, and each panel has something to show."""
    panels = panels_of(DASHBOARDS[name], rate_interval="1m", shown="1h")
    drawn = []
    for panel in panels:
        series: list[Series] = []
        for query in panel.queries:
            series += made_up(query)
        drawn.append(Drawn(panel, series))
        picture = draw_panel(drawn[-1], WINDOW)
        assert escape(panel.title) in picture
        queries = "".join(query.expr for query in panel.queries)
        assert not re.search(r"\$\{?\w|\{\{|No data", picture + queries)
        if panel.kind in {"stat", "bargauge"}:
            assert unit_text(panel.unit, 0.5, panel.decimals) in picture
        if panel.kind in {"timeseries", "bargauge"}:
            assert UNNAMED not in {shown.name for shown in series}
    page = draw_dashboard(DASHBOARDS[name]["title"], drawn, WINDOW)
    assert page.count("<section") == len(panels)


def made_up(query: Query) -> list[Series]:
    """Return two series that a query might find."""
    labels = {
        *PLACEHOLDER.findall(query.legend),
        "class",
        "tier",
        "instance",
        "replica",
        "state",
    }
    points = [[at, "0.5"] for at in range(0, 75, 15)]
    return series_of(
        query,
        [
            {"metric": dict.fromkeys(labels, name), "values": points}
            for name in ("one", "two")
        ],
    )


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        ("short", 12_345, "12.3 K"),
        ("short", 0.0123, "0.0123"),
        ("short", 3, "3"),
        ("none", 1.5, "1.50"),
        ("short", 0, "0"),
        ("percentunit", 0.987, "98.7%"),
        ("percentunit", 1, "100%"),
        ("percentunit", 0, "0%"),
        ("s", 0, "0 s"),
        ("s", 0.0042, "4.20 ms"),
        ("s", 0.00015, "150 µs"),
        ("s", 90, "1.50 min"),
        ("reqps", 2.6, "2.60 req/s"),
        ("reqps", 1500, "1.50K req/s"),
        ("count:tok/s", 1500, "1.50K tok/s"),
    ],
)
def test_values_are_written_as_grafana_does(unit: str, value: float, text: str) -> None:
    """Values have three significant digits, scaled as the unit says."""
    assert unit_text(unit, value) == text


@pytest.mark.anyio
@pytest.mark.timeout(180)
async def test_no_panel_is_empty(tmp_path: Path) -> None:
    """After everything has happened to two routers, every query of every panel has something to show, of every tier."""
    async with two_routers(tmp_path) as routers, monitoring(tmp_path, routers) as found:
        # A rate needs two points, so every series must be scraped before it grows.
        await routers.ordinary()
        await until(lambda: found.query("job:qarr_requests:sum > 0"))
        await routers.everything()
        panel_queries = []
        for name, dashboard in DASHBOARDS.items():
            for panel in panels_of(dashboard, rate_interval="2m", shown="2m"):
                where = f"{name}: {panel.title}"
                panel_queries += [(where, query) for query in panel.queries]
        assert len(panel_queries) > 50

        async def all_answered() -> bool:
            nonlocal empty
            empty = [
                (where, query.expr)
                for where, query in panel_queries
                if not await found.query(query.expr)
            ]
            if empty:
                await routers.ordinary()
            return not empty

        empty = [(where, query.expr) for where, query in panel_queries]
        try:
            await until(all_answered)
        except AssertionError:
            raise AssertionError(empty) from None
        for where, query in panel_queries:
            the_legend_names_its_series(where, query, await found.query(query.expr))
        assert await found.query('sum(qarr_refusals_total{reason="too_long"}) > 0')
        told = {
            tier: {
                where
                for where, query in panel_queries
                if await found.tells_of(query.expr, tier)
            }
            for tier in ("balanced", "int8")
        }
        assert told["balanced"] <= told["int8"], (
            "a tier that the settings add is in every panel"
        )
        assert len(told["int8"]) > 15
        assert await found.query("sum(qarr_continuations_total) > 0")


def the_legend_names_its_series(
    where: str, query: Query, result: list[dict[str, Any]]
) -> None:
    """Check that the labels of a legend exist, and that no two series have one name."""
    for label in PLACEHOLDER.findall(query.legend):
        assert any(label in series["metric"] for series in result), (where, label)
    names = [series.name for series in series_of(query, result)]
    if query.legend:
        assert UNNAMED not in names, where
        assert len(set(names)) == len(names), (where, names)
