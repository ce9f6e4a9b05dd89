// The tiers: state, load, speed and attainment of each, and of all together; and the replicas below them.

const LEAST_SECONDS = 30;
const MOST_SECONDS = 180;
const IDLE_TEXT_MS = 10_000; // so that it can be read, however many requests there are
const rows = new Map();
let fleet = null;

/** Take the fleet as it is now. */
function showFleet(next) {
  const before = fleet;
  fleet = next;
  put(byId("model"), next.model);
  put(byId("machine"), next.machine && !startedHere(next) ? `router on ${next.machine}` : next.machine);
  put(byId("notice"), next.notice ?? "");
  byId("notice").hidden = !next.notice;
  put(byId("version"), next.version);
  put(byId("window"), `last ${next.window_s} s`);
  byId("live-empty").hidden = next.tiers.length > 0;
  byId("scope").hidden = next.scope !== "own";
  offerTiers(next.tiers.map((tier) => tier.tier));
  sync(byId("tiers"), next.tiers, (tier) => tier.tier, makeTier, (_, tier) => rows.get(tier.tier).update(tier, next));
  showSums(next);
  showBudget(next.loss_budget);
  showMeasuring(next.profiling);
  showTitle(next);
  if (before) tellChanges(before, next);
}

/** Tell whether engines run on the router's machine, as far as this key may know: the machine is told as theirs. */
function startedHere({ scope, tiers }) {
  return scope === "own" || tiers.some((tier) => tier.checkpoint || tier.preparing);
}

/** Leave a gap in what is drawn over time: nothing was heard. */
function gapInSeries() {
  for (const row of rows.values()) row.gap();
}

let filled = false;

/** Draw what the last requests tell of the time before the page was opened. */
function fillPlots(past) {
  if (filled || !past.length) return;
  filled = true;
  const seconds = Math.min(MOST_SECONDS, Math.floor(fleet.at - Math.min(...past.map(ended))));
  for (const [tier, row] of rows) {
    row.fill(past.filter((r) => (r.served_by ?? r.tier) === tier), fleet.in_flight.filter((r) => r.tier === tier), seconds);
  }
}

/** Tokens a second at a time: each request's were written evenly. */
const speedAt = (spans, at) => sum(spans, ({ from, to, tokens }) => (from <= at && at < to ? tokens / (to - from) : 0));

function share(values, part) {
  return values.length ? values.sort((a, b) => a - b)[Math.floor((values.length - 1) * part)] : null;
}

const sum = (items, of) => items.reduce((total, item) => total + (of(item) ?? 0), 0);

function showSums({ tiers, waiting, in_flight_total, totals, window_s }) {
  const asked = sum(tiers, (t) => t.sla?.asked), met = sum(tiers, (t) => t.sla?.met), errors = sum(tiers, (t) => t.errors);
  put(byId("sum-speed"), rate(sum(tiers, (t) => t.tokens_per_s)));
  put(byId("sum-flight"), count(in_flight_total));
  put(byId("sum-waiting"), count(waiting));
  put(byId("sum-requests"), count(sum(tiers, (t) => t.requests)));
  put(byId("sum-errors"), errors ? `${plural(errors, "error")} of them` : "no errors");
  put(byId("sum-sla"), asked ? percent(met / asked) : NONE);
  put(byId("sum-sla-of"), asked ? `${count(met)} of ${count(asked)} with bounds` : `none with bounds in ${window_s} s`);
  sync(byId("totals"), TOTALS.filter(([name]) => totals[name] || name === "requests"), ([name]) => name,
    ([name]) => {
      const parts = [el("b"), " ", el("span")];
      return el("li", {}, SHOWN_BY[name] ? el("button", { type: "button", class: "open", title: "Show these requests", onclick: () => showOnly(SHOWN_BY[name]) }, parts) : el("span", {}, parts));
    },
    (item, [name, one, many]) => {
      put(item.firstChild.firstChild, count(totals[name]));
      put(item.firstChild.lastChild, totals[name] === 1 ? one : many ?? one);
    });
}

const MEASURED = { latency: "speed", quality: "loss" };

/** What the router measures of itself, and how far it is. */
function showMeasuring(profiling) {
  const { state, what, done, total, detail } = profiling ?? {};
  const shown = state === "running" || state === "waiting";
  const before = byId("measuring").dataset.state ?? "", now = `${state} ${what}`;
  byId("measuring").hidden = !shown;
  byId("measuring").dataset.state = now;
  if (shown) {
    const far = total ? `: ${count(done)} of ${count(total)}, ${percent(done / total)}` : "";
    const why = state === "waiting" ? `, paused: ${detail || "requests go first"}` : "";
    put(byId("measuring-text"), what ? `Measuring the tiers’ ${MEASURED[what]} while no request is served${far}${why}` : `The tiers will be measured: ${detail || "not yet"}`);
    const bar = byId("measuring-bar");
    bar.hidden = !total;
    Object.assign(bar, { max: total || 1, value: done });
  }
  if (before && before !== now) refreshPolicy();
}

const TOTALS = [
  ["requests", "request", "requests"], ["ok", "answered"], ["refused", "refused"], ["errors", "failed"], ["client_gone", "left by clients"],
  ["retries", "retry", "retries"], ["continuations", "continued elsewhere"],
];

const SHOWN_BY = { refused: "refused", errors: "failed", client_gone: "gone", retries: "moved", continuations: "moved" }; // filters of the list

function showTitle({ tiers }) {
  const bad = tiers.filter((t) => t.state !== "ready");
  document.title = bad.length ? `! ${bad.map((t) => `${t.tier} ${t.state}`).join(", ")} · QARR` : "QARR";
}

function tellChanges(before, next) {
  const states = new Map(before.tiers.map((t) => [t.tier, t.state]));
  const changed = next.tiers.filter((t) => states.has(t.tier) && states.get(t.tier) !== t.state);
  if (changed.length) announce(changed.map((t) => `tier ${t.tier} is ${t.state}`).join("; "));
}

function makeTier(tier) {
  const row = new TierRow(tier.tier);
  rows.set(tier.tier, row);
  return row.node;
}

/** One figure with its name, and perhaps another figure besides, and below it a plot or a bar. */
function figure(name, title) {
  const value = el("span", { class: "value" }), more = el("span", { class: "more" }), below = el("div", { class: "below" });
  const besides = el("span", { class: "besides" });
  const node = el("div", { class: "figure", title }, el("dt", {}, name, besides), el("dd", {}, value, more, below));
  return { node, besides, value, more, below };
}

function bar(parent, share) {
  if (!parent.firstChild) parent.append(el("div", { class: "bar" }, el("i")));
  const fill = parent.firstChild.firstChild;
  fill.style.width = `${Math.min(1, Math.max(0, share ?? 0)) * 100}%`;
  fill.classList.toggle("high", (share ?? 0) >= 0.9);
}

class TierRow {
  constructor(tier) {
    this.series = Object.fromEntries(["speed", "ttft", "ttft95", "tpot", "tpot95"].map((n) => [n, new Series(LEAST_SECONDS, MOST_SECONDS)]));
    this.precision = el("span", { class: "precision" });
    this.state = el("span", { class: "state" });
    this.detail = el("p", { class: "why", hidden: true });
    this.coming = { step: el("p", { class: "clip" }), left: el("p"), bar: el("div") };
    this.comingNode = el("div", { class: "coming", hidden: true }, Object.values(this.coming));
    this.idle = el("span", { class: "idle" }, "idle");
    this.idleText = "idle";
    this.lane = el("canvas", { class: `lane ${tierClass(tier)}`, "aria-hidden": "true" });
    this.figures = {
      load: figure("In flight", "Requests on the engine, and how many it takes at once"),
      speed: figure("Tokens/s", "Output tokens in the last second"),
      ttft: figure("TTFT", "Time to the first token: median, and 95th percentile; then, if models think, the median time to the first token of the answer itself"),
      tpot: figure("TPOT", "Time for each further token: median, and 95th percentile"),
      sla: figure("SLA met", "Requests with bounds on TTFT or TPOT that were kept"),
      kv: figure("KV cache", "Use of the fullest replica's KV cache"),
      requests: figure("Requests", "Ended in the window"),
    };
    this.replicas = el("ul", { class: "replicas" });
    this.summary = el("summary");
    this.node = el("li", { class: `tier ${tierClass(tier)}`, "data-tier": tier },
      el("div", { class: "who" }, el("h3", {}, tierName(tier)), this.precision, this.state),
      el("div", { class: "track" }, this.lane, el("span", { "aria-hidden": "true" }, "reads"), el("span", { "aria-hidden": "true" }, "writes"), this.idle, this.comingNode),
      el("dl", { class: "figures" }, Object.values(this.figures).map((f) => f.node)),
      this.detail,
      el("details", { class: "more-replicas" }, this.summary, this.replicas));
    this.marks = new Lane(tier, this.lane);
  }

  gap() {
    for (const series of Object.values(this.series)) series.push(null);
  }

  fill(past, open, seconds) {
    const { at, window_s } = fleet, { speed, ttft, ttft95, tpot, tpot95 } = this.series;
    const times = Array.from({ length: Math.max(seconds, 0) }, (_, n) => at - seconds + n);
    const spans = [
      ...past.map((r) => ({ from: r.at + (r.ttft_ms ?? 0) / 1000, to: ended(r), tokens: r.output_tokens })),
      ...open.map((r) => ({ from: at - r.age_ms / 1000, to: at, tokens: r.output_tokens })),
    ].filter(({ from, to }) => to > from);
    const recent = (name, part) => times.map((t) => share(past.filter((r) => ended(r) <= t && ended(r) > t - window_s).map((r) => r[name]).filter(known), part));
    speed.precede(times.map((t) => speedAt(spans, t)));
    ttft.precede(recent("ttft_ms", 0.5));
    ttft95.precede(recent("ttft_ms", 0.95));
    tpot.precede(recent("tpot_ms", 0.5));
    tpot95.precede(recent("tpot_ms", 0.95));
  }

  update(tier, { in_flight }) {
    const { load, speed, ttft, tpot, sla, kv, requests } = this.figures;
    put(this.precision, tier.preparing ? "" : tier.precision); // before there is a checkpoint nobody knows
    this.precision.title = `provider.quantizations: ${tier.quantization}`;
    putState(this.state, tier.state);
    const inFlight = sum(tier.replicas, placesTaken);
    const limit = sum(tier.replicas, (r) => r.limit ?? tier.max_in_flight);
    this.idle.hidden = inFlight > 0 || tier.state !== "ready";
    this.#showIdle(tier);
    put(load.value, count(inFlight));
    put(load.more, ` of ${count(limit)}`);
    bar(load.below, limit ? inFlight / limit : 0);
    this.#times(ttft, tier.ttft_ms, this.series.ttft, this.series.ttft95);
    const thinks = tier.ttfa_ms?.p50 > tier.ttft_ms?.p50;
    put(ttft.besides, thinks ? ` · answer ${duration(tier.ttfa_ms.p50)}` : "");
    this.#times(tpot, tier.tpot_ms, this.series.tpot, this.series.tpot95);
    this.series.speed.push(tier.tokens_per_s);
    put(speed.value, rate(tier.tokens_per_s));
    sparkline(speed.below, this.series.speed);
    put(sla.value, tier.sla?.asked ? percent(tier.sla.met / tier.sla.asked) : NONE);
    put(sla.more, tier.sla?.asked ? ` ${count(tier.sla.met)} of ${count(tier.sla.asked)}` : "");
    sla.node.classList.toggle("bad", tier.sla?.met < tier.sla?.asked);
    const fullest = Math.max(...tier.replicas.map((r) => r.kv_cache_usage ?? -1));
    put(kv.value, fullest < 0 ? NONE : percent(fullest));
    bar(kv.below, Math.max(0, fullest));
    put(requests.value, count(tier.requests));
    put(requests.more, tier.errors ? ` ${plural(tier.errors, "error")}` : "");
    requests.node.classList.toggle("bad", tier.errors > 0);
    this.#showComing(tier.preparing, tier.state);
    this.#showReplicas(tier);
    this.marks.update(in_flight.filter((r) => r.tier === tier.tier));
  }

  /** Say why no request came here in the whole window, if others got some: the verdict of the last decision, for a while. */
  #showIdle({ tier, requests }) {
    const last = requests ? null : lastDecision();
    const against = last?.tiers.find((each) => each.tier === tier && each.tier !== last.tier)?.verdict;
    if (!against) this.idleText = "idle";
    else if (this.idleText === "idle" || performance.now() - this.idleSince > IDLE_TEXT_MS) {
      this.idleText = `idle; for the last prompt: ${against}`;
      this.idleSince = performance.now();
    }
    put(this.idle, this.idleText);
  }

  /** Say on the lane what the tier needs before it serves for the first time; there are no requests on it yet. */
  #showComing(preparing, state) {
    this.comingNode.hidden = !preparing || state === "ready" || state === "failed";
    if (this.comingNode.hidden) return;
    const { what, done, total, remaining_s } = preparing;
    put(this.coming.step, what + (total ? ` (${count(done)} of ${count(total)})` : ""));
    put(this.coming.left, known(remaining_s) ? `ready in ${about(remaining_s)}` : "");
    this.coming.bar.hidden = !total;
    if (total) bar(this.coming.bar, done / total);
  }

  #times({ value, more, below }, times, half, most) {
    half.push(times?.p50);
    most.push(times?.p95);
    put(value, times ? duration(times.p50) : NONE);
    put(more, times ? ` p95 ${duration(times.p95)}` : "");
    sparkline(below, half, most);
  }

  #showReplicas(tier) {
    const ready = tier.replicas.filter((r) => r.state === "ready").length;
    put(this.summary, `${plural(tier.replicas.length, "replica")}, ${ready} ready · context ${count(tier.max_model_len)}` +
      (tier.checkpoint_digest ? ` · checkpoint ${tier.checkpoint_digest.slice(0, 8)}` : ""));
    const why = [tier.detail, ...tier.replicas.filter((r) => r.detail).map((r) => `${r.id}: ${r.detail}`)].filter(Boolean).join(" · ");
    put(this.detail, why);
    this.detail.hidden = !why;
    sync(this.replicas, tier.replicas, (r) => r.id, makeReplica, updateReplica);
  }
}

function makeReplica(replica) {
  return el("li", { "data-replica": replica.id },
    el("b", {}, replica.id), el("span", { class: "state" }), el("span", { class: "numbers" }), el("span", { class: "breaker" }),
    el("span", { class: "address" }), el("div", { class: "operate" }));
}

/** One for each answer that is computed: a request may ask for several. */
function placesTaken(replica) {
  return replica.places_taken ?? replica.in_flight;
}

function updateReplica(node, r) {
  const [, state, numbers, breaker, address, controls] = node.children;
  putState(state, r.state);
  const parts = [`${count(placesTaken(r))} of ${count(r.limit)} in flight`, `${rate(r.tokens_per_s)} tokens/s`];
  if (known(r.kv_cache_usage)) parts.push(`KV cache ${percent(r.kv_cache_usage)}`);
  parts.push(`${count(r.served)} served`);
  if (r.failed) parts.push(`${count(r.failed)} failed`);
  if (known(r.engine_waiting) && r.engine_waiting > 0) parts.push(`${count(r.engine_waiting)} wait in the engine`);
  put(numbers, parts.join(" · "));
  put(breaker, r.breaker && r.breaker !== "closed" ? `breaker ${r.breaker}` : "");
  put(address, r.url ?? "");
  operate(controls, r);
}
