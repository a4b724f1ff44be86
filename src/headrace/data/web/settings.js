// How questions are asked: the settings, kept in this browser, and their panel. What is wrong there is said before anything is sent.

import { byId } from "./dom.js";

const SETTINGS = "headrace.settings";
const EXAMPLE_TOOL = {
  type: "function",
  function: {
    name: "get_weather",
    description: "Get the weather of a city",
    parameters: { type: "object", properties: { city: { type: "string", description: "Name of the city" } }, required: ["city"] },
  },
};

export const settings = load();

function load() {
  try {
    return { ...JSON.parse(localStorage.getItem(SETTINGS)) };
  } catch {
    return {};
  }
}

function save() {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(settings));
  } catch {
    // The browser keeps no more: they hold until the tab is closed.
  }
}

/** The tools in the settings, or a sentence why they are none. */
export function readTools(text) {
  if (!text?.trim()) return { tools: null };
  try {
    const tools = JSON.parse(text);
    if (!Array.isArray(tools)) return { error: "Tools must be a JSON list: put [ and ] around them." };
    const odd = tools.findIndex((tool) => typeof tool !== "object" || tool === null || Array.isArray(tool));
    return odd < 0 ? { tools } : { error: `Tool ${odd + 1} is no JSON object.` };
  } catch (error) {
    return { error: `This is not JSON: ${error.message}` };
  }
}

/** The field that keeps a question from being sent, and why; null if there is none. */
export function findFault() {
  const { error } = readTools(settings.tools);
  if (error) return { field: byId("tools"), text: `The tools in the settings cannot be sent. ${error}` };
  const odd = [...byId("settings-form").elements].find((field) => field.validity?.badInput);
  return odd ? { field: odd, text: `${odd.labels[0].firstChild.textContent} in the settings is not a number.` } : null;
}

export function toggleSettings(open, focus = byId("system")) {
  byId("settings").hidden = !open;
  byId("settings-toggle").setAttribute("aria-expanded", String(open));
  (open ? focus : byId("settings-toggle")).focus();
}

export function showSettings() {
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

function change(react) {
  react();
  save();
  showSettings();
}

/** ``changed`` is called after each change. */
export function listenToSettings(changed) {
  byId("settings-toggle").addEventListener("click", () => toggleSettings(byId("settings").hidden));
  byId("settings-close").addEventListener("click", () => toggleSettings(false));
  byId("settings-form").addEventListener("submit", (event) => event.preventDefault());
  byId("settings-form").addEventListener("input", ({ target }) => {
    settings[target.name] = target.value;
    save();
    if (target.name === "tools") checkTools();
    changed();
  });
  byId("tools-example").addEventListener("click", () => {
    change(() => (settings.tools = JSON.stringify([EXAMPLE_TOOL], null, 2)));
    changed();
  });
  byId("settings-reset").addEventListener("click", () => {
    change(() => Object.keys(settings).forEach((name) => delete settings[name]));
    changed();
  });
}
