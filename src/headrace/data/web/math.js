// TeX's mathematics, the part of it that models write, as MathML: elements of a fixed set, in which the text stands as text.
// What is not known is shown as it was written. Reading is one pass; depth and length are bounded.

import { ACCENTS, DELIMITERS, FONTS, FUNCTIONS, LETTERS, OPERATORS, SPACES, styled } from "./math_symbols.js";

export const MAX_TEX = 4000; // characters of a formula
const MAX_DEPTH = 40;
const TOKEN = /\\(?:[A-Za-z]+|[^]|$)|[0-9]+(?:[.,][0-9]+)*|\s+|%[^\n]*|[^]/gu;
const NAMESPACE = "http://www.w3.org/1998/Math/MathML";
const ENVIRONMENTS = {
  matrix: "", pmatrix: "()", bmatrix: "[]", Bmatrix: "{}", vmatrix: "||", Vmatrix: "‖‖", smallmatrix: "", array: "", cases: "{",
  aligned: "", align: "", "align*": "", alignedat: "", split: "", gather: "", "gather*": "", gathered: "", equation: "", "equation*": "",
};

function m(tag, attributes, ...children) {
  const node = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** A formula, or its source where it cannot be read (also while it is being written). */
export function formula(tex, display) {
  const math = m("math", { display: display ? "block" : "inline", alttext: tex.trim() });
  try {
    if (tex.length > MAX_TEX) throw new Unreadable();
    math.append(...new Reader(tex).all());
  } catch (error) {
    if (!(error instanceof Unreadable)) throw error;
    math.append(m("mtext", { class: "tex" }, tex));
  }
  return math;
}

class Unreadable extends Error {}

class Reader {
  constructor(tex) {
    this.tokens = tex.match(TOKEN)?.filter((token) => !token.startsWith("%")) ?? [];
    this.at = 0;
    this.depth = 0;
  }

  /** The next token that is no space; undefined at the end. */
  peek() {
    while (this.at < this.tokens.length && !this.tokens[this.at].trim()) this.at++;
    return this.tokens[this.at];
  }

  next() {
    const token = this.peek();
    if (token === undefined) throw new Unreadable();
    this.at++;
    return token;
  }

  /** All of it; several lines become a table. */
  all() {
    const rows = this.rows(undefined);
    return rows.length > 1 || rows[0]?.childNodes.length > 1 ? [m("mtable", { class: "aligned", displaystyle: "true" }, ...rows)] : [...(rows[0]?.firstChild.childNodes ?? [])];
  }

  /** Nodes up to a token that ends them, which is left for the caller. */
  until(ends) {
    if (++this.depth > MAX_DEPTH) throw new Unreadable();
    const nodes = [];
    for (let token; (token = this.peek()) !== undefined && !ends(token) && token !== "}"; ) {
      const word = FUNCTIONS.has(token.slice(1)) || token === "\\operatorname";
      if (word && nodes.length && nodes.at(-1).localName !== "mo") nodes.push(space("0.17em"));
      const node = this.scripts(this.atom());
      if (node) nodes.push(node);
      if (word && !/^([([{})\]^]|\\left|\\right|$)/.test(this.peek() ?? "")) nodes.push(space("0.17em"));
    }
    this.depth--;
    return nodes;
  }

  /** What stands in braces, or one atom. */
  argument() {
    if (++this.depth > MAX_DEPTH) throw new Unreadable();
    const node = this.peek() === "{" ? this.group() : this.atom();
    this.depth--;
    return node ?? m("mrow", {});
  }

  group() {
    this.expect("{");
    const nodes = this.until(() => false);
    this.expect("}");
    return row(nodes);
  }

  expect(token) {
    if (this.next() !== token) throw new Unreadable();
  }

  /** An atom with what stands above and below it, at the right or, for sums and limits, in the middle. */
  scripts(base) {
    let [sub, sup, primes] = [null, null, ""];
    let limits = base?.dataset?.limits !== undefined;
    for (let token; (token = this.peek()); ) {
      if (token === "_" && !sub) [sub] = [(this.next(), this.argument())];
      else if (token === "^" && !sup) [sup] = [(this.next(), this.argument())];
      else if (token === "'") [primes] = [primes + (this.next(), "′")];
      else if (token === "\\limits") [limits] = [Boolean(this.next())];
      else if (token === "\\nolimits") [limits] = [!this.next()];
      else if (token === "_" || token === "^") throw new Unreadable(); // twice
      else break;
    }
    if (primes) sup = sup ? row([m("mo", {}, primes), sup]) : m("mo", {}, primes);
    if (!sub && !sup) return base;
    const parts = [base ?? m("mrow", {}), sub, sup].filter(Boolean);
    const tag = limits ? (sub && sup ? "munderover" : sub ? "munder" : "mover") : sub && sup ? "msubsup" : sub ? "msub" : "msup";
    return m(tag, {}, ...parts);
  }

  atom() {
    const token = this.next();
    if (token === "{") {
      this.at--;
      return this.group();
    }
    if (token === "_" || token === "^" || token === "'") {
      this.at--;
      return null; // a script of nothing
    }
    if (token.startsWith("\\")) return this.command(token.slice(1));
    if (/^[0-9]/.test(token)) return m("mn", {}, token);
    if (token === "&") throw new Unreadable();
    if (token === "~") return space("0.33em");
    if (/^[\p{L}\p{M}]$/u.test(token)) return m("mi", {}, token);
    return operator(token === "-" ? "−" : token === "*" ? "∗" : token);
  }

  command(name) {
    if (Object.hasOwn(LETTERS, name)) return m("mi", /^[A-Z]/.test(name) ? { mathvariant: "normal" } : {}, LETTERS[name]);
    if (Object.hasOwn(OPERATORS, name)) return operator(OPERATORS[name]);
    if (Object.hasOwn(SPACES, name)) return space(SPACES[name]);
    if (FUNCTIONS.has(name)) return named(name);
    if (Object.hasOwn(ACCENTS, name)) return this.accent(...ACCENTS[name]);
    if (Object.hasOwn(FONTS, name)) return this.font(FONTS[name]);
    if (Object.hasOwn(COMMANDS, name)) return COMMANDS[name](this);
    if (!/^[A-Za-z]/.test(name)) return /^[{}%$#&_|]$/.test(name) ? operator(name === "|" ? "‖" : name) : space("0.17em");
    return m("mtext", { class: "tex" }, `\\${name}`);
  }

  accent(mark, under) {
    const base = this.argument();
    const node = m(under ? "munder" : "mover", under ? { accentunder: "true" } : { accent: "true" }, base, m("mo", { stretchy: String("‾_⏞⏟^~→←".includes(mark)) }, mark));
    return "⏞⏟".includes(mark) ? limited(node) : node;
  }

  /** Letters in another alphabet. */
  font(name) {
    const node = this.argument();
    for (const leaf of [node, ...node.querySelectorAll("mi, mn")]) {
      if (!["mi", "mn"].includes(leaf.localName)) continue;
      leaf.textContent = styled(leaf.textContent, name);
      if (leaf.localName === "mi") leaf.setAttribute("mathvariant", "normal");
    }
    return node;
  }

  /** What stands in braces as it was written. */
  raw() {
    if (this.peek() !== "{") return this.next();
    const begin = ++this.at;
    for (let depth = 1; depth; this.at++) {
      if (this.at >= this.tokens.length) throw new Unreadable();
      depth += { "{": 1, "}": -1 }[this.tokens[this.at]] ?? 0;
    }
    return this.tokens.slice(begin, this.at - 1).join("");
  }

  delimiter() {
    const token = this.next();
    const name = token.slice(1);
    if (token === ".") return "";
    if (!token.startsWith("\\")) return { "<": "⟨", ">": "⟩" }[token] ?? token;
    return DELIMITERS[name] ?? (/^[{}]$/.test(name) ? name : name === "|" ? "‖" : OPERATORS[name] ?? fail());
  }

  /** \left … \middle … \right */
  fenced() {
    const parts = [fence(this.delimiter())];
    for (;;) {
      parts.push(...this.until((token) => token === "\\right" || token === "\\middle"));
      const token = this.next();
      if (token === "}") throw new Unreadable();
      parts.push(fence(this.delimiter()));
      if (token === "\\right") return enclosed(parts);
    }
  }

  environment() {
    const name = this.raw();
    if (!Object.hasOwn(ENVIRONMENTS, name)) throw new Unreadable();
    if (name === "array" || name === "alignedat") this.raw(); // the columns
    const rows = this.rows("\\end");
    if (this.raw() !== name) throw new Unreadable();
    const kind = /^(align|split)/.test(name) ? "aligned" : name === "cases" || name === "array" ? "left" : "";
    const table = m("mtable", kind === "aligned" ? { class: kind, displaystyle: "true" } : { class: kind }, ...rows);
    const [open, close] = ENVIRONMENTS[name];
    return open ? enclosed([fence(open), table, close ? fence(close) : ""]) : table;
  }

  /** Rows of cells up to ``end``, which is taken; undefined: up to the end of all. */
  rows(end) {
    const rows = [];
    for (let cells = []; ; ) {
      cells.push(m("mtd", {}, ...this.until((token) => token === "&" || token === "\\\\" || token === end)));
      const token = this.peek() === end ? end : this.next();
      if (token === "}" || (token === undefined && end)) throw new Unreadable();
      if (token === "&") continue;
      if (token === "\\\\" && this.peek() === "[") while (this.next() !== "]"); // the height of the gap
      const empty = cells.length === 1 && !cells[0].childNodes.length;
      if (!(empty && token === end)) rows.push(m("mtr", {}, ...cells));
      cells = [];
      if (token === end) {
        this.at++;
        return rows;
      }
    }
  }

  root() {
    if (this.peek() !== "[") return m("msqrt", {}, this.argument());
    this.next();
    const index = row(this.until((token) => token === "]"));
    this.expect("]");
    return m("mroot", {}, this.argument(), index);
  }
}

function fail() {
  throw new Unreadable();
}

function row(nodes) {
  return nodes.length === 1 ? nodes[0] : m("mrow", {}, ...nodes);
}

function operator(text) {
  const node = m("mo", "()[]{}|‖".includes(text) ? { stretchy: "false" } : {}, text);
  if ("∫∬∭∮".includes(text)) node.classList.add("large");
  if (!"∑∏∐⋃⋂⋁⋀⨁⨂".includes(text)) return node;
  node.classList.add("large");
  return limited(node);
}

function named(name) {
  const text = name.replace(/^(lim|arg)(?=sup|inf|max|min)/, "$1 ");
  if (!/^(lim|max|min|sup|inf|arg(max|min)|det|gcd|Pr)/.test(name)) return m("mi", { mathvariant: "normal" }, text);
  return limited(m("mo", { movablelimits: "true", form: "prefix", lspace: "0", rspace: "0" }, text)); // beside it in a line of text
}

function fence(text) {
  return m("mo", { stretchy: "true", fence: "true" }, text);
}

/** A row whose fences know about how many lines they enclose, for fonts that cannot stretch them. */
function enclosed(parts) {
  const node = m("mrow", {}, ...parts);
  const lines = Math.max(...parts.map((part) => (part.querySelectorAll ? linesOf(part) : 0)));
  for (const part of parts) if (lines > 1 && part.localName === "mo" && part.hasAttribute("fence")) part.classList.add(`tall${Math.min(lines, 3)}`);
  return node;
}

function linesOf(node) {
  if (node.localName === "mtable") return node.childElementCount;
  return node.localName === "mfrac" ? 2 : Math.max(0, ...Array.from(node.children, (child) => (/^m(row|padded|under|over|underover)$/.test(node.localName) ? linesOf(child) : 0)));
}

/** Whether this browser has a font for mathematics: only those can be stretched. */
export function stretches() {
  const tall = m("mtable", {}, ...[1, 2, 3].map(() => m("mtr", {}, m("mtd", {}, m("mi", {}, "x")))));
  const math = m("math", {}, fence("("), tall, m("mo", { stretchy: "false" }, "("));
  document.body.append(math);
  const [first, , last] = math.children;
  const stretched = first.getBoundingClientRect().height > 1.5 * last.getBoundingClientRect().height;
  math.remove();
  return stretched;
}

function space(width) {
  return m("mspace", { width });
}

function fraction(attributes) {
  return (reader) => m("mfrac", attributes, reader.argument(), reader.argument());
}

function binomial(reader) {
  return enclosed([fence("("), fraction({ linethickness: "0" })(reader), fence(")")]);
}

function stacked(tag, swap) {
  return (reader) => {
    const [mark, base] = [reader.argument(), reader.argument()];
    return m(tag, {}, ...(swap ? [mark, base] : [base, mark]));
  };
}

const text = (reader) => m("mtext", {}, reader.raw().replace(/^ | $/g, "\u00a0").replace(/\\([ %$#&_{}])/g, "$1"));
const nothing = () => null;
const size = (reader) => m("mo", { stretchy: "true", symmetric: "true" }, reader.delimiter());

const COMMANDS = {
  frac: fraction({}), dfrac: fraction({ displaystyle: "true" }), tfrac: fraction({ displaystyle: "false" }), cfrac: fraction({ displaystyle: "true" }),
  binom: binomial, dbinom: binomial, tbinom: binomial, sqrt: (reader) => reader.root(),
  text, textrm: text, textbf: text, textit: text, texttt: text, mbox: text, hbox: text,
  operatorname: (reader) => (reader.peek() === "*" ? limited(named((reader.next(), reader.raw()))) : named(reader.raw())),
  left: (reader) => reader.fenced(), begin: (reader) => reader.environment(),
  overset: stacked("mover"), underset: stacked("munder"), stackrel: stacked("mover"),
  boxed: (reader) => m("mrow", { class: "boxed" }, reader.argument()),
  phantom: (reader) => m("mphantom", {}, reader.argument()),
  pmod: (reader) => m("mrow", {}, space("0.4em"), operator("("), named("mod"), space("0.33em"), reader.argument(), operator(")")),
  bmod: () => m("mo", { lspace: "0.28em", rspace: "0.28em" }, "mod"), mod: () => m("mo", { lspace: "0.5em", rspace: "0.28em" }, "mod"),
  not: (reader) => negated(reader.atom()), tag: (reader) => m("mtext", {}, `\u2003(${reader.raw()})`),
  color: (reader) => (reader.raw(), null), textcolor: (reader) => (reader.raw(), reader.argument()),
  big: size, Big: size, bigg: size, Bigg: size, bigl: size, bigr: size, Bigl: size, Bigr: size, biggl: size, biggr: size, Biggl: size, Biggr: size,
  displaystyle: nothing, textstyle: nothing, scriptstyle: nothing, label: (reader) => (reader.raw(), null), nonumber: nothing, notag: nothing, hline: nothing,
  right: fail, end: fail, middle: fail,
};

function limited(node) {
  node.dataset.limits = "";
  return node;
}

function negated(node) {
  if (!node) return null;
  node.append("\u0338");
  return node;
}
