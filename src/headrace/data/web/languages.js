// What the common languages look like, as data: words, comments, strings. Drawn by highlight.js.
// Every pattern reads a line without going back: a quantifier is followed by nothing that it could have taken.

const WORD = String.raw`[A-Za-z_$][\w$]*`;
const NUMBER = String.raw`\b(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d[\d_]*)?(?:[eE][+-]?\d+)?)\w*`;

function escape(text) {
  return text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
}

/** From ``open`` to ``close``, over lines. */
function long(kind, open, close) {
  return { kind, source: escape(open), until: new RegExp(escape(close), "g") };
}

function line(kind, source) {
  return { kind, source };
}

function quoted(mark, prefix = "") {
  return line("string", String.raw`${prefix}${mark}(?:[^${mark}\\]|\\.)*(?:${mark}|\\?$)`);
}

const words = (text) => new Set(text.trim().split(/\s+/));

/** Identifiers: keywords, constants, types by their capital, functions by their bracket. */
function names(keywords, { constants = "", types = "", ignoreCase = false, source = WORD, calls = true } = {}) {
  const [known, fixed, built] = [words(keywords), words(`true false null nil None True False undefined NULL nullptr ${constants}`), words(types)];
  const kindOf = (word, text, end) => {
    const name = ignoreCase ? word.toLowerCase() : word;
    if (known.has(name)) return "keyword";
    if (fixed.has(name)) return "number";
    if (built.has(name) || /^[A-Z]\w*[a-z]/.test(word)) return ignoreCase && !built.has(name) ? "" : "type";
    return calls && text[end] === "(" ? "call" : "";
  };
  return { source, kindOf };
}

function language(...rules) {
  return { rules, pattern: new RegExp(rules.map(({ source }) => `(${source})`).join("|"), "g") };
}

const SLASHES = [long("comment", "/*", "*/"), line("comment", "//.*")];
const HASH = line("comment", "#.*");
const STRINGS = [quoted('"'), quoted("'")];
const BRACED = "if else for while do switch case default break continue return goto struct enum union typedef static const volatile extern inline sizeof";
const C_TYPES = "int char float double void long short unsigned signed bool size_t ssize_t int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t auto";

function braced(keywords, options = {}, ...first) {
  return language(...first, ...SLASHES, ...STRINGS, line("number", NUMBER), line("note", String.raw`@[\w.]+`), names(keywords, options));
}

const C = `${BRACED} register restrict`;
const CPP = `${C} class public private protected virtual override final template typename namespace using new delete try catch throw operator this friend explicit
  constexpr consteval mutable noexcept static_cast reinterpret_cast const_cast dynamic_cast decltype concept requires co_await co_return co_yield __global__ __device__
  __host__ __shared__ __constant__ __restrict__ __syncthreads __launch_bounds__`;
const JAVA = `${BRACED} abstract class interface extends implements new package import public private protected final try catch finally throw throws this super instanceof
  synchronized record sealed permits var yield transient native async await using namespace get set in is as out ref params foreach lock readonly virtual override base
  internal partial delegate event where fun val when object companion data open lateinit suspend by init typealias trait def match given with implicit lazy`;
const JS = `async await break case catch class const continue debugger default delete do else export extends finally for from function get if import in instanceof let new of
  return set static super switch this throw try typeof var void while with yield interface type enum implements declare readonly namespace abstract as satisfies keyof`;

const LANGUAGES = {
  python: language(
    HASH, long("string", '"""', '"""'), long("string", "'''", "'''"), quoted('"', "[rbfuRBFU]{0,2}"), quoted("'", "[rbfuRBFU]{0,2}"),
    line("number", NUMBER), line("note", String.raw`@[\w.]+`),
    names(`and as assert async await break case class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise
      return try while with yield`, { types: "int float str bool list dict set tuple bytes object type self cls" }),
  ),
  javascript: language(...SLASHES, ...STRINGS, long("string", "`", "`"), line("number", NUMBER), line("note", String.raw`@[\w.]+`),
    names(JS, { constants: "NaN Infinity", types: "string number boolean any unknown never object symbol bigint console" })),
  json: language(line("key", String.raw`"(?:[^"\\]|\\.)*"(?=\s{0,20}:)`), quoted('"'), ...SLASHES, line("number", `-?${NUMBER}`), names("")),
  c: braced(C, { types: C_TYPES }, line("note", String.raw`^\s*#\s*\w+`)),
  cpp: braced(CPP, { types: `${C_TYPES} string vector map std` }, line("note", String.raw`^\s*#\s*\w+`)),
  java: braced(JAVA, { types: `${C_TYPES} byte boolean string decimal Int String` }),
  go: braced(`${BRACED} func package import type interface map chan go defer select range var fallthrough`,
    { constants: "iota", types: `${C_TYPES} string error byte rune any int8 int16 int32 int64 uint uint8 uint16 uint32 uint64 float32 float64` }, long("string", "`", "`")),
  rust: language(...SLASHES, quoted('"', "[br]?"), line("string", String.raw`b?'(?:[^'\\]|\\[^']{1,10})'`), line("note", String.raw`#!?\[[^\]]{0,200}\]|'[a-z_]\w*`), line("number", NUMBER),
    line("call", String.raw`\b[a-z_]\w*!`), names(`as async await break const continue crate dyn else enum extern fn for if impl in let loop match mod move mut pub ref return self Self
      static struct super trait type unsafe use where while union`, { types: "i8 i16 i32 i64 i128 isize u8 u16 u32 u64 u128 usize f32 f64 bool char str" })),
  swift: braced(`${BRACED} func let var class protocol extension import guard in init deinit self super throws throw try catch as is where defer repeat mutating async await some any
    public private internal fileprivate override weak lazy get set`, { types: "Int String Bool Double Float" }),
  php: braced(`${JAVA} function echo print foreach endforeach elseif isset unset array fn use global require require_once include`, { source: String.raw`\$?[A-Za-z_]\w*` }, HASH),
  ruby: language(HASH, ...STRINGS, line("number", NUMBER), line("note", String.raw`@{1,2}\w+|:[a-z_]\w*`), names(`alias and begin break case class def defined? do else elsif end ensure for if
    in module next not or redo require require_relative rescue retry return self super then unless until when while yield attr_accessor attr_reader puts`)),
  bash: language(line("comment", String.raw`(?<![^\s])#.*`), long("string", '"', '"'), line("string", "'[^']*(?:'|$)"), line("note", String.raw`\$(?:\w+|\{[^}]{0,200}\}|[@#?*$!-])`),
    line("number", String.raw`(?<![\w./-])\d+(?![\w./-])`), names(`if then else elif fi for while until do done case esac in function select return exit break continue local export source set
    unset alias echo cd sudo eval exec trap shift readonly declare`, { source: String.raw`(?<![\w./-])[A-Za-z_][\w-]*`, calls: false })),
  sql: language(long("comment", "/*", "*/"), line("comment", "--.*"), line("string", "'[^']*(?:'|$)"), line("number", NUMBER), names(`select from where and or not insert into values update set
    delete create table view index drop alter add column primary key foreign references join left right inner outer full cross on group by order having limit offset union all
    distinct as is in like between exists case when then else end with recursive over partition asc desc default unique check constraint if begin commit rollback returning
    using explain analyze`, { ignoreCase: true, types: "int integer bigint smallint text varchar char boolean date timestamp numeric decimal real float serial json jsonb uuid" })),
  html: language(long("comment", "<!--", "-->"), line("keyword", String.raw`<\/?[A-Za-z][\w:.-]*|\/?>|<[!?]\w+`), line("key", String.raw`(?<![\w:.@-])[A-Za-z_:@][\w:.-]*(?==)`), ...STRINGS, line("number", String.raw`&#?\w{1,20};`)),
  css: language(long("comment", "/*", "*/"), ...STRINGS, line("keyword", String.raw`@[\w-]+`), line("number", String.raw`#[\da-fA-F]{3,8}\b|-?\b\d+(?:\.\d+)?(?:%|[a-z]+)?`),
    line("key", String.raw`(?<![\w-])--[\w-]+|(?<![\w-])[a-z][a-z-]*(?=\s{0,20}:)`), line("type", String.raw`[.#][A-Za-z_][\w-]*`), line("call", String.raw`(?<![\w-])[a-z][a-z-]*(?=\()`)),
  yaml: language(line("comment", String.raw`(?<![^\s])#.*`), line("key", String.raw`^ {0,80}(?:- )?[\w./-][\w./ -]{0,200}(?=:(?:\s|$))`), ...STRINGS, line("note", String.raw`[&*][A-Za-z]\w*`),
    line("number", NUMBER), names("", { constants: "yes no on off", calls: false })),
  toml: language(line("comment", "[#;].*"), line("type", String.raw`^\s*\[{1,2}[^\]]{0,200}\]{1,2}`), line("key", String.raw`^ {0,80}[\w."-]{1,200}(?=\s{0,20}=)`), long("string", '"""', '"""'), ...STRINGS,
    line("number", NUMBER), names("", { calls: false })),
  dockerfile: language(HASH, ...STRINGS, line("keyword", String.raw`^\s*[A-Z]{2,20}\b`), line("note", String.raw`\$\{?\w+\}?`)),
  makefile: language(HASH, line("call", String.raw`^[\w./%-]{1,200}(?=:)`), line("note", String.raw`\$[({]?[\w@<^*]+[)}]?`), ...STRINGS),
  lua: language(long("comment", "--[[", "]]"), line("comment", "--.*"), ...STRINGS, long("string", "[[", "]]"), line("number", NUMBER),
    names("and break do else elseif end for function goto if in local not or repeat return then until while")),
  haskell: language(long("comment", "{-", "-}"), line("comment", "--.*"), quoted('"'), line("number", NUMBER), names(`case class data deriving do else if import in instance let module
    newtype of then type where forall qualified as hiding`, { calls: false })),
  r: language(HASH, ...STRINGS, line("number", NUMBER), names("if else for while repeat function return next break in library require", { constants: "TRUE FALSE NA Inf NaN", source: String.raw`[A-Za-z.][\w.]*` })),
  julia: language(long("comment", "#=", "=#"), HASH, long("string", '"""', '"""'), quoted('"'), line("number", NUMBER), line("note", String.raw`@\w+`), names(`function end if else elseif for while
    return using import module struct mutable abstract type const let begin do try catch finally in local global macro quote export where`)),
  diff: language(line("note", String.raw`^(?:@@.*|diff .*|index .*|\+\+\+.*|---.*)`), line("string", String.raw`^\+.*`), line("removed", "^-.*")),
  latex: language(line("comment", "%.*"), line("keyword", String.raw`\\(?:[A-Za-z]+|.)`), line("note", "[$&{}]")),
};

const ALIASES = {
  python: "py python3 pyi pycon ipython", javascript: "js jsx ts tsx typescript mjs cjs node", json: "jsonc json5 jsonl geojson", c: "h objc", cpp: "c++ cc cxx hpp cuda cu metal glsl",
  java: "kotlin kt scala csharp cs c# groovy dart", go: "golang", rust: "rs", bash: "sh shell zsh fish console shell-session terminal powershell ps1", html: "xml svg vue svelte xhtml",
  css: "scss less sass", yaml: "yml", toml: "ini cfg conf properties env", dockerfile: "docker containerfile", makefile: "make mk", ruby: "rb", sql: "postgres postgresql mysql sqlite",
  haskell: "hs elm", julia: "jl", diff: "patch", latex: "tex",
};
const BY_ALIAS = new Map(Object.entries(ALIASES).flatMap(([name, others]) => others.split(" ").map((other) => [other, name])));

/** null for what is not known: it stays plain. */
export function languageOf(name) {
  const lower = name.toLowerCase();
  const found = BY_ALIAS.get(lower) ?? lower;
  return Object.hasOwn(LANGUAGES, found) ? LANGUAGES[found] : null;
}
