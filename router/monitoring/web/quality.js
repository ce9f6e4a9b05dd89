// The loss budget over time; and what each precision loses on each class of prompts: measured, with intervals and the class's cap.

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

const OVER_BUDGET = 1.1; // times what is allowed: a price that falls between two assignments may leave it a little above
const budgetSeries = { mean: new Series(LEAST_SECONDS, MOST_SECONDS), allowed: new Series(LEAST_SECONDS, MOST_SECONDS), price: new Series(LEAST_SECONDS, MOST_SECONDS) };
const budgetFigures = {
  mean: figure("Mean loss", "Share of tokens that differ from the highest precision's first choice: over recent answers, the older the less; dashed: what is allowed of the same answers"),
  price: figure("Price of loss", "Engine time that a token which differs is worth: a request takes a lower precision where that saves more"),
};

/** What recent answers lose beside what they may, and the price of loss that follows from it. */
function showBudget(budget) {
  const { rule, mean, budget: allowed, price, half_life_s } = budget ?? {};
  put(byId("sum-loss"), loss(mean));
  put(byId("sum-loss-of"), known(allowed) ? `of ${loss(allowed)} allowed` : "not measured yet");
  budgetSeries.mean.push(mean);
  budgetSeries.allowed.push(allowed);
  budgetSeries.price.push(price);
  byId("budget").hidden = !known(mean);
  if (!known(mean)) return;
  const may = rule?.like ? `Answers may lose as much as if ${rule.like} served them all` : rule === 0 ? "No answer may lose anything" : `Answers may lose ${loss(rule)} of their tokens`;
  put(byId("budget-rule"), `${may}, on average, with a half-life of ${about(half_life_s).replace("about ", "")}.`);
  const { mean: lost, price: worth } = budgetFigures;
  if (!byId("budget-figures").firstChild) byId("budget-figures").append(lost.node, worth.node);
  put(lost.value, loss(mean));
  put(lost.more, ` of ${loss(allowed)} allowed`);
  lost.node.classList.toggle("bad", mean > OVER_BUDGET * allowed);
  sparkline(lost.below, budgetSeries.mean, budgetSeries.allowed);
  put(worth.value, known(price) ? duration(price * 1000) : NONE);
  put(worth.more, known(price) ? " of engine time a token" : " no request had a choice yet");
  sparkline(worth.below, budgetSeries.price);
}

function showPolicy(policy) {
  const area = byId("quality"), losses = policy.losses ?? {};
  const order = fleet?.tiers.map((t) => t.tier) ?? Object.keys(losses);
  const tiers = order.filter((t) => t !== "precise" && Object.keys(losses[t] ?? {}).length);
  const classes = Object.keys(policy.class_floor).filter((c) => tiers.some((t) => policy.losses[t][c]));
  area.dataset.shown = "true";
  area.replaceChildren(...(classes.length ? measured(policy, classes, tiers) : unmeasured(policy)));
}

function unmeasured(policy) {
  const rows = Object.entries(policy.class_floor).map(([name, tier]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, tierName(tier))));
  const itself = ["running", "waiting"].includes(fleet?.profiling?.state);
  const how = itself ? "The router measures it while no request is served." : "To measure it on this fleet, run";
  return [
    el("p", {}, `The loss of these checkpoints is not measured yet. Until it is, each class gets at least the tier of a cautious table. ${how}`),
    itself ? null : el("pre", {}, el("code", {}, "qarr profile quality")),
    el("table", { class: "floor" }, el("caption", { class: "hidden" }, "Lowest tier for each class"), el("tbody", {}, rows)),
  ].filter(Boolean);
}

function measured(policy, classes, tiers) {
  const live = (policy.live_losses ?? []).filter((l) => classes.includes(l.class));
  const promoted = Object.entries(policy.promoted ?? {});
  return [
    el("p", { class: "legend" }, tiers.map((t) => el("span", {}, tierName(t))), classes.some((c) => known(policy.max_loss[c])) ? el("span", {}, el("i", { class: "bound-mark" }), "cap of the class") : null,
      live.length ? el("span", {}, "○ live answers") : null),
    lossPlot(policy, classes, tiers, live),
    promoted.length ? el("p", {}, "Promoted, because live answers lose more than they may: ", promoted.map(([c, t]) => `${c} to ${t}`).join(", "), ".") : null,
    el("details", {}, el("summary", {}, "The figures as a table"), lossTable(policy, classes, tiers, live)),
  ].filter(Boolean);
}

const PLOT = { left: 92, right: 14, top: 6, row: 30, bottom: 22, width: 460 };

/** A row for each class: an interval with its mean for each tier, and its cap, if it has one, as a line across. */
function lossPlot(policy, classes, tiers, live) {
  const most = Math.max(...classes.map((c) => policy.max_loss[c] ?? 0), ...classes.flatMap((c) => tiers.map((t) => policy.losses[t][c]?.high ?? 0)), ...live.map((l) => l.loss));
  const top = Math.max(0.02, most * 1.05);
  const { left, right, row, bottom, width } = PLOT, height = PLOT.top + classes.length * row + bottom;
  const x = (share) => left + (Math.min(share, top) / top) * (width - left - right);
  const plot = svg("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Measured loss of ${tiers.join(" and ")} for ${plural(classes.length, "class", "classes")} of prompts; the table below has the figures` });
  const step = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5].find((s) => top / s <= 6) ?? 1;
  for (let share = 0; share <= top; share += step) {
    plot.append(svg("line", { class: "grid", x1: x(share), x2: x(share), y1: PLOT.top, y2: height - bottom }),
      svg("text", { class: "tick-text", x: x(share), y: height - 7, "text-anchor": "middle" }, percent(share)));
  }
  classes.forEach((name, n) => {
    const y = PLOT.top + n * row;
    if (n % 2) plot.append(svg("rect", { class: "stripe", x: 0, y, width, height: row }));
    plot.append(svg("text", { class: "class-text", x: left - 10, y: y + row / 2 + 4, "text-anchor": "end" }, name));
    if (known(policy.max_loss[name])) plot.append(svg("line", { class: "bound", x1: x(policy.max_loss[name]), x2: x(policy.max_loss[name]), y1: y + 3, y2: y + row - 3 }));
    tiers.forEach((tier, m) => {
      const found = policy.losses[tier][name], middle = y + (row * (m + 1)) / (tiers.length + 1);
      if (found) plot.append(lossMark(tier, name, found, x, middle, policy.max_loss[name]));
      for (const l of live.filter((l) => l.class === name && l.tier === tier)) plot.append(svg("circle", { class: `live-mark ${tierClass(tier)}`, cx: x(l.loss), cy: middle, r: 4 }));
    });
  });
  return plot;
}

function lossMark(tier, name, { mean, low, high }, x, y, bound) {
  const words = `${name} on ${tier}: ${loss(mean)} (${loss(low)} to ${loss(high)})${known(bound) ? `, cap ${loss(bound)}` : ""}`;
  return svg("g", { class: tierClass(tier) }, svg("title", {}, words),
    svg("line", { class: "interval", x1: x(low), x2: x(high), y1: y, y2: y }),
    svg("path", { class: "mean", d: SHAPES[lookOf(tier)], transform: `translate(${x(mean) - 5} ${y - 5}) scale(0.83)` }));
}

function lossTable(policy, classes, tiers, live) {
  const capped = classes.some((c) => known(policy.max_loss[c]));
  const cell = (tier, name) => {
    const found = policy.losses[tier][name], seen = live.find((l) => l.class === name && l.tier === tier);
    if (!found) return NONE;
    return `${loss(found.mean)} (${fixed(found.low * 100, 1)}–${fixed(found.high * 100, 1)})${found.mean > policy.max_loss[name] ? " over" : ""}${seen ? `, live ${loss(seen.loss)} of ${count(seen.checked)}` : ""}`;
  };
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Measured loss" }, el("table", {},
    el("thead", {}, el("tr", {}, ["Class", ...(capped ? ["Cap"] : []), ...tiers].map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, classes.map((c) => el("tr", {}, el("th", { scope: "row" }, c), capped ? el("td", { class: "num" }, loss(policy.max_loss[c])) : null, tiers.map((t) => el("td", { class: "num" }, cell(t, c))))))));
}
