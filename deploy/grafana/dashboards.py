"""Make the dashboards: ``python dashboards.py`` writes dashboards/*.json beside itself; ``--check`` only compares.

Needs requirements.txt of this folder. Queries use the recording rules of deploy/prometheus/rules where one fits. Counters are
added over routers; gauges about engines are what each router sees, so their maximum is shown.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    prometheus,
    stat,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    DataTransformerConfig,
    Threshold,
    ThresholdsMode,
    VariableHide,
    VariableRefresh,
)

FOLDER = Path(__file__).parent / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
J = 'job=~"$job"'
SHARE, SECONDS, PER_S, COUNT, TOKENS_PER_S = (
    "percentunit",
    "s",
    "reqps",
    "short",
    "count:tok/s",
)
RED = "red"
TABLES = {"table", "matrix"}
# Of the chosen fleets, and those that are about none, such as that no router is left.
FIRING = 'ALERTS{alertname=~"Qarr.+", alertstate="firing", job=~"$job|"}'
CLASS_BY_TIER = ("class", "tier", "Value")
ALERT_LABELS = (
    "alertname",
    "severity",
    "job",
    "instance",
    "tier",
    "replica",
    "class",
    "reason",
)
RUNBOOKS = "runbooks"  # the variable with the address of docs/runbooks.md
# deploy/compose.yaml's; others set the variable
PROMETHEUS_PAGE = "http://localhost:9090/consoles/runbooks.html"


@dataclass(frozen=True, slots=True)
class Chart:
    """One panel.

    Attributes:
        queries: PromQL and legend of each.
        unit: Grafana's name of the unit.
        text: What it shows, for whoever asks.
        kind: ``lines``, ``stacked``, ``number``, ``bars``, ``table``, or ``matrix``.
        width: Of 24 columns.
        limit: Value from which it is red; over time, a line.
        height: In rows of the grid; 0: as usual for its kind.
        lowest: Where the axis begins; None: with the data.
        decimals: Digits behind the point; None: three significant ones.
        columns: A table's columns, from left to right; a matrix's labels down and across, and what its cells show.
        traces: Show the traces behind a histogram.
        alerts: Names of those that are about it: the panel links to their runbooks.
    """

    title: str
    unit: str
    text: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "lines"
    width: int = 8
    limit: float | None = None
    traces: bool = False
    alerts: tuple[str, ...] = ()
    height: int = 0
    lowest: float | None = 0
    columns: tuple[str, ...] = ()
    decimals: int | None = None


def quantiles(
    metric: str, by: str, legend: str, *shares: str
) -> tuple[tuple[str, str], ...]:
    """Return queries for quantiles of a histogram.

    Args:
        metric: Its name, without ``_bucket``.
        by: Labels that are kept.
        legend: Of each line, before the quantile.
        shares: Which, as in ``0.95``.
    """
    grouped = f"sum by ({by}{', ' if by else ''}le) (rate({metric}_bucket{{{J}}}[$__rate_interval]))"
    return tuple(
        (f"histogram_quantile({s}, {grouped})", f"{legend} p{float(s) * 100:g}".strip())
        for s in shares
    )


def rate(metric: str, by: str, more: str = "") -> str:
    """Return a query for a counter's rate by labels."""
    return f"sum by ({by}) (rate({metric}{{{J}{more}}}[$__rate_interval]))"


def or_none(query: str, *labels: str) -> str:
    """Return a query that has one series, named none, while the given one has none at all."""
    none = "vector(0)"
    for label in labels:
        none = f'label_replace({none}, "{label}", "none", "", "")'
    return f"{query} or on () {none}"


def seen(metric: str, by: str) -> str:
    """Return a query for a gauge about engines: the most that any router sees."""
    return f"max by ({by}) ({metric}{{{J}}})"


OVERVIEW: dict[str, tuple[Chart, ...]] = {
    "Now": (
        Chart("Routers", COUNT, "Routers that Prometheus can read.", ((f"sum(up{{{J}}})", ""),), "number", 3, alerts=("QarrRouterDown", "QarrNoRouterUp")),
        Chart("Requests", PER_S, "Per second.", ((f"sum(job:qarr_requests:rate5m{{{J}}})", ""),), "number", 3),
        Chart("Goodput", PER_S, "Requests per second that were answered in full and within their bounds.",
              ((f"sum(job:qarr_goodput:rate5m{{{J}}})", ""),), "number", 3),
        Chart("Available", SHARE, "Requests of the last hour that neither failed nor found no place or no ready tier.",
              ((f"1 - max(job:qarr_unavailable:ratio_rate1h{{{J}}})", ""),), "number", 3, alerts=("QarrAvailabilityBurnFast", "QarrAvailabilityBurnSlow")),
        Chart("SLA met", SHARE, "Of the last hour's requests with bounds on TTFT or TPOT.",
              ((f"1 - max(job:qarr_sla_missed:ratio_rate1h{{{J}}})", ""),), "number", 3, alerts=("QarrSlaBurnFast", "QarrSlaBurnSlow")),
        Chart("Waiting", COUNT, "Requests that wait for a place.", ((f"sum(qarr_waiting_requests{{{J}}})", ""),), "number", 3),
        Chart("Open requests", COUNT, "Being served.", ((f"sum(qarr_open_requests{{{J}}})", ""),), "number", 3),
        Chart("Alerts", COUNT, "How many fire: the next panel has their names.",
              ((f"count({FIRING}) or vector(0)", ""),), "number", 3, 1),
        Chart("Alerts that fire", COUNT, "By name, with what they are about. Each has a section in the runbooks, to which the link above leads.",
              ((or_none(f"max by ({', '.join(ALERT_LABELS)}) ({FIRING})", "alertname"), ""),), "table", 24, columns=ALERT_LABELS),
    ),
    "Requests": (
        Chart("Requests by outcome", PER_S, "ok, refused, error, client_gone.",
              ((rate("qarr_requests_total", "outcome"), "{{outcome}}"),), "stacked"),
        Chart("Decisions by tier", PER_S, "The tier that was decided on; none: refused.",
              ((rate("qarr_decisions_total", "tier"), "{{tier}}"),), "stacked"),
        Chart("Decisions by what they rest on", PER_S, "budget: by engine time and loss; measured: by engine time; table: not measured yet; degraded: a bound was given up, or nobody knows whether it holds.",
              ((rate("qarr_decisions_total", "reason"), "{{reason}}"),), "stacked"),
        Chart("SLA met, by tier", SHARE, "Share of requests with bounds on TTFT or TPOT.",
              (((f'sum by (tier) (rate(qarr_sla_requests_total{{{J}, result="met"}}[$__rate_interval])) / '
                f'sum by (tier) (rate(qarr_sla_requests_total{{{J}, result!="impossible"}}[$__rate_interval]))'), "{{tier}}"),)),
        Chart("Burn rate of the error budget", COUNT, "1: the budget lasts exactly its month. Alerts: 14.4 over an hour, 6 over six.",
              ((f"job:qarr_unavailable:ratio_rate1h{{{J}}} / scalar(qarr:unavailable:budget_ratio)", "{{job}} 1 h"),
               (f"job:qarr_unavailable:ratio_rate6h{{{J}}} / scalar(qarr:unavailable:budget_ratio)", "{{job}} 6 h")), limit=6, alerts=("QarrAvailabilityBurnFast", "QarrAvailabilityBurnSlow")),
        Chart("Goodput and all requests", PER_S, "Good: answered in full and within their bounds.",
              ((f"job:qarr_requests:rate5m{{{J}}}", "{{job}} all"), (f"job:qarr_goodput:rate5m{{{J}}}", "{{job}} good"))),
        Chart("Decisions by class", PER_S, "The class that the prompt was taken for.",
              ((rate("qarr_decisions_total", "class"), "{{class}}"),), "stacked", 12, height=11),
        Chart("Decisions by class and tier", COUNT, "How many, over the time that is shown. none: refused.",
              ((f"sum by (class, tier) (increase(qarr_decisions_total{{{J}}}[$__range]))", ""),), "matrix", 12, height=11, columns=CLASS_BY_TIER, decimals=0),
    ),
    "Latency": (
        Chart("Time to first token", SECONDS, "By tier that served, the queue included. Points are traces.",
              quantiles("qarr_time_to_first_token_seconds", "tier", "{{tier}}", "0.5", "0.95", "0.99"), traces=True),
        Chart("Time per output token", SECONDS, "By tier that served.",
              quantiles("qarr_time_per_output_token_seconds", "tier", "{{tier}}", "0.5", "0.95", "0.99"), traces=True),
        Chart("Duration of whole requests", SECONDS, "From arrival to the last byte.",
              quantiles("qarr_request_duration_seconds", "tier", "{{tier}}", "0.5", "0.95"), traces=True),
        Chart("Wait for a place", SECONDS, "By priority.",
              quantiles("qarr_queue_wait_seconds", "priority", "{{priority}}", "0.5", "0.95")),
        Chart("The router's own time", SECONDS, "From arrival until sent to an engine, but for the queue.",
              quantiles("qarr_overhead_seconds", "", "", "0.5", "0.99")),
        Chart("Queue", COUNT, "By router, and what it may hold.",
              ((f"qarr_waiting_requests{{{J}}}", "{{instance}}"), (f"qarr_waiting_requests_limit{{{J}}}", "{{instance}} limit")), alerts=("QarrQueueGrowing",)),
    ),
    "Thinking, and cached prompts": (
        Chart("Time to the answer's first token", SECONDS, "Its first text or tool call: later than the first token by the time that the model thinks. By tier that served. Points are traces.",
              quantiles("qarr_time_to_first_answer_token_seconds", "tier", "{{tier}}", "0.5", "0.95", "0.99"), traces=True),
        Chart("Reasoning's share of the output", SHARE, "Of output tokens; where nobody knows the number, reasoning counts as answer.",
              ((or_none(f"{rate('qarr_reasoning_tokens_total', 'tier')} / {rate('qarr_output_tokens_total', 'tier')}", "tier"), "{{tier}}"),)),
        Chart("Prompt tokens in the prefix cache", SHARE, "Of prompt tokens, as engines report them.",
              ((or_none(f"sum by (tier) (rate(qarr_cached_prompt_tokens_total{{{J}, source=\"reported\"}}[$__rate_interval])) / {rate('qarr_prompt_tokens_total', 'tier')}", "tier"), "{{tier}}"),)),
    ),
    "What went wrong, and what it costs": (
        Chart("Refusals", PER_S, "By reason.", ((rate("qarr_refusals_total", "reason"), "{{reason}}"),), "stacked", 12, alerts=("QarrRefusing",)),
        Chart("Errors", PER_S, "Requests that ended in one, by the tier that had begun to answer.",
              ((or_none(rate("qarr_requests_total", "tier", ', outcome="error"'), "tier"), "{{tier}}"),), "stacked", 12),
        Chart("HTTP answers", PER_S, "Other than 200.",
              ((or_none(rate("qarr_http_requests_total", "route, code", ', code!="200"'), "route"), "{{route}} {{code}}"),), width=12),
        Chart("Routers without Redis", COUNT, "Those that count quotas or budgets alone, or balance by their own view, though state.redis_url is set.",
              ((or_none(f"sum by (use) (qarr_redis_serves{{{J}}} == bool 0)", "use"), "{{use}}"),), width=12, limit=1, alerts=("QarrRedisNotServing",)),
        Chart("Tokens out", TOKENS_PER_S, "By tier.", ((rate("qarr_output_tokens_total", "tier"), "{{tier}}"),), "stacked"),
        Chart("Tokens in", TOKENS_PER_S, "By tier.", ((rate("qarr_prompt_tokens_total", "tier"), "{{tier}}"),), "stacked"),
        Chart("Engine time", COUNT, "Predicted engine-seconds, by price, per second.",
              ((rate("qarr_cost_engine_seconds_total", "tier"), "{{tier}}"),), "stacked"),
    ),
}  # fmt: skip

ENGINES: dict[str, tuple[Chart, ...]] = {
    "Replicas": (
        Chart("Ready replicas", COUNT, "Of each tier, as the router that sees most of them sees it.",
              ((f"job_tier:qarr_ready_replicas:max{{{J}}}", "{{tier}}"),), alerts=("QarrTierDown", "QarrNoTierReady")),
        Chart("States of replicas", COUNT, "What each router sees of each.",
              ((f"max by (instance, replica, state) (qarr_replica_state{{{J}}}) == 1", ""),), "matrix", 16, columns=("replica", "instance", "state"), alerts=("QarrReplicaFailed",)),
        Chart("In flight", COUNT, "Requests on each replica, added over routers, and what one router gives it at once.",
              ((f"sum by (replica) (qarr_requests_in_flight{{{J}}})", "{{replica}}"),
               (seen("qarr_requests_limit", "replica"), "{{replica}} limit"))),
        Chart("KV cache", SHARE, "From 88 % on a replica gets no more long prompts.",
              ((seen("qarr_kv_cache_usage_ratio", "replica"), "{{replica}}"),), limit=0.85, alerts=("QarrKvCacheFull",)),
        Chart("Restarts", COUNT, "Engines started again by themselves, in half an hour.",
              ((f"sum by (tier) (increase(qarr_engine_restarts_total{{{J}}}[30m]))", "{{tier}}"),), limit=3, alerts=("QarrEngineRestartLoop",)),
    ),
    "Failures": (
        Chart("Breakers", COUNT, "1: spared after failures, or waiting for a request to try.",
              ((seen("qarr_breaker_open", "instance, replica"), "{{instance}} {{replica}}"),), alerts=("QarrBreakerOpenLong",)),
        Chart("Breakers opened", COUNT, "Times, in ten minutes.",
              ((f"sum by (replica) (increase(qarr_breaker_opened_total{{{J}}}[10m]))", "{{replica}}"),)),
        Chart("Failed attempts", PER_S, "By tier and error.",
              ((rate("qarr_upstream_failures_total", "tier, error"), "{{tier}} {{error}}"),), "stacked"),
        Chart("Further attempts", PER_S, "Before the first byte, by the tier that they went to.",
              ((rate("qarr_retries_total", "tier"), "{{tier}}"),), "stacked"),
        Chart("The router's tasks", COUNT, "Of its event loop: far more than open requests means that something piles up.",
              ((f"qarr_tasks{{{J}}}", "{{instance}} tasks"), (f"qarr_open_requests{{{J}}}", "{{instance}} open requests"))),
        Chart("Versions of routers", COUNT, "What runs.", ((f"max by (job, instance, version, model) (qarr_build_info{{{J}}})", ""),), "table",
              columns=("job", "instance", "version", "model")),
    ),
    "vLLM's own": (
        Chart("Running sequences", COUNT, "Sequences in each engine.", (("sum by (tier, instance) (vllm:num_requests_running)", "{{tier}} {{instance}}"),)),
        Chart("Waiting inside the engine", COUNT, "Should be near nothing: requests wait in the router instead.",
              (("sum by (tier, instance) (vllm:num_requests_waiting)", "{{tier}} {{instance}}"),)),
        Chart("KV cache, as engines report it", SHARE, "By each engine's own word.", (("max by (tier, instance) (vllm:kv_cache_usage_perc)", "{{tier}} {{instance}}"),)),
        Chart("Tokens generated", TOKENS_PER_S, "By each engine's own word.",
              (("sum by (tier, instance) (rate(vllm:generation_tokens_total[$__rate_interval]))", "{{tier}} {{instance}}"),), "stacked"),
        Chart("Tokens prefilled", TOKENS_PER_S, "By each engine's own word.",
              (("sum by (tier, instance) (rate(vllm:prompt_tokens_total[$__rate_interval]))", "{{tier}} {{instance}}"),), "stacked"),
        Chart("Prefix cache", TOKENS_PER_S, "Prompt tokens that were looked up, and found.",
              (("sum by (tier) (rate(vllm:prefix_cache_queries_total[$__rate_interval]))", "{{tier}} looked up"),
               ("sum by (tier) (rate(vllm:prefix_cache_hits_total[$__rate_interval]))", "{{tier}} found"))),
    ),
}  # fmt: skip

QUALITY: dict[str, tuple[Chart, ...]] = {
    "Loss": (
        Chart("Answers expected worse, and allowed", SHARE, "Share of answers that are expected to be worse than the highest precision's, and what the loss budget would have allowed.",
              ((f"sum by (job) (rate(qarr_loss_expected_answers_total{{{J}}}[$__rate_interval])) / sum by (job) (rate(qarr_loss_counted_answers_total{{{J}}}[$__rate_interval]))", "{{job}} expected"),
               (f"sum by (job) (rate(qarr_loss_allowed_answers_total{{{J}}}[$__rate_interval])) / sum by (job) (rate(qarr_loss_counted_answers_total{{{J}}}[$__rate_interval]))", "{{job}} allowed")), width=6),
        Chart("Expected of allowed", SHARE, "Over 100 % for an hour: alert.",
              ((f"job:qarr_loss:budget_ratio10m{{{J}}}", "{{job}} 10 min"), (f"job:qarr_loss:budget_ratio1h{{{J}}}", "{{job}} 1 h")), width=6, limit=1, alerts=("QarrLossOverBudget",)),
        Chart("Tiers that answer worse than they may", COUNT, "1: the tier is known to lose more answers than policy.loss_budget allows.",
              ((seen("qarr_tier_worse", "tier"), "{{tier}}"),), width=6, alerts=("QarrTierWorse",)),
        Chart("Caps on the loss, by class", SHARE, "policy.max_loss: most that an answer of a class may lose. None: only the budget holds.", ((seen("qarr_loss_bound_ratio", "class"), "{{class}}"),), "bars", 6),
        Chart("Expected loss", SHARE, "Share of answers that are expected to be worse than the highest precision's; of a class, its worst complexity.",
              ((seen("qarr_expected_loss_ratio", "class, tier"), ""),), "matrix", 12, height=11, columns=CLASS_BY_TIER, decimals=1),
        Chart("Measured answers", COUNT, "That the expected loss rests on; of a class, all complexities. 0: it is published.",
              ((f"sum by (class, tier) (max by (class, complexity, tier) (qarr_expected_loss_answers{{{J}}}))", ""),), "matrix", 12, height=11, columns=CLASS_BY_TIER),
    ),
    "Answers that changed tier": (
        Chart("Continuations", PER_S, "Answers that another engine went on with.",
              ((or_none(rate("qarr_continuations_total", "from_tier, to_tier"), "from_tier", "to_tier"), "{{from_tier}} → {{to_tier}}"),), "stacked", 24),
    ),
    "Predictions": (
        Chart("Error of predicted TTFT and TPOT", SHARE, "As a share of what was seen.",
              quantiles("qarr_prediction_error_ratio", "tier, kind", "{{kind}} {{tier}}", "0.5", "0.95"), width=12, limit=0.5),
        Chart("Error of predictions, median over half an hour", SHARE, "An alert from 50 % on.",
              ((f"job_tier_kind:qarr_prediction_error:median30m{{{J}}}", "{{kind}} {{tier}}"),), width=12, limit=0.5, alerts=("QarrPredictionsOff",)),
    ),
}  # fmt: skip

ENGINE, HIGHEST = (
    f"qarr_key_{name}_total" for name in ("engine_seconds", "highest_engine_seconds")
)
SAVED = f"1 - sum by (key, team) (rate({ENGINE}{{{J}}}[$__rate_interval])) / sum by (key, team) (rate({HIGHEST}{{{J}}}[$__rate_interval]))"
USAGE: dict[str, tuple[Chart, ...]] = {
    "Now": (
        Chart("Replicas' worth of work", COUNT, "Engine time of all keys in seconds a second, of replicas of the highest tier, over five minutes.",
              ((f"sum(rate({ENGINE}{{{J}}}[5m]))", ""),), "number", 6),
        Chart("Saved by precision", SHARE, "Engine time less than if every request had been served at the highest precision, over the time that is shown.",
              ((f"1 - sum(increase({ENGINE}{{{J}}}[$__range])) / (sum(increase({HIGHEST}{{{J}}}[$__range])) > 0)", ""),), "number", 6),
        Chart("Cost an hour", COUNT, "At the rate of the last five minutes, in the currency of budgets.currency; 0 without budgets.replica_hour.",
              ((f"sum(rate(qarr_key_money_total{{{J}}}[5m])) * 3600", ""),), "number", 6),
        Chart("Fullest budget", SHARE, "The largest used share of any budget.",
              ((f"max(qarr_budget_used_ratio{{{J}}})", ""),), "number", 6, 1, decimals=1),
    ),
    "Who uses what at what cost": (
        Chart("Engine time by key", COUNT, "In seconds a second. Keys beyond the first 50 are other.",
              ((rate(ENGINE, "key"), "{{key}}"),), "stacked"),
        Chart("Engine time by team", COUNT, "In seconds a second.",
              ((f'label_replace({rate(ENGINE, "team")}, "team", "no team", "team", "")', "{{team}}"),), "stacked"),
        Chart("Cost an hour by key", COUNT, "At the present rate, in the currency of budgets.currency.",
              ((rate("qarr_key_money_total", "key") + " * 3600", "{{key}}"),), "stacked"),
        Chart("Requests by key", PER_S, "That an engine began to answer.", ((rate("qarr_key_requests_total", "key"), "{{key}}"),), "stacked"),
        Chart("Tokens by key", TOKENS_PER_S, "Of prompts, of these from the prefix cache, of answers.",
              ((rate("qarr_key_tokens_total", "key, kind"), "{{key}} {{kind}}"),)),
        Chart("Budgets", SHARE, "Used or reserved share of each; a team's budgets have no key.",
              ((seen("qarr_budget_used_ratio", "key, team, budget"), "{{key}} {{team}} {{budget}}"),), "bars", limit=1, decimals=1),
    ),
    "What precision routing saved": (
        Chart("Saved share by key", SHARE, "Below 0: the tiers that served took longer than the highest precision would have.",
              ((SAVED, "{{key}} {{team}}"),), lowest=None),
        Chart("Engine time, and at the highest precision", COUNT, "In seconds a second, of all keys.",
              ((f"sum(rate({ENGINE}{{{J}}}[$__rate_interval]))", "as served"),
               (f"sum(rate({HIGHEST}{{{J}}}[$__rate_interval]))", "all at the highest precision"))),
        Chart("Requests of keys by tier", PER_S, "The tier that served.", ((rate("qarr_key_requests_total", "tier"), "{{tier}}"),), "stacked"),
    ),
}  # fmt: skip

DASHBOARDS = {
    "qarr-overview": ("QARR overview", OVERVIEW),
    "qarr-engines": ("QARR engines", ENGINES),
    "qarr-quality": ("QARR quality", QUALITY),
    "qarr-usage": ("QARR usage and cost", USAGE),
}


def panel(chart: Chart, number: int) -> object:
    """Return the builder of a panel with a number of its own."""
    if chart.kind == "number":
        made = stat.Panel().height(4).color_scheme(_colours(chart))
    elif chart.kind == "bars":
        made = bargauge.Panel().height(8).orientation(VizOrientation.HORIZONTAL).min(0)
        if chart.limit is not None:
            made = made.max(chart.limit)
    elif chart.kind in TABLES:
        made = table.Panel().height(8).with_transformation(_columns(chart))
    else:
        made = _over_time(chart)
    if chart.height:
        made = made.height(chart.height)
    made = (
        made.id(number)
        .title(chart.title)
        .description(chart.text)
        .span(chart.width)
        .datasource(SOURCE)
    )
    made = made.links(
        [_runbooks(f"Runbook: {alert}", f"#{alert.lower()}") for alert in chart.alerts]
    )
    if chart.kind != "table":
        made = made.unit(chart.unit).thresholds(_thresholds(chart))
    if chart.decimals is not None:
        made = made.decimals(chart.decimals)
    for letter, (expr, legend) in zip("ABCDEFG", chart.queries, strict=False):
        query = (
            prometheus.Dataquery()
            .expr(expr)
            .legend_format(legend)
            .ref_id(letter)
            .datasource(SOURCE)
        )
        if chart.kind in {"number", "bars", *TABLES}:
            query = query.instant().format(
                "table" if chart.kind in TABLES else "time_series"
            )
        made = made.with_target(query.exemplar(chart.traces))
    return made


def _over_time(chart: Chart) -> timeseries.Panel:
    made = (
        timeseries.Panel()
        .height(8)
        .fill_opacity(20 if chart.kind == "stacked" else 5)
        .line_width(1)
    )
    made = made.legend(_legend())
    if chart.lowest is not None:
        made = made.min(chart.lowest)
    if chart.kind == "stacked":
        made = made.stacking(common.StackingConfig().mode("normal"))
    if chart.limit is not None:
        made = made.thresholds_style(
            common.GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED)
        )
    return made


def _columns(chart: Chart) -> DataTransformerConfig:
    """Return what arranges a table's labels, or spans a matrix of two of them."""
    if chart.kind == "matrix":
        down, across, cells = chart.columns
        labels = {"rowField": down, "columnField": across, "valueField": cells}
        return DataTransformerConfig("groupingToMatrix", options=labels)
    columns = {
        "excludeByName": {"Time": True, "Value": True},
        "indexByName": {name: number for number, name in enumerate(chart.columns)},
        "renameByName": {},
    }
    return DataTransformerConfig("organize", options=columns)


def _runbooks(title: str, section: str = "") -> dashboard.DashboardLink:
    """Return a link to the runbooks, or to one of their sections."""
    return (
        dashboard.DashboardLink(title)
        .type("link")
        .url(f"${{{RUNBOOKS}}}{section}")
        .target_blank(True)
    )


def _colours(chart: Chart) -> dashboard.FieldColor:
    return (
        dashboard.FieldColor()
        .mode("thresholds" if chart.limit is not None else "fixed")
        .fixed_color("text")
    )


def _thresholds(chart: Chart) -> dashboard.ThresholdsConfig:
    steps = [Threshold(value=None, color="green")]
    if chart.limit is not None:
        steps.append(Threshold(value=chart.limit, color=RED))
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _legend() -> common.VizLegendOptions:
    return (
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs([])
    )


def build(uid: str, title: str, rows: dict[str, tuple[Chart, ...]]) -> str:
    """Return a dashboard as JSON."""
    made = (
        dashboard.Dashboard(title)
        .uid(uid)
        .tags(["qarr"])
        .time("now-1h", "now")
        .refresh("15s")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("QARR")
            .type("dashboards")
            .tags(["qarr"])
            .keep_time(True)
            .include_vars(True)
        )
        .link(_runbooks("Runbooks"))
        .with_variable(
            dashboard.DatasourceVariable("datasource")
            .label("Prometheus")
            .type("prometheus")
        )
        .with_variable(
            dashboard.QueryVariable("job")
            .label("Fleet")
            .query("label_values(qarr_build_info, job)")
            .datasource(SOURCE)
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value("qarr.*")
        )
        .with_variable(
            dashboard.TextBoxVariable(RUNBOOKS)
            .label("Runbooks")
            .default_value(PROMETHEUS_PAGE)
            .hide(VariableHide.HIDE_VARIABLE)
        )
    )
    numbers = count(1)
    for name, charts in rows.items():
        made = made.with_row(dashboard.Row(name).id(next(numbers)))
        for chart in charts:
            made = made.with_panel(panel(chart, next(numbers)))
    return JSONEncoder(sort_keys=True, indent=2).encode(made.build()) + "\n"


def main() -> None:
    """Write every dashboard, or tell which differ from what is written."""
    differ = []
    for uid, (title, rows) in DASHBOARDS.items():
        path, text = FOLDER / f"{uid}.json", build(uid, title, rows)
        if "--check" in sys.argv:
            if not path.is_file() or path.read_text("utf-8") != text:
                differ.append(path.name)
        else:
            path.write_text(text, "utf-8")
    if differ:
        sys.exit(
            f"not what dashboards.py makes: {', '.join(differ)}; run it without --check"
        )


if __name__ == "__main__":
    main()
