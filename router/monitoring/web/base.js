// Elements, numbers and times. Nothing here knows what it shows. Text is only ever set as text: data come from elsewhere.

const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

/** Make an element. Attributes that are null or false are left out; "onclick" and the like become listeners. */
function el(name, attributes = {}, ...children) {
  return furnish(document.createElement(name), attributes, children);
}

/** Make an SVG element, in the same way. */
function svg(name, attributes = {}, ...children) {
  return furnish(document.createElementNS(SVG, name), attributes, children);
}

function furnish(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Set an element's text where it differs, so that nothing is read out or laid out again for nothing. */
function put(node, text) {
  const next = String(text);
  if (node.textContent !== next) node.textContent = next;
}

/** Make a list's children those of `items`, in order: elements are kept by key, made by `make`, and given each item. */
function sync(parent, items, key, make, update) {
  const kept = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const times = new Map();
  let at = parent.firstElementChild;
  for (const item of items) {
    let name = String(key(item));
    times.set(name, (times.get(name) ?? 0) + 1);
    if (times.get(name) > 1) name += ` (${times.get(name)})`; // callers choose ids, and may use one twice
    let child = kept.get(name);
    kept.delete(name);
    if (!child) {
      child = make(item);
      child.dataset.key = name;
    }
    if (child === at) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
    if (update) update(child, item);
  }
  for (const child of kept.values()) child.remove();
}

const NONE = "–";
const known = (value) => value !== null && value !== undefined && !Number.isNaN(value);
const whole = new Intl.NumberFormat("en");

function fixed(value, digits) {
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** A time for people: 4.2 ms, 412 ms, 1.24 s, 2 min 5 s. */
function duration(ms) {
  if (!known(ms)) return NONE;
  if (ms < 9.95) return `${fixed(ms, 1)} ms`;
  if (ms < 999.5) return `${fixed(ms, 0)} ms`;
  if (ms < 9_995) return `${fixed(ms / 1000, 2)} s`;
  if (ms < 59_950) return `${fixed(ms / 1000, 1)} s`;
  const s = Math.round(ms / 1000);
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}

/** A rough time for people: the next five seconds, from two minutes on the next half minute. */
function about(seconds) {
  return seconds <= 120 ? `about ${Math.max(5 * Math.ceil(seconds / 5), 5)} s` : `about ${Math.ceil(seconds / 30) / 2} min`;
}

const count = (value) => (known(value) ? whole.format(value) : NONE);
const rate = (value) => (known(value) ? fixed(value, value < 99.95 ? 1 : 0) : NONE);
const percent = (share, digits = 0) => (known(share) ? `${fixed(share * 100, digits)} %` : NONE);

/** A share of answers for people, without its unit: the 2.1 of "2.1 of 100". */
function of100(share) {
  const answers = share * 100;
  if (answers === 0) return "none";
  if (answers < 0.01) return "under 0.01";
  return fixed(answers, answers < 0.1 ? 2 : answers < 9.95 ? 1 : 0);
}

/** A share of answers for people: 2.1 of 100. */
const loss = (share) => (known(share) ? `${of100(share)} of 100` : NONE);

const LOSS_SOURCES = {
  measured: (answers) => `measured on ${plural(answers, "answer")}`,
  published: (answers) => `published for models of this size${tooFew(answers)}`,
  estimated: (answers) => `estimated from what is published for other models${tooFew(answers)}`,
};
const tooFew = (answers) => (answers ? `; ${plural(answers, "answer")} here do not tell more yet` : "");

/** The interval of such a share, and what it rests on. */
function lossBasis(low, high, answers, source) {
  const within = low < 0.0001 ? `up to ${loss(high)}` : `${of100(low)} to ${loss(high)}`;
  return el("small", { title: `90 % interval, ${LOSS_SOURCES[source]?.(answers) ?? ""}` }, ` ${within}, ${source}`);
}

const cost = (seconds) => (known(seconds) ? `${fixed(seconds, seconds < 10 ? 2 : 1)} s` : NONE);
const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const calendar = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });
const timeOf = (at) => clock.format(new Date(at * 1000));

/** What tells tiers apart besides their names: a shape, for those who do not see its colour. */
const SHAPES = {
  fast: "M6 1a5 5 0 1 0 0 10a5 5 0 1 0 0-10z", balanced: "M1.5 1.5h9v9h-9z", precise: "M6 0l6 6l-6 6l-6-6z",
  "more-0": "M6 1l5.5 10h-11z", "more-1": "M6 .5l5 3v5l-5 3l-5-3v-5z", "more-2": "M4 .5h4v3.5h3.5v4h-3.5v3.5h-4v-3.5h-3.5v-4h3.5z", "more-3": "M.5 1h11l-5.5 10z",
};
const added = []; // tiers that the settings add, in the order in which the page met them

/** The look of a tier: its own, or one of those for added tiers. */
function lookOf(tier) {
  if (!tier) return "none";
  if (SHAPES[tier]) return tier;
  if (!added.includes(tier)) added.push(tier);
  return `more-${added.indexOf(tier) % 4}`;
}

const tierClass = (tier) => `of-${lookOf(tier)}`;

function shape(tier) {
  const path = SHAPES[lookOf(tier)] ?? SHAPES.fast;
  return svg("svg", { class: `shape ${tierClass(tier)}`, viewBox: "0 0 12 12", "aria-hidden": "true" }, svg("path", { d: path }));
}

/** A tier's name with its shape. */
const tierName = (tier) => el("span", { class: "tier-name" }, shape(tier), tier);

const STATE_MARKS = { ready: "✓", preparing: "…", starting: "…", warming: "…", draining: "↓", unreachable: "!", failed: "✕", quarantined: "✕", stopped: "■", waiting: "…", absent: "–" };

/** Show a replica's or tier's state: a mark, and the word. */
function putState(node, state) {
  put(node, `${STATE_MARKS[state] ?? "?"} ${state}`);
  node.dataset.state = state;
}

/** Say something to those who listen rather than look. */
function announce(text) {
  byId("announce").textContent = text;
}

/** Make an address clickable, but only one of the web. */
function link(address, text) {
  if (!/^https?:\/\//i.test(address)) return null;
  return el("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, text);
}

/** Hold values of the last while; null where there was none. The while grows to its full length, so that a plot is soon full. */
class Series {
  constructor(least, most) {
    this.values = new Array(least).fill(null);
    Object.assign(this, { least, most, heard: 0 });
  }
  /** Put what was before the first value that was heard. */
  precede(before) {
    const told = [...before, ...(this.heard ? this.values.slice(-this.heard) : [])];
    this.values = [...new Array(Math.max(this.least - told.length, 0)).fill(null), ...told].slice(-this.most);
  }
  push(value) {
    this.heard = Math.min(this.heard + 1, this.most);
    this.values.push(known(value) ? value : null);
    if (this.values.length > this.most || this.values[0] === null) this.values.shift();
  }
}

/** Draw series into one small plot, from zero. The first is the main one. */
function sparkline(parent, ...series) {
  const w = 120, h = 26;
  const top = Math.max(...series.flatMap((s) => s.values.map((v) => v ?? 0)), 1e-9) * 1.1;
  if (!parent.firstChild) {
    const plot = svg("svg", { viewBox: `0 0 ${w} ${h}`, preserveAspectRatio: "none", class: "spark", "aria-hidden": "true" });
    plot.append(svg("path", { class: "under" }));
    for (let n = series.length; n > 0; n -= 1) plot.append(svg("path", { class: n === 1 ? "line" : "line second" }));
    parent.append(plot);
  }
  const paths = [...parent.firstChild.children];
  const place = (values) => (v, i) => [(i / (values.length - 1)) * w, h - 1 - (v / top) * (h - 2)];
  series.forEach((s, n) => {
    const at = place(s.values);
    let pen = "M", d = "";
    s.values.forEach((v, i) => {
      if (v === null) { pen = "M"; return; }
      const [x, y] = at(v, i);
      d += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
      pen = "L";
    });
    paths[paths.length - 1 - n].setAttribute("d", d);
    if (n === 0) paths[0].setAttribute("d", areaUnder(s.values, at, h));
  });
}

function areaUnder(values, at, h) {
  let d = "", open = false, last = 0;
  values.forEach((v, i) => {
    if (v === null) {
      if (open) d += `L${last.toFixed(1)} ${h}z`;
      open = false;
      return;
    }
    const [x, y] = at(v, i);
    d += open ? `L${x.toFixed(1)} ${y.toFixed(1)}` : `M${x.toFixed(1)} ${h}L${x.toFixed(1)} ${y.toFixed(1)}`;
    open = true;
    last = x;
  });
  return open ? `${d}L${last.toFixed(1)} ${h}z` : d;
}
