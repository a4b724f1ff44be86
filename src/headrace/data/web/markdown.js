// Markdown, the common part of it, as DOM nodes: the blocks; their spans are in inline.js. The text comes from a model: it becomes
// text nodes and a fixed set of elements, and the only attributes taken from it are the address of an http(s) or mail link and names.

import { el, icon } from "./dom.js";
import { Code } from "./highlight.js";
import { inline } from "./inline.js";
import { formula, MAX_TEX } from "./math.js";

// No pattern tries two ways of sharing the same characters: a hostile line costs no more than its length.
const FENCE = /^ {0,3}(`{3,}|~{3,})(?![`~])([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=\s)(.*)$/s;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/s;
const QUOTE = /^ {0,3}> ?/;
const MATH = [[/^\s*\$\$/, "$$"], [/^\s*\\\[/, "\\]"]]; // how a formula on lines of its own begins, and ends
const MAX_DEPTH = 8; // of quotes and lists in one another

/**
 * Renders a text that grows. All blocks but the last are final (a list before it may still go on): only they are read again.
 * A fence that is still open takes its new lines alone.
 */
export class Growing {
  constructor(container) {
    this.container = container;
    this.start = 0; // of what is not final, in the text
    this.last = []; // its nodes
    this.fence = null; // {code, marks}: then what is not final is the line that is being written
  }

  update(text) {
    if (this.fence && !this.feed(text)) return;
    const lines = text.slice(this.start).split("\n");
    const found = blocks(lines);
    const nodes = found.map((block) => render(block, 0));
    for (const node of this.last) node.remove();
    this.container.append(...nodes);
    const open = found.at(-1)?.code ? 0 : found.at(-2)?.kind === "list" ? 2 : 1;
    this.last = open ? nodes.slice(-open) : [];
    if (!open) this.fence = found.at(-1);
    if (found.length) this.start += lengthOf(lines.slice(0, open ? found.at(-open).line : -1));
  }

  /** More of the open fence; true when it has ended. */
  feed(text) {
    const { code, marks } = this.fence;
    const lines = text.slice(this.start).split("\n");
    const partial = lines.pop();
    code.clear();
    const end = lines.findIndex((line) => closes(line, marks));
    const whole = end < 0 ? lines : lines.slice(0, end);
    for (const line of whole) code.add(line);
    this.start += lengthOf(end < 0 ? whole : lines.slice(0, end + 1));
    if (end >= 0) this.fence = null;
    else if (!closes(partial, marks)) code.show(partial);
    return end >= 0;
  }
}

function lengthOf(lines) {
  return lines.reduce((sum, line) => sum + line.length + 1, 0);
}

/** The blocks of some lines, each with the number of its first line. */
function blocks(lines) {
  const found = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const block = { line: at, ...readBlock(lines, at) };
    at = block.end;
    found.push(block);
  }
  return found;
}

function readBlock(lines, at) {
  const fence = FENCE.exec(lines[at]);
  if (fence) return readFence(lines, at, fence);
  const math = readMath(lines, at);
  if (math) return math;
  const heading = HEADING.exec(lines[at]);
  if (heading) return { kind: "heading", level: heading[1].length, text: heading[2].trim().replace(/(?<![^\s])#+$/, ""), end: at + 1 };
  if (RULE.test(lines[at])) return { kind: "rule", end: at + 1 };
  if (QUOTE.test(lines[at])) return readWhile(lines, at, "quote", (line) => QUOTE.test(line));
  if (ITEM.test(lines[at])) return readList(lines, at);
  if (isTable(lines, at)) return readWhile(lines, at, "table", (line) => line.includes("|"));
  return readWhile(lines, at, "paragraph", (line, index) => index === at || (line.trim() && !interrupts(lines, index)));
}

function interrupts(lines, index) {
  const line = lines[index];
  const starts = FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
  return starts || isTable(lines, index) || readMath(lines, index) !== null;
}

/** A line of cells above a line of dashes. */
function isTable(lines, at) {
  const below = lines[at + 1] ?? "";
  return lines[at].includes("|") && below.includes("|") && cells(below).every((cell) => /^:?-+:?$/.test(cell));
}

function readWhile(lines, at, kind, belongs) {
  let end = at;
  while (end < lines.length && belongs(lines[end], end)) end++;
  return { kind, lines: lines.slice(at, end), end };
}

function readFence(lines, at, [, marks, label]) {
  const language = label.trim().split(/\s/)[0].slice(0, 40);
  let end = at + 1;
  while (end < lines.length && !closes(lines[end], marks)) end++;
  return { kind: "code", language, marks, lines: lines.slice(at + 1, end), open: end === lines.length && end > at + 1, end: Math.min(end + 1, lines.length) };
}

function closes(line, marks) {
  const text = line.trim();
  return text.startsWith(marks) && !text.replaceAll(marks[0], "");
}

/** A formula on lines of its own, up to the next blank one; null if it does not end there. */
function readMath(lines, at) {
  const [begin, close] = MATH.find(([pattern]) => pattern.test(lines[at])) ?? [];
  if (!begin) return null;
  const first = lines[at].replace(begin, "").trimEnd();
  if (first.length > MAX_TEX) return null;
  if (first.endsWith(close)) return { kind: "math", text: first.slice(0, -close.length), end: at + 1 };
  for (let end = at + 1, length = first.length; end < lines.length && lines[end].trim() && length <= MAX_TEX; length += lines[end++].length) {
    const line = lines[end].trim();
    if (line.endsWith(close)) return { kind: "math", text: [first, ...lines.slice(at + 1, end), line.slice(0, -close.length)].join("\n"), end: end + 1 };
    if (begin.test(line)) return null; // the next one begins: no line is looked at twice
  }
  return null;
}

/** Items at the first one's indentation; deeper lines belong to the item above. A blank line ends the list unless it goes on. */
function readList(lines, at) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const items = [];
  let end = at;
  for (; end < lines.length; end++) {
    const item = ITEM.exec(lines[end]);
    if (item && item[1].length <= indent.length + 1) {
      if (/\d/.test(item[2]) !== ordered) break;
      items.push([item[3]]);
    } else if (!lines[end].trim()) {
      const next = lines[end + 1] ?? "";
      if (!/^\s{2,}\S/.test(next) && !(ITEM.test(next) && /\d/.test(ITEM.exec(next)[2]) === ordered)) break;
      items.at(-1).push("");
    } else if (/^\s{2,}/.test(lines[end]) || !interrupts(lines, end)) {
      items.at(-1).push(lines[end].replace(/^ {1,4}/, ""));
    } else break;
  }
  return { kind: "list", ordered, first: ordered ? Number.parseInt(mark, 10) : 1, items, end };
}

function render(block, depth) {
  switch (block.kind) {
    case "heading":
      return el(`h${Math.min(block.level + 2, 6)}`, {}, inline(block.text));
    case "rule":
      return el("hr");
    case "code":
      return code(block, depth);
    case "math":
      return el("div", { class: "math", tabindex: "0" }, formula(block.text, true));
    case "quote":
      return el("blockquote", {}, inner(block.lines.map((line) => line.replace(QUOTE, "")), depth));
    case "list":
      return el(block.ordered ? "ol" : "ul", { start: block.ordered ? block.first : null }, block.items.map((item) => el("li", {}, itemNodes(item, depth))));
    case "table":
      return table(block.lines);
    default:
      return el("p", {}, inline(block.lines.join("\n")));
  }
}

function inner(lines, depth) {
  return depth < MAX_DEPTH ? blocks(lines).map((block) => render(block, depth + 1)) : lines.join("\n");
}

function itemNodes(lines, depth) {
  const nodes = inner(lines, depth);
  const tight = Array.isArray(nodes) && nodes[0]?.tagName === "P" && !lines.includes("");
  return tight ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes;
}

function code(block, depth) {
  const { language, lines, open } = block;
  const code = new Code(language);
  const partial = open ? lines.at(-1) : null;
  for (const line of open ? lines.slice(0, -1) : lines) code.add(line);
  if (open) code.show(partial);
  if (open && !depth) block.code = code;
  const copy = el("button", { class: "button quiet", type: "button", "data-copy": "code" }, icon("copy"), "Copy");
  const head = el("div", { class: "code-head" }, el("span", {}, language || "text"), copy);
  return el("div", { class: "code" }, head, el("pre", { tabindex: "0", "aria-label": language ? `${language} code` : "code" }, code.node));
}

function cells(line) {
  return line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function table([head, rule, ...rows]) {
  const aligned = cells(rule).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "centre" : "right") : null));
  const row = (tag) => (line) => el("tr", {}, cells(line).map((cell, at) => el(tag, { class: aligned[at] }, inline(cell))));
  return el("div", { class: "table", tabindex: "0" }, el("table", {}, el("thead", {}, row("th")(head)), el("tbody", {}, rows.map(row("td")))));
}
