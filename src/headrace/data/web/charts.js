// Charts as SVG: axes with round numbers and units, legends with the latest values, a reading at the pointer. No library.

import { el, svg } from "./dom.js";

const HEIGHT = 182; // as in dashboard.css
const TALL = 234;
const LEFT = 52;
const BOTTOM = 22;
const TOP = 8;
const RIGHT = 6;

/** Units that numbers are shown in: the largest that leaves at least 1. */
const UNITS = {
  seconds: [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]],
  count: [[1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]],
  percent: [[0.01, "%"]],
  watts: [[1e3, "kW"], [1, "W"]],
  joules: [[1e3, "kJ"], [1, "J"], [1e-3, "mJ"]],
  bytes: [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]],
};

export function scaleOf(kind, largest) {
  return UNITS[kind].find(([size]) => Math.abs(largest) >= size) ?? UNITS[kind].at(-1);
}

export function format(value, kind, scale = scaleOf(kind, value)) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const [size, unit] = value === 0 && kind !== "percent" ? [1, kind === "count" ? "" : scale[1]] : scale;
  const number = value / size;
  const digits = number !== 0 && Math.abs(number) < 10 && !(kind === "count" && unit === "" && Number.isInteger(number)) ? (Math.abs(number) < 1 ? 2 : 1) : 0;
  const text = number.toFixed(digits);
  return unit === "" ? text : kind === "count" || unit === "%" ? text + (unit === "%" ? " %" : unit) : `${text} ${unit}`;
}

/** 0 and up to four round steps that cover ``largest``. */
function ticks(largest, size) {
  const wanted = largest / size || 1;
  const power = 10 ** Math.floor(Math.log10(wanted / 3));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((each) => each * 4 >= wanted) ?? 10 * power;
  const count = Math.max(Math.ceil(wanted / step - 1e-9), 1);
  return Array.from({ length: count + 1 }, (_, index) => index * step * size);
}

class Frame {
  /** The axes of one drawing. ``largest``: of the values; ``kind``: their unit. */
  constructor(box, largest, kind, fixed = null) {
    this.width = Math.max(box.clientWidth, 200);
    this.height = box.classList.contains("tall") ? TALL : HEIGHT;
    this.scale = scaleOf(kind, largest);
    this.ticks = fixed ?? ticks(largest, this.scale[0]);
    this.kind = kind;
    this.top = this.ticks.at(-1) || 1;
    this.svg = svg("svg", { viewBox: `0 0 ${this.width} ${this.height}`, role: "img" });
    for (const tick of this.ticks) {
      const y = this.y(tick);
      const label = this.label(tick);
      this.svg.append(svg("line", { class: tick ? "grid" : "axis", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }), svg("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, label));
    }
  }

  label(tick) {
    const number = Number((tick / this.scale[0]).toPrecision(3));
    const unit = this.scale[1];
    return unit && tick ? `${number}${["k", "M", "G"].includes(unit) ? "" : " "}${unit}` : String(number);
  }

  x(share) {
    return LEFT + share * (this.width - LEFT - RIGHT);
  }

  y(value) {
    return TOP + (1 - Math.min(value / this.top, 1)) * (this.height - TOP - BOTTOM);
  }

  below(share, text, anchor = "middle") {
    this.svg.append(svg("text", { x: this.x(share), y: this.height - 4, "text-anchor": anchor }, text));
  }

  say(text) {
    this.svg.append(svg("text", { class: "nothing", x: this.x(0.5), y: this.height / 2, "text-anchor": "middle" }, text));
  }
}

export function legend(entries) {
  const item = ([mark, name, value]) => el("li", {}, mark && el("i", { class: mark }), name, value !== undefined && el("b", {}, value));
  return el("ul", { class: "legend" }, entries.map(item));
}

function ago(seconds) {
  return seconds === 0 ? "now" : seconds % 60 ? `−${seconds} s` : `−${seconds / 60} min`;
}

/**
 * Lines over time. ``series``: [{name, mark: 1…5, values}], null where nothing was measured; ``times`` in seconds.
 * ``stacked``: areas on top of one another; ``fixed``: ticks to use whatever the values.
 */
export function lineChart(box, { times, now, range, series, kind, stacked = false, fixed = null, nothing = "Nothing yet" }) {
  const tops = stacked ? times.map((_, at) => series.reduce((sum, each) => sum + (each.values[at] ?? 0), 0)) : series.flatMap((each) => each.values);
  const frame = new Frame(box, Math.max(...tops.map((value) => value ?? 0), kind === "count" ? 1 : 0) || (kind === "percent" ? 1 : 1e-3), kind, fixed);
  for (const share of [0, 1 / 3, 2 / 3]) frame.below(share, ago(Math.round(range * (1 - share))), share ? "middle" : "start");
  frame.below(1, "now", "end");
  const xs = times.map((time) => frame.x(1 - (now - time) / range));
  const bases = times.map(() => 0);
  for (const each of series) frame.svg.append(...(stacked ? stackedArea(frame, xs, each, bases) : lines(frame, xs, each, series.length === 1)));
  if (tops.every((value) => !value)) frame.say(nothing);
  const latest = series.map((each) => [`b${each.mark}`, each.name, format(each.values.at(-1) ?? null, kind)]);
  frame.svg.setAttribute("aria-label", latest.map(([, name, value]) => `${name} ${value}`).join(", "));
  place(box, frame, legend(latest), (at) => [`${Math.round(now - times[at])} s ago`, ...series.map((each) => [each.name, format(each.values[at], kind)])], xs);
}

/** A line may have gaps; under a single one the area is shaded. */
function lines(frame, xs, { values, mark }, shaded) {
  const runs = [];
  values.forEach((value, at) => {
    if (value === null || value === undefined) return;
    if (at === 0 || values[at - 1] === null || !runs.length) runs.push([]);
    runs.at(-1).push(`${xs[at].toFixed(1)},${frame.y(value).toFixed(1)}`);
  });
  const zero = frame.y(0);
  return runs.flatMap((points) => {
    const alone = points.length === 1;
    const line = alone ? svg("circle", { class: `f${mark}`, cx: points[0].split(",")[0], cy: points[0].split(",")[1], r: 1.8 }) : svg("polyline", { class: `line s${mark}`, points: points.join(" ") });
    const edge = [points[0].split(",")[0], points.at(-1).split(",")[0]];
    return shaded && !alone ? [svg("polygon", { class: `area f${mark}`, points: `${edge[0]},${zero} ${points.join(" ")} ${edge[1]},${zero}` }), line] : [line];
  });
}

function stackedArea(frame, xs, { values, mark }, bases) {
  if (!xs.length) return [];
  const low = xs.map((x, at) => `${x.toFixed(1)},${frame.y(bases[at]).toFixed(1)}`);
  values.forEach((value, at) => (bases[at] += value ?? 0));
  const high = xs.map((x, at) => `${x.toFixed(1)},${frame.y(bases[at]).toFixed(1)}`);
  return [svg("polygon", { class: `stack f${mark}`, points: [...high, ...low.reverse()].join(" ") })];
}

const KINDS = { decode: 1, prefill: 2, mixed: 4 };

/** The last steps as bars: measured by kind, the prediction as a tick across, the floor as a shadow at the foot. */
export function stepChart(box, steps) {
  const slots = Math.max(Math.floor((box.clientWidth - LEFT - RIGHT) / 7), 20);
  const shown = steps.slice(-slots);
  const sorted = shown.map((step) => Math.max(step.measured_seconds, step.predicted_seconds)).sort((a, b) => a - b);
  const usual = sorted[Math.floor(sorted.length * 0.95)] ?? 1e-3; // a few long steps must not flatten all others: they are cut, and marked
  const frame = new Frame(box, Math.min(sorted.at(-1) ?? 1e-3, usual * 1.6), "seconds");
  const width = 1 / slots;
  const xs = shown.map((_, at) => frame.x((slots - shown.length + at) * width));
  const wide = (frame.width - LEFT - RIGHT) * width;
  shown.forEach((step, at) => frame.svg.append(...stepBar(frame, step, xs[at], wide)));
  markCut(frame, shown, xs);
  if (!shown.length) frame.say("No step has run yet");
  else for (const at of new Set([0, shown.length >> 1, shown.length - 1])) frame.below((slots - shown.length + at + 0.5) * width, `step ${shown[at].step_id.toLocaleString("en")}`, at === shown.length - 1 ? "end" : at ? "middle" : "start");
  const entries = [["b1", "decode"], ["b2", "prefill"], ["b4", "mixed"], ["btick", "predicted"], ["bfloor", "floor: the device's limit"]];
  const last = shown.at(-1);
  frame.svg.setAttribute("aria-label", last ? `Last step: measured ${format(last.measured_seconds, "seconds")}, predicted ${format(last.predicted_seconds, "seconds")}` : "No step yet");
  place(box, frame, legend(entries), (at) => stepFacts(shown[at]), xs.map((x) => x + wide / 2));
}

/** The time of each bar that goes beyond the chart, where there is room to write it. */
function markCut(frame, steps, xs) {
  let free = 0;
  steps.forEach((step, at) => {
    if (step.measured_seconds <= frame.top || xs[at] < free) return;
    free = xs[at] + 48;
    frame.svg.append(svg("text", { class: "cut", x: xs[at] + 3, y: TOP - 1, "text-anchor": "middle" }, format(step.measured_seconds, "seconds")));
  });
}

function stepBar(frame, step, x, wide) {
  const zero = frame.y(0);
  const bar = (name, value, inset) => {
    const y = frame.y(value);
    return svg("rect", { class: name, x: (x + inset).toFixed(1), width: Math.max(wide - 1.5 - 2 * inset, 1).toFixed(1), y: y.toFixed(1), height: Math.max(zero - y, 0).toFixed(1), rx: 1 });
  };
  const y = frame.y(step.predicted_seconds);
  return [
    bar(step.failed ? "f3" : `f${KINDS[step.kind]}`, step.measured_seconds, 0),
    step.floor_seconds ? bar("floor", step.floor_seconds, 0) : "",
    step.predicted_seconds ? svg("line", { class: "tick", x1: x - 0.5, x2: x + wide - 1, y1: y, y2: y }) : "",
  ].filter(Boolean);
}

function stepFacts(step) {
  const facts = [`step ${step.step_id}, ${step.failed ? "failed" : step.kind}`, ["sequences", String(step.rows)], ["tokens", String(step.tokens)], ["measured", format(step.measured_seconds, "seconds")]];
  if (step.predicted_seconds) facts.push(["predicted", format(step.predicted_seconds, "seconds")]);
  if (step.fraction !== null) facts.push(["share of the limit", format(step.fraction, "percent")]);
  return facts;
}

/** A line without axes, for tiles. */
export function spark(values, mark) {
  const largest = Math.max(...values.map((value) => value ?? 0), 1e-12);
  const points = values.map((value, at) => `${((at / Math.max(values.length - 1, 1)) * 100).toFixed(2)},${(25 - ((value ?? 0) / largest) * 21).toFixed(2)}`);
  const shape = svg("svg", { viewBox: "0 0 100 26", preserveAspectRatio: "none", "aria-hidden": "true" });
  if (values.length > 1) shape.append(svg("polygon", { class: `area f${mark}`, points: `0,26 ${points.join(" ")} 100,26` }), svg("polyline", { class: `line s${mark}`, points: points.join(" ") }));
  return shape;
}

// --- reading at the pointer

const pointers = new WeakMap();

function place(box, frame, key, facts, xs) {
  if (!pointers.has(box)) {
    pointers.set(box, { at: null });
    box.addEventListener("pointermove", (event) => read(box, event.clientX - box.getBoundingClientRect().left));
    box.addEventListener("pointerleave", () => read(box, null));
  }
  Object.assign(pointers.get(box), { frame, facts, xs });
  box.replaceChildren(frame.svg, key);
  read(box, pointers.get(box).at);
}

function read(box, at) {
  const state = pointers.get(box);
  state.at = at;
  for (const old of box.querySelectorAll(".tip, .hair")) old.remove();
  if (at === null || !state.xs.length) return;
  const nearest = state.xs.reduce((best, x, index) => (Math.abs(x - at) < Math.abs(state.xs[best] - at) ? index : best), 0);
  const x = state.xs[nearest];
  const [title, ...rest] = state.facts(nearest);
  const tip = el("div", { class: "tip" }, el("div", {}, title), rest.map(([name, value]) => el("div", {}, `${name} `, el("b", {}, value))));
  state.frame.svg.append(svg("line", { class: "hair", x1: x, x2: x, y1: TOP, y2: state.frame.height - BOTTOM }));
  box.append(tip);
  tip.style.top = "4px";
  if (x > state.frame.width / 2) tip.style.right = `${state.frame.width - x + 8}px`;
  else tip.style.left = `${x + 8}px`;
}
