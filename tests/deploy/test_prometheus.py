"""Prometheus' and Alertmanager's configuration: checked by their own tools, then run for real against two routers."""

from __future__ import annotations

import asyncio
import re
import subprocess
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml

from tests.deploy.metric_names import NAME, metrics_on
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


def all_rules() -> list[dict[str, Any]]:
    """Return the rules of all files."""
    rules: list[dict[str, Any]] = []
    for path in sorted((PROMETHEUS / "rules").glob("*.yml")):
        for group in yaml.safe_load(path.read_text("utf-8"))["groups"]:
            rules += group["rules"]
    return rules


RULES = all_rules()
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDS = {rule["record"]: rule for rule in RULES if "record" in rule}
HEADING = re.compile(r"^## (Qarr\w+)$", re.MULTILINE)


def run(tool: str, command: str, *arguments: str) -> str:
    """Run a command of a tool in the folder of the Prometheus configuration, and return its output."""
    process = subprocess.run(
        [program(tool), *command.split(), *arguments],
        cwd=PROMETHEUS,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    output = process.stdout + process.stderr
    assert process.returncode == 0, output
    return output


def test_the_tools_accept_the_configuration() -> None:
    """Promtool and amtool find no fault in configuration and rules, and each severity goes to its receiver."""
    run("promtool", "check config", "prometheus.yml")
    rules = [str(path) for path in (PROMETHEUS / "rules").glob("*.yml")]
    run("promtool", "check rules", *rules)
    config = str(DEPLOY / "alertmanager/alertmanager.yml")
    run("amtool", "check-config", config)
    for severity in {rule["labels"]["severity"] for rule in ALERTS.values()}:
        labels = f"severity={severity} job=qarr"
        output = run(
            "amtool", f"config routes test {labels}", f"--config.file={config}"
        )
        assert {"page", "ticket"} & set(output.split()) == {severity}


def test_every_alert_fires_and_clears() -> None:
    """Promtool's tests pass, and in one of them each alert fires and later clears."""
    tests = sorted((PROMETHEUS / "tests").glob("*.yml"))
    run("promtool", "test rules", *map(str, tests))
    fired: set[str] = set()
    cleared: set[str] = set()
    for path in tests:
        for test in yaml.safe_load(path.read_text("utf-8"))["tests"]:
            burning = False
            for step in test["alert_rule_test"]:
                name = step["alertname"]
                expected = bool(step["exp_alerts"])
                if expected:
                    fired.add(name)
                elif burning:
                    cleared.add(name)
                burning = expected
    assert fired == cleared == set(ALERTS)


def test_every_alert_has_a_runbook() -> None:
    """Each alert has texts and links to its section, and every section is of an alert."""
    text = (ROOT / "docs/runbooks.md").read_text("utf-8")
    assert sorted(HEADING.findall(text)) == sorted(ALERTS)
    for name, rule in ALERTS.items():
        assert rule["labels"]["severity"] in {"page", "ticket"}, name
        assert {"summary", "description"} < set(rule["annotations"]), name
        runbook = rule["annotations"]["runbook_url"]
        assert runbook.endswith(f" }}}}#{name.lower()}"), name
    # The split text is a name, a section, a name, a section, ...
    for section in HEADING.split(text)[2::2]:
        parts = [section.index(part) for part in ("**Means.**", "**See.**", "**Do.**")]
        assert parts == sorted(parts)
        seen = section[parts[1] : parts[2]]
        assert "```promql" in seen
        # A command must be there too.
        assert "`" in re.sub(r"```promql.*?```", "", seen, flags=re.DOTALL)
    links = set(re.findall(r"\]\(#(\w+)\)", text))
    assert links <= {name.lower() for name in ALERTS}


def queries() -> dict[str, str]:
    """Return the queries of rules, dashboards and runbooks, by where they stand."""
    by_place = {rule.get("alert") or rule["record"]: rule["expr"] for rule in RULES}
    for path in (DEPLOY / "grafana/dashboards").glob("*.json"):
        expressions = re.findall(r'"expr": "(.*)"', path.read_text("utf-8"))
        for number, expression in enumerate(expressions):
            by_place[f"{path.name} {number}"] = expression
    blocks = re.findall(
        r"```promql\n(.*?)```",
        (ROOT / "docs/runbooks.md").read_text("utf-8"),
        re.DOTALL,
    )
    by_place |= {f"runbooks {number}": text for number, text in enumerate(blocks)}
    return by_place


@pytest.mark.anyio
async def test_every_metric_exists(tmp_path: Path) -> None:
    """Every metric in rules, dashboards and runbooks is recorded, or is on a page of routers or engines."""
    async with router_stack(tmp_path) as stack:
        router = (await stack.client.get(f"{stack.url}/metrics")).text
        engine = (await stack.client.get(f"{stack.fleet.replicas[0].url}/metrics")).text
    names = metrics_on(router) | set(RECORDS)
    names |= {line.partition("{")[0] for line in engine.splitlines()}
    # Only a real engine has this one, and only a router with TLS the other.
    names |= {"vllm:num_preemptions_total", "qarr_tls_expires_timestamp_seconds"}
    # Only a router with Redis has these.
    names |= {"qarr_redis_serves", "qarr_redis_failures_total"}
    names |= {"qarr_redis_budgets_restored_total"}
    named_metrics = set(NAME.findall("\n".join(queries().values())))
    assert len(named_metrics) > 40
    assert named_metrics - names == set()


@pytest.mark.anyio
@pytest.mark.timeout(180)
async def test_an_alert_reaches_its_receiver_and_clears(tmp_path: Path) -> None:
    """Of two routers under load nothing is counted twice, and an alert is sent while a tier is down."""
    async with (
        two_routers(tmp_path) as routers,
        monitoring(tmp_path, routers) as monitored,
    ):
        await routers.ordinary()
        await until(lambda: monitored.query("sum(job:qarr_requests:sum) > 0"))
        load = asyncio.create_task(keep_asking(routers))
        for stack in routers.stacks:
            stack.engines[BALANCED].alive = False
        await until(
            lambda: monitored.query(
                'ALERTS{alertname="QarrTierDown",alertstate="firing",tier="balanced"}'
            )
        )
        held = await until(lambda: of_name(monitored, "QarrTierDown"))
        assert held[0]["labels"] == {
            "alertname": "QarrTierDown",
            "job": "qarr",
            "severity": "ticket",
            "tier": "balanced",
        }
        assert held[0]["annotations"]["summary"] == "qarr: tier balanced is down"
        await the_runbook_is_there(monitored, held[0]["annotations"]["runbook_url"])
        await until(lambda: received(monitored, "firing"))
        for stack in routers.stacks:
            stack.engines[BALANCED].alive = True
        await until(lambda: received(monitored, "resolved"))
        assert await monitored.query('ALERTS{alertname="QarrTierDown"}') == []
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        # The other tiers served.
        assert set(routers.statuses) == {200}
        await nothing_is_counted_twice(monitored, routers)
        exemplars = await monitored.exemplars("qarr_time_to_first_token_seconds_bucket")
        assert exemplars
        for exemplar in exemplars:
            assert re.fullmatch("[0-9a-f]{32}", exemplar["labels"]["trace_id"])
        assert not monitored.received("/page", "QarrTierDown", "firing")


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
    """A real Alertmanager holds back alerts that another explains, but none of another fleet, router or tier.

    It processes alerts in order, a moment after it has accepted them: once the last one is held back, it knows all.
    """
    async with alertmanager(tmp_path) as monitored:
        cases = [*TOLD, *INHIBITED]
        targets: list[dict[str, str]] = []
        for number, (source, source_labels, target, target_labels) in enumerate(cases):
            pair = [
                alert_of(source, source_labels, number),
                alert_of(target, target_labels, number),
            ]
            answer = await monitored.client.post(
                f"{monitored.alertmanager}/api/v2/alerts", json=pair
            )
            assert answer.status_code == 200
            targets.append(pair[1]["labels"])

        async def held_back() -> list[dict[str, str]]:
            return [
                alert["labels"]
                for alert in await monitored.alerts()
                if alert["status"]["inhibitedBy"]
            ]

        async def last_is_held_back() -> bool:
            return targets[-1] in await held_back()

        await until(last_is_held_back)
        held = await held_back()
        for case, labels in zip(cases, targets, strict=True):
            assert (labels in held) is (case in INHIBITED), case


def alert_of(name: str, labels: dict[str, str], fleet: int) -> dict[str, Any]:
    """Return an alert of a rule, in a fleet of its own."""
    own = {"alertname": name, **labels, "job": f"{labels['job']}-{fleet}"}
    return {"labels": {**ALERTS[name]["labels"], **own}}


async def the_runbook_is_there(monitored: Monitoring, link: str) -> None:
    """Check that the link of an alert leads to its section, which Prometheus itself serves."""
    address, _, section = link.partition("#")
    assert address.startswith(monitored.prometheus)
    page = await monitored.client.get(address)
    assert page.status_code == httpx.codes.OK
    assert f'<h2 id="{section}">' in page.text


async def keep_asking(routers: Routers) -> None:
    while True:
        for stack in routers.stacks:
            await asyncio.shield(asyncio.ensure_future(routers.ask(stack)))
        await asyncio.sleep(0.05)


async def of_name(monitored: Monitoring, name: str) -> list[dict[str, Any]]:
    return [
        alert
        for alert in await monitored.alerts()
        if alert["labels"]["alertname"] == name
    ]


async def received(monitored: Monitoring, status: str) -> list[dict[str, Any]]:
    return monitored.received("/ticket", "QarrTierDown", status)


async def nothing_is_counted_twice(monitored: Monitoring, routers: Routers) -> None:
    """Check that what routers count adds up to what was sent, by the recording rule and by router."""

    async def all_there() -> bool:
        return await monitored.number("job:qarr_requests:sum") == routers.sent

    await until(all_there)
    by_router = await monitored.query("sum by (instance) (qarr_requests_total)")
    assert len(by_router) == 2
    assert sum(float(series["value"][1]) for series in by_router) == routers.sent
