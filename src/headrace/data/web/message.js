// How one message looks. What its buttons do is the page's business (chat.js): they carry data-action, and the page listens.

import { el, icon } from "./dom.js";
import { Growing } from "./markdown.js";

function button(action, name, label, extra = {}) {
  return el("button", { class: "button quiet", type: "button", "data-action": action, ...extra }, icon(name), label);
}

export function userMessage(message, last) {
  const foot = el("div", { class: "foot" }, last && button("edit", "edit", "Edit"), button("copy", "copy", "Copy"));
  return el("article", { class: "message user", "aria-label": "You" }, el("div", { class: "text" }, message.content), foot);
}

export function editForm(message) {
  const field = el("textarea", { class: "field", rows: Math.min(message.content.split("\n").length + 1, 12), "aria-label": "Edit your message" });
  field.value = message.content;
  const cancel = el("button", { class: "button", type: "button", "data-action": "cancel-edit" }, "Cancel");
  return el("form", { "data-form": "edit" }, field, el("div", { class: "row" }, cancel, el("button", { class: "button primary", type: "submit" }, "Send")));
}

export function toolResult(message) {
  const head = el("header", {}, el("span", {}, "Result"));
  return el("article", { class: "message result", "aria-label": "Tool result" }, el("div", { class: "tool" }, head, el("pre", {}, message.content)));
}

/** An assistant's message that can grow: update() after each change of ``message``, finish() once. */
export class AssistantView {
  constructor(message, name) {
    this.message = message;
    this.reasoning = el("div", { class: "prose" });
    this.details = el("details", { class: "reasoning", hidden: true }, el("summary", {}, "Reasoning"), this.reasoning);
    this.content = el("div", { class: "prose" });
    this.progress = el("progress", { "aria-label": "Prompt", max: "1", hidden: true });
    this.progressText = el("p", {});
    this.waiting = el("div", { class: "waiting" }, this.progressText, this.progress);
    this.calls = el("div");
    this.after = el("div");
    this.foot = el("div", { class: "foot" });
    this.growing = [new Growing(this.reasoning), new Growing(this.content)];
    const who = el("p", { class: "who" }, el("img", { src: "/web/icon.svg", alt: "" }), name);
    this.node = el("article", { class: "message assistant working", "aria-label": "Answer" }, who, this.details, this.content, this.waiting, this.calls, this.after, this.foot);
  }

  update() {
    const { content, reasoning, tool_calls: calls } = this.message;
    this.details.hidden = !reasoning;
    if (this.node.classList.contains("working")) this.details.open = Boolean(reasoning) && !content;
    this.growing[0].update(reasoning ?? "");
    this.growing[1].update(content ?? "");
    this.waiting.hidden = Boolean(content || reasoning || calls?.length);
    if (calls?.length) this.calls.replaceChildren(...calls.map((call) => toolCall(call)));
  }

  /** Where the request stands before its first token. */
  tell({ text, done, total }) {
    this.progressText.textContent = text;
    this.progress.hidden = done === null;
    if (done === null || done >= total) this.progress.removeAttribute("value"); // the last of it is being computed
    else this.progress.value = done / total;
  }

  /** The end: what became of it, and what can be done with it. ``last``: it is the newest message. */
  finish(last) {
    const { message } = this;
    this.update();
    if (this.node.classList.contains("working")) this.details.open = false;
    this.node.classList.remove("working");
    this.waiting.hidden = true;
    const open = last && message.finish === "tool_calls";
    this.calls.replaceChildren(...(message.tool_calls ?? []).map((call) => toolCall(call, open)));
    this.after.replaceChildren(...[failure(message, last), note(message)].filter(Boolean));
    const figures = message.figures && el("span", { class: "figures" }, figuresText(message.figures));
    this.foot.replaceChildren(...[message.content && button("copy", "copy", "Copy"), last && button("regenerate", "redo", "Regenerate"), figures].filter(Boolean));
  }
}

function toolCall(call, open = false) {
  const { name, arguments: given } = call.function;
  const head = el("header", {}, el("span", {}, "Tool call"), el("b", {}, name));
  const field = open && el("input", { class: "field", "aria-label": `Result of ${name}`, placeholder: `What ${name} returns` });
  const answer = open && el("form", { class: "answer", "data-form": "tool", "data-id": call.id }, field, el("button", { class: "button", type: "submit" }, "Send result"));
  return el("section", { class: "tool", "aria-label": `Call of ${name}` }, head, el("pre", {}, pretty(given)), answer);
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // not complete yet
  }
}

function failure({ error, retryAfter }, last) {
  if (!error) return null;
  const wait = retryAfter ? ` It asks to wait ${retryAfter} s.` : "";
  return el("div", { class: "failure", role: "alert" }, el("span", {}, error + (error.includes("try again in") ? "" : wait)), last && el("button", { class: "button", type: "button", "data-action": "regenerate" }, "Try again"));
}

const NOTES = { length: "Cut off: it reached the limit of tokens.", content_filter: "Ended by the server's content filter.", stopped: "You stopped this answer." };

function note({ finish, stopReason }) {
  const text = stopReason === "repetition" ? "Ended by the server: the answer was repeating itself." : NOTES[finish];
  return text ? el("p", { class: "note" }, text) : null;
}

function figuresText({ tokens, first, rate, cached }) {
  const parts = [];
  const name = rate === null && tokens > 1 ? "first shown" : "first token"; // calls are shown once their name is whole
  if (first !== null) parts.push(first < 1 ? `${name} ${Math.round(first * 1000)} ms` : `${name} ${first.toFixed(1)} s`);
  if (rate !== null) parts.push(`${rate < 10 ? rate.toFixed(1) : Math.round(rate)} tokens/s`);
  parts.push(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
  if (cached) parts.push(`${cached} of the prompt cached`);
  return parts.join(" · ");
}
