// The spans of a paragraph as DOM nodes: emphasis by CommonMark's rule of delimiters, code, links, mathematics.
// One pass and no search that is repeated: the time is linear in the text, whatever a model writes.

import { el } from "./dom.js";
import { formula, MAX_TEX } from "./math.js";

const MAX_NESTING = 12; // of emphasis in one another
const BEGIN = /[\\`*_$[]|~~|!\[|https?:\/\/|<br ?\/?>/g;
const LINK = /!?\[([^[\]\n]{1,500})\]\(([^()\s]{0,1000}(?:\([^()\s]{0,200}\)[^()\s]{0,800})?)(?:\s+"[^"\n]{0,300}")?\)/y;
const BARE = /https?:\/\/[^\s<>()"'`]{3,2000}/y;
const ESCAPED = /[!-/:-@[-`{-~]/;
const SPACE = /^$|\s/;
const PUNCTUATION = /[\p{P}\p{S}]/u;
const MATH = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false], ["$", "$", false]];
const TAGS = { "*": ["em", "strong"], _: ["em", "strong"], "~": [null, "s"] };

/** The nodes of ``text``. ``links``: addresses become links; inside a link they do not. */
export function inline(text, links = true) {
  return new Spans(text, links).nodes();
}

class Spans {
  constructor(text, links) {
    this.text = text;
    this.links = links;
    this.box = document.createDocumentFragment();
    this.delimiters = [];
    this.places = new Map(); // of closing marks: the next one, so that nothing is looked for twice
  }

  nodes() {
    const { text } = this;
    let end = 0; // of what stands in the box
    BEGIN.lastIndex = 0;
    for (let found; (found = BEGIN.exec(text)); ) {
      const at = found.index;
      const next = this.span(found[0], at, () => this.box.append(text.slice(end, at)));
      if (next) end = next;
      BEGIN.lastIndex = next || at + found[0].length;
    }
    this.box.append(text.slice(end));
    emphasise(this.delimiters);
    return [...this.box.childNodes];
  }

  /** Reads what begins at ``at``: where it ends, or 0 if it is only text. ``flush`` comes before anything is added. */
  span(mark, at, flush) {
    const read = { "`": this.code, "*": this.delimiter, _: this.delimiter, "~~": this.delimiter, $: this.math, "\\": this.escape, "[": this.link, "![": this.link }[mark];
    const [node, end] = read?.call(this, at) ?? (mark.startsWith("<") ? [el("br"), at + mark.length] : mark.startsWith("http") ? this.bare(at) : null) ?? [];
    if (!end) return 0;
    flush();
    this.box.append(node);
    return end;
  }

  code(at) {
    const { text } = this;
    let open = at;
    while (text[open] === "`") open++;
    const close = this.ticks().get(open - at).find(open);
    if (close === undefined) return [text.slice(at, open), open];
    const content = text.slice(open, close).replaceAll("\n", " ");
    return [el("code", {}, /^ .*\S.* $/.test(content) ? content.slice(1, -1) : content), close + open - at];
  }

  /** Where runs of backticks begin, by their length. */
  ticks() {
    if (!this.runs) {
      this.runs = new Map();
      for (const { 0: run, index } of this.text.matchAll(/`+/g)) {
        if (!this.runs.has(run.length)) this.runs.set(run.length, new Positions());
        this.runs.get(run.length).add(index);
      }
    }
    return this.runs;
  }

  /** Where ``mark`` comes next; Infinity if it does not. */
  closing(mark, from) {
    if (!(this.places.get(mark) >= from)) {
      const place = this.text.indexOf(mark, from);
      this.places.set(mark, place < 0 ? Infinity : place);
    }
    return this.places.get(mark);
  }

  math(at) {
    const { text } = this;
    const found = MATH.find(([open]) => text.startsWith(open, at));
    if (!found) return null;
    const [open, close, display] = found;
    const begin = at + open.length;
    const end = this.closing(close, begin);
    if (end === begin || end - begin > MAX_TEX) return null;
    const dollar = open === "$"; // also a sign of money: no space inside, no digit behind, as in pandoc
    if (dollar && (SPACE.test(text[begin]) || SPACE.test(text[end - 1]) || /\d/.test(text[end + 1] ?? "") || text.slice(begin, end).includes("`"))) return null;
    return [formula(text.slice(begin, end), display), end + close.length];
  }

  escape(at) {
    const next = this.text[at + 1] ?? "";
    return (next === "(" || next === "[" ? this.math(at) : null) ?? (ESCAPED.test(next) ? [next, at + 2] : null);
  }

  link(at) {
    LINK.lastIndex = at;
    const [whole, label, address] = LINK.exec(this.text) ?? [];
    if (!whole || !this.links || !isAddress(address)) return null;
    return [anchor(address, inline(label, false)), at + whole.length];
  }

  bare(at) {
    BARE.lastIndex = at;
    const [whole] = (this.links && !/\w/.test(this.text[at - 1] ?? "") && BARE.exec(this.text)) || [];
    if (!whole) return null;
    let length = whole.length;
    while (".,;:!?*_~$".includes(whole[length - 1])) length--; // they end the sentence, not the address
    const target = whole.slice(0, length);
    return [anchor(target, [target]), at + length];
  }

  delimiter(at) {
    const { text } = this;
    const mark = text[at];
    let end = at;
    while (text[end] === mark) end++;
    const count = end - at;
    if (mark === "~" && count !== 2) return [text.slice(at, end), end];
    const before = text[at - 1] ?? "";
    const after = text[end] ?? "";
    const left = !SPACE.test(after) && (!PUNCTUATION.test(after) || SPACE.test(before) || PUNCTUATION.test(before));
    const right = !SPACE.test(before) && (!PUNCTUATION.test(before) || SPACE.test(after) || PUNCTUATION.test(after));
    const inWord = mark === "_" && left && right;
    const node = document.createTextNode("");
    this.delimiters.push({
      mark, node, count, length: count, inner: 0,
      opens: left && (!inWord || PUNCTUATION.test(before)),
      closes: right && (!inWord || PUNCTUATION.test(after)),
    });
    return [node, end];
  }
}

/** Places in rising order, asked for in rising order. */
class Positions {
  constructor() {
    this.places = [];
    this.at = 0;
  }

  add(place) {
    this.places.push(place);
  }

  find(from) {
    while (this.places[this.at] < from) this.at++;
    return this.places[this.at];
  }
}

function isAddress(text) {
  return /^(https?:\/\/|mailto:)/i.test(text);
}

function anchor(address, children) {
  return el("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
}

/** Puts what lies between matching delimiters into elements; what is left of them is text. */
function emphasise(delimiters) {
  const open = []; // those that wait for their end; ``inner``: the deepest element that follows one directly
  const bottom = new Map(); // by kind of closer: no opener for it below this height
  for (const closer of delimiters) {
    while (closer.closes && closer.count) {
      const kind = `${closer.mark}${closer.opens}${closer.length % 3}`;
      const at = findOpener(open, closer, bottom.get(kind) ?? 0);
      if (at < 0) {
        bottom.set(kind, open.length);
        break;
      }
      if (!match(open, at, closer)) closer.closes = closer.opens = false;
      for (const [name, height] of bottom) bottom.set(name, Math.min(height, open.length));
    }
    if (closer.opens && closer.count) open.push(closer);
  }
  for (const { node, mark, count } of delimiters) node.data = mark.repeat(count);
}

function findOpener(open, closer, lowest) {
  for (let at = open.length - 1; at >= lowest; at--) {
    const opener = open[at];
    const odd = (opener.closes || closer.opens) && (opener.length + closer.length) % 3 === 0 && (opener.length % 3 || closer.length % 3);
    if (opener.mark === closer.mark && !odd) return at;
  }
  return -1;
}

/** Makes an element of what lies between; false where too many are in one another already. */
function match(open, at, closer) {
  const opener = open[at];
  const depth = 1 + open.splice(at).reduce((deepest, each) => Math.max(deepest, each.inner), 0);
  const fits = depth <= MAX_NESTING;
  if (fits) {
    const used = Math.min(opener.count, closer.count, 2);
    const element = el(TAGS[opener.mark][used - 1]);
    while (opener.node.nextSibling !== closer.node) element.append(opener.node.nextSibling);
    closer.node.before(element);
    opener.count -= used;
    closer.count -= used;
    opener.inner = depth;
    if (opener.count) open.push(opener);
  }
  if (open.length) open.at(-1).inner = Math.max(open.at(-1).inner, Math.min(depth, MAX_NESTING));
  return fits;
}
