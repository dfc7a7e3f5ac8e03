// The page around the views: theme, rank, section links, help.
import { getState, onState, setState } from "./state.js";

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

// Parts of the page that are about one rank: only the chosen one is shown.
export function chooseRank() {
  const choice = document.getElementById("rank");
  if (!choice) return;
  const apply = (rank) => {
    const known = [...choice.options].some((option) => option.value === rank);
    choice.value = known ? rank : choice.options[0].value;
    for (const part of document.querySelectorAll("[data-of-rank]")) part.hidden = part.dataset.ofRank !== choice.value;
  };
  choice.addEventListener("change", () => {
    setState("rank", choice.selectedIndex === 0 ? null : choice.value);
    apply(choice.value);
  });
  onState("rank", apply);
  apply(getState("rank"));
}

// What stands folded in menus: one is open at a time, until the reader looks elsewhere.
const menus = [...document.querySelectorAll("nav .menu")];

function closeMenus(but = null) {
  for (const menu of menus) if (menu !== but) menu.open = false;
}

export function sectionMenus() {
  addEventListener("click", (event) => closeMenus(event.target.closest?.(".menu")));
  addEventListener("keydown", (event) => {
    const open = event.key === "Escape" && menus.find((menu) => menu.open);
    if (!open) return;
    open.open = false;
    open.querySelector("summary").focus();
  });
  for (const menu of menus) {
    menu.addEventListener("focusout", (event) => {
      if (event.relatedTarget && !menu.contains(event.relatedTarget)) menu.open = false;
    });
  }
}

// Paper has no folds: all of them open while it is printed.
export function unfoldForPrint() {
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("main details:not([open])")];
    for (const fold of opened) fold.open = true;
  });
  addEventListener("afterprint", () => {
    for (const fold of opened) fold.open = false;
  });
}

export function sectionLinks() {
  const links = [...document.querySelectorAll("nav a[href^='#']")];
  const go = (name) => {
    const section = name && document.getElementById(name);
    if (!section) return;
    for (let around = section.parentElement.closest("details"); around; around = around.parentElement.closest("details")) around.open = true;
    section.scrollIntoView();
  };
  for (const link of links) {
    link.addEventListener("click", (event) => {
      event.preventDefault();
      closeMenus();
      const name = link.getAttribute("href").slice(1);
      setState("at", name);
      go(name);
    });
  }
  onState("at", go);
  const seen = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        for (const link of links) link.toggleAttribute("aria-current", link.getAttribute("href") === `#${entry.target.id}`);
        for (const menu of menus) menu.toggleAttribute("data-current", menu.querySelector("[aria-current]") !== null);
      }
    },
    { rootMargin: "-20% 0px -70% 0px" },
  );
  for (const link of links) {
    const section = document.getElementById(link.getAttribute("href").slice(1));
    if (section) seen.observe(section);
  }
  go(getState("at"));
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
      document.querySelector("[data-part=search]")?.focus();
      event.preventDefault();
    } else if (event.key === "t" && !dialog.open) document.getElementById("theme").click();
  });
}
