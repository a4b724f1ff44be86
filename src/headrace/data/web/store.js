// Conversations in this browser's localStorage: one entry each, a line about it and a line of messages. Nothing is ever deleted to make
// room: what does not fit is refused with numbers, and the conversation goes on in memory.

const PREFIX = "headrace.chat.";
const OLD = "headrace.conversation"; // where versions before kept the only one
export const LIMIT = 4_000_000; // characters of all; browsers end at about five million
const ROLES = new Set(["user", "assistant", "tool"]);

export class StoreFull extends Error {}

export function newConversation() {
  const now = Date.now();
  return { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "", created: now, updated: now, messages: [] };
}

/** What a conversation is called: by its reader, or by its first question. */
export function titleOf({ title, messages }) {
  return title || shorten(messages.find((each) => each.role === "user")?.content ?? "") || "New conversation";
}

function shorten(text) {
  const line = text.trim().slice(0, 200).replace(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

/** A message as it came from a file or the store, with what is known of it; null if it is none. */
export function readMessage(value) {
  if (!ROLES.has(value?.role) || typeof (value.content ?? "") !== "string") return null;
  const calls = Array.isArray(value.tool_calls) ? value.tool_calls.map(readCall) : [];
  if (calls.includes(null)) return null;
  const message = { role: value.role, content: value.content ?? "" };
  if (value.role === "tool") return { ...message, tool_call_id: String(value.tool_call_id ?? "") };
  if (value.role === "user") return message;
  const texts = ["reasoning", "finish", "stopReason", "error"].filter((name) => typeof value[name] === "string").map((name) => [name, value[name]]);
  return { ...message, tool_calls: calls, figures: readFigures(value.figures), ...Object.fromEntries(texts) };
}

function readCall(call) {
  const { name, arguments: given } = call?.function ?? {};
  return typeof name === "string" && typeof given === "string" ? { id: String(call.id ?? ""), type: "function", function: { name, arguments: given } } : null;
}

function readFigures(figures) {
  const number = (name) => (Number.isFinite(figures[name]) ? figures[name] : null);
  return figures && Number.isFinite(figures.tokens) ? { tokens: figures.tokens, first: number("first"), rate: number("rate"), cached: number("cached") } : null;
}

export class Store {
  constructor(storage = localStorage) {
    this.storage = storage;
    this.heads = new Map(); // id → {id, title, updated, size}
    this.refresh();
    this.takeOver();
  }

  /** Reads all heads anew: another tab may have written. */
  refresh() {
    this.heads.clear();
    for (let index = 0; index < this.storage.length; index++) {
      const id = this.idOf(this.storage.key(index));
      if (id) this.readHead(id);
    }
  }

  /** The conversation that an entry is, if it is one. */
  idOf(key) {
    return key?.startsWith(PREFIX) ? key.slice(PREFIX.length) : null;
  }

  readHead(id) {
    const text = this.storage.getItem(PREFIX + id) ?? "";
    const head = parse(text.slice(0, text.indexOf("\n")));
    if (typeof head?.title === "string" && Number.isFinite(head.updated)) this.heads.set(id, { ...head, id, size: text.length });
    else this.heads.delete(id);
  }

  /** Newest first. */
  list() {
    return [...this.heads.values()].sort((a, b) => b.updated - a.updated);
  }

  get size() {
    return [...this.heads.values()].reduce((sum, head) => sum + head.size, 0);
  }

  /** null for one that is not there, or that cannot be read. */
  load(id) {
    const text = this.storage.getItem(PREFIX + id);
    const end = text?.indexOf("\n") ?? -1;
    const head = end < 0 ? null : parse(text.slice(0, end));
    const messages = end < 0 ? null : parse(text.slice(end + 1));
    if (!head || !Array.isArray(messages)) return null;
    return { id, title: head.named ? String(head.title) : "", created: Number(head.created) || head.updated, updated: head.updated, messages: messages.map(readMessage).filter(Boolean) };
  }

  /** Throws StoreFull, with what to do about it. */
  save(conversation) {
    const { id, title, created, updated, messages } = conversation;
    const text = `${JSON.stringify({ title: titleOf(conversation), named: Boolean(title), created, updated })}\n${JSON.stringify(messages)}`;
    if (this.size - (this.heads.get(id)?.size ?? 0) + text.length > LIMIT) throw this.full(text.length);
    try {
      this.storage.setItem(PREFIX + id, text);
    } catch {
      throw this.full(text.length); // less than LIMIT is allowed here, or nothing
    }
    this.readHead(id);
  }

  full(size) {
    const kept = `${counted(this.heads.size)}, ${sized(this.size)} of at most ${sized(LIMIT)}`;
    return new StoreFull(`This browser keeps no more (${kept}; this one has ${sized(size)}). It lasts until you close the tab; export it, or delete others.`);
  }

  remove(id) {
    this.storage.removeItem(PREFIX + id);
    this.heads.delete(id);
  }

  takeOver() {
    const messages = parse(this.storage.getItem(OLD));
    if (Array.isArray(messages) && messages.length) {
      try {
        this.save({ ...newConversation(), messages: messages.map(readMessage).filter(Boolean) });
      } catch {
        return; // there is no room for it here: it stays where it is
      }
    }
    this.storage.removeItem(OLD);
  }
}

export function sized(characters) {
  return characters < 1e6 ? `${Math.ceil(characters / 1e3)} KB` : `${Number((characters / 1e6).toFixed(1))} MB`;
}

export function counted(conversations) {
  return `${conversations} ${conversations === 1 ? "conversation" : "conversations"}`;
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
