// Colours for code: a line at a time, with what stays open from line to line (a comment, a long string), so that a block that is
// being written costs only its new lines. What a language looks like is in languages.js.

import { el } from "./dom.js";
import { languageOf } from "./languages.js";

const MAX_LINE = 2000; // characters; longer lines stay plain

/** The text of one block of code, growing by lines. */
export class Code {
  constructor(name) {
    this.language = languageOf(name);
    this.node = el("code");
    this.inside = null; // what the next line begins in: a rule of the language
    this.tail = []; // nodes of the last line, which is still being written
    this.empty = true;
  }

  /** A line that is whole. */
  add(line) {
    this.inside = this.put(line);
    this.tail = [];
    this.empty = false;
  }

  /** The line that is being written: shown until the next call. */
  show(line) {
    this.clear();
    const before = this.node.lastChild;
    this.put(line);
    for (let node = before ? before.nextSibling : this.node.firstChild; node; node = node.nextSibling) this.tail.push(node);
  }

  clear() {
    for (const node of this.tail) node.remove();
    this.tail = [];
  }

  /** Appends a line; the rule that it ends in. */
  put(line) {
    const parts = this.empty ? [] : ["\n"];
    const inside = this.language && line.length <= MAX_LINE ? colour(line, this.language, this.inside, parts) : (parts.push(line), this.inside);
    this.node.append(...parts);
    return inside;
  }
}

/** Puts the nodes of a line into ``parts``; the rule that stays open at its end, or null. */
function colour(line, { pattern, rules }, inside, parts) {
  let at = 0;
  if (inside) {
    at = endOf(inside, line, 0);
    parts.push(token(inside.kind, line.slice(0, at < 0 ? line.length : at)));
    if (at < 0) return inside;
  }
  pattern.lastIndex = at;
  for (let found; (found = pattern.exec(line)); pattern.lastIndex = at) {
    const rule = rules[found.findIndex((group, index) => index && group !== undefined) - 1];
    let end = pattern.lastIndex;
    if (rule.until) end = endOf(rule, line, end);
    if (found.index > at) parts.push(line.slice(at, found.index));
    parts.push(token(rule.kindOf ? rule.kindOf(found[0], line, end) : rule.kind, line.slice(found.index, end < 0 ? line.length : end)));
    if (end < 0) return rule;
    at = end;
  }
  if (at < line.length) parts.push(line.slice(at));
  return null;
}

function endOf(rule, line, from) {
  rule.until.lastIndex = from;
  return rule.until.test(line) ? rule.until.lastIndex : -1;
}

function token(kind, text) {
  return kind && text ? el("span", { class: `t-${kind}` }, text) : text;
}
