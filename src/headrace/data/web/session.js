// Which conversation is on the screen, and which ones are being answered: a question goes on while its reader looks at another.

import { Answer, requestBody } from "./conversation.js";
import { ApiError, ask, events } from "./api.js";
import { watch } from "./progress.js";
import { newConversation, Store, StoreFull } from "./store.js";

const REST = 3; // times as long as a drawing took, at least, before the next: a long answer must not take all of a processor

export class Session {
  /** ``changed(fault)``: conversations were saved, or why not. */
  constructor(changed) {
    this.store = new Store();
    this.changed = changed;
    this.running = new Map(); // by conversation's id
    this.held = new Map(); // conversations that are open, answered, or could not be saved
    this.current = this.open(location.hash.slice(1)) ?? this.open(this.store.list()[0]?.id) ?? newConversation();
  }

  /** A conversation that is known; null else. The same one is one object. */
  open(id) {
    return id ? this.held.get(id) ?? this.store.load(id) : null;
  }

  /** Another tab wrote an entry (null: cleared all): the conversation on the screen, if it is that one and has changed. */
  heed(key) {
    const id = this.store.idOf(key);
    this.store.refresh();
    if (!id || this.running.has(id)) return null;
    this.held.delete(id);
    return id === this.current.id ? this.store.load(id) : null;
  }

  save(conversation, { touch = true } = {}) {
    if (touch) conversation.updated = Date.now();
    this.held.set(conversation.id, conversation);
    try {
      this.store.save(conversation);
      if (conversation !== this.current && !this.running.has(conversation.id)) this.held.delete(conversation.id);
      this.changed(null);
    } catch (error) {
      if (!(error instanceof StoreFull)) throw error;
      this.changed(error.message);
    }
  }

  remove(id) {
    this.running.get(id)?.controller.abort();
    this.held.delete(id);
    this.store.remove(id);
    this.changed(null);
  }

  /** Answers a conversation's last message. ``view``: of the answer's message; ``follow()`` before and after each drawing. */
  async answer(conversation, createView, around) {
    const growing = new Answer();
    const view = createView(growing.message);
    const work = { controller: new AbortController(), message: growing.message, view };
    this.running.set(conversation.id, work);
    this.held.set(conversation.id, conversation);
    const painter = paint(view, around);
    try {
      const tell = (progress) => growing.chunks || around(() => view.tell(progress));
      await receive(growing, requestBody(conversation.messages), work.controller.signal, tell, painter.request);
    } catch (error) {
      note(growing.message, error, work.controller);
    } finally {
      painter.cancel();
      this.running.delete(conversation.id);
    }
    if (growing.chunks) growing.message.figures = growing.figures();
    if (!this.held.has(conversation.id)) return null; // deleted meanwhile
    conversation.messages.push(growing.message);
    this.save(conversation);
    return view;
  }

  /** The page goes: what was written stays. */
  keepRunning() {
    for (const [id, { message, controller }] of this.running) {
      controller.abort(); // else a broken connection would be told
      const conversation = this.held.get(id);
      const written = message.content || message.reasoning;
      if (conversation && written) this.save({ ...conversation, messages: [...conversation.messages, { ...message, finish: "stopped" }] });
    }
  }
}

/** ``tell(progress)`` until the first token, then ``changed()``. */
async function receive(growing, body, signal, tell, changed) {
  const name = `page-${crypto.getRandomValues(new Uint32Array(3)).join("-")}`;
  const waiting = new AbortController();
  const stop = () => waiting.abort();
  signal.addEventListener("abort", stop);
  watch(name, waiting.signal, tell);
  try {
    const headers = { "Content-Type": "application/json", "X-Request-Id": name };
    const response = await ask("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
    for await (const event of events(response)) {
      growing.add(event);
      if (growing.chunks) stop();
      changed();
    }
  } finally {
    stop();
  }
}

/** At most one drawing a frame, and never more of them than leave the page to its reader. */
function paint(view, around) {
  let timer = 0;
  let frame = 0;
  let ready = 0;
  const draw = () => {
    frame = 0;
    const begun = performance.now();
    around(() => view.update());
    const now = performance.now();
    ready = now + REST * (now - begun);
  };
  const wait = () => {
    timer = 0;
    frame = requestAnimationFrame(draw);
  };
  return {
    request: () => timer || frame || (timer = setTimeout(wait, Math.max(0, ready - performance.now()))),
    cancel: () => (clearTimeout(timer), cancelAnimationFrame(frame)),
  };
}

function note(message, error, controller) {
  if (controller.signal.aborted) {
    message.finish = "stopped";
  } else {
    message.finish = "error";
    message.error = error instanceof ApiError ? error.message : `This page failed: ${error.message}`;
    message.retryAfter = error.retryAfter ?? null;
    message.status = error.status ?? 0;
  }
}
