// Conversations as files: JSON that can be read back, Markdown for people. Whatever a file holds is checked before it is taken.

import { newConversation, readMessage, titleOf } from "./store.js";

const FORMAT = "headrace-conversations";
export const MAX_FILE = 8_000_000; // bytes

export function toJson(conversations) {
  const shown = conversations.map(({ title, created, updated, messages }) => ({ title, created, updated, messages }));
  return JSON.stringify({ format: FORMAT, version: 1, conversations: shown }, null, 2);
}

export function toMarkdown(conversation) {
  const parts = conversation.messages.map((message) => `${heading(message)}\n\n${body(message)}`);
  return [`# ${titleOf(conversation)}`, ...parts].join("\n\n") + "\n";
}

function heading({ role, finish }) {
  const names = { user: "You", assistant: "Answer", tool: "Tool result" };
  return `## ${names[role]}${finish === "stopped" || finish === "length" || finish === "error" ? " (not complete)" : ""}`;
}

function body({ role, content, reasoning, tool_calls: calls = [] }) {
  if (role === "tool") return fenced("", content);
  const thought = reasoning ? [`<details><summary>Reasoning</summary>\n\n${reasoning}\n\n</details>`] : [];
  const called = calls.map((call) => `Call of \`${call.function.name}\`:\n\n${fenced("json", call.function.arguments)}`);
  return [...thought, ...(content ? [content] : []), ...called].join("\n\n");
}

/** In a fence that the text does not end. */
function fenced(language, text) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).slice(0, 10_000).map((run) => run.length));
  const marks = "`".repeat(longest + 1);
  return `${marks}${language}\n${text}\n${marks}`;
}

/** The conversations of a file: ours, or messages as the API takes them. Throws an Error that a person can read. */
export function fromJson(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`This file is not JSON: ${error.message}`);
  }
  const found = value?.format === FORMAT ? value.conversations : [Array.isArray(value) ? { messages: value } : value];
  if (!Array.isArray(found) || !found.length) throw new Error("This file holds no conversation.");
  return found.map(readConversation);
}

function readConversation(value, index) {
  const given = Array.isArray(value?.messages) ? value.messages.filter((each) => each?.role !== "system") : [];
  const messages = given.map(readMessage);
  const bad = messages.indexOf(null);
  if (!messages.length) throw new Error(`Conversation ${index + 1} of this file has no messages.`);
  if (bad >= 0) throw new Error(`Message ${bad + 1} of conversation ${index + 1} in this file is none that this page knows.`);
  const { id, updated: now } = newConversation();
  const time = (given_) => (Number.isFinite(given_) ? Math.min(given_, now) : now);
  return { id, title: typeof value.title === "string" ? value.title.slice(0, 200) : "", created: time(value.created), updated: time(value.updated), messages };
}

export function download(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** A name for a file: of the title's letters. */
export function fileName(conversation, extension) {
  const stem = titleOf(conversation).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 50).replace(/^-|-$/g, "");
  return `${stem || "conversation"}.${extension}`;
}
