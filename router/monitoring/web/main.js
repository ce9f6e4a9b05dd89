// The page: what is set up at start, and what happens as the router tells things.

const THEME = "qarr-theme";
const THEMES = { auto: "Theme: auto", light: "Theme: light", dark: "Theme: dark" };
const connection = { state: "connecting", problem: null, again: null, heard: null };

function showConnection() {
  const { state, problem, again, heard } = connection;
  const age = heard ? Math.round((Date.now() - heard) / 1000) : null;
  const words = { live: "● live", connecting: "… connecting", lost: "✕ connection lost", key: "✕ key needed" }[state];
  put(byId("connection"), words);
  byId("connection").dataset.state = state;
  const old = state !== "live" && heard !== null;
  document.body.classList.toggle("old", old);
  byId("lost").hidden = state === "live" || (state === "connecting" && !problem);
  const figures = old ? `The figures below are ${duration(age * 1000)} old.` : "There are no figures yet.";
  const next = again ? ` Next attempt in ${Math.max(0, Math.ceil((again - Date.now()) / 1000))} s.` : state === "connecting" ? " Connecting." : "";
  const why = problem instanceof Problem ? `${problem.message}. ` : "";
  put(byId("lost-text"), `${state === "key" ? "" : "The connection to the router is lost. "}${why}${figures}${next}`);
}

const live = new Live({
  onState(change) {
    if (change.state !== "connecting" && connection.state === "live") announce("connection lost: figures are old");
    if (change.state === "connecting") Object.assign(connection, change);
    else Object.assign(connection, change, { problem: change.problem ?? true });
    showConnection();
  },
  onFleet(next) {
    const back = connection.state !== "live";
    if (back && connection.heard) { gapInSeries(); announce("connected again"); }
    Object.assign(connection, { state: "live", problem: null, again: null, heard: Date.now() });
    showFleet(next);
    showInFlight(next);
    showConnection();
    if (back) refresh();
  },
  onRequest(record) {
    addRecords([record]);
    const ended = record.at * 1000 + (record.duration_ms ?? 0);
    // Those that the router tells again after a reconnect have left long ago.
    if (Date.now() - ended < 5_000) Lane.all.get(record.continued_on.at(-1) ?? record.served_by ?? record.tier)?.end(record.request_id, record.outcome === "ok");
    openNamed();
  },
});

/** Fetch what `/live` does not tell. */
async function refresh() {
  refreshPolicy();
  refreshOperations();
  decide();
  try {
    const { requests, scope } = await askJson("/requests?limit=1000");
    addRecords(requests);
    if (scope === "all") fillPlots(requests);
    openNamed();
  } catch {
    // The connection tells what is wrong; this is tried again with it.
  }
}

function setUpTheme() {
  const button = byId("theme"), names = Object.keys(THEMES);
  const show = (name) => {
    document.documentElement.dataset.theme = name;
    put(button, THEMES[name]);
  };
  let name = localStorage.getItem(THEME);
  if (!names.includes(name)) name = "auto";
  show(name);
  button.addEventListener("click", () => {
    name = names[(names.indexOf(name) + 1) % names.length];
    localStorage.setItem(THEME, name);
    show(name);
    for (const lane of Lane.all.values()) lane.draw(performance.now());
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => Lane.wake());
}

setUpTheme();
setUpRequests();
setUpDetails();
setUpAsk();
setUpKeys(() => {
  forgetRecords(); // the next key may see others
  live.restart();
  refresh();
});
byId("again").addEventListener("click", () => live.restart());
setInterval(() => { if (connection.state !== "live") showConnection(); }, 1000);
document.addEventListener("visibilitychange", () => Lane.wake());
live.run();
