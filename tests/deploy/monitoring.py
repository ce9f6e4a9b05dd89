"""Real Prometheus and Alertmanager with the configuration of deploy/, faster: the tests do not wait for hours.

What differs is made here from the real files: addresses; scrapes and evaluations each second; ranges and ``for`` of the rules
cut to seconds; Alertmanager's grouping cut to a second. ``promtool test rules`` tests the rules with their own times.
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

SHORT_RANGE, SHORT_FOR = "12s", "2s"


@dataclass(slots=True)
class Monitoring:
    """Prometheus, Alertmanager and a receiver of what it sends.

    Attributes:
        posted: Paths and bodies that the receiver got.
    """

    prometheus: str
    alertmanager: str
    client: httpx.AsyncClient
    posted: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    async def query(
        self, expr: str, *, at: float | None = None
    ) -> list[dict[str, Any]]:
        parameters = {"query": expr} | ({} if at is None else {"time": str(at)})
        answer = (
            await self.client.post(f"{self.prometheus}/api/v1/query", data=parameters)
        ).json()
        assert answer["status"] == "success", (expr, answer)
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    async def query_range(
        self, expr: str, *, start: float, end: float, step: float
    ) -> list[dict[str, Any]]:
        parameters = {"query": expr, "start": start, "end": end, "step": step}
        answer = (
            await self.client.post(
                f"{self.prometheus}/api/v1/query_range", data=parameters
            )
        ).json()
        assert answer["status"] == "success", (expr, answer)
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    async def tells_of(self, expr: str, tier: str) -> bool:
        """Tell whether a query has a series of a tier."""
        return any(
            series["metric"].get("tier") == tier for series in await self.query(expr)
        )

    async def number(self, expr: str) -> float | None:
        """Return the value of a query for one series; None where there is none."""
        found = await self.query(expr)
        return float(found[0]["value"][1]) if found else None

    async def exemplars(
        self, expr: str, *, start: float = 0, end: float = 99999999999
    ) -> list[dict[str, Any]]:
        parameters = {"query": expr, "start": start, "end": end}
        answer = (
            await self.client.get(
                f"{self.prometheus}/api/v1/query_exemplars", params=parameters
            )
        ).json()
        return [each for series in answer["data"] for each in series["exemplars"]]

    async def alerts(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (
            await self.client.get(f"{self.alertmanager}/api/v2/alerts")
        ).json()
        return found

    def received(self, path: str, name: str, status: str) -> list[dict[str, Any]]:
        """Return the alerts of a name and status that came to a receiver."""
        return [
            alert
            for where, body in self.posted
            for alert in body["alerts"]
            if (where, alert["labels"]["alertname"], alert["status"])
            == (path, name, status)
        ]


@asynccontextmanager
async def monitoring(tmp_path: Path, routers: Routers) -> AsyncIterator[Monitoring]:
    """Scrape routers and their engines, and send alerts to a receiver."""
    folder = tmp_path / "monitoring"
    folder.mkdir()
    (port,) = reserved_ports()
    async with alertmanager(folder) as found:
        found.prometheus = f"http://127.0.0.1:{port}"
        write_prometheus(folder, routers, found.alertmanager.removeprefix("http://"))
        scraping = [
            program("prometheus"), "--config.file=prometheus.yml", "--storage.tsdb.path=series",
            f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage",
            f"--web.external-url={found.prometheus}", f"--web.console.templates={DEPLOY / 'prometheus/consoles'}",
        ]  # fmt: skip
        async with running(scraping, f"{found.prometheus}/-/ready", folder):
            yield found


@asynccontextmanager
async def alertmanager(folder: Path) -> AsyncIterator[Monitoring]:
    (port,) = reserved_ports()
    found = Monitoring(
        "", f"http://127.0.0.1:{port}", httpx.AsyncClient(timeout=20, trust_env=False)
    )
    async with found.client, serving(_receiver(found)) as receiver:
        (folder / "alertmanager.yml").write_text(
            yaml.safe_dump(_alertmanager(receiver))
        )
        alerting = [
            program("prometheus-alertmanager"), "--config.file=alertmanager.yml", "--storage.path=alerts",
            f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address=",
        ]  # fmt: skip
        async with running(alerting, f"{found.alertmanager}/-/ready", folder):
            yield found


def _receiver(found: Monitoring) -> Starlette:
    async def post(request: Request) -> Response:
        found.posted.append((request.url.path, await request.json()))
        return Response()

    return Starlette(routes=[Route("/{name}", post, methods=["POST"])])


def write_prometheus(folder: Path, routers: Routers, alertmanager: str) -> None:
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text("utf-8"))
    config["global"] = {
        "scrape_interval": "1s",
        "scrape_timeout": "1s",
        "evaluation_interval": "1s",
    }
    for job in config["scrape_configs"] if routers.key else ():
        job["authorization"] = {"credentials": routers.key}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    for kind in ("rules", "targets"):
        (folder / kind).mkdir()
    for path in (DEPLOY / "prometheus/rules").glob("*.yml"):
        (folder / "rules" / path.name).write_text(shortened(path.read_text("utf-8")))
    addresses = [stack.url.removeprefix("http://") for stack in routers.stacks]
    engines = [
        {
            "targets": [replica.url.removeprefix("http://")],
            "labels": {"tier": str(replica.spec.name)},
        }
        for stack in routers.stacks
        for replica in stack.fleet.replicas
    ]
    (folder / "targets/routers.yml").write_text(
        yaml.safe_dump([{"targets": addresses}])
    )
    (folder / "targets/alertmanagers.yml").write_text(
        yaml.safe_dump([{"targets": [alertmanager]}])
    )
    (folder / "targets/engines.yml").write_text(yaml.safe_dump(engines))


def shortened(rules: str) -> str:
    """Return rules with all ranges, and all times for which something has to last, cut to seconds."""
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
    for each in config["receivers"]:
        hook = each["webhook_configs"][0]
        hook["url"] = receiver + httpx.URL(hook["url"]).path
    return config
