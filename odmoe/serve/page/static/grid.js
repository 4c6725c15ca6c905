// The experts of all layers, as cells that light up when a gate chooses them and fade within a second.

const FADE_MS = 1300;
const FRAME_MS = 32;
const LABEL = 24;
const COLOURS = ["--hit", "--in-time", "--late", "--missed", "--host"];

/** Of a worker, apart from its neighbours'. */
export function workerColour(number, dark) {
  return `hsl(${(number * 137.5 + 30) % 360} 65% ${dark ? 62 : 45}%)`;
}

export class Grid {
  constructor(canvas, note, frame) {
    this.canvas = canvas;
    this.note = note;
    this.frame = frame;
    this.context = canvas.getContext("2d", { alpha: false });
    this.layers = [];
    this.lit = new Map();
    this.counts = null;
    this.by = "outcome";
    this.frames = 0;
    this.drawn = 0;
    this.dark = matchMedia("(prefers-color-scheme: dark)");
    this.dark.addEventListener("change", () => this.redraw());
    new ResizeObserver(() => this.resize()).observe(frame);
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => (note.hidden = true));
  }

  describe(layers, experts, outcomes) {
    this.layers = layers;
    this.experts = experts;
    this.outcomes = outcomes;
    this.most = Math.max(1, ...experts);
    this.row = new Map(layers.map((layer, at) => [layer, at]));
    this.counts = new Uint32Array(layers.length * this.most);
    this.latest = new Int16Array(layers.length * this.most).fill(-1);
    this.latestWorker = new Int16Array(layers.length * this.most);
    this.lit.clear();
    this.resize();
  }

  resize() {
    this.shown = this.layers.length > 0 && this.canvas.clientWidth > 0;
    if (!this.shown) return;
    this.ratio = Math.min(2, devicePixelRatio || 1);
    const width = this.canvas.clientWidth;
    const tall = Math.max(5, Math.min(16, 420 / this.layers.length));
    const height = Math.round(tall * this.layers.length);
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(width * this.ratio);
    this.canvas.height = Math.round(height * this.ratio);
    this.left = LABEL * this.ratio;
    this.wide = (this.canvas.width - this.left) / this.most;
    this.tall = this.canvas.height / this.layers.length;
    this.redraw();
  }

  redraw() {
    if (!this.shown) return;
    const style = getComputedStyle(this.canvas);
    this.back = style.getPropertyValue("--panel");
    this.base = style.getPropertyValue("--cell");
    this.colours = COLOURS.map((name) => style.getPropertyValue(name));
    const { context } = this;
    context.globalAlpha = 1;
    context.fillStyle = this.back;
    context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    context.fillStyle = style.getPropertyValue("--soft");
    context.font = `${10 * this.ratio}px system-ui, sans-serif`;
    context.textAlign = "right";
    context.textBaseline = "middle";
    const step = Math.ceil((11 * this.ratio) / this.tall);
    for (let row = 0; row < this.layers.length; row += step) {
      context.fillText(String(this.layers[row]), this.left - 5 * this.ratio, (row + 0.5) * this.tall);
    }
    for (let row = 0; row < this.layers.length; row += 1) {
      for (let expert = 0; expert < this.experts[row]; expert += 1) this.cell(row, expert, null, 0);
    }
  }

  /** Cells with at most a pixel between them; none where they are too small for one. */
  cell(row, expert, colour, alpha) {
    const { context, ratio } = this;
    const x = Math.round(this.left + expert * this.wide);
    const y = Math.round(row * this.tall);
    const gapX = this.wide > 4 * ratio ? ratio : this.wide > 3 * ratio ? 1 : 0;
    const gapY = this.tall > 4 * ratio ? ratio : 0;
    const width = Math.max(1, Math.round(this.left + (expert + 1) * this.wide) - x - gapX);
    const height = Math.max(1, Math.round((row + 1) * this.tall) - y - gapY);
    context.globalAlpha = 1;
    context.fillStyle = this.base;
    context.fillRect(x, y, width, height);
    if (colour) {
      context.globalAlpha = alpha;
      context.fillStyle = colour;
      context.fillRect(x, y, width, height);
    }
  }

  /** `accesses`: layer, expert, outcome, worker, times, and so on; lit one after the other within `overMs`. */
  light(accesses, overMs) {
    const now = performance.now();
    const count = accesses.length / 5;
    for (let at = 0; at < count; at += 1) {
      const [layer, expert, outcome, worker, times] = accesses.slice(5 * at, 5 * at + 5);
      const row = this.row.get(layer);
      if (row === undefined) continue;
      const cell = row * this.most + expert;
      this.counts[cell] += times;
      this.latest[cell] = outcome;
      this.latestWorker[cell] = worker;
      if (this.shown) this.lit.set(cell, now + (at / count) * overMs);
    }
    if (this.lit.size && !this.timer) this.timer = requestAnimationFrame((time) => this.step(time));
  }

  colourOf(cell) {
    if (this.by === "worker") return workerColour(this.latestWorker[cell], this.dark.matches);
    return this.colours[this.latest[cell]];
  }

  step(time) {
    this.timer = 0;
    if (time - this.drawn >= FRAME_MS - 8) {
      this.drawn = time;
      this.frames += 1;
      const now = performance.now();
      for (const [cell, began] of this.lit) {
        const age = now - began;
        if (age < 0) continue;
        const alpha = 1 - age / FADE_MS;
        const row = Math.floor(cell / this.most);
        if (this.shown) this.cell(row, cell % this.most, alpha > 0 ? this.colourOf(cell) : null, Math.max(0, alpha));
        if (alpha <= 0) this.lit.delete(cell);
      }
    }
    if (this.lit.size) this.timer = requestAnimationFrame((next) => this.step(next));
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top) * this.ratio) / this.tall);
    const expert = Math.floor(((event.clientX - box.left) * this.ratio - this.left) / this.wide);
    this.note.hidden = !(row >= 0 && row < this.layers.length && expert >= 0 && expert < this.experts[row]);
    if (this.note.hidden) return;
    const cell = row * this.most + expert;
    const times = this.counts[cell];
    const latest = times ? `, seen ${times}×, last: ${this.outcomes[this.latest[cell]]}, worker ${this.latestWorker[cell]}` : ""; // of the steps that are followed
    this.note.textContent = `layer ${this.layers[row]}, expert ${expert}${latest}`;
    const frame = this.frame.getBoundingClientRect();
    const left = Math.min(event.clientX - frame.left + 12, frame.width - this.note.offsetWidth - 6);
    this.note.style.left = `${Math.max(4, left)}px`;
    this.note.style.top = `${event.clientY - frame.top + 16}px`;
  }
}
