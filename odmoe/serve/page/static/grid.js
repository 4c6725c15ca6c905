// The experts of all layers, as cells that light up when a gate chooses them and fade within a second or so.
// What a frame costs is hardly the drawing, but that there is one: so there are thirty a second, and none where no cell changes.

const FADE_MS = 1300;
const FRAME_MS = 25; // and until the next refresh of the screen: 27 to 30 frames a second
const STILL_MS = 330; // for those who want less motion
const SHADES = 24;
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
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.dark = matchMedia("(prefers-color-scheme: dark)");
    this.dark.addEventListener("change", () => this.redraw());
    new ResizeObserver(() => this.resize()).observe(frame);
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => (note.hidden = true));
    canvas.addEventListener("blur", () => (note.hidden = true));
    canvas.addEventListener("keydown", (event) => this.move(event));
    this.at = [0, 0];
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
    const step = [1, 5, 10, 20, 50].find((one) => one * this.tall >= 11 * this.ratio) ?? 100;
    for (let row = 0; row < this.layers.length; row += step) {
      context.fillText(String(this.layers[row]), this.left - 5 * this.ratio, Math.max(5 * this.ratio, (row + 0.5) * this.tall));
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
      if (this.shown) this.lit.set(cell, { began: now + (at / count) * overMs, shade: -1 });
    }
    this.schedule();
  }

  schedule() {
    if (this.lit.size) this.timer ||= setTimeout(() => requestAnimationFrame(() => this.step()), this.still.matches ? STILL_MS : FRAME_MS);
  }

  colourOf(cell) {
    if (this.by === "worker") return workerColour(this.latestWorker[cell], this.dark.matches);
    return this.colours[this.latest[cell]];
  }

  /** Draws the cells whose shade has changed. */
  step() {
    this.timer = 0;
    const now = performance.now();
    for (const [cell, lit] of this.lit) {
      const age = now - lit.began;
      if (age < 0) continue;
      const shade = Math.max(0, Math.ceil(SHADES * (1 - age / FADE_MS)));
      if (shade === lit.shade) continue;
      lit.shade = shade;
      if (this.shown) this.cell(Math.floor(cell / this.most), cell % this.most, shade ? this.colourOf(cell) : null, shade / SHADES);
      if (!shade) this.lit.delete(cell);
    }
    this.schedule();
  }

  /** Arrow keys go from cell to cell. */
  move(event) {
    const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!by || !this.layers.length) return;
    event.preventDefault();
    const row = Math.max(0, Math.min(this.layers.length - 1, this.at[0] + by[0]));
    const expert = Math.max(0, Math.min(this.experts[row] - 1, this.at[1] + by[1]));
    this.at = [row, expert];
    const box = this.canvas.getBoundingClientRect();
    const x = (this.left + (expert + 0.5) * this.wide) / this.ratio;
    this.tell(row, expert, box.left + x, box.top + ((row + 0.5) * this.tall) / this.ratio);
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top) * this.ratio) / this.tall);
    const expert = Math.floor(((event.clientX - box.left) * this.ratio - this.left) / this.wide);
    const isCell = row >= 0 && row < this.layers.length && expert >= 0 && expert < this.experts[row];
    if (isCell) this.tell(row, expert, event.clientX, event.clientY);
    else this.note.hidden = true;
  }

  /** Says what is known of a cell, beside a point of the window. */
  tell(row, expert, x, y) {
    const cell = row * this.most + expert;
    const times = this.counts[cell];
    const latest = times ? `, seen ${times}×, last: ${this.outcomes[this.latest[cell]]}, worker ${this.latestWorker[cell]}` : ""; // of the steps that are followed
    this.note.hidden = false;
    this.note.textContent = `layer ${this.layers[row]}, expert ${expert}${latest}`;
    const frame = this.frame.getBoundingClientRect();
    const left = Math.min(x - frame.left + 12, frame.width - this.note.offsetWidth - 6);
    this.note.style.left = `${Math.max(4, left)}px`;
    this.note.style.top = `${y - frame.top + 16}px`;
  }
}
