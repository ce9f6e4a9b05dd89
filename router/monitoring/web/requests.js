// Requests: those in flight, and the last ones that ended. Each opens into its details.

const KEPT = 200; // besides those that went badly
const MOST_KEPT = 1000;
const SHOWN = 60;
const TOUCH_HOLDS_MS = 5_000;
const SHOWN_EVERY_MS = 250; // under load the list would move faster than anybody reads
let records = []; // newest first
let held = null; // what is shown while the list is held
let pinned = false;
let shownAt = 0;
let showing = false;

const recordKey = (r) => `${r.at}|${r.request_id}|${r.trace_id}`; // callers choose ids
const FILTERS = {
  all: () => true,
  missed: (r) => r.sla_met === false,
  failed: (r) => r.outcome === "error",
  refused: (r) => r.outcome === "refused",
  gone: (r) => r.outcome === "client_gone",
  moved: (r) => r.attempts_failed > 0 || r.continued_on.length > 0,
  degraded: (r) => r.degraded.length > 0,
};

/** Take records, in whatever order; those that are known already change nothing. */
function addRecords(added) {
  const seen = new Set(records.map(recordKey));
  const fresh = added.filter((r) => !seen.has(recordKey(r)));
  if (!fresh.length) return;
  // In the order in which they ended: the newest first.
  let good = 0;
  records = [...fresh, ...records].sort((a, b) => ended(b) - ended(a))
    .filter((r) => r.outcome !== "ok" || FILTERS.missed(r) || ++good <= KEPT).slice(0, MOST_KEPT);
  showSoon();
}

/** Show new records: at once after a quiet time, else together with those that come meanwhile. */
function showSoon() {
  if (showing) return;
  showing = true;
  setTimeout(() => {
    showing = false;
    shownAt = performance.now();
    showRequests();
  }, Math.max(0, shownAt + SHOWN_EVERY_MS - performance.now()));
}

/** The newest record of a request that was decided in the window; null: there is none. */
function lastDecision() {
  const newest = records.find((r) => r.tier);
  return newest && fleet.at - ended(newest) < fleet.window_s ? newest : null;
}

/** Forget what was listed. */
function forgetRecords() {
  records = [];
  held = null;
  showRequests();
}

const ended = (r) => r.at + (r.duration_ms ?? 0) / 1000;

/** Hold the list as it is, so that nothing moves away from under a pointer or a reading eye. */
function hold(on) {
  if (on && !held) held = records;
  if (!on) held = null;
  showRequests();
}

function showRequests() {
  const newer = held ? records.filter((r) => !held.includes(r)).length : 0;
  const matching = (held ?? records).filter(FILTERS[byId("filter").value]);
  const list = byId("requests");
  sync(list, matching.slice(0, SHOWN), recordKey, makeRequest);
  byId("requests-empty").hidden = matching.length > 0;
  put(byId("requests-empty"), records.length ? "None of the last requests is like that." : "No request has ended yet. Ask something, here or with curl.");
  put(byId("newer"), newer ? `${count(newer)} newer` : held ? "held" : "");
}

/** A code or an error's name as words: over_budget, EngineRefused. */
const inWords = (code) => code.replace(/(?<=[a-z])(?=[A-Z])/g, " ").replaceAll("_", " ").toLowerCase();

/** The words for how a request ended, with a mark. */
function outcome(r) {
  if (r.outcome === "refused") return ["refused", `✕ refused: ${inWords(r.error ?? "")}`];
  if (r.outcome === "error") return ["error", `✕ failed: ${inWords(r.error ?? "")}`];
  if (r.outcome === "client_gone") return ["gone", "– client left"];
  if (r.sla_met === false) return ["missed", "▾ SLA missed"];
  if (r.sla_met === true) return ["met", "✓ SLA met"];
  return ["ok", "✓ done"];
}

/** What happened on the way, in short. */
function detours(r) {
  const found = [];
  if (r.attempts_failed) found.push(plural(r.attempts_failed, "failed attempt"));
  if (r.overflow_failure) found.push(`overflow ${r.overflow_failure}`);
  if (r.continued_on.length) found.push(`continued on ${r.continued_on.join(", ")}`);
  return [...found, ...notAssured(r.degraded)];
}

/** What is not going to be kept, and whether that is known. */
function notAssured(degraded) {
  const given = degraded.filter((bound) => bound !== "unmeasured");
  return [...(given.length ? [`${given.join(" and ")} given up`] : []), ...(degraded.includes("unmeasured") ? ["not measured: a bound may break"] : [])];
}

/** The reason without class and complexity, which have a column of their own. */
function briefly({ reason }) {
  const [, kind, complexity, why] = /^([a-z ]+), (trivial|moderate|complex): (.*)$/s.exec(reason) ?? [null, "", "", reason];
  return { doubtful: kind.startsWith("probably "), complexity, why };
}

/** Times of a request; an answer that is not streamed has no first token that anyone sees, but a speed. */
const wholeSpeed = (r) => (known(r.ttft_ms) || !r.output_tokens || !r.duration_ms ? null : `${rate((1000 * r.output_tokens) / r.duration_ms)} tokens/s`);

/** Whether the model thought before it answered, as far as anybody saw. */
const thoughtFirst = (r) => known(r.ttfa_ms) && known(r.ttft_ms) && r.ttfa_ms > r.ttft_ms;

/** Tokens in words: of the prompt, how many the engine had cached, and of the answer, how many are reasoning. */
function tokensInWords(r) {
  const cached = known(r.cached_prompt_tokens) ? `, ${count(r.cached_prompt_tokens)} of them cached` : "";
  const thought = r.reasoning_tokens ? `, ${count(r.reasoning_tokens)} of them thought` : "";
  return `${count(r.prompt_tokens)} in the prompt${cached}; ${count(r.output_tokens)} in the answer${thought}`;
}

/** The time to the first token, and below it the one to the first of the answer itself. */
function firstTokens(r) {
  const answer = `The model thought first: its answer began after ${duration(r.ttfa_ms)}`;
  return [duration(r.ttft_ms), thoughtFirst(r) ? el("small", { title: answer }, ` → ${duration(r.ttfa_ms)}`) : null];
}

/** Choose which requests are listed. */
function showOnly(filter) {
  const chosen = byId("filter");
  chosen.value = filter;
  showRequests();
  chosen.scrollIntoView({ block: "center" });
  chosen.focus();
}

function tierCell(r) {
  if (r.overflow) return el("span", { class: "moved", title: "every tier was full: a server outside of the fleet answered" }, `overflow: ${r.overflow}`);
  const served = r.served_by ?? r.tier;
  if (!served) return el("span", { class: "muted" }, "none");
  if (r.tier && r.served_by && r.tier !== r.served_by) {
    return el("span", { class: "moved", title: `decided for ${r.tier}, served by ${r.served_by}` }, shape(r.tier), el("span", { class: "hidden" }, r.tier), " → ", tierName(r.served_by));
  }
  return tierName(served);
}

function makeRequest(r) {
  const [kind, words] = outcome(r);
  const { doubtful, complexity, why } = briefly(r), speed = wholeSpeed(r);
  const cell = (name, label, ...children) => el("td", { role: "cell", class: name, "data-label": label }, ...children);
  const open = el("button", { type: "button", class: "open", "aria-haspopup": "dialog", "aria-label": `Details of the request that ended at ${timeOf(ended(r))}, ${r.class}, ${words}` }, timeOf(ended(r)));
  const row = el("tr", { role: "row", "data-outcome": kind, "data-request": r.request_id },
    cell("at", "Ended", open),
    cell("class", "Class", r.class.replaceAll("_", " "), doubtful ? "?" : "", complexity ? el("small", {}, ` ${complexity}`) : null),
    cell("which", "Tier", tierCell(r)),
    cell("why", "Reason", el("span", { title: r.reason }, [...detours(r), why].join(" · "))),
    cell("num tokens", "Tokens", el("span", { title: tokensInWords(r) }, `${count(r.prompt_tokens)} → ${count(r.output_tokens)}`),
      r.reasoning_tokens ? el("small", {}, `${count(r.reasoning_tokens)} thought`) : null),
    ...(speed ? [el("td", { role: "cell", class: "num speed", colspan: "2", "aria-colspan": "2", title: "not streamed: the answer came as a whole" }, speed)]
      : [cell("num first", "TTFT", ...firstTokens(r)), cell("num tpot", "TPOT", duration(r.tpot_ms))]),
    cell("num", "Total", duration(r.duration_ms)),
    cell("outcome", "Outcome", el("span", { class: `badge ${kind}` }, words)));
  row.addEventListener("click", () => { if (!String(getSelection())) openRequest(r); });
  return row;
}

const STAGES = { waiting: "waits", prefill: "reads", decode: "writes" };
const LISTED = 50;

function showInFlight({ in_flight, in_flight_total }) {
  sync(byId("flight"), in_flight.slice(0, LISTED), (r) => r.request_id,
    (r) => el("li", { title: r.request_id }, el("span", {}), el("span", {}, r.class.replaceAll("_", " ")), el("span", { class: "stage" }), el("span", { class: "num" })),
    (node, r) => {
      const [tier, , stage, age] = node.children;
      const where = r.overflow ? `overflow: ${r.overflow}` : String(r.tier);
      if (tier.dataset.tier !== where) {
        tier.dataset.tier = where;
        tier.replaceChildren(r.overflow ? where : r.tier ? tierName(r.tier) : "no tier yet");
      }
      put(stage, `${r.is_thinking ? "thinks" : STAGES[r.state] ?? r.state} · ${plural(r.state === "decode" ? r.output_tokens : r.prompt_tokens, "token")}`);
      put(age, duration(r.age_ms));
    });
  const list = byId("flight-list"); // it keeps the height that it once had: what stands below does not jump
  list.style.minHeight = `${Math.max(list.offsetHeight, parseFloat(list.style.minHeight) || 0)}px`;
  put(byId("flight-count"), in_flight_total ? count(in_flight_total) : "none");
  const more = in_flight_total - Math.min(in_flight.length, LISTED);
  put(byId("flight-more"), more > 0 ? `and ${count(more)} more` : "");
}

function setUpRequests() {
  showRequests();
  byId("filter").addEventListener("change", showRequests);
  const button = byId("hold"), list = byId("requests-list");
  button.addEventListener("click", () => {
    pinned = !pinned;
    button.setAttribute("aria-pressed", String(pinned));
    hold(pinned);
  });
  list.addEventListener("pointerenter", (event) => { if (event.pointerType === "mouse") hold(true); });
  list.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hold(pinned); });
  let release = 0;
  list.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "mouse") return;
    hold(true); // a row that moves away is not tapped
    clearTimeout(release);
    release = setTimeout(() => hold(pinned), TOUCH_HOLDS_MS);
  });
}
