// The chat page: what happens when. How messages look is in message.js, conversations and answers in session.js, the wire in api.js.

import { ask } from "./api.js";
import { byId, el, icon } from "./dom.js";
import { stretches } from "./math.js";
import { AssistantView, editForm, toolResult, userMessage } from "./message.js";
import { Session } from "./session.js";
import { findFault, listenToSettings, settings, showSettings, toggleSettings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { newConversation, titleOf } from "./store.js";

const SUGGESTIONS = ["Hello! Who are you?", "What is the capital of France?", "Write the opening of a story set by the sea.", "How do I return an error in Rust?"];

const list = byId("messages");
const scroll = byId("scroll");
const input = byId("input");
let views = new WeakMap(); // of answers that were drawn, by their message
let modelName = "Answer";

const session = new Session((fault) => {
  byId("store-fault").textContent = fault ?? "";
  byId("store-fault").hidden = !fault;
  sidebar.draw();
});
const sidebar = new Sidebar(session, { open, fresh: () => open(newConversation()) });

// --- the conversation on the screen

function messages() {
  return session.current.messages;
}

function working() {
  return session.running.get(session.current.id);
}

function open(conversation, { keepAddress = false } = {}) {
  session.current = conversation;
  if (!keepAddress) history.pushState(null, "", messages().length ? `#${conversation.id}` : location.pathname);
  show();
  toBottom();
}

function show() {
  const lastUser = messages().findLastIndex((each) => each.role === "user");
  const nodes = messages().map((message, index) => messageNode(message, index, lastUser));
  list.replaceChildren(...nodes, ...(working() ? [working().view.node] : []));
  byId("welcome").hidden = messages().length > 0;
  byId("new").disabled = messages().length === 0;
  document.title = messages().length ? `${titleOf(session.current)} – Headrace` : "Headrace";
  setWorking();
  sidebar.draw();
}

function messageNode(message, index, lastUser) {
  const node = createNode(message, index, lastUser);
  node.dataset.index = index;
  return node;
}

function createNode(message, index, lastUser) {
  if (message.role === "user") return userMessage(message, index === lastUser);
  if (message.role === "tool") return toolResult(message);
  const view = createView(message);
  view.finish(index === messages().length - 1);
  return view.node;
}

function createView(message) {
  if (!views.has(message)) views.set(message, new AssistantView(message, modelName));
  return views.get(message);
}

function atBottom() {
  return scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
}

function toBottom() {
  scroll.scrollTop = scroll.scrollHeight;
}

/** Does something to the messages; a reader who was at their end stays there. */
function following(react) {
  const follow = atBottom();
  react();
  if (follow) toBottom();
}

// --- questions and answers

/** Nothing is sent that the settings spoil: says why, and keeps what was written. */
function ready() {
  const fault = findFault();
  byId("fault").hidden = !fault;
  byId("fault-text").textContent = fault?.text ?? "";
  return !fault;
}

async function answer() {
  const conversation = session.current;
  const done = session.answer(conversation, createView, following);
  show();
  toBottom();
  const view = await done;
  if (!view) return;
  const { message } = view;
  if (message.status === 503) watchReadiness();
  if (conversation !== session.current) return view.finish(true);
  following(show);
  byId("status").textContent = message.error ?? `Answer complete, ${message.figures?.tokens ?? 0} tokens.`;
}

function setWorking() {
  const busy = Boolean(working());
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
  list.setAttribute("aria-busy", String(busy));
  if (busy) byId("status").textContent = "Answering";
  else if (document.activeElement === document.body) input.focus();
}

function say(text) {
  const first = !messages().length;
  messages().push({ role: "user", content: text });
  session.save(session.current);
  if (first) history.replaceState(null, "", `#${session.current.id}`);
  answer();
}

/** Forgets what came after a message and answers again. */
function regenerate() {
  while (messages().length && messages().at(-1).role === "assistant") messages().pop();
  if (messages().length) answer();
}

// --- what the reader does

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = input.value.trim();
  if (!text || working() || !ready()) return;
  input.value = "";
  fit();
  say(text);
});

input.addEventListener("input", fit);
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("composer").requestSubmit();
  } else if (event.key === "ArrowUp" && !input.value && !working()) {
    list.querySelector('[data-action="edit"]')?.click();
  }
});

function fit() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
}

byId("stop").addEventListener("click", () => working()?.controller.abort());
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || byId("key-dialog").open) return;
  if (working()) working().controller.abort();
  else if (!byId("settings").hidden) toggleSettings(false);
  else if (!byId("history").hidden && byId("history").contains(document.activeElement)) sidebar.toggle(false);
});

byId("new").addEventListener("click", () => startNew());
byId("history-new").addEventListener("click", () => startNew());

function startNew() {
  open(newConversation());
  sidebar.leave();
  input.focus();
}

addEventListener("popstate", () => open(session.open(location.hash.slice(1)) ?? newConversation(), { keepAddress: true }));
addEventListener("pagehide", () => session.keepRunning());

list.addEventListener("click", (event) => {
  const button = event.target.closest("[data-action], [data-copy]");
  if (!button) return;
  const node = button.closest(".message");
  if (button.dataset.copy) return void copy(button, button.closest(".code").querySelector("code").textContent);
  const message = messages()[node.dataset.index];
  if (button.dataset.action === "copy") copy(button, message.content);
  else if (working()) return;
  else if (button.dataset.action === "regenerate") ready() && regenerate();
  else if (button.dataset.action === "cancel-edit") show();
  else if (button.dataset.action === "edit") startEdit(node, message);
});

function startEdit(node, message) {
  node.replaceChildren(editForm(message));
  const field = node.querySelector("textarea");
  field.focus();
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      field.form.requestSubmit();
    } else if (event.key === "Escape") {
      event.stopPropagation();
      show();
      input.focus();
    }
  });
}

list.addEventListener("submit", (event) => {
  event.preventDefault();
  const form = event.target;
  const text = form.querySelector("textarea, input").value.trim();
  if (!text || working() || !ready()) return;
  if (form.dataset.form === "edit") {
    messages().length = Number(form.closest(".message").dataset.index);
    say(text);
  } else {
    sendResult(form, text);
  }
});

/** The result of one call; when none is missing the model goes on. */
function sendResult(form, text) {
  const calls = messages().findLast((each) => each.tool_calls?.length).tool_calls;
  messages().push({ role: "tool", content: text, tool_call_id: form.dataset.id });
  session.save(session.current);
  const given = new Set(messages().map((each) => each.tool_call_id));
  if (calls.every((call) => given.has(call.id))) answer();
  else form.replaceChildren(el("span", { class: "field" }, text));
}

async function copy(button, text) {
  try {
    await navigator.clipboard.writeText(text);
    button.replaceChildren(icon("check"), "Copied");
  } catch {
    button.replaceChildren("The browser does not allow it");
  }
  setTimeout(() => button.replaceChildren(icon("copy"), "Copy"), 1500);
}

scroll.addEventListener("scroll", () => (byId("jump").hidden = atBottom()));
byId("jump").addEventListener("click", toBottom);

// --- the server

async function readModels() {
  const { data } = await (await ask("/v1/models")).json();
  modelName = data[0].id;
  byId("model-name").textContent = modelName;
  byId("welcome-text").textContent = `${modelName} answers from this server. Conversations are kept in this browser only.`;
  byId("model").replaceChildren(...data.map((each) => el("option", { value: each.id }, each.id)));
  byId("model-row").hidden = data.length < 2;
  if (!data.some((each) => each.id === settings.model)) delete settings.model;
}

let watching = false;

/** Until the server takes requests: says so above the field. */
async function watchReadiness() {
  if (watching) return;
  watching = true;
  const banner = byId("banner");
  for (;;) {
    const response = await fetch("/ready", { cache: "no-store" }).catch(() => null);
    if (response?.ok) break;
    const body = await response?.json().catch(() => null);
    banner.textContent = body?.error?.message ?? "The server does not answer.";
    banner.hidden = false;
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
  banner.hidden = true;
  watching = false;
}

async function start() {
  document.documentElement.classList.toggle("unstretched", !stretches());
  for (const text of SUGGESTIONS) {
    byId("suggestions").append(el("button", { type: "button", onclick: () => !working() && ready() && say(text) }, text));
  }
  listenToSettings(() => byId("fault").hidden || ready());
  byId("fault-open").addEventListener("click", () => toggleSettings(true, findFault()?.field));
  showSettings();
  if (messages().length) history.replaceState(null, "", `#${session.current.id}`);
  show();
  toBottom();
  await watchReadiness();
  try {
    await readModels();
  } catch (error) {
    byId("banner").textContent = error.message;
    byId("banner").hidden = false;
  }
  showSettings();
  if (!working()) {
    views = new WeakMap(); // they name the model
    show();
  }
}

start();
