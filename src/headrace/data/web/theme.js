// Light or dark: the system's choice until the reader makes one. Loaded before the page is drawn, so that it never flashes.

const KEY = "headrace.theme";
const system = matchMedia("(prefers-color-scheme: dark)");

function current() {
  const chosen = localStorage.getItem(KEY);
  return chosen === "dark" || chosen === "light" ? chosen : system.matches ? "dark" : "light";
}

function apply() {
  const theme = current();
  document.documentElement.dataset.theme = theme;
  for (const button of document.querySelectorAll("[data-theme-toggle]")) {
    button.setAttribute("aria-label", theme === "dark" ? "Use light colours" : "Use dark colours");
    button.title = button.getAttribute("aria-label");
  }
}

apply();
system.addEventListener("change", apply);
document.addEventListener("DOMContentLoaded", () => {
  apply();
  for (const button of document.querySelectorAll("[data-theme-toggle]")) {
    button.addEventListener("click", () => {
      localStorage.setItem(KEY, current() === "dark" ? "light" : "dark");
      apply();
    });
  }
});
