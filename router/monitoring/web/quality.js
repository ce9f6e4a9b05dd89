// The loss budget, and the answers that each precision is expected to lose on each kind of prompt.

const POLICY_EVERY_MS = 30_000;
let policyTimer = 0;

/** Fetch the policy's table and show it; again after a while. */
async function refreshPolicy() {
  clearTimeout(policyTimer);
  if (connection.state !== "live") return; // asked again when it is
  policyTimer = setTimeout(refreshPolicy, POLICY_EVERY_MS);
  try {
    showPolicy(await askJson("/policy"));
  } catch (error) {
    if (!byId("quality").dataset.shown) byId("quality").replaceChildren(el("p", { class: "muted" }, error instanceof Problem ? error.message : "Not known: the router cannot be reached."));
  }
}

/** The budget's rule, and what the answers since the start are expected to have lost beside what they may. */
function showBudget(budget) {
  const { rule, answers, mean, budget: allowed, saved } = budget ?? {};
  const highest = fleet.tiers.at(-1)?.tier;
  put(byId("sum-saved"), known(saved) ? percent(saved) : NONE);
  put(byId("sum-saved-of"), known(saved) ? `against all on ${highest}` : answers ? "speeds not measured yet" : "no answers yet");
  put(byId("sum-loss"), loss(mean));
  byId("sum-loss").parentNode.classList.toggle("bad", mean > allowed);
  put(byId("sum-loss-of"), known(allowed) ? `${loss(allowed)} allowed` : "no answers yet");
  byId("budget").hidden = !budget;
  if (!budget) return;
  const may = rule?.like ? `no prompt may lose more than ${rule.like} loses` : `no prompt may lose more than ${loss(rule)} answers`;
  const worse = (share) => fixed(share * answers, share * answers < 10 ? 2 : 0);
  put(byId("budget"), `Where engine time is scarce, ${rule === 0 ? "nothing more may be lost" : may}.${answers ? ` Of ${plural(answers, "answer")} since the start, ${worse(mean)} are expected to be worse than the highest precision’s; ${worse(allowed)} were allowed.` : ""}`);
}

function showPolicy(policy) {
  const area = byId("quality"), { losses } = policy;
  const order = fleet?.tiers.map((t) => t.tier) ?? Object.keys(losses);
  const tiers = order.filter((t) => losses[t]), classes = Object.keys(losses[tiers[0]] ?? {});
  const measured = tiers.some((t) => classes.some((c) => Object.values(losses[t][c]).some((l) => l.answers)));
  area.dataset.shown = "true";
  area.replaceChildren(...[
    ...[...Object.values(policy.worse), ...differing()].map((why) => el("p", { class: "worse", role: "alert" }, why)),
    ...unmeasuredHeld().map((why) => el("p", { class: "cut" }, why)),
    ...Object.values(policy.pointless).map((why) => el("p", { class: "pointless" }, why)),
    ...Object.entries(policy.not_measured ?? {}).map(([tier, { text, remedy }]) => el("p", { class: "cut" }, `${tier}: ${text}. To measure it, ${remedy}.`)),
    ...(measured || !tiers.length ? [] : unmeasured()),
    tiers.length ? lossTable(policy, classes, tiers) : el("p", {}, "The highest precision is the only one."),
  ].filter(Boolean));
}

/** The engines that treat requests otherwise than their reference, each in one sentence. */
function differing() {
  const replicas = fleet?.tiers.flatMap((t) => t.replicas) ?? [];
  return replicas.filter((r) => r.verification === "differs").map((r) => `${r.id} may answer wrongly: ${r.verification_detail || "it differs from its reference"}.`);
}

/** The tiers that get no requests before they are measured, each in one sentence. */
function unmeasuredHeld() {
  const served = (fleet?.tiers ?? []).filter((t) => t.replicas.length).map((t) => t.tier);
  const verdicts = Object.entries(fleet?.profiling?.verdicts ?? {});
  return verdicts.filter(([tier, v]) => v.held && !v.verdict && served.includes(tier)).map(([, v]) => v.sentence);
}

function unmeasured() {
  const itself = ["running", "waiting"].includes(fleet?.profiling?.state);
  const how = itself ? "The router measures them while no request is served." : "To measure them on this fleet, run";
  return [
    el("p", {}, `The losses of these checkpoints are not measured yet; those published of such precisions count. ${how}`),
    itself ? null : el("pre", {}, el("code", {}, "qarr profile quality")),
  ];
}

/** A row for each kind of prompt: of each tier, the share of answers with its interval, and what that rests on. */
function lossTable({ losses, negligible_loss, max_loss }, classes, tiers) {
  const cell = (tier, kind, complexity) => {
    const found = losses[tier][kind][complexity], over = found.mean > (max_loss[kind] ?? 1);
    return el("td", { class: over ? "num over" : "num" }, found.mean <= negligible_loss ? el("span", { title: "As good as the highest precision" }, "✓ ") : null, loss(found.mean), over ? " over the cap" : "", lossBasis(found.low, found.high, found.answers, found.source));
  };
  const head = (kind) => el("tr", {}, el("th", { scope: "rowgroup", class: "kind", colspan: 1 + tiers.length }, kind.replaceAll("_", " "), known(max_loss[kind]) ? el("small", {}, ` cap ${loss(max_loss[kind])}`) : null));
  const row = (kind, complexity) => el("tr", {}, el("th", { scope: "row" }, complexity), tiers.map((t) => cell(t, kind, complexity)));
  return figuresTable("Expected loss", ["Prompts"], tiers, classes.map((c) => el("tbody", {}, head(c), Object.keys(losses[tiers[0]][c]).map((complexity) => row(c, complexity)))));
}

const figuresTable = (name, words, figures, ...bodies) => el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, el("table", {},
  el("thead", {}, el("tr", {}, [...words, ...figures].map((head, n) => el("th", { scope: "col", class: n < words.length ? null : "num" }, head)))), ...bodies));
