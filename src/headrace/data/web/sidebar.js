// The panel of conversations: open, rename, delete (and take that back), export, import.

import { byId, el, icon } from "./dom.js";
import { counted, LIMIT, sized, titleOf } from "./store.js";
import { download, fileName, fromJson, MAX_FILE, toJson, toMarkdown } from "./transfer.js";

const WIDE = matchMedia("(min-width: 1200px)"); // there is room for it beside the messages
const OPEN = "headrace.history";

export class Sidebar {
  /** ``open(conversation)`` shows one; ``fresh()`` begins a new one. */
  constructor(session, { open, fresh }) {
    this.session = session;
    this.open = open;
    this.fresh = fresh;
    this.renaming = null; // id
    this.deleted = null; // the last one
    this.fault = "";
    this.listen();
    this.toggle(WIDE.matches && read() !== "closed", { focus: false });
  }

  draw() {
    const { store, running, current } = this.session;
    const heads = store.list();
    const kept = new Set(heads.map((head) => head.id));
    if (current.messages.length && !kept.has(current.id)) heads.unshift({ id: current.id, title: titleOf(current) });
    byId("history-list").replaceChildren(...heads.map((head) => this.item(head, head.id === current.id, running.has(head.id))));
    byId("history-empty").hidden = heads.length > 0;
    byId("history-size").textContent = heads.length ? `${counted(heads.length)}, ${sized(store.size)} of ${sized(LIMIT)}` : "";
    for (const name of ["export-markdown", "export-json"]) byId(name).disabled = !current.messages.length;
    byId("export-all").disabled = !heads.length;
    byId("history-fault").textContent = this.fault;
    byId("undo").hidden = !this.deleted;
    if (this.deleted) byId("undo-text").textContent = `Deleted “${titleOf(this.deleted)}”.`;
  }

  item({ id, title }, current, running) {
    if (this.renaming === id) return el("li", { "data-id": id }, this.renameForm(title));
    const open = el("button", { class: "open", type: "button", "data-do": "open", "aria-current": current ? "true" : null }, el("span", {}, title), running && el("i", { title: "Being answered" }));
    const small = (name, drawn, label) => el("button", { class: "button quiet icon", type: "button", "data-do": name, "aria-label": `${label} “${title}”`, title: label }, icon(drawn));
    return el("li", { "data-id": id, class: current ? "current" : null }, open, small("rename", "edit", "Rename"), small("delete", "bin", "Delete"));
  }

  renameForm(title) {
    const field = el("input", { class: "field", "aria-label": "New title", maxlength: "200", value: title });
    return el("form", {}, field);
  }

  listen() {
    const list = byId("history-list");
    list.addEventListener("click", ({ target }) => {
      const button = target.closest("[data-do]");
      if (button) this.act(button.dataset.do, button.closest("li").dataset.id);
    });
    list.addEventListener("submit", (event) => {
      event.preventDefault();
      this.rename(event.target.querySelector("input").value.trim());
    });
    list.addEventListener("focusout", ({ target }) => target.matches("input") && this.renaming && this.rename(target.value.trim()));
    list.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.renaming) return;
      event.stopPropagation();
      this.endRenaming();
    });
    byId("history-toggle").addEventListener("click", () => this.toggle(byId("history").hidden, { keep: true }));
    byId("history-close").addEventListener("click", () => this.toggle(false, { keep: true }));
    byId("undo-button").addEventListener("click", () => this.undo());
    byId("export-markdown").addEventListener("click", () => this.export(toMarkdown(this.session.current), "text/markdown", "md"));
    byId("export-json").addEventListener("click", () => this.export(toJson([this.session.current]), "application/json", "json"));
    byId("export-all").addEventListener("click", () => this.exportAll());
    byId("import").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", ({ target }) => this.import(target));
    addEventListener("storage", ({ key }) => {
      const changed = this.session.heed(key);
      if (changed) this.open(changed);
      else this.draw();
    });
  }

  toggle(open, { keep = false, focus = true } = {}) {
    byId("history").hidden = !open;
    byId("history-toggle").setAttribute("aria-expanded", String(open));
    if (keep && WIDE.matches) write(open ? "open" : "closed");
    if (focus) (open ? byId("history").querySelector("[aria-current], .button") : byId("history-toggle")).focus();
  }

  /** On a narrow screen it lies over the messages. */
  leave() {
    if (!WIDE.matches) this.toggle(false, { focus: false });
  }

  act(name, id) {
    if (name === "open") {
      const conversation = this.session.open(id);
      if (!conversation) return this.fail("This conversation is gone: another tab deleted it.");
      this.open(conversation);
      this.leave();
    } else if (name === "rename") {
      this.renaming = id;
      this.draw();
      byId("history-list").querySelector("input").select();
    } else {
      this.remove(id);
    }
  }

  rename(title) {
    const conversation = this.session.open(this.renaming);
    this.renaming = null;
    if (conversation && title) {
      conversation.title = title.slice(0, 200);
      this.session.save(conversation, { touch: false });
    }
    this.draw();
  }

  endRenaming() {
    const id = this.renaming;
    this.renaming = null;
    this.draw();
    [...byId("history-list").children].find((item) => item.dataset.id === id)?.querySelector("[data-do=rename]").focus();
  }

  remove(id) {
    this.deleted = this.session.open(id);
    this.session.remove(id);
    if (id === this.session.current.id) this.fresh();
    this.draw();
    byId("undo-button").focus();
  }

  undo() {
    const conversation = this.deleted;
    this.deleted = null;
    this.session.save(conversation, { touch: false });
    this.open(conversation);
  }

  export(text, type, extension) {
    download(fileName(this.session.current, extension), type, text);
  }

  exportAll() {
    const { store } = this.session;
    const all = store.list().map((head) => this.session.open(head.id)).filter(Boolean);
    download("conversations.json", "application/json", toJson(all));
  }

  async import(input) {
    const [file] = input.files;
    input.value = "";
    if (!file) return;
    try {
      if (file.size > MAX_FILE) throw new Error(`This file has ${sized(file.size)}; at most ${sized(MAX_FILE)} can be read.`);
      const found = fromJson(await file.text());
      for (const conversation of found) this.session.store.save(conversation);
      this.fault = "";
      this.open(found[0]);
    } catch (error) {
      this.fail(error.message);
    }
  }

  fail(text) {
    this.fault = text;
    this.draw();
  }
}

function read() {
  try {
    return localStorage.getItem(OPEN);
  } catch {
    return null;
  }
}

function write(value) {
  try {
    localStorage.setItem(OPEN, value);
  } catch {
    // it opens as it likes then
  }
}
