// The theme is chosen before the first paint: the address, else what was chosen before, else the system.
(() => {
  const fromAddress = /(?:^#|&)theme=(dark|light)/.exec(location.hash);
  let chosen = fromAddress ? fromAddress[1] : null;
  if (!chosen) {
    try {
      chosen = localStorage.getItem("traceloom-theme");
    } catch {
      chosen = null; // storage is closed to pages of some browsers' file: addresses; the system's theme is fine then
    }
  }
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
  document.documentElement.classList.add("js");
})();
