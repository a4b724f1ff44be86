// What is sent, and what comes back: the body of a request, an answer put together from its events.

import { readTools, settings } from "./settings.js";

const NUMBERS = { temperature: Number, top_p: Number, top_k: toInteger, max_tokens: toInteger, seed: toInteger };
const MOST = 0.8; // of the tokens, that came in events of their own

function toInteger(text) {
  return Number.parseInt(text, 10);
}

export function requestBody(messages) {
  const body = { messages: wireMessages(messages), stream: true, stream_options: { include_usage: true } };
  if (settings.model) body.model = settings.model;
  for (const [name, convert] of Object.entries(NUMBERS)) {
    const value = convert(settings[name] || "x");
    if (Number.isFinite(value)) body[name] = value;
  }
  const { tools } = readTools(settings.tools);
  if (tools?.length) body.tools = tools;
  return body;
}

function wireMessages(messages) {
  const said = messages.filter((each) => each.role !== "assistant" || each.content || each.tool_calls?.length).map(wireMessage);
  return settings.system?.trim() ? [{ role: "system", content: settings.system }, ...said] : said;
}

function wireMessage({ role, content, tool_calls: calls, tool_call_id: id }) {
  if (role === "tool") return { role, content, tool_call_id: id };
  return calls?.length ? { role, content: content || null, tool_calls: calls } : { role, content };
}

/** An answer that grows by deltas, with its times in seconds. */
export class Answer {
  constructor() {
    this.message = { role: "assistant", content: "", reasoning: "", tool_calls: [], figures: null };
    this.begun = performance.now();
    this.first = this.last = 0;
    this.chunks = 0;
  }

  /** One event of the stream. */
  add(event) {
    if (event.usage) this.usage = event.usage;
    const choice = event.choices?.[0];
    if (!choice) return;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? {};
    if (content || reasoning || calls) this.stamp();
    this.message.content += content ?? "";
    this.message.reasoning += reasoning ?? "";
    for (const call of calls ?? []) this.addCall(call);
    if (choice.finish_reason) this.message.finish = choice.finish_reason;
    if (choice.stop_reason) this.message.stopReason = String(choice.stop_reason);
  }

  stamp() {
    this.last = performance.now();
    this.first ||= this.last;
    this.chunks++;
  }

  addCall({ index = 0, id, function: called }) {
    const call = (this.message.tool_calls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    if (id) call.id = id;
    call.function.name += called?.name ?? "";
    call.function.arguments += called?.arguments ?? "";
  }

  figures() {
    const tokens = this.usage?.completion_tokens ?? this.chunks;
    const cached = this.usage?.prompt_tokens_details?.cached_tokens ?? 0;
    const seconds = (this.last - this.first) / 1000;
    const told = this.chunks > 1 && this.chunks >= MOST * tokens && seconds > 0; // else the first event held several: no rate can be told
    return { tokens, first: this.first ? (this.first - this.begun) / 1000 : null, rate: told ? (tokens - 1) / seconds : null, cached };
  }
}
