// The chat page: what happens when. How messages look is in message.js, what is sent in conversation.js, the wire in api.js.

import { ApiError, ask, events } from "./api.js";
import { Answer, messages, readTools, requestBody, saveMessages, saveSettings, settings } from "./conversation.js";
import { byId, el, icon } from "./dom.js";
import { AssistantView, editForm, toolResult, userMessage } from "./message.js";

const SUGGESTIONS = ["Hello! Who are you?", "What is the capital of France?", "Write the opening of a story set by the sea.", "How do I return an error in Rust?"];
const EXAMPLE_TOOL = {
  type: "function",
  function: {
    name: "get_weather",
    description: "Get the weather of a city",
    parameters: { type: "object", properties: { city: { type: "string", description: "Name of the city" } }, required: ["city"] },
  },
};

const list = byId("messages");
const scroll = byId("scroll");
const input = byId("input");
let running = null; // AbortController of the answer under way
let modelName = "Answer";

// --- the conversation on the screen

function show() {
  const lastUser = messages.findLastIndex((each) => each.role === "user");
  list.replaceChildren(...messages.map((message, index) => messageNode(message, index, lastUser)));
  byId("welcome").hidden = messages.length > 0;
  byId("new").disabled = messages.length === 0;
}

function messageNode(message, index, lastUser) {
  const node = createNode(message, index, lastUser);
  node.dataset.index = index;
  return node;
}

function createNode(message, index, lastUser) {
  if (message.role === "user") return userMessage(message, index === lastUser);
  if (message.role === "tool") return toolResult(message);
  const view = new AssistantView(message, modelName);
  view.finish(index === messages.length - 1);
  return view.node;
}

function atBottom() {
  return scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
}

function toBottom() {
  scroll.scrollTop = scroll.scrollHeight;
}

// --- answers

async function answer() {
  const controller = (running = new AbortController());
  show();
  const growing = new Answer();
  const view = new AssistantView(growing.message, modelName);
  list.append(view.node);
  setWorking(true);
  toBottom();
  const painter = paint(view);
  try {
    await receive(growing, controller.signal, painter.request);
  } catch (error) {
    note(growing.message, error, controller);
  } finally {
    painter.cancel();
    settle(growing, view);
  }
}

async function receive(growing, signal, changed) {
  const response = await ask("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(requestBody()),
    signal,
  });
  for await (const event of events(response)) {
    growing.add(event);
    changed();
  }
}

/** At most one drawing a frame, following the text as long as the reader is at its end. */
function paint(view) {
  let frame = 0;
  const draw = () => {
    frame = 0;
    const follow = atBottom();
    view.update();
    if (follow) toBottom();
  };
  return { request: () => (frame ||= requestAnimationFrame(draw)), cancel: () => cancelAnimationFrame(frame) };
}

function note(message, error, controller) {
  if (controller.signal.aborted) {
    message.finish = "stopped";
  } else {
    message.finish = "error";
    message.error = error instanceof ApiError ? error.message : `This page failed: ${error.message}`;
    message.retryAfter = error.retryAfter ?? null;
    if (error.status === 503) watchReadiness();
  }
}

function settle(growing, view) {
  const follow = atBottom();
  const { message } = growing;
  if (growing.chunks) message.figures = growing.figures();
  running = null;
  setWorking(false);
  if (!view.node.isConnected) return; // the conversation was cleared meanwhile
  messages.push(message);
  saveMessages();
  view.finish(true);
  view.node.dataset.index = messages.length - 1;
  if (follow) toBottom();
  byId("status").textContent = message.error ?? `Answer complete, ${message.figures?.tokens ?? 0} tokens.`;
}

function setWorking(working) {
  byId("send").hidden = working;
  byId("stop").hidden = !working;
  list.setAttribute("aria-busy", String(working));
  if (working) byId("status").textContent = "Answering";
  else if (document.activeElement === document.body) input.focus();
}

function say(text) {
  messages.push({ role: "user", content: text });
  saveMessages();
  answer();
}

/** Forgets what came after a message and answers again. */
function regenerate() {
  while (messages.length && messages.at(-1).role === "assistant") messages.pop();
  if (messages.length) answer();
}

// --- what the reader does

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = input.value.trim();
  if (!text || running) return;
  input.value = "";
  fit();
  say(text);
});

input.addEventListener("input", fit);
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("composer").requestSubmit();
  } else if (event.key === "ArrowUp" && !input.value && !running) {
    list.querySelector('[data-action="edit"]')?.click();
  }
});

function fit() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
}

byId("stop").addEventListener("click", () => running?.abort());
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || byId("key-dialog").open) return;
  if (running) running.abort();
  else if (!byId("settings").hidden) toggleSettings(false);
});

byId("new").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  saveMessages();
  show();
  input.focus();
});

list.addEventListener("click", (event) => {
  const button = event.target.closest("[data-action], [data-copy]");
  if (!button) return;
  const node = button.closest(".message");
  const message = messages[node.dataset.index];
  if (button.dataset.copy) copy(button, button.closest(".code").querySelector("code").textContent);
  else if (button.dataset.action === "copy") copy(button, message.content);
  else if (running) return;
  else if (button.dataset.action === "regenerate") regenerate();
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
  if (!text || running) return;
  if (form.dataset.form === "edit") {
    messages.length = Number(form.closest(".message").dataset.index);
    say(text);
  } else {
    sendResult(form, text);
  }
});

/** The result of one call; when none is missing the model goes on. */
function sendResult(form, text) {
  const calls = messages.findLast((each) => each.tool_calls?.length).tool_calls;
  messages.push({ role: "tool", content: text, tool_call_id: form.dataset.id });
  saveMessages();
  const given = new Set(messages.map((each) => each.tool_call_id));
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

// --- settings

function toggleSettings(open) {
  byId("settings").hidden = !open;
  byId("settings-toggle").setAttribute("aria-expanded", String(open));
  (open ? byId("system") : byId("settings-toggle")).focus();
}

function showSettings() {
  for (const field of byId("settings-form").elements) {
    if (field.name) field.value = settings[field.name] ?? "";
  }
  if (!byId("model").value) byId("model").selectedIndex = 0;
  checkTools();
}

function checkTools() {
  const { error } = readTools(settings.tools);
  byId("tools-error").textContent = error ?? "";
  byId("tools").setAttribute("aria-invalid", String(Boolean(error)));
}

byId("settings-toggle").addEventListener("click", () => toggleSettings(byId("settings").hidden));
byId("settings-close").addEventListener("click", () => toggleSettings(false));
byId("settings-form").addEventListener("submit", (event) => event.preventDefault());
byId("settings-form").addEventListener("input", ({ target }) => {
  settings[target.name] = target.value;
  saveSettings();
  if (target.name === "tools") checkTools();
});
byId("tools-example").addEventListener("click", () => {
  settings.tools = JSON.stringify([EXAMPLE_TOOL], null, 2);
  saveSettings();
  showSettings();
});
byId("settings-reset").addEventListener("click", () => {
  for (const name of Object.keys(settings)) delete settings[name];
  saveSettings();
  showSettings();
});

// --- the server

async function readModels() {
  const { data } = await (await ask("/v1/models")).json();
  modelName = data[0].id;
  byId("model-name").textContent = modelName;
  byId("welcome-text").textContent = `${modelName} answers from this server. The conversation is kept in this browser only.`;
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
  for (const text of SUGGESTIONS) {
    byId("suggestions").append(el("button", { type: "button", onclick: () => !running && say(text) }, text));
  }
  showSettings();
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
  if (!running) show();
}

start();
