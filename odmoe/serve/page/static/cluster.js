// The cluster as it runs: plots, nodes, experts, memory.

import { events, request } from "./api.js";
import { Grid, workerColour } from "./grid.js";
import { element } from "./markdown.js";
import { History, Plot } from "./plots.js";

const AGAIN_MS = [500, 1000, 2000, 4000, 8000];
const UPDATE_MS = 500;
const [NUMBER, IS_UP, LOADS, LOAD_S, , COMPUTE_S] = [0, 1, 2, 3, 4, 5];
const by = (id) => document.getElementById(id);

export class Cluster {
  constructor() {
    this.grid = new Grid(by("grid"), by("cell"), by("grid-frame"));
    this.rows = new Map();
    this.nodes = [];
    this.lines = [];
    this.workers = new Map();
    this.tries = 0;
    by("colour").addEventListener("change", (event) => {
      this.grid.by = event.target.value;
      this.drawLegend();
    });
    document.addEventListener("visibilitychange", () => (document.hidden ? this.abort?.abort() : this.watch()));
  }

  /** `cluster`: as /cluster describes it. */
  describe(cluster) {
    this.cluster = cluster;
    this.history = new History(cluster.totals);
    this.grid.describe(cluster.layers, cluster.experts, cluster.outcomes);
    by("axis").textContent = `layers ${cluster.layers[0]} to ${cluster.layers.at(-1)} ↓, experts 0 to ${Math.max(...cluster.experts) - 1} →`;
    const plots = {
      rate: new Plot("speed", "tokens/s", "Tokens of all answers, the last 3 s", "--accent"),
      stall: new Plot("stalls", "% of time", "Time for which requests wait for loads, of each request", "--missed"),
      hits: new Plot("hit rate", "%", "Chosen experts that were in a slot at their gate", "--hit", 1),
      recall: new Plot("recall", "%", "Chosen experts that the prediction had named", "--in-time", 1),
    };
    if (cluster.drafts) plots.accepted = new Plot("acceptance", "%", "Drafts that the model chose itself", "--host", 1);
    plots.loads = new Plot("loads", "/s", "Experts that begin to be loaded", "--load");
    this.plots = plots;
    by("plots").replaceChildren(...Object.values(plots).map((plot) => plot.root));
    this.drawLegend();
  }

  /** Shows what `odmoe plan` says of this cluster beside what is. */
  async comparePlan() {
    try {
      this.plan = await (await request("cluster/plan")).json();
    } catch (error) {
      this.plan = { memory: {}, tokens_per_s: null, why: error.message };
    }
    const { tokens_per_s: rate, hardware, why, memory } = this.plan;
    if (rate) this.plots.rate.expect(rate, `plan ${rate.toFixed(rate < 9.95 ? 1 : 0)}`);
    const speed = rate
      ? `odmoe plan: ${rate.toFixed(1)} tokens/s for one request, with the times of ${hardware}.`
      : `odmoe plan has no ${memory.main ? "speed" : "figures"} for this cluster: ${why}.`;
    const room = memory.main ? ` Its memory is that with a full context of ${this.cluster.context} tokens.` : "";
    by("plan").textContent = speed + room;
    by("plan").hidden = false;
    this.drawMemory();
  }

  /** Bytes that the plan has for a node, or null. */
  plannedBytes(node) {
    const { main, shadow, worker, expert } = this.plan?.memory ?? {};
    if (main === undefined || (node.role === "worker" && !node.slots)) return null;
    return { main, shadow, worker: worker + node.slots * expert }[node.role];
  }

  /** Reads the feed while the page can be seen. */
  async watch() {
    if (this.abort && !this.abort.signal.aborted) return;
    const abort = (this.abort = new AbortController());
    while (!abort.signal.aborted) {
      try {
        const response = await request("cluster/events", { signal: abort.signal });
        for await (const update of events(response)) {
          if (abort.signal.aborted) break;
          this.take(update);
        }
        throw new Error("The service has ended the feed.");
      } catch (error) {
        if (abort.signal.aborted) return;
        this.setLink("lost", error.message);
      }
      const wait = AGAIN_MS[Math.min(this.tries, AGAIN_MS.length - 1)];
      this.tries += 1;
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }

  setLink(state, why = "") {
    const link = by("link");
    const text = { live: "live", lost: "not connected", connecting: "connecting" }[state];
    if (link.dataset.state !== state) link.dataset.state = state;
    if (link.textContent !== text) link.textContent = text;
    by("trouble").hidden = !why;
    by("trouble").textContent = why;
  }

  take(update) {
    if (update.end) throw new Error(update.end);
    if (update.lost) {
      this.setLink("lost", update.lost);
      return;
    }
    this.tries = 0;
    this.setLink("live");
    if (update.nodes) this.nodes = update.nodes;
    if (update.lines) this.drawLines(update.lines);
    this.grid.light(update.a, UPDATE_MS);
    this.drawPlots(update);
    this.drawNodes(update);
    if (update.nodes && String(this.nodes.map((node) => [node.name, node.up, node.memory])) !== this.heldBefore) this.drawMemory();
  }

  drawPlots({ s, T, q }) {
    const { history, plots } = this;
    history.add(s, T);
    const percent = (value) => (value === null ? "–" : (100 * value).toFixed(value > 0.995 || value < 0.0005 ? 0 : 1));
    const add = (name, value, text) => plots[name]?.add(s, value, text);
    const rate = history.rate("answer_tokens");
    const stall = history.rate("stall_s") + history.rate("prefill_stall_s");
    const loads = history.rate("loads");
    add("rate", rate, rate.toFixed(rate < 9.95 ? 1 : 0));
    add("stall", stall, (100 * stall).toFixed(0));
    add("loads", loads, loads.toFixed(0));
    for (const [name, part, whole] of [
      ["hits", "hits", "named"],
      ["recall", "predicted", "activated"],
      ["accepted", "accepted", "drafted"],
    ]) {
      const share = history.share(part, whole);
      add(name, share, percent(share));
    }
    for (const plot of Object.values(plots)) plot.draw();
    const [answered, waiting] = q;
    const text = `${answered} answered, ${waiting} waiting`;
    if (by("summary").textContent !== text) by("summary").textContent = text;
  }

  drawNodes({ s, w, q, p, T }) {
    const now = new Map(w.map((one) => [one[NUMBER], one]));
    const passed = s - (this.at ?? s);
    const tokens = T[this.history.index.answer_tokens];
    for (const node of this.nodes) {
      const row = this.rowOf(node);
      const found = node.role === "worker" ? now.get(node.number) : null;
      const before = this.workers.get(node.number);
      const share = (at) => (found && before && passed > 0 ? Math.max(0, Math.min(1, (found[at] - before[at]) / passed)) : 0);
      const up = found ? Boolean(found[IS_UP]) : node.up;
      row.root.classList.toggle("lost", !up);
      row.why.hidden = up;
      if (!up) set(row.why, this.whyLost(node));
      row.loads.style.transform = `scaleX(${share(LOAD_S).toFixed(3)})`;
      row.computes.style.transform = `scaleX(${share(COMPUTE_S).toFixed(3)})`;
      set(row.does, up ? doing(node, found, share(LOAD_S), share(COMPUTE_S), { q, p, tokens }) : "lost");
      set(row.figures, figures(node, found));
    }
    this.workers = now;
    this.at = s;
  }

  rowOf(node) {
    const known = this.rows.get(node.name);
    if (known) return known;
    const row = { root: element("div", "node"), loads: element("i", "loads"), computes: element("i", "computes") };
    row.does = element("span", "does");
    row.figures = element("span", "figures");
    row.why = element("span", "why");
    row.root.dataset.node = node.name;
    row.root.title = `${node.host}, ${node.device}${node.slots ? `, slots: ${node.slots}` : ""}`;
    const bars = element("span", "bars");
    bars.title = "Share of the time: loading (above), computing (below)";
    bars.hidden = node.role !== "worker";
    if (bars.hidden) row.does.style.gridColumn = "2 / 4";
    bars.append(row.loads, row.computes);
    row.root.append(element("span", "name", node.name), bars, row.does, row.figures, row.why);
    this.rows.set(node.name, row);
    by("nodes").replaceChildren(...this.nodes.filter((one) => this.rows.has(one.name)).map((one) => this.rows.get(one.name).root));
    return row;
  }

  whyLost(node) {
    const line = this.lines.findLast((one) => one.includes(`${node.name} is lost`));
    return line ? line.slice(line.indexOf(": ") + 2) : "it is not connected";
  }

  drawLines(lines) {
    if (String(lines) === String(this.lines)) return;
    this.lines = lines;
    by("lines").replaceChildren(...lines.toReversed().map((line) => element("li", "", line)));
  }

  drawMemory() {
    this.heldBefore = String(this.nodes.map((node) => [node.name, node.up, node.memory]));
    const held = this.nodes.filter((node) => node.up && (node.memory || this.plannedBytes(node)));
    const planned = held.map((node) => [node, this.plannedBytes(node) ?? 0]);
    const used = held.map((node) => [node, node.memory ?? 0]);
    const sum = (all) => all.reduce((before, [, count]) => before + count, 0);
    const { budget_bytes: budget, whole_bytes: whole } = this.cluster;
    const most = Math.max(sum(used), sum(planned), budget ?? whole);
    const silent = used.filter(([, count]) => !count).length;
    const text =
      `${bytes(sum(used))} on ${silent ? `${used.length - silent} of ${used.length}` : "all"} nodes` +
      (sum(planned) ? `, planned ${bytes(sum(planned))}` : "") +
      (budget ? `, of a budget of ${bytes(budget)}` : "") +
      `; the whole model has ${bytes(whole)}`;
    const key = element("div", "key");
    for (const [node, count] of used) {
      const plan = this.plannedBytes(node);
      const entry = element("span", "", `${node.name} ${count ? bytes(count) : "–"}${plan ? ` (${bytes(plan)})` : ""}`);
      entry.prepend(this.mark(node));
      key.append(entry);
    }
    const bars = [this.memoryBar("now", used, most)];
    if (sum(planned)) bars.push(this.memoryBar("plan", planned, most));
    by("memory").replaceChildren(element("div", "", text), ...bars, key);
  }

  mark(node) {
    const found = element("i");
    const own = node.role === "worker" ? workerColour(node.number, this.grid.dark.matches) : `var(--${node.role === "main" ? "accent" : "host"})`;
    found.style.background = own;
    return found;
  }

  /** A bar with a part for each node. `held`: nodes with their bytes. */
  memoryBar(name, held, most) {
    const row = element("div", "memory-bar");
    const stack = element("div", "stack");
    for (const [node, count] of held) {
      const part = this.mark(node);
      part.style.width = `${(100 * count) / most}%`;
      part.title = `${node.name}: ${bytes(count)}`;
      stack.append(part);
    }
    row.append(element("span", "", name), stack);
    return row;
  }

  drawLegend() {
    const dark = this.grid.dark.matches;
    const workers = this.nodes.filter((node) => node.role === "worker");
    const entries =
      this.grid.by === "worker"
        ? workers.map((node) => [workerColour(node.number, dark), String(node.number)])
        : this.cluster.outcomes.map((name) => [`var(--${name.replace(" ", "-")})`, name]);
    by("legend").replaceChildren(
      ...entries.map(([colour, name]) => {
        const entry = element("span", "", name);
        const mark = element("i");
        mark.style.background = colour;
        entry.prepend(mark);
        return entry;
      }),
    );
  }
}

function doing(node, found, loading, computing, { q, p, tokens }) {
  if (node.role === "main") return q[0] ? `answers ${q[0]}` : "idle";
  if (node.role === "shadow") return `${short(p)} predicted`;
  if (!found) return "";
  if (loading < 0.005 && computing < 0.005) return q[0] ? "waits" : "idle";
  return `loads ${(100 * loading).toFixed(0)} %, computes ${(100 * computing).toFixed(0)} %`;
}

function figures(node, found) {
  const memory = node.memory ? bytes(node.memory) : "";
  if (node.role !== "worker") return memory;
  if (!node.slots) return "host place";
  const loads = found ? found[LOADS] : node.loads;
  const each = loads ? ` of ${duration((found ? found[LOAD_S] : node.load_s) / loads)}` : "";
  return `${short(loads)} loads${each}`;
}

function duration(seconds) {
  return seconds < 1 ? `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms` : `${seconds.toFixed(1)} s`;
}

function set(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

function short(count) {
  return count < 10000 ? String(count) : count < 1e6 ? `${(count / 1000).toFixed(0)}k` : `${(count / 1e6).toFixed(1)}M`;
}

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  let value = count;
  while (value >= 1000 && at < units.length - 1) {
    value /= 1000;
    at += 1;
  }
  return `${value.toFixed(value < 10 && at ? 1 : 0)} ${units[at]}`;
}
