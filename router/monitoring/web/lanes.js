// The lanes: every request in flight is a mark that moves along its tier's lane. It is a picture of the list beside it.

const calm = matchMedia("(prefers-reduced-motion: reduce)");
const PREFILL_ENDS = 0.3;
const LEAVING_MS = 700;
const DISTINCT = 200;

/** Where a request is on its lane, 0 to 1: it moves on while it is computed, and never arrives before it ends. */
function progress(request) {
  if (request.state === "waiting") return 0.015;
  if (request.state === "prefill") return 0.03 + (PREFILL_ENDS - 0.07) * (1 - Math.exp(-request.age_ms / 1500));
  return PREFILL_ENDS + 0.02 + (0.92 - PREFILL_ENDS) * (1 - Math.exp(-request.output_tokens / 90));
}

/** A number from a text, for a place across the lane that stays the same. */
function scatter(text) {
  let h = 2166136261;
  for (let i = 0; i < text.length; i += 1) h = Math.imul(h ^ text.charCodeAt(i), 16777619);
  h ^= h >>> 13;
  return ((h >>> 0) % 1000) / 999;
}

class Lane {
  static all = new Map();
  static #last = 0;
  static #running = false;

  constructor(tier, canvas) {
    this.tier = tier;
    this.canvas = canvas;
    this.marks = new Map();
    Lane.all.set(tier, this);
    new ResizeObserver(() => this.#resize()).observe(canvas);
  }

  /** Show what is in flight now. */
  update(requests) {
    const seen = new Set();
    for (const request of requests.slice(0, DISTINCT)) {
      seen.add(request.request_id);
      const mark = this.marks.get(request.request_id) ?? this.#enter(request.request_id);
      mark.target = Math.max(mark.target, progress(request));
      mark.decoding = request.state === "decode";
      mark.missed = 0;
    }
    for (const [id, mark] of this.marks) {
      // One that is gone has ended, and its record comes with its own event.
      if (!seen.has(id) && !mark.leaving && (mark.missed += 1) > 2) this.marks.delete(id);
    }
    Lane.wake();
  }

  /** Let one leave at the end of its lane, or break off where it is. */
  end(id, ok) {
    if (calm.matches || document.hidden) {
      this.marks.delete(id);
    } else {
      const mark = this.marks.get(id) ?? this.#enter(id);
      Object.assign(mark, { leaving: performance.now(), ok, from: mark.x, decoding: true });
    }
    Lane.wake();
  }

  #enter(id) {
    const mark = { x: 0, target: 0.03, y: scatter(id), decoding: false, leaving: 0, ok: true, from: 0, missed: 0 };
    this.marks.set(id, mark);
    return mark;
  }

  #resize() {
    const { width, height } = this.canvas.getBoundingClientRect();
    this.canvas.width = Math.round(width * devicePixelRatio);
    this.canvas.height = Math.round(height * devicePixelRatio);
    this.draw(performance.now());
  }

  /** Move by the time that has passed; tell whether anything still moves. */
  step(now, passed) {
    let moving = false;
    for (const [id, mark] of this.marks) {
      if (mark.leaving) {
        const t = (now - mark.leaving) / LEAVING_MS;
        if (t >= 1) { this.marks.delete(id); moving = true; continue; }
        if (mark.ok) mark.x = mark.from + (1.02 - mark.from) * t * (2 - t);
        moving = true;
        continue;
      }
      const gap = mark.target - mark.x;
      mark.x = calm.matches ? mark.target : mark.x + gap * (1 - Math.exp(-passed / 350));
      moving ||= Math.abs(gap) > 0.001;
    }
    return moving && !calm.matches;
  }

  draw(now) {
    const pen = this.canvas.getContext("2d");
    const scale = devicePixelRatio, w = this.canvas.width / scale, h = this.canvas.height / scale;
    if (!w) return;
    const style = getComputedStyle(this.canvas);
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, w, h);
    pen.strokeStyle = style.borderTopColor;
    pen.lineWidth = 1;
    pen.setLineDash([2, 4]);
    pen.beginPath();
    pen.moveTo(Math.round(w * PREFILL_ENDS) + 0.5, 4);
    pen.lineTo(Math.round(w * PREFILL_ENDS) + 0.5, h - 4);
    pen.stroke();
    pen.setLineDash([]);
    for (const mark of this.marks.values()) this.#drawMark(pen, mark, now, w, h, style);
  }

  #drawMark(pen, mark, now, w, h, style) {
    const r = 4.5, x = r + 2 + mark.x * (w - 2 * r - 4), y = r + 15 + mark.y * (h - 2 * r - 20);
    const left = mark.leaving ? 1 - (now - mark.leaving) / LEAVING_MS : 1;
    const bad = mark.leaving && !mark.ok;
    pen.globalAlpha = Math.max(0, left);
    pen.fillStyle = pen.strokeStyle = bad ? style.outlineColor : style.color;
    pen.lineWidth = 1.6;
    if (bad) {
      pen.beginPath();
      pen.moveTo(x - r, y - r); pen.lineTo(x + r, y + r);
      pen.moveTo(x + r, y - r); pen.lineTo(x - r, y + r);
      pen.stroke();
    } else {
      if (mark.decoding) {
        const tail = Math.min(x - r, 46);
        const fade = pen.createLinearGradient(x - tail, 0, x, 0);
        fade.addColorStop(0, "transparent");
        fade.addColorStop(1, style.color);
        pen.strokeStyle = fade;
        pen.globalAlpha *= 0.45;
        pen.beginPath(); pen.moveTo(x - tail, y); pen.lineTo(x, y); pen.stroke();
        pen.globalAlpha = Math.max(0, left);
        pen.strokeStyle = style.color;
      }
      pen.beginPath();
      pen.arc(x, y, mark.decoding ? r : r - 0.8, 0, 2 * Math.PI);
      if (mark.decoding) pen.fill(); else pen.stroke();
    }
    pen.globalAlpha = 1;
  }

  /** Draw for as long as something moves; an idle page computes nothing. */
  static wake() {
    if (Lane.#running || document.hidden) return;
    Lane.#running = true;
    Lane.#last = performance.now();
    requestAnimationFrame(Lane.#frame);
  }

  static #frame = (now) => {
    let moving = false;
    for (const lane of Lane.all.values()) {
      moving = lane.step(now, Math.max(0, now - Lane.#last)) || moving;
      lane.draw(now);
    }
    Lane.#last = now;
    Lane.#running = moving && !document.hidden;
    if (Lane.#running) requestAnimationFrame(Lane.#frame);
  };
}
