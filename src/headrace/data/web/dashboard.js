// The dashboard: asks for news once a second, keeps what it shows, draws it. Charts are in charts.js, words come from the server.

import { ask } from "./api.js";
import { format, legend, lineChart, spark, stepChart } from "./charts.js";
import { byId, el } from "./dom.js";

const MODEL = new URLSearchParams(location.search).get("model"); // of several, which one is shown
const POLL_MS = 1000;
const KEEP = { samples: 600, steps: 256, decisions: 200 };
const CELLS = 250; // of the picture of the cache

const known = { created: 0, samples: [], steps: [], decisions: [], news: null, engine: null };

// --- news

async function poll() {
  const cursors = new URLSearchParams();
  if (known.samples.length) cursors.set("sample", known.samples.at(-1).number);
  if (known.steps.length) cursors.set("step", known.steps.at(-1).step_id);
  if (known.decisions.length) cursors.set("decision", known.decisions.at(-1).number);
  take(await (await ask(`/v1/dashboard?${cursors}${MODEL ? `&model=${encodeURIComponent(MODEL)}` : ""}`)).json());
}

function take(news) {
  if (known.created && known.created !== news.created) {
    location.reload(); // another server stands here now
    return;
  }
  known.created = news.created;
  known.news = news;
  known.engine = news.engine ?? known.engine;
  for (const name of ["samples", "steps"]) append(name, records(news[name]));
  append("decisions", news.decisions);
}

function records({ columns, rows }) {
  return rows.map((row) => Object.fromEntries(columns.map((name, index) => [name, row[index]])));
}

function append(name, added) {
  known[name] = [...known[name], ...added].slice(-KEEP[name]);
}

// --- sections: on a phone the essentials are open, elsewhere all; what the reader changes stays

const NARROW = matchMedia("(max-width: 640px)");
const ESSENTIAL = new Set(["card-generated", "card-requests"]);
const SECTIONS = "headrace.sections";

function sections() {
  try {
    return { narrow: {}, wide: {}, ...JSON.parse(localStorage.getItem(SECTIONS)) };
  } catch {
    return { narrow: {}, wide: {} };
  }
}

function arrange() {
  const chosen = sections()[NARROW.matches ? "narrow" : "wide"];
  for (const card of document.querySelectorAll("details.card")) card.open = chosen[card.id] ?? (!NARROW.matches || ESSENTIAL.has(card.id));
}

/** A click, not "toggle": that is also told when arrange() opens one. */
function remember({ target }) {
  const card = target.closest("summary")?.parentElement;
  if (!card) return;
  const all = sections();
  all[NARROW.matches ? "narrow" : "wide"][card.id] = !card.open; // it changes after the click
  try {
    localStorage.setItem(SECTIONS, JSON.stringify(all));
  } catch {
    // the browser keeps no more: it holds until the page is left
  }
}

function isOpen(id) {
  return byId(id).closest("details").open;
}

// --- what is drawn

function draw() {
  const { news, engine } = known;
  const age = known.samples.length ? news.now - known.samples[0].time : 0;
  const range = Math.min(Number(byId("range").value), Math.max(60, Math.ceil(age / 30) * 30)); // no wider than there is something to show
  const shown = known.samples.filter((sample) => sample.time >= news.now - range);
  drawState(news, engine);
  drawTiles(news, shown);
  drawTimes(news, range, shown);
  drawCache(news, known.samples);
  if (isOpen("steps")) stepChart(byId("steps"), known.steps);
  byId("scope").textContent = news.scope === "own" ? "on your key's requests; all others are in the sums" : "";
  drawDecisions(news.now);
  byId("footer").textContent = `Headrace ${news.version} · ${news.totals.steps.toLocaleString("en")} steps since the start${news.totals.failed_steps ? `, ${news.totals.failed_steps} of them failed` : ""} · answers ended: ${Object.entries(news.finished).map(([reason, count]) => `${count.toLocaleString("en")} ${reason}`).join(", ")}`;
}

function drawState({ state }, engine) {
  const pill = byId("state");
  pill.textContent = state;
  pill.className = `pill ${{ ready: "good", loading: "warn", draining: "warn" }[state] ?? "bad"}`;
  if (engine && byId("model-name").textContent === "") drawEngine(engine);
}

/** What a counter grew by a second, from one sample to the next. */
function rates(samples, name) {
  return samples.map((sample, at) => (at ? (sample[name] - samples[at - 1][name]) / (sample.time - samples[at - 1].time) : 0));
}

/** Growth of one counter beside another's, over the last ten samples. */
function ratios(samples, part, whole) {
  return samples.map((sample, at) => {
    const before = samples[Math.max(at - 10, 0)];
    const grown = sample[whole] - before[whole];
    return grown > 0 ? (sample[part] - before[part]) / grown : null;
  });
}

function drawTiles(news, samples) {
  const last = samples.at(-1) ?? {};
  const column = (name) => samples.map((sample) => sample[name]);
  const generated = rates(samples, "generated_tokens");
  const usage = samples.map((sample) => sample.used_blocks / (news.num_blocks || 1));
  const limit = ratios(samples, "floor_seconds", "measured_seconds");
  byId("tiles").replaceChildren(
    tile("Running", last.decoding + last.prefilling, "count", `${last.prefilling ?? 0} in their prompt`, samples.map((each) => each.decoding + each.prefilling), 1),
    tile("Waiting", last.waiting + last.preempted, "count", last.preempted ? `${last.preempted} preempted` : `${last.preemptions ?? 0} preempted so far`, samples.map((each) => each.waiting + each.preempted), 4),
    tile("Generated", generated.at(-1), "count", "tokens/s", generated, 1),
    tile("First token", last.ttft_p50, "seconds", `99 %: ${format(last.ttft_p99 ?? null, "seconds")}`, column("ttft_p50"), 2),
    tile("Between tokens", last.tpot_p50, "seconds", `99 %: ${format(last.tpot_p99 ?? null, "seconds")}`, column("tpot_p50"), 2),
    tile("KV cache in use", usage.at(-1), "percent", `${(last.used_blocks ?? 0).toLocaleString("en")} of ${news.num_blocks.toLocaleString("en")} blocks`, usage, 1),
    tile("Of physical limit", limit.at(-1) ?? null, "percent", "over the last 10 s", limit, 4),
    ...draftsTile(samples),
    ...powerTile(samples),
  );
}

/** How many tokens a verification gives, where something drafts. */
function draftsTile(samples) {
  const counted = samples.filter((sample) => sample.draft_steps !== null);
  if (counted.length < 2) return [];
  const right = ratios(counted, "accepted", "drafted");
  const tokens = ratios(counted, "accepted", "draft_steps").at(-1);
  return [tile("Drafts right", right.at(-1), "percent", tokens === null ? "none in the last 10 s" : `${(1 + tokens).toFixed(2)} tokens a row and step`, right, 2)];
}

/** What the device draws, where it counts that. */
function powerTile(samples) {
  const counted = samples.filter((sample) => sample.energy_joules !== null);
  if (counted.length < 2) return [];
  const [watts, each] = ["energy_seconds", "generated_tokens"].map((whole) => ratios(counted, "energy_joules", whole));
  return [tile("Power", watts.at(-1), "watts", each.at(-1) === null ? "over the last 10 s" : `${format(each.at(-1), "joules")} a token`, watts, 3)];
}

function tile(name, value, kind, more, history, mark) {
  return el("div", { class: "tile" }, el("div", { class: "name" }, name), el("p", { class: "value" }, format(value, kind)), el("div", { class: "more" }, more), spark(history, mark));
}

function drawTimes({ now }, range, samples) {
  const base = { times: samples.map((sample) => sample.time), now, range };
  const column = (name) => samples.map((sample) => sample[name]);
  const percentiles = (name) => [["median", "p50", 1], ["90 %", "p90", 2], ["99 %", "p99", 3]].map(([label, suffix, mark]) => ({ name: label, mark, values: column(`${name}_${suffix}`) }));
  const chart = (id, values) => isOpen(id) && lineChart(byId(id), { ...base, ...values });
  chart("generated", { kind: "count", series: [{ name: "generated", mark: 1, values: rates(samples, "generated_tokens") }] });
  chart("prompts", { kind: "count", series: [{ name: "arrived", mark: 2, values: rates(samples, "prompt_tokens") }, { name: "found in the cache", mark: 1, values: rates(samples, "prefix_hits") }] });
  chart("ttft", { kind: "seconds", series: percentiles("ttft"), nothing: "No first token in this time" });
  chart("tpot", { kind: "seconds", series: percentiles("tpot"), nothing: "No tokens in this time" });
  const states = [["decoding", 1], ["prefilling", 2], ["waiting", 4], ["preempted", 3]];
  chart("requests", { kind: "count", stacked: true, nothing: "No requests", series: states.map(([name, mark]) => ({ name, mark, values: column(name) })) });
  const limit = ratios(samples, "floor_seconds", "measured_seconds");
  const busy = ratios(samples.map((each) => ({ ...each, both: each.measured_seconds + each.idle_seconds })), "measured_seconds", "both");
  chart("limit", {
    kind: "percent", fixed: [0, 0.25, 0.5, 0.75, 1], nothing: "No step in this time",
    series: [{ name: "of the limit, while a step runs", mark: 1, values: limit }, { name: "device at work, while there is some", mark: 5, values: busy }],
  });
}

function drawCache({ num_blocks: total }, samples) {
  const last = samples.at(-1);
  if (!last || !total) return;
  const { used_blocks: used, cached_blocks: cached } = last;
  const counts = [["b1", Math.ceil((used / total) * CELLS)], ["b2", Math.ceil((cached / total) * CELLS)]];
  const box = byId("blocks");
  if (box.childElementCount !== CELLS) box.replaceChildren(...Array.from({ length: CELLS }, () => el("i")));
  [...box.children].forEach((cell, at) => (cell.className = at < counts[0][1] ? "b1" : at < counts[0][1] + counts[1][1] ? "b2" : "bfree"));
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", `${used} blocks in use, ${cached} cached, ${total - used - cached} free`);
  const hits = ratios(samples, "prefix_hits", "prefix_queries").at(-1);
  const rows = [["b1", "in use", used], ["b2", "cached", cached], ["bfree", "free", total - used - cached], null, ["", "blocks", total], ["", "one square", `${format(total / CELLS, "count")}`], null];
  const all = last.prefix_queries ? last.prefix_hits / last.prefix_queries : null;
  const facts = [...rows, ["", "hits, 10 s", format(hits ?? null, "percent")], ["", "hits, all", format(all, "percent")]];
  byId("cache-facts").replaceChildren(el("dl", {}, facts.flatMap((fact) => (fact ? fact_(fact) : [el("div", { class: "rule" })]))));
}

function fact_([mark, name, value]) {
  return [el("dt", {}, mark && el("i", { class: mark }), name), el("dd", {}, typeof value === "number" ? value.toLocaleString("en") : value)];
}

let newest = -1; // the decision on top of the list

function drawDecisions(now) {
  const list = byId("decisions");
  const top = known.decisions.at(-1)?.number ?? 0;
  if (top !== newest) {
    newest = top;
    const item = (entry) => el("li", { class: entry.kind, "data-time": entry.time }, el("time"), el("i"), el("span", {}, entry.text));
    list.replaceChildren(...(top ? known.decisions.toReversed().map(item) : [el("li", { class: "empty" }, "No decision yet: send a request.")]));
  }
  for (const item of list.querySelectorAll("[data-time]")) {
    const seconds = Math.max(now - Number(item.dataset.time), 0);
    item.firstChild.textContent = seconds < 100 ? `${seconds.toFixed(seconds < 10 ? 1 : 0)} s` : `${Math.round(seconds / 60)} min`;
  }
}

// --- what stays

function drawEngine(engine) {
  byId("model-name").textContent = `${engine.model} · ${engine.dtype} on ${engine.device}`;
  drawTechniques(engine.techniques);
  drawMemory(Object.entries(engine.memory).filter(([, size]) => size > 0).sort((a, b) => b[1] - a[1]));
  const rows = [...limits(engine), ...chosen(engine.decisions)];
  byId("choices").replaceChildren(...rows.map(([name, value, reason]) => el("tr", {}, el("td", {}, name), el("td", { class: "value" }, typeof value === "number" ? value.toLocaleString("en") : value), el("td", { class: "reason" }, reason))));
}

/** Limits that were given, and so not decided here. */
function limits({ max_num_seqs: running, max_sequence_tokens: longest, decisions }) {
  const decided = new Set(decisions.map(({ name }) => name));
  const rows = [["max_num_seqs", running, "sequences that run at once"], ["max_model_len", longest, "the longest sequence that is served"]];
  return rows.filter(([name]) => !decided.has(name));
}

/** A line each; kernels of one kind share a line, with the reason of those that have their own. */
function chosen(decisions) {
  const rows = new Map();
  for (const { name, value, reason } of decisions) {
    const kernel = name.startsWith("kernel ") ? name.slice(7).replaceAll("_", " ") : null;
    const key = kernel ? `${value} kernels` : name;
    if (!rows.has(key)) rows.set(key, { value, reason, kernels: new Set(), others: [] });
    const row = rows.get(key);
    if (kernel) row.kernels.add(kernel);
    if (kernel && reason !== row.reason) row.others.push(`${kernel}: ${reason}`);
  }
  return [...rows].map(([name, { value, reason, kernels, others }]) => [name, kernels.size ? [...kernels].join(", ") : value, [reason, ...others].join("; ")]);
}

/** Those that cannot be here at all share a line. */
function drawTechniques(techniques) {
  const here = techniques.filter(({ state }) => state === "on" || state === "off");
  const states = [...new Set(techniques.filter((each) => !here.includes(each)).map(({ state }) => state))];
  const missing = states.map((state) => {
    const names = techniques.filter((each) => each.state === state).map(({ name }) => name.replaceAll("_", " "));
    return el("div", { class: "technique needs" }, el("span", { class: "pill" }, state), el("p", {}, names.join(", ")));
  });
  byId("techniques").replaceChildren(...here.map(technique), ...missing);
  byId("techniques-on").textContent = `${techniques.filter(({ state }) => state === "on").length} of ${techniques.length} on`;
}

function technique({ name, state, improves, off_means: off, source }) {
  const pill = el("span", { class: `pill ${state === "on" ? "good" : ""}` }, state);
  const text = state === "off" ? `Off: ${off}.` : `Improves ${improves}.`;
  return el("div", { class: "technique", title: source }, pill, el("div", {}, el("strong", {}, name.replaceAll("_", " ")), el("p", {}, text)));
}

function drawMemory(purposes) {
  const total = purposes.reduce((sum, [, size]) => sum + size, 0);
  const bar = el("div", { class: "split", "aria-hidden": "true" }, purposes.map((_, index) => el("i", { class: `b${(index % 5) + 1}` })));
  purposes.forEach(([, size], index) => (bar.children[index].style.flexGrow = String(size / total)));
  const entries = purposes.map(([name, size], index) => [`b${(index % 5) + 1}`, name.replaceAll("_", " "), `${format(size, "bytes")} (${format(size / total, "percent")})`]);
  byId("memory").replaceChildren(...(total ? [bar] : []), legend(total ? entries : [["", "This engine holds no memory of note."]]));
}

// --- the clock

async function run() {
  const banner = byId("banner");
  for (;;) {
    try {
      await poll();
      banner.hidden = true;
      draw();
    } catch (error) {
      banner.textContent = error.message;
      banner.hidden = false;
      byId("state").textContent = "no answer";
      byId("state").className = "pill bad";
    }
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    if (document.hidden) await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
  }
}

arrange();
NARROW.addEventListener("change", arrange);
byId("cards").addEventListener("click", remember);
for (const card of byId("cards").children) card.addEventListener("toggle", () => known.news && draw());
addEventListener("resize", () => known.news && draw());
byId("range").addEventListener("change", () => known.news && draw());
run();
