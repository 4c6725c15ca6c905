// Small plots of the last minute.

import { element } from "./markdown.js";

const SPAN_S = 60;
const WINDOW_S = 3;

/** Rates and shares from sums that only grow. */
export class History {
  constructor(names) {
    this.index = Object.fromEntries(names.map((name, at) => [name, at]));
    this.samples = [];
  }

  add(at, totals) {
    const last = this.samples[this.samples.length - 1];
    if (last && (at < last.at || totals[this.index.answer_tokens] < last.totals[this.index.answer_tokens])) this.samples = [];
    this.samples.push({ at, totals });
    while (this.samples.length > 1 && this.samples[1].at < at - WINDOW_S) this.samples.shift();
  }

  /** The growth of `name` within the last seconds, and these seconds. */
  grown(name) {
    const first = this.samples[0];
    const last = this.samples[this.samples.length - 1];
    const at = this.index[name];
    return { by: last.totals[at] - first.totals[at], in: last.at - first.at };
  }

  rate(name) {
    const grown = this.grown(name);
    return grown.in > 0 ? grown.by / grown.in : 0;
  }

  /** Null where nothing was counted. */
  share(part, whole) {
    const of = this.grown(whole).by;
    return of > 0 ? this.grown(part).by / of : null;
  }
}

export class Plot {
  constructor(label, unit, title, colour, most = null) {
    this.colour = colour;
    this.most = most;
    this.points = [];
    this.root = element("div", "plot");
    this.root.title = title;
    const value = element("b");
    this.value = document.createTextNode("–");
    value.append(this.value, element("small", "", unit));
    this.canvas = element("canvas");
    this.canvas.ariaHidden = "true"; // the value says it
    this.plan = element("span", "plan");
    this.root.append(element("span", "", label), value, this.plan, this.canvas);
  }

  /** Draws a line at what was planned. */
  expect(value, text) {
    this.planned = value;
    this.plan.textContent = text;
  }

  add(at, value, text) {
    this.points.push([at, value]);
    while (this.points.length && this.points[0][0] < at - SPAN_S) this.points.shift();
    if (this.value.data !== text) this.value.data = text;
  }

  draw() {
    const ratio = devicePixelRatio || 1;
    const width = Math.round(this.canvas.clientWidth * ratio);
    const height = Math.round(this.canvas.clientHeight * ratio);
    if (!width) return;
    if (this.canvas.width !== width || this.canvas.height !== height) {
      this.canvas.width = width;
      this.canvas.height = height;
    }
    const context = this.canvas.getContext("2d");
    context.clearRect(0, 0, width, height);
    const end = this.points.length ? this.points[this.points.length - 1][0] : 0;
    const most = this.most ?? Math.max(1e-9, this.planned ?? 0, ...this.points.map((point) => point[1] ?? 0));
    const x = (at) => width - ((end - at) / SPAN_S) * width;
    const y = (value) => height - ratio - (Math.min(value, most) / most) * (height - 3 * ratio);
    const style = getComputedStyle(this.root);
    if (this.planned) {
      context.fillStyle = style.getPropertyValue("--soft");
      for (let at = 0; at < width; at += 6 * ratio) context.fillRect(at, y(this.planned), 3 * ratio, ratio);
    }
    context.strokeStyle = style.getPropertyValue(this.colour);
    context.lineWidth = 1.5 * ratio;
    context.lineJoin = "round";
    context.beginPath();
    let open = false;
    for (const [at, value] of this.points) {
      if (value === null) open = false;
      else if (open) context.lineTo(x(at), y(value));
      else context.moveTo(x(at), y(value));
      open = value !== null;
    }
    context.stroke();
  }
}
