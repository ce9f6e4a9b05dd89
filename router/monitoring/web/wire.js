// The router's endpoints: keys, problems, and streams that come back by themselves.

const KEY = "qarr-key";
const SILENCE_MS = 5_000; // the fleet is told every second
const LONGEST_PAUSE_MS = 8_000;

/** An answer that is not what was asked for, as the router explains it. */
class Problem extends Error {
  constructor(status, body, retryAfter) {
    const title = body?.title ?? `the router answered ${status}`;
    super(body?.detail && body.detail !== title ? `${title}: ${body.detail}` : title);
    this.status = status;
    this.body = body;
    this.retryAfter = retryAfter;
  }
}

const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** Ask the router. @throws Problem, or a TypeError where there is no connection. */
async function ask(path, { method = "GET", body = undefined, signal = undefined } = {}) {
  const headers = {}, own = key.get();
  if (own) headers.authorization = `Bearer ${own}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const request = { method, headers, signal, cache: "no-store", credentials: "omit", redirect: "error" };
  const answer = await fetch(path, { ...request, body: body === undefined ? undefined : JSON.stringify(body) });
  if (answer.ok) return answer;
  const problem = await answer.json().catch(() => null);
  const refused = new Problem(answer.status, problem, answer.headers.get("retry-after"));
  if (answer.status === 401 && own === key.get()) needKey(refused); // else there is another key by now
  throw refused;
}

const askJson = async (path, options) => (await ask(path, options)).json();

/** Read an answer's server-sent events, one by one. */
async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text = (text + value).replaceAll("\r\n", "\n");
      for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
        const event = readEvent(text.slice(0, end));
        text = text.slice(end + 2);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function readEvent(block) {
  const event = { name: "message", data: "" };
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) event.name = line.slice(6).trim();
    if (line.startsWith("data:")) event.data += line.slice(5).trimStart();
  }
  return event;
}

/** Follows `/live` for as long as the page is open. */
class Live {
  constructor({ onState, onFleet, onRequest }) {
    Object.assign(this, { onState, onFleet, onRequest });
    this.failures = 0;
    this.restart = () => {};
  }

  /** Connect, and connect again, for ever. */
  async run() {
    for (;;) {
      const problem = await this.#follow();
      const blocked = problem instanceof Problem && [401, 403, 404].includes(problem.status);
      const pause = blocked ? null : Math.min(LONGEST_PAUSE_MS, 500 * 2 ** this.failures) * (0.8 + 0.4 * Math.random());
      this.failures += 1;
      this.onState({ state: problem?.status === 401 ? "key" : "lost", problem, again: pause === null ? null : Date.now() + pause });
      await new Promise((go) => {
        this.restart = go;
        if (pause !== null) setTimeout(go, pause);
      });
      this.onState({ state: "connecting" });
    }
  }

  /** Follow one connection to its end; return why it ended. */
  async #follow() {
    const cut = new AbortController();
    this.restart = () => cut.abort();
    let heard = Date.now();
    const watch = setInterval(() => { if (Date.now() - heard > SILENCE_MS) cut.abort(); }, 500);
    try {
      for await (const event of eventsOf(await ask("/live", { signal: cut.signal }))) {
        if (event.name === "message") continue; // a comment that keeps the connection open
        heard = Date.now();
        const data = JSON.parse(event.data);
        if (event.name === "request") this.onRequest(data);
        if (event.name !== "fleet") continue;
        this.failures = 0;
        this.onFleet(data);
      }
      return null;
    } catch (error) {
      return error;
    } finally {
      clearInterval(watch);
      cut.abort();
    }
  }
}
