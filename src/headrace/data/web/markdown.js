// Markdown, the common part of it, as DOM nodes. The text comes from a model: it becomes text nodes and a fixed set of elements,
// and the only attribute taken from it is the address of an http(s) or mail link.

import { el, icon } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)+\|?\s*$/;
const MAX_DEPTH = 8; // of quotes and lists in one another
const MAX_INLINE = 20_000; // characters of one paragraph in which spans are looked for

/** Renders a text that grows. All blocks but the last are final (a list before it may still go on): only they are read again. */
export class Growing {
  constructor(container) {
    this.container = container;
    this.start = 0; // of what is not final, in the text
    this.last = []; // its nodes
  }

  update(text) {
    const lines = text.slice(this.start).split("\n");
    const found = blocks(lines);
    const nodes = found.map((block) => render(block, 0));
    for (const node of this.last) node.remove();
    this.container.append(...nodes);
    const open = found.at(-2)?.kind === "list" ? 2 : 1;
    this.last = nodes.slice(-open);
    if (found.length) this.start += lines.slice(0, found.at(-open).line).reduce((sum, line) => sum + line.length + 1, 0);
  }
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
  const heading = HEADING.exec(lines[at]);
  if (heading) return { kind: "heading", level: heading[1].length, text: heading[2], end: at + 1 };
  if (RULE.test(lines[at])) return { kind: "rule", end: at + 1 };
  if (QUOTE.test(lines[at])) return readWhile(lines, at, "quote", (line) => QUOTE.test(line));
  if (ITEM.test(lines[at])) return readList(lines, at);
  if (lines[at].includes("|") && TABLE_RULE.test(lines[at + 1] ?? "")) return readWhile(lines, at, "table", (line) => line.includes("|"));
  return readWhile(lines, at, "paragraph", (line, index) => index === at || (line.trim() && !interrupts(lines, index)));
}

function interrupts(lines, index) {
  const line = lines[index];
  const starts = FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
  return starts || (line.includes("|") && TABLE_RULE.test(lines[index + 1] ?? ""));
}

function readWhile(lines, at, kind, belongs) {
  let end = at;
  while (end < lines.length && belongs(lines[end], end)) end++;
  return { kind, lines: lines.slice(at, end), end };
}

function readFence(lines, at, [, marks, language]) {
  let end = at + 1;
  while (end < lines.length && !(lines[end].trim().startsWith(marks) && !lines[end].trim().replaceAll(marks[0], ""))) end++;
  return { kind: "code", language, text: lines.slice(at + 1, end).join("\n"), end: Math.min(end + 1, lines.length) };
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
      return code(block);
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

function code({ language, text }) {
  const copy = el("button", { class: "button quiet", type: "button", "data-copy": "code" }, icon("copy"), "Copy");
  const head = el("div", { class: "code-head" }, el("span", {}, language || "text"), copy);
  return el("div", { class: "code" }, head, el("pre", { tabindex: "0", "aria-label": language ? `${language} code` : "code" }, el("code", {}, text)));
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
}

function table([head, , ...rows]) {
  const row = (tag) => (line) => el("tr", {}, cells(line).map((cell) => el(tag, {}, inline(cell))));
  return el("div", { class: "table", tabindex: "0" }, el("table", {}, el("thead", {}, row("th")(head)), el("tbody", {}, rows.map(row("td")))));
}

// One pattern for all spans.
const SPAN = /(`+)([^`]|[^`][^]*?[^`])\1(?!`)|\*\*(?=\S)([^*]+)\*\*|__(?=\S)([^_]+)__|~~(?=\S)([^~]+)~~|\*(?=\S)([^*\n]+)\*|(?<!\w)_(?=\S)([^_\n]+)_(?!\w)|\[([^[\]\n]{1,500})\]\(([^()\s]{1,2000})\)|(https?:\/\/[^\s<>()"'`]{3,2000})/g;

export function inline(text) {
  if (text.length > MAX_INLINE) return [text];
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(SPAN)) {
    if (match.index > end) nodes.push(text.slice(end, match.index));
    nodes.push(span(match));
    end = match.index + match[0].length;
  }
  if (end < text.length) nodes.push(text.slice(end));
  return nodes;
}

function span([whole, , literal, bold, bold2, struck, italic, italic2, label, address, bare]) {
  if (literal !== undefined) return el("code", {}, literal.trim() || literal);
  if (bold ?? bold2) return el("strong", {}, inline(bold ?? bold2));
  if (struck) return el("s", {}, inline(struck));
  if (italic ?? italic2) return el("em", {}, inline(italic ?? italic2));
  const target = bare ? bare.replace(/[.,;:!?]+$/, "") : address;
  if (!/^(https?:\/\/|mailto:)/i.test(target)) return whole;
  const link = el("a", { href: target, target: "_blank", rel: "noopener noreferrer nofollow" }, bare ? target : label);
  return bare && bare !== target ? el("span", {}, link, bare.slice(target.length)) : link;
}
