// While nothing has come yet: where the request stands, in the server's own numbers. It is found among one's own requests by the name
// that this page gave it.

import { ask } from "./api.js";

const FIRST_MS = 400; // a short prompt is not worth asking about
const EVERY_MS = 500;

/** Calls ``tell({text, done, total})`` until the signal aborts. Whatever fails here is not worth a word: the answer will tell. */
export async function watch(name, signal, tell) {
  let id = null;
  for (let wait = FIRST_MS; await pause(wait, signal); wait = EVERY_MS) {
    try {
      id ??= (await get("/v1/requests", signal)).data.find((each) => each.client_request_id === name)?.id ?? null;
      if (id) tell(describe(await get(`/v1/requests/${id}`, signal)));
    } catch {
      // it may have ended between two questions, or the network is gone
    }
  }
}

async function get(path, signal) {
  return (await ask(path, { signal })).json();
}

function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(() => resolve(!signal.aborted), milliseconds);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve(false)), { once: true });
  });
}

const count = (number) => number.toLocaleString("en");

/** One line, and how much of the prompt is done where that is known. */
export function describe({ state, prompt_tokens: total, computed_prompt_tokens: done, cached_tokens: cached, queue, waits_for: waits, predicted_start: start }) {
  if (state === "running" && done !== undefined) {
    const found = cached ? `, ${count(cached)} of them from the cache` : "";
    return { text: `Reading the prompt: ${count(Math.min(done, total))} of ${count(total)} tokens${found}`, done: Math.min(done, total), total };
  }
  if (queue) {
    const soon = start?.earliest_seconds >= 1 ? ` Not before ${Math.round(start.earliest_seconds)} s from now.` : "";
    return { text: `Waiting: number ${count(queue.position)} of ${count(queue.length)} in the queue. ${waits?.text ?? ""}${soon}`, done: null, total };
  }
  return { text: waits?.text ?? `The prompt has ${count(total)} tokens.`, done: null, total };
}
