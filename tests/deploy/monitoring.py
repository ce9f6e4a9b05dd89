"""Real Prometheus and Alertmanager with the configuration of deploy/, made faster so that tests do not wait for hours.

These things are changed: addresses; scrapes and evaluations come each second; ranges and ``for`` of the rules are seconds;
Alertmanager groups for a second. ``promtool test rules`` tests the rules with their own times.
"""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import yaml
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from tests.deploy.services import DEPLOY, program, running
from tests.fakes.engine import serving
from tests.ports import reserved_ports

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from starlette.requests import Request

    from tests.deploy.traffic import Routers

SHORT_RANGE = "12s"
SHORT_FOR = "2s"


@dataclass(slots=True)
class Monitoring:
    """Prometheus, Alertmanager and a receiver of its notifications.

    Attributes:
        posted: The paths and bodies that the receiver got.
    """

    prometheus: str
    alertmanager: str
    client: httpx.AsyncClient
    posted: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    async def query(
        self, expr: str, *, at: float | None = None
    ) -> list[dict[str, Any]]:
        """Return the series that a query has, now or at a time in seconds."""
        parameters = {"query": expr}
        if at is not None:
            parameters["time"] = str(at)
        response = await self.client.post(
            f"{self.prometheus}/api/v1/query", data=parameters
        )
        answer = response.json()
        assert answer["status"] == "success", (expr, answer)
        series: list[dict[str, Any]] = answer["data"]["result"]
        return series

    async def query_range(
        self, expr: str, *, start: float, end: float, step: float
    ) -> list[dict[str, Any]]:
        parameters = {"query": expr, "start": start, "end": end, "step": step}
        response = await self.client.post(
            f"{self.prometheus}/api/v1/query_range", data=parameters
        )
        answer = response.json()
        assert answer["status"] == "success", (expr, answer)
        series: list[dict[str, Any]] = answer["data"]["result"]
        return series

    async def tells_of(self, expr: str, tier: str) -> bool:
        """Tell whether a query has a series of a tier."""
        return any(
            series["metric"].get("tier") == tier for series in await self.query(expr)
        )

    async def number(self, expr: str) -> float | None:
        """Return the value of a query's first series, or None without one."""
        series = await self.query(expr)
        return float(series[0]["value"][1]) if series else None

    async def exemplars(
        self, expr: str, *, start: float = 0, end: float = 99999999999
    ) -> list[dict[str, Any]]:
        parameters = {"query": expr, "start": start, "end": end}
        response = await self.client.get(
            f"{self.prometheus}/api/v1/query_exemplars", params=parameters
        )
        exemplars: list[dict[str, Any]] = []
        for series in response.json()["data"]:
            exemplars += series["exemplars"]
        return exemplars

    async def alerts(self) -> list[dict[str, Any]]:
        """Return the alerts that Alertmanager has."""
        response = await self.client.get(f"{self.alertmanager}/api/v2/alerts")
        alerts: list[dict[str, Any]] = response.json()
        return alerts

    def received(self, path: str, name: str, status: str) -> list[dict[str, Any]]:
        """Return the alerts of a name and status that came to a receiver."""
        alerts: list[dict[str, Any]] = []
        for posted_path, body in self.posted:
            if posted_path == path:
                alerts += body["alerts"]
        return [
            alert
            for alert in alerts
            if alert["labels"]["alertname"] == name and alert["status"] == status
        ]


@asynccontextmanager
async def monitoring(tmp_path: Path, routers: Routers) -> AsyncIterator[Monitoring]:
    """Scrape routers and their engines, and send alerts to a receiver."""
    folder = tmp_path / "monitoring"
    folder.mkdir()
    (port,) = reserved_ports()
    async with alertmanager(folder) as started:
        started.prometheus = f"http://127.0.0.1:{port}"
        write_prometheus(folder, routers, started.alertmanager.removeprefix("http://"))
        scraping = [
            program("prometheus"),
            "--config.file=prometheus.yml",
            "--storage.tsdb.path=series",
            f"--web.listen-address=127.0.0.1:{port}",
            "--enable-feature=exemplar-storage",
            f"--web.external-url={started.prometheus}",
            f"--web.console.templates={DEPLOY / 'prometheus/consoles'}",
        ]
        async with running(scraping, f"{started.prometheus}/-/ready", folder):
            yield started


@asynccontextmanager
async def alertmanager(folder: Path) -> AsyncIterator[Monitoring]:
    """Run Alertmanager and a receiver, without Prometheus."""
    (port,) = reserved_ports()
    started = Monitoring(
        "", f"http://127.0.0.1:{port}", httpx.AsyncClient(timeout=20, trust_env=False)
    )
    async with started.client, serving(_receiver(started)) as receiver:
        (folder / "alertmanager.yml").write_text(
            yaml.safe_dump(_alertmanager(receiver))
        )
        alerting = [
            program("prometheus-alertmanager"),
            "--config.file=alertmanager.yml",
            "--storage.path=alerts",
            f"--web.listen-address=127.0.0.1:{port}",
            "--cluster.listen-address=",
        ]
        async with running(alerting, f"{started.alertmanager}/-/ready", folder):
            yield started


def _receiver(started: Monitoring) -> Starlette:
    async def post(request: Request) -> Response:
        started.posted.append((request.url.path, await request.json()))
        return Response()

    return Starlette(routes=[Route("/{name}", post, methods=["POST"])])


def write_prometheus(folder: Path, routers: Routers, alertmanager: str) -> None:
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text("utf-8"))
    config["global"] = {
        "scrape_interval": "1s",
        "scrape_timeout": "1s",
        "evaluation_interval": "1s",
    }
    if routers.key:
        for job in config["scrape_configs"]:
            job["authorization"] = {"credentials": routers.key}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    for kind in ("rules", "targets"):
        (folder / kind).mkdir()
    for path in (DEPLOY / "prometheus/rules").glob("*.yml"):
        (folder / "rules" / path.name).write_text(shortened(path.read_text("utf-8")))
    addresses = [stack.url.removeprefix("http://") for stack in routers.stacks]
    engines = []
    for stack in routers.stacks:
        for replica in stack.fleet.replicas:
            target = replica.url.removeprefix("http://")
            labels = {"tier": str(replica.spec.name)}
            engines.append({"targets": [target], "labels": labels})
    (folder / "targets/routers.yml").write_text(
        yaml.safe_dump([{"targets": addresses}])
    )
    (folder / "targets/alertmanagers.yml").write_text(
        yaml.safe_dump([{"targets": [alertmanager]}])
    )
    (folder / "targets/engines.yml").write_text(yaml.safe_dump(engines))


def shortened(rules: str) -> str:
    """Return rules whose ranges and ``for`` are seconds."""
    ranged, ranges = re.subn(r"\[\d+[mhd]\]", f"[{SHORT_RANGE}]", rules)
    lasting, times = re.subn(r"(?m)^( +for:) \d+m$", rf"\1 {SHORT_FOR}", ranged)
    assert ranges + times > 20
    return lasting


def _alertmanager(receiver: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(
        (DEPLOY / "alertmanager/alertmanager.yml").read_text("utf-8")
    )
    for route in (config["route"], *config["route"]["routes"]):
        route["group_wait"] = "1s"
    config["route"]["group_interval"] = "1s"
    for configured in config["receivers"]:
        hook = configured["webhook_configs"][0]
        hook["url"] = receiver + httpx.URL(hook["url"]).path
    return config
