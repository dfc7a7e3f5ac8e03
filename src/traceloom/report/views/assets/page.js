// The page around the views: theme, rank, help.
import { getState, onState, setState } from "./state.js";
import { drawTables } from "./tables.js";
import { openView } from "./views.js";

export function effectiveTheme() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

function remember(theme) {
  try {
    localStorage.setItem("traceloom-theme", theme);
  } catch {
    document.documentElement.dataset.remembered = "no"; // no storage: the address still carries the theme
  }
}

export function switchTheme(changed) {
  const button = document.getElementById("theme");
  const apply = (theme) => {
    if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    label();
    changed();
  };
  const label = () => button.setAttribute("aria-label", `Switch to the ${effectiveTheme() === "dark" ? "light" : "dark"} theme`);
  button.addEventListener("click", () => {
    const theme = effectiveTheme() === "dark" ? "light" : "dark";
    setState("theme", theme);
    remember(theme);
    apply(theme);
  });
  onState("theme", apply);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    label();
    changed();
  });
  label();
}

// Of what is about one rank each, only the parts of the chosen one are shown.
export function showRank(root) {
  const rank = document.getElementById("rank")?.value;
  for (const part of rank ? root.querySelectorAll("[data-of-rank]") : []) part.hidden = part.dataset.ofRank !== rank;
  drawTables(root);
}

export function chooseRank() {
  const choice = document.getElementById("rank");
  if (!choice) return;
  const apply = (rank) => {
    const isThere = [...choice.options].some((option) => option.value === rank);
    choice.value = isThere ? rank : choice.options[0].value;
    showRank(document);
  };
  choice.addEventListener("change", () => {
    setState("rank", choice.selectedIndex === 0 ? null : choice.value);
    apply(choice.value);
  });
  onState("rank", apply);
  apply(getState("rank"));
}

export function help() {
  const dialog = document.getElementById("help");
  document.getElementById("help-button").addEventListener("click", () => dialog.showModal());
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog || event.target.closest("[data-close]")) dialog.close();
  });
  addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, select, textarea");
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "?") dialog.open ? dialog.close() : dialog.showModal();
    else if (event.key === "/") {
      (openView().querySelector("[data-part=search]") ?? document.getElementById("lookup")).focus();
      event.preventDefault();
    } else if (event.key === "t" && !dialog.open) document.getElementById("theme").click();
  });
}
