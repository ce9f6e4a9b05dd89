// Keys, and what operators may do: drain, resume, restart, recycle. Without a key for it, the page says how it is done.

const OPERATIONS = "/admin/operations";
const BUSY_POLL_MS = 700;
const IDLE_POLL_MS = 5_000;
const KINDS = {
  drain: "It gets no new requests; those that it has may finish.",
  resume: "It gets requests again. A quarantined one is warmed up and compared with its earlier answers first.",
  restart: "It drains, then its engine is stopped and started again. Its tier has less room meanwhile, or none.",
  recycle: "A new engine is started beside it and takes its place, or in its place where there is no memory for both.",
};
const PAUSED = new Set(["draining", "quarantined"]); // states that "resume" ends
// "unknown" until the router has answered; "cli": no keys here, and web pages may not; "look": this key may not; "admin"; "none": no such thing here.
let rights = "unknown";
let operations = [];
let restartable = []; // ids of replicas that were started here
let operationsTimer = 0;
const told = new Set();

/** Find out what may be done here, and follow what is being done. */
async function refreshOperations() {
  clearTimeout(operationsTimer);
  if (connection.state !== "live") return; // asked again when it is
  try {
    const { operations: found, restartable: ids } = await askJson(OPERATIONS);
    restartable = ids;
    rights = key.get() && (await keysNeeded()) ? "admin" : "cli";
    tellEnds(found);
    operations = found;
  } catch (error) {
    operations = [];
    rights = { 403: key.get() ? "look" : "cli", 404: "none" }[error.status] ?? "unknown";
  }
  showRights();
  const busy = operations.some((o) => o.state === "running");
  operationsTimer = setTimeout(refreshOperations, busy ? BUSY_POLL_MS : IDLE_POLL_MS);
}

let needed = null;

/** Tell whether this router needs keys: where it does not, a key changes nothing. */
async function keysNeeded() {
  needed ??= (await fetch("/tiers", { cache: "no-store", credentials: "omit" })).status === 401;
  return needed;
}

function tellEnds(found) {
  for (const o of found) {
    if (o.state === "running" || told.has(o.id)) continue;
    told.add(o.id);
    if (operations.some((before) => before.id === o.id)) announce(`${o.operation} of ${o.replica} ${o.state}: ${o.detail}`);
  }
}

const RIGHTS = {
  unknown: "",
  cli: "This router needs no keys, so replicas are operated on from its machine's command line, and not from web pages. To do it here, make a key with: qarr keys add NAME --admin. From then on every request needs a key, this page too; qarr keys off ends that.",
  look: "This key sees its own requests, and may not operate on replicas.",
  admin: "This key may operate on replicas.",
  none: "Replicas are not operated on by this router.",
};

function showRights() {
  put(byId("rights"), RIGHTS[rights]);
  byId("key-button").hidden = rights === "cli" && !key.get();
  put(byId("key-button"), key.get() ? "Key ✓" : "Key");
  if (fleet) for (const tier of fleet.tiers) rows.get(tier.tier)?.replicas.childNodes.forEach((node, n) => tier.replicas[n] && updateReplica(node, tier.replicas[n]));
}

/** Show what may be done to a replica, and how far that is. */
function operate(area, replica) {
  const running = [...operations].reverse().find((o) => o.replica === replica.id || o.successor === replica.id);
  const recent = running && (running.state === "running" || Date.now() / 1000 - running.ended < 60) ? running : null;
  const here = restartable.includes(replica.id), possible = { drain: !PAUSED.has(replica.state), resume: PAUSED.has(replica.state), restart: here, recycle: here };
  const shown = JSON.stringify([rights, possible, recent]);
  if (area.dataset.shown === shown) return;
  area.dataset.shown = shown;
  const parts = [];
  if (rights === "admin") {
    const kinds = Object.keys(KINDS).filter((kind) => possible[kind]);
    parts.push(...kinds.map((kind) => el("button", { type: "button", class: "plain", "data-kind": kind, "aria-label": `${kind} ${replica.id}`, onclick: () => confirmOperation(kind, replica) }, kind)));
  } else if (rights === "cli" || rights === "look") {
    parts.push(el("code", {}, `qarr tiers ${PAUSED.has(replica.state) ? "resume" : "drain"} ${replica.id}`));
  }
  if (recent) {
    const mark = { running: "…", done: "✓", failed: "✕" }[recent.state];
    parts.push(el("span", { class: `operation ${recent.state}` }, `${mark} ${recent.operation} ${recent.state}${recent.detail ? `: ${recent.detail}` : ""}`));
  }
  // The focus stays where it was: on the button of the same kind.
  const focused = area.contains(document.activeElement) ? document.activeElement.dataset.kind : null;
  area.replaceChildren(...parts);
  if (focused) (area.querySelector(`[data-kind="${focused}"]`) ?? area.querySelector("button"))?.focus();
}

/** The warning that nobody is served without this replica; empty where others serve, or where it goes on. */
function lastOne(kind, replica) {
  const others = fleet.tiers.flatMap((tier) => tier.replicas).filter((r) => r.state === "ready" && r.id !== replica.id);
  const stops = ["drain", "restart"].includes(kind) && replica.state === "ready";
  return stops && !others.length ? " No other replica of any tier is ready: every request will get 503." : "";
}

function confirmOperation(kind, replica) {
  const dialog = byId("confirm");
  put(byId("confirm-title"), `${kind[0].toUpperCase()}${kind.slice(1)} ${replica.id}?`);
  put(byId("confirm-text"), `${KINDS[kind]} It has ${plural(replica.in_flight, "request")} in flight.${lastOne(kind, replica)}`);
  byId("confirm-problem").replaceChildren();
  put(byId("confirm-do"), `${kind[0].toUpperCase()}${kind.slice(1)}`);
  byId("confirm-do").onclick = async () => {
    try {
      await ask(`/admin/replicas/${encodeURIComponent(replica.id)}/${kind}`, { method: "POST" });
      dialog.close();
      announce(`${kind} of ${replica.id} begun`);
      refreshOperations();
    } catch (error) {
      byId("confirm-problem").replaceChildren(problemText(error));
    }
  };
  dialog.showModal();
}

/** Ask for a key; the router has refused without, or with the one that was there. */
function needKey(problem) {
  needed = true;
  byId("key-button").hidden = false;
  const dialog = byId("key");
  if (dialog.open) return;
  byId("key-problem").replaceChildren(...(key.get() ? [problemText(problem)] : []));
  byId("key-text").textContent = "This router answers only to those who have a key.";
  byId("key-value").value = "";
  dialog.showModal();
}

function setUpKeys(changed) {
  const dialog = byId("key"), form = byId("key-form");
  byId("key-button").addEventListener("click", () => {
    byId("key-problem").replaceChildren();
    byId("key-value").value = "";
    dialog.showModal();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    key.set(byId("key-value").value.trim());
    byId("key-value").value = "";
    dialog.close();
    changed();
  });
  byId("key-forget").addEventListener("click", () => {
    key.set("");
    dialog.close();
    changed();
  });
  for (const button of document.querySelectorAll("[data-close]")) button.addEventListener("click", () => button.closest("dialog").close());
}
