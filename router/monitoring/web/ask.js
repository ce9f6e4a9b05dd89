// The box for a prompt: what would be decided, before it is sent; then the answer as it is written.

const TYPING_MS = 250;
const EXAMPLES = {
  "a question": "What is the capital of France?",
  code: "Write a Python function that merges two sorted lists, with type hints.",
  mathematics: "A train leaves at 14:05 and travels 312 km at 96 km/h. When does it arrive? Show your steps.",
  translation: "Übersetze ins Englische: Der Zug hat heute leider zwanzig Minuten Verspätung.",
};
let preview = null; // the request under way for a decision
let sending = null; // the one for an answer
let previewed = null; // the decision that is shown
let typing = 0;

/** Offer the fleet's tiers as hints. */
function offerTiers(names) {
  sync(byId("ask").elements.tier, ["auto", ...names], (name) => name, (name) => el("option", { value: name }, name));
}

/** The request as the form has it. */
function bodyOf(form) {
  const number = (name) => (form.elements[name].value === "" ? undefined : Number(form.elements[name].value));
  const sla = { ttft_ms: number("ttft"), tpot_ms: number("tpot") };
  const allowed = number("loss");
  if (allowed !== undefined) sla.max_quality_loss = allowed / 100;
  return {
    prompt: form.elements.prompt.value,
    system_prompt: form.elements.system.value || undefined,
    max_tokens: number("tokens"),
    temperature: number("temperature"),
    tier: form.elements.tier.value,
    tier_policy: form.elements.require.checked ? "require" : undefined,
    priority: form.elements.priority.value || undefined,
    sla: Object.values(sla).some((v) => v !== undefined) ? sla : undefined,
  };
}

function decideSoon() {
  clearTimeout(typing);
  preview?.abort();
  preview = previewed = null;
  typing = setTimeout(decide, TYPING_MS);
}

async function decide() {
  const form = byId("ask"), area = byId("decision");
  preview?.abort();
  previewed = null;
  const empty = !form.elements.prompt.value.trim();
  if (empty || !form.checkValidity()) {
    area.replaceChildren(el("p", { class: "muted" }, empty ? "The decision shows here while you type." : "One of the numbers is not possible."));
    return;
  }
  const mine = (preview = new AbortController());
  area.setAttribute("aria-busy", "true");
  try {
    const decision = await askJson("/route", { method: "POST", body: bodyOf(form), signal: mine.signal });
    if (preview !== mine) return;
    previewed = decision;
    area.replaceChildren(...renderDecision(decision));
  } catch (error) {
    if (preview === mine) area.replaceChildren(problemText(error));
  } finally {
    if (preview === mine) area.removeAttribute("aria-busy");
  }
}

function renderDecision(decision) {
  const features = `${decision.class.replaceAll("_", " ")}, ${percent(decision.confidence)} sure · ${plural(decision.prompt_tokens, "token")}`;
  const head = decision.tier
    ? el("p", { class: "to" }, "would go to ", tierName(decision.tier), decision.degraded.length ? el("span", { class: "badge missed" }, `▾ ${notAssured(decision.degraded).join(", ")}`) : null)
    : el("p", { class: "to refused" }, "✕ would be refused", known(decision.retry_after_s) ? `, possible in about ${duration(decision.retry_after_s * 1000)}` : "");
  return [head, el("p", { class: "muted" }, features), el("p", { class: "reason" }, decision.reason), verdictTable(decision.tiers, decision.tier)];
}

/** What is wrong, as the router says it. */
function problemText(error) {
  const network = error instanceof TypeError;
  const lines = (error.body?.errors ?? []).map((e) => el("li", {}, el("b", {}, e.field), ` ${e.problem}${e.allowed ? ` (allowed: ${e.allowed})` : ""}`));
  const again = error.retryAfter ? ` Try again in ${duration(Number(error.retryAfter) * 1000)}.` : "";
  return el("div", { class: "problem" }, el("p", {}, "✕ ", network ? "The router cannot be reached." : `${error.message}${again}`), lines.length ? el("ul", {}, lines) : null);
}

async function send(event) {
  event?.preventDefault();
  const form = byId("ask");
  if (sending || !form.reportValidity()) return;
  const mine = (sending = new AbortController());
  const began = performance.now(), expected = previewed?.tier;
  const answer = byId("answer"), facts = byId("answer-facts");
  byId("answer-area").hidden = false;
  put(answer, "");
  facts.replaceChildren("sent");
  byId("answer-problem").replaceChildren();
  working(true);
  try {
    await receive(await ask("/generate", { method: "POST", body: { ...bodyOf(form), stream: true }, signal: mine.signal }), began, expected);
  } catch (error) {
    if (mine.signal.aborted) { facts.append(" · stopped"); announce("stopped"); }
    else byId("answer-problem").replaceChildren(problemText(error));
  } finally {
    sending = null;
    working(false);
  }
}

/** Show a stream as it comes. */
async function receive(response, began, expected) {
  const answer = byId("answer"), facts = byId("answer-facts");
  const tier = response.headers.get("x-qarr-tier"), id = response.headers.get("x-request-id");
  const reason = response.headers.get("x-qarr-reason");
  let first = null, ended = false;
  const overflow = response.headers.get("x-qarr-overflow");
  facts.replaceChildren(...(tier ? [tierName(tier)] : overflow ? [`overflow: ${overflow}`] : []), " writes");
  const changed = tier && expected && tier !== expected ? `The preview said ${expected}. When it was sent: ${reason ?? "no reason is known"}.` : "";
  if (reason) facts.title = reason;
  for await (const { name, data } of eventsOf(response)) {
    if (name === "message") {
      if (first === null) first = performance.now() - began;
      answer.append(JSON.parse(data).text ?? "");
      answer.scrollTop = answer.scrollHeight;
    } else if (name === "done") {
      ended = true;
      closing(facts, JSON.parse(data), first, performance.now() - began, id);
      if (changed) facts.append(el("br"), changed);
    } else if (name === "error") {
      throw new Problem(0, JSON.parse(data), null);
    }
  }
  if (!ended) throw new Problem(0, { title: "The answer is incomplete: the connection ended before it did" }, null);
}

function closing(facts, done, first, whole, id) {
  const tier = [done.tier ? tierName(done.tier) : `overflow: ${done.overflow}`, ...(done.continued_on ?? []).flatMap((t) => [" → ", tierName(t)])];
  const parts = [
    plural(done.usage?.completion_tokens ?? 0, "token"), ...(done.usage?.reasoning_tokens ? [`${count(done.usage.reasoning_tokens)} of them thought`] : []), `TTFT ${duration(done.ttft_ms)}`, `TPOT ${duration(done.tpot_ms)}`,
    `first token here after ${duration(first)}`, `${duration(whole)} in all`, ...(done.finish_reason === "length" ? ["cut at max tokens"] : []),
  ];
  facts.replaceChildren(...tier, ` · ${parts.join(" · ")} `);
  const show = () => {
    const record = records.find((r) => r.request_id === id);
    if (record) openRequest(record);
    else announce("its record has not come yet");
  };
  if (id) facts.append(el("button", { type: "button", class: "plain", onclick: show }, "Details"));
  announce(`answered by ${done.tier}, ${parts[0]}`);
}

function working(on) {
  byId("send").disabled = on;
  byId("stop").disabled = !on;
  byId("answer").setAttribute("aria-busy", String(on));
}

function setUpAsk() {
  const form = byId("ask"), text = form.elements.prompt;
  form.addEventListener("input", decideSoon);
  form.addEventListener("submit", send);
  byId("stop").addEventListener("click", () => sending?.abort());
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send(event);
  });
  byId("examples").append(...Object.entries(EXAMPLES).map(([name, prompt]) =>
    el("button", { type: "button", class: "plain", onclick: () => { text.value = prompt; decide(); text.focus(); } }, name)));
  decide();
}
