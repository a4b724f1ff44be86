// Building elements. Text only ever becomes text nodes: nothing here, or anywhere else, parses markup.

const SVG = "http://www.w3.org/2000/svg";

/** el("p", {class: "x", onclick: f, disabled: true}, "text", node, null, …) */
export function el(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && typeof value === "boolean") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const PATHS = {
  copy: "M9 9h10v10H9zM5 15V5h10",
  check: "M5 12.5l4.5 4.5L19 7.5",
  redo: "M4 12a8 8 0 1 0 2.6-5.9M4 4v4.5h4.5",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  close: "M6 6l12 12M18 6L6 18",
  bin: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
};

export function icon(name) {
  return svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, svg("path", { d: PATHS[name] }));
}

export function byId(id) {
  return document.getElementById(id);
}
