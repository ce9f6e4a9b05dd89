"""Prometheus' and Alertmanager's configuration: checked by their own tools, then run for real against two routers."""

from __future__ import annotations

import asyncio
import re
import subprocess
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml

from tests.deploy.monitoring import alertmanager, monitoring
from tests.deploy.services import DEPLOY, ROOT, program
from tests.deploy.traffic import BALANCED, two_routers
from tests.unit.router_stack import router_stack
from tests.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.deploy.monitoring import Monitoring
    from tests.deploy.traffic import Routers

PROMETHEUS = DEPLOY / "prometheus"
RULES = [
    rule
    for path in sorted((PROMETHEUS / "rules").glob("*.yml"))
    for group in yaml.safe_load(path.read_text("utf-8"))["groups"]
    for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDS = {rule["record"]: rule for rule in RULES if "record" in rule}
HEADING = re.compile(r"^## (Qarr\w+)$", re.MULTILINE)
# Names in a query: what is recorded, what routers have, what vLLM has.
NAME = re.compile(r"\b(?:[a-z_]+:)?(?:qarr|vllm)[_:]\w+(?::\w+)*")


def run(*argv: str) -> str:
    """Run a tool in the folder of the Prometheus configuration; return what it said."""
    done = subprocess.run(
        [program(argv[0]), *argv[1:]],
        cwd=PROMETHEUS,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_tools_accept_the_configuration() -> None:
    """Promtool and amtool find no fault in configuration and rules; severities have the receiver they are meant for."""
    run("promtool", "check", "config", "prometheus.yml")
    run(
        "promtool",
        "check",
        "rules",
        *(str(path) for path in (PROMETHEUS / "rules").glob("*.yml")),
    )
    config = str(DEPLOY / "alertmanager/alertmanager.yml")
    run("amtool", "check-config", config)
    for severity in {rule["labels"]["severity"] for rule in ALERTS.values()}:
        found = run(
            "amtool",
            "config",
            "routes",
            "test",
            f"--config.file={config}",
            f"severity={severity}",
            "job=qarr",
        )
        assert {"page", "ticket"} & set(found.split()) == {severity}


def test_every_alert_fires_and_clears() -> None:
    """Promtool's tests pass with the rules as they are, and each alert has one in which it fires and later does not."""
    run(
        "promtool",
        "test",
        "rules",
        *(str(path) for path in sorted((PROMETHEUS / "tests").glob("*.yml"))),
    )
    fired: set[str] = set()
    cleared: set[str] = set()
    for path in (PROMETHEUS / "tests").glob("*.yml"):
        for test in yaml.safe_load(path.read_text("utf-8"))["tests"]:
            burning = False
            for step in test["alert_rule_test"]:
                name, expected = step["alertname"], bool(step["exp_alerts"])
                if expected:
                    fired.add(name)
                elif burning:
                    cleared.add(name)
                burning = expected
    assert fired == cleared == set(ALERTS)


def test_every_alert_has_a_runbook() -> None:
    """Each alert says what it means and links to its section; there is no section for an alert that is gone."""
    text = (ROOT / "docs/runbooks.md").read_text("utf-8")
    assert sorted(HEADING.findall(text)) == sorted(ALERTS)
    for name, rule in ALERTS.items():
        assert rule["labels"]["severity"] in {"page", "ticket"}, name
        assert {"summary", "description"} < set(rule["annotations"]), name
        assert rule["annotations"]["runbook_url"].endswith(f" }}}}#{name.lower()}"), (
            name
        )
    for section in HEADING.split(text)[2::2]:  # name, text, name, text, ...
        parts = [section.index(part) for part in ("**Means.**", "**See.**", "**Do.**")]
        assert parts == sorted(parts)
        seen = section[parts[1] : parts[2]]
        assert "```promql" in seen
        # and a command
        assert "`" in re.sub(r"```promql.*?```", "", seen, flags=re.DOTALL)
    links = set(re.findall(r"\]\(#(\w+)\)", text))
    assert links <= {name.lower() for name in ALERTS}


def known(page: str) -> set[str]:
    names = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", page, re.MULTILINE):
        names.add(name)
        if kind == "histogram":
            names |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"}
    return names


def queries() -> dict[str, str]:
    found = {rule.get("alert") or rule["record"]: rule["expr"] for rule in RULES}
    for path in (DEPLOY / "grafana/dashboards").glob("*.json"):
        for number, expr in enumerate(
            re.findall(r'"expr": "(.*)"', path.read_text("utf-8"))
        ):
            found[f"{path.name} {number}"] = expr
    blocks = re.findall(
        r"```promql\n(.*?)```",
        (ROOT / "docs/runbooks.md").read_text("utf-8"),
        re.DOTALL,
    )
    found |= {f"runbooks {number}": text for number, text in enumerate(blocks)}
    return found


@pytest.mark.anyio
async def test_every_metric_exists(tmp_path: Path) -> None:
    """Whatever rules, dashboards and runbooks ask for is recorded, or is on the routers' or the engines' own page."""
    async with router_stack(tmp_path) as stack:
        names = known((await stack.client.get(f"{stack.url}/metrics")).text) | set(
            RECORDS
        )
        engine = (await stack.client.get(f"{stack.fleet.replicas[0].url}/metrics")).text
    names |= {line.partition("{")[0] for line in engine.splitlines()}
    # not the fake's; only with TLS
    names |= {"vllm:num_preemptions_total", "qarr_tls_expires_timestamp_seconds"}
    names |= {
        f"qarr_redis_{name}"
        for name in ("serves", "failures_total", "budgets_restored_total")
    }  # only with Redis
    asked = {name for expr in queries().values() for name in NAME.findall(expr)}
    assert len(asked) > 40
    assert asked - names == set()


@pytest.mark.anyio
@pytest.mark.timeout(180)
async def test_an_alert_reaches_its_receiver_and_clears(tmp_path: Path) -> None:
    """Two routers are scraped under load: nothing is counted twice, and a tier that goes down is told of until it is back."""
    async with two_routers(tmp_path) as routers, monitoring(tmp_path, routers) as found:
        await routers.ordinary()
        await until(lambda: found.query("sum(job:qarr_requests:sum) > 0"))
        load = asyncio.create_task(keep_asking(routers))
        for stack in routers.stacks:
            stack.engines[BALANCED].alive = False
        await until(
            lambda: found.query(
                'ALERTS{alertname="QarrTierDown",alertstate="firing",tier="balanced"}'
            )
        )
        held = await until(lambda: of_name(found, "QarrTierDown"))
        assert held[0]["labels"] == {
            "alertname": "QarrTierDown",
            "job": "qarr",
            "severity": "ticket",
            "tier": "balanced",
        }
        assert held[0]["annotations"]["summary"] == "qarr: tier balanced is down"
        await the_runbook_is_there(found, held[0]["annotations"]["runbook_url"])
        await until(lambda: received(found, "firing"))
        for stack in routers.stacks:
            stack.engines[BALANCED].alive = True
        await until(lambda: received(found, "resolved"))
        assert await found.query('ALERTS{alertname="QarrTierDown"}') == []
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        assert set(routers.statuses) == {200}  # the other tiers served
        await nothing_is_counted_twice(found, routers)
        exemplars = await found.exemplars("qarr_time_to_first_token_seconds_bucket")
        assert exemplars
        assert all(
            re.fullmatch("[0-9a-f]{32}", each["labels"]["trace_id"])
            for each in exemplars
        )
        assert not found.received("/page", "QarrTierDown", "firing")


SAME = {"job": "qarr"}
INHIBITED = [
    ("QarrNoRouterUp", SAME, "QarrTierDown", {**SAME, "tier": "fast"}),
    ("QarrNoRouterUp", SAME, "QarrAvailabilityBurnFast", SAME),
    (
        "QarrRouterDown",
        {**SAME, "instance": "a"},
        "QarrNoTierReady",
        {**SAME, "instance": "a"},
    ),
    ("QarrRouterDown", {**SAME, "instance": "a"}, "QarrQueueGrowing", SAME),
    (
        "QarrNoTierReady",
        {**SAME, "instance": "a"},
        "QarrReplicaFailed",
        {**SAME, "tier": "fast"},
    ),
    (
        "QarrTierDown",
        {**SAME, "tier": "fast"},
        "QarrBreakerOpenLong",
        {**SAME, "tier": "fast"},
    ),
    ("QarrAvailabilityBurnFast", SAME, "QarrAvailabilityBurnSlow", SAME),
    ("QarrSlaBurnFast", SAME, "QarrSlaBurnSlow", SAME),
]
TOLD = [
    ("QarrNoRouterUp", SAME, "QarrTierDown", {"job": "qarr-two", "tier": "fast"}),
    (
        "QarrRouterDown",
        {**SAME, "instance": "a"},
        "QarrNoTierReady",
        {**SAME, "instance": "b"},
    ),
    (
        "QarrRouterDown",
        {**SAME, "instance": "a"},
        "QarrTierDown",
        {**SAME, "tier": "fast"},
    ),
    (
        "QarrTierDown",
        {**SAME, "tier": "fast"},
        "QarrBreakerOpenLong",
        {**SAME, "tier": "precise"},
    ),
]


@pytest.mark.anyio
async def test_what_follows_from_something_worse_is_not_told(tmp_path: Path) -> None:
    """A real Alertmanager holds back what another alert explains, and nothing of another fleet, router or tier.

    It learns of alerts in their order, a moment after it has taken them: when the last one is held back, it knows all.
    """
    async with alertmanager(tmp_path) as found:
        cases = [(*case, False) for case in TOLD] + [
            (*case, True) for case in INHIBITED
        ]
        targets: list[dict[str, str]] = []
        for number, (source, about, target, of, _) in enumerate(cases):
            assert {source, target} <= set(ALERTS)
            # Each case is a fleet of its own.
            pair = [
                {
                    "labels": {
                        **ALERTS[name]["labels"],
                        "alertname": name,
                        **labels,
                        "job": f"{labels['job']}-{number}",
                    }
                }
                for name, labels in ((source, about), (target, of))
            ]
            assert (
                await found.client.post(
                    f"{found.alertmanager}/api/v2/alerts", json=pair
                )
            ).status_code == 200
            targets.append(pair[1]["labels"])

        async def held_back() -> list[dict[str, str]]:
            return [
                alert["labels"]
                for alert in await found.alerts()
                if alert["status"]["inhibitedBy"]
            ]

        async def the_last_one() -> bool:
            return targets[-1] in await held_back()

        await until(the_last_one)
        held = await held_back()
        for (source, _, target, _, inhibited), labels in zip(
            cases, targets, strict=True
        ):
            assert (labels in held) is inhibited, (source, target)


async def the_runbook_is_there(found: Monitoring, link: str) -> None:
    """Follow the link of an alert: Prometheus itself serves its section."""
    address, _, section = link.partition("#")
    assert address.startswith(found.prometheus)
    page = await found.client.get(address)
    assert page.status_code == httpx.codes.OK
    assert f'<h2 id="{section}">' in page.text


async def keep_asking(routers: Routers) -> None:
    while True:
        for stack in routers.stacks:
            await asyncio.shield(asyncio.ensure_future(routers.ask(stack)))
        await asyncio.sleep(0.05)


async def of_name(found: Monitoring, name: str) -> list[dict[str, Any]]:
    return [
        alert for alert in await found.alerts() if alert["labels"]["alertname"] == name
    ]


async def received(found: Monitoring, status: str) -> list[dict[str, Any]]:
    return found.received("/ticket", "QarrTierDown", status)


async def nothing_is_counted_twice(found: Monitoring, routers: Routers) -> None:
    """Check that what routers count adds up to what was sent, by the recording rule and by router."""

    async def all_there() -> bool:
        return await found.number("job:qarr_requests:sum") == routers.sent

    await until(all_there)
    by_router = await found.query("sum by (instance) (qarr_requests_total)")
    assert len(by_router) == 2
    assert sum(float(series["value"][1]) for series in by_router) == routers.sent
