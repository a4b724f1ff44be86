// Talking to the server that sent this page, and to no other: the key, errors as sentences, server-sent events.

import { byId } from "./dom.js";

const KEY = "headrace.key"; // of this tab only

export class ApiError extends Error {
  constructor(message, { status = 0, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** fetch with the key. Asks for the key when the server wants one. Throws ApiError with the server's own sentence. */
export async function ask(path, options = {}) {
  for (;;) {
    const response = await send(path, options);
    if (response.status !== 401) return checked(response);
    await askForKey(sessionStorage.getItem(KEY) !== null, options.signal);
  }
}

async function send(path, options) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  try {
    return await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. It may have ended, or the network is gone.");
  }
}

async function checked(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const seconds = Number.parseInt(response.headers.get("retry-after") ?? "", 10);
  const message = body?.error?.message ?? `The server answered with status ${response.status}.`;
  throw new ApiError(message, { status: response.status, retryAfter: Number.isNaN(seconds) ? null : seconds });
}

let asking = null;

/** One dialog, however many requests wait for it. */
function askForKey(wrong, signal) {
  asking ??= new Promise((resolve) => openKeyDialog(wrong, resolve)).finally(() => (asking = null));
  return Promise.race([asking, new Promise((_, reject) => signal?.addEventListener("abort", () => reject(signal.reason)))]);
}

function openKeyDialog(wrong, done) {
  const dialog = byId("key-dialog");
  const input = byId("key");
  byId("key-wrong").hidden = !wrong;
  input.value = "";
  const listening = new AbortController();
  const listen = (node, name, react) => node.addEventListener(name, react, { signal: listening.signal });
  listen(byId("key-form"), "submit", (event) => {
    event.preventDefault();
    if (!input.value.trim()) return;
    sessionStorage.setItem(KEY, input.value.trim());
    listening.abort();
    dialog.close();
    done();
  });
  listen(dialog, "close", () => dialog.showModal()); // Esc closes it, and nothing works without a key
  dialog.showModal();
  input.focus();
}

/** The JSON of each event until [DONE]. A stream that ends without it, or with an error, throws ApiError. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  let complete = false;
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const frames = (buffer + value).split("\n\n");
      buffer = frames.pop();
      for (const frame of frames) {
        if (!frame.startsWith("data: ")) continue; // a comment that keeps the connection open
        const data = frame.slice(6);
        if (data === "[DONE]") {
          complete = true;
          continue;
        }
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(event.error.message);
        yield event;
      }
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError("The connection broke before the answer was complete.");
  } finally {
    reader.cancel().catch(() => {});
  }
  if (!complete) throw new ApiError("The connection ended before the answer was complete.");
}
