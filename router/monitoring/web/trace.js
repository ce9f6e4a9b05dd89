// One request in full: what was known of every tier when it was decided, and its trace as a waterfall.

const EVENTS_SHOWN = 12;
let opened = null;

/** Open a request's details. */
function openRequest(r) {
  opened = r;
  const dialog = byId("details"), [kind, words] = outcome(r);
  byId("details-title").replaceChildren(r.class.replaceAll("_", " "), " → ", tierCell(r));
  byId("details-badge").className = `badge ${kind}`;
  put(byId("details-badge"), words);
  put(byId("details-reason"), r.reason);
  byId("details-facts").replaceChildren(...facts(r).map(([name, ...value]) => el("div", {}, el("dt", {}, name), el("dd", {}, ...value))));
  byId("details-verdicts").replaceChildren(verdictTable(r.tiers, r.tier));
  byId("trace").replaceChildren(el("p", { class: "muted" }, "The trace is being fetched."));
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  history.replaceState(null, "", `#request=${encodeURIComponent(r.request_id)}`);
  showTrace(r);
}

function facts(r) {
  const { sla } = r;
  const bound = (value) => (known(value) ? `, asked for at most ${duration(value)}` : "");
  const predicted = (value) => (known(value) ? ` (predicted ${duration(value)}` : " (not predicted");
  const list = [
    ["Arrived", calendar.format(new Date(r.at * 1000))],
    ["Class", `${r.class.replaceAll("_", " ")}, ${percent(r.confidence)} sure`],
    ["Decided by", (BASES[r.basis] ?? r.basis ?? NONE)],
    ["Served by", r.replica ? `${r.replica}${r.precision ? `, ${r.precision}` : ""}` : NONE],
    ["TTFT", `${wholeSpeed(r) ? "not streamed" : duration(r.ttft_ms)}${predicted(r.predicted_ttft_ms)}${bound(sla?.ttft_ms)})`],
    ...(thoughtFirst(r) ? [["Answer began", `after ${duration(r.ttfa_ms)}, ${duration(r.ttfa_ms - r.ttft_ms)} of them thinking`]] : []),
    ["TPOT", `${wholeSpeed(r) ?? duration(r.tpot_ms)}${predicted(r.predicted_tpot_ms)}${bound(sla?.tpot_ms)})`],
    ["Total", duration(r.duration_ms)],
    ["Queue", duration(r.queue_ms)],
    ["Overhead", duration(r.overhead_ms)],
    ["Tokens", tokensInWords(r)],
    ["Expected worse", loss(r.tiers?.find((t) => t.tier === r.tier)?.expected_loss)],
    ["Cost", known(r.cost) ? `${cost(r.cost)} of engine time, predicted` : NONE],
    ["Priority", r.priority],
    ["Endpoint", r.route],
  ];
  if (known(sla?.max_quality_loss)) list.push(["Loss allowed", loss(sla.max_quality_loss)]);
  if (detours(r).length) list.push(["On the way", detours(r).join(", ")]);
  if (r.error) list.push(["Error", el("span", { class: "error-text" }, inWords(r.error))]);
  if (r.key) list.push(["Key", r.key]);
  if (r.checkpoint) list.push(["Checkpoint", el("code", {}, r.checkpoint)]);
  return [...list, ["Request", el("code", {}, r.request_id)], ["Trace", el("code", {}, r.trace_id)]];
}

const BASES = {
  hint: "the caller's hint", sort: "what the caller sorts tiers by", least_loss: "the least loss", negligible: "the soonest finish, among tiers that are as good", budget: "the soonest finish, within the loss budget",
  small_talk: "small talk: the lowest precision will do", conversation: "the conversation that the tier holds",
  degraded_quality: "what was possible: quality gave way", degraded_latency: "what was possible: latency gave way",
  degraded_unmeasured: "what was possible: a bound is not known to be kept", refused: "refusal",
};

/** Every tier's verdict. */
function verdictTable(tiers, chosen) {
  if (!tiers?.length) return el("p", { class: "muted" }, "No tier was looked at.");
  const head = ["Tier", "TTFT", "TPOT", "Loss", "Cost", "Verdict"];
  const cell = (kind, ...children) => el("td", { role: "cell", class: kind }, ...children);
  const row = (t) => {
    const interval = t.expected_loss_interval ?? [0, 0];
    return el("tr", { role: "row", class: t.tier === chosen ? "chosen" : null },
      el("th", { role: "rowheader", scope: "row" }, tierName(t.tier), t.state === "ready" ? null : el("span", { class: "muted" }, ` ${t.state}`)),
      cell("num", duration(t.predicted_ttft_ms)),
      cell("num", duration(t.predicted_tpot_ms)),
      cell("num", loss(t.expected_loss), interval[1] > 0 ? lossBasis(...interval, t.loss_answers, t.loss_source) : null),
      cell("num", cost(t.cost)),
      cell("verdict", t.tier === chosen ? `✓ ${t.verdict}` : t.verdict));
  };
  const heads = head.map((name) => el("th", { role: "columnheader", scope: "col", class: name === "Tier" || name === "Verdict" ? null : "num" }, name));
  return el("table", { role: "table", class: "verdicts", "aria-label": "Verdict on every tier" },
    el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, heads)), el("tbody", { role: "rowgroup" }, tiers.map(row)));
}

async function showTrace(r) {
  const area = byId("trace");
  try {
    const trace = await askJson(`/traces/${encodeURIComponent(r.trace_id)}`);
    if (opened !== r) return;
    area.replaceChildren(...[viewerLink(trace, r), waterfall(trace)].filter(Boolean));
  } catch (error) {
    if (opened !== r) return;
    const gone = error.status === 404;
    const address = viewerLink({ trace_url: fleet?.trace_url, trace_id: r.trace_id }, r);
    area.replaceChildren(...[address, el("p", { class: "muted" }, gone ? "This router does not keep the trace (any longer)." : String(error.message))].filter(Boolean));
  }
}

function viewerLink(trace, r) {
  const address = trace.trace_url?.replaceAll("{trace_id}", encodeURIComponent(r.trace_id));
  const shown = address ? link(address, "Open in the trace viewer ↗") : null;
  return shown && el("p", {}, shown);
}

/** Put spans below their parents, by start; those whose parent is elsewhere come first. */
function inOrder(spans) {
  const ids = new Set(spans.map((s) => s.span_id));
  const below = new Map();
  for (const span of [...spans].sort((a, b) => a.start_ms - b.start_ms)) {
    const parent = ids.has(span.parent_id) ? span.parent_id : null;
    below.set(parent, [...(below.get(parent) ?? []), span]);
  }
  const walk = (parent, depth) => (below.get(parent) ?? []).flatMap((span) => [{ span, depth }, ...walk(span.span_id, depth + 1)]);
  return walk(null, 0);
}

function waterfall(trace) {
  const total = Math.max(trace.duration_ms, ...trace.spans.map((s) => s.start_ms + s.duration_ms), 0.001);
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => {
    const tick = el("span", {}, duration(share * total));
    tick.style.left = `${share * 100}%`;
    return tick;
  });
  return el("div", { class: "waterfall", "data-trace": trace.trace_id },
    el("div", { class: "axis", "aria-hidden": "true" }, el("span", { class: "names" }), el("div", { class: "ticks" }, ticks)),
    el("ol", {}, inOrder(trace.spans).map(({ span, depth }) => spanItem(span, depth, total))));
}

function spanItem(span, depth, total) {
  const fill = el("i", { class: span.error ? "bar error" : `bar kind-${span.kind}` });
  fill.style.left = `${(span.start_ms / total) * 100}%`;
  fill.style.width = `${(span.duration_ms / total) * 100}%`;
  const name = el("span", { class: "name" }, el("span", {}, span.error ? `✕ ${span.name}` : span.name));
  name.style.paddingLeft = `${Math.min(depth, 6) * 12}px`;
  const tier = span.attributes["qarr.tier"] ?? span.attributes.tier;
  if (span.kind === "client" && tier) { fill.classList.add(tierClass(tier)); name.prepend(shape(tier)); }
  const pairs = Object.entries(span.attributes);
  const events = span.events.slice(0, EVENTS_SHOWN);
  return el("li", { class: span.error ? "failed" : null },
    el("details", {},
      el("summary", {}, name, el("span", { class: "line" }, fill, el("span", { class: "hidden" }, ` from ${duration(span.start_ms)}, for `)), el("span", { class: "took" }, duration(span.duration_ms))),
      span.error ? el("p", { class: "error-text" }, span.error) : null,
      el("dl", { class: "attributes" }, [["kind", span.kind], ["starts at", duration(span.start_ms)], ...pairs].map(attribute))),
    events.map((event) => eventRow(event, depth, total)),
    span.events.length > events.length ? el("p", { class: "muted" }, `and ${span.events.length - events.length} more events`) : null);
}

const LOSSES = /\b(expected_loss|expected_loss_high|loss\.expected|max_quality_loss)$/; // shares, on spans

const attribute = ([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, attributeText(name, value)));

/** A span's attribute for people; losses as everywhere else on the page. */
function attributeText(name, value) {
  if (LOSSES.test(name) && typeof value === "number") return loss(value);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

function eventRow(event, depth, total) {
  const tick = el("i", { class: "tick" });
  tick.style.left = `${Math.min(100, (event.at_ms / total) * 100)}%`;
  const { "exception.message": message, "exception.stacktrace": _stack, "exception.type": _type, "exception.escaped": _escaped, ...others } = event.attributes ?? {};
  const said = [message, ...Object.entries(others).map(([name, value]) => `${name.replace(/^qarr\./, "").replaceAll("_", " ")} ${value}`)].filter(Boolean).join(", ");
  const name = el("span", { class: "name", title: said || null }, el("span", {}, `◇ ${event.name.replace(/^qarr\./, "").replaceAll("_", " ")}${said ? `: ${said}` : ""}`));
  name.style.paddingLeft = `${Math.min(depth + 1, 7) * 12}px`;
  return el("div", { class: "event" }, name, el("span", { class: "line" }, tick), el("span", { class: "took" }, duration(event.at_ms)));
}

/** Open what the address names, once it is known. */
function openNamed() {
  const name = /^#request=(.+)$/.exec(location.hash)?.[1];
  const found = name && records.find((r) => r.request_id === decodeURIComponent(name));
  if (found && !opened) openRequest(found);
}

function setUpDetails() {
  const dialog = byId("details");
  dialog.addEventListener("close", () => {
    opened = null;
    history.replaceState(null, "", location.pathname);
  });
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
}
