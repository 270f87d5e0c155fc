// Puts the page together: tabs, theme, the model's name.

import * as chat from "./chat.js";
import * as client from "./client.js";
import * as server from "./server.js";

const THEME = "pagedserve.theme";
const $ = (id) => document.getElementById(id);
const tabs = [$("tab-chat"), $("tab-server")];

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
}

function selectTab(tab) {
  for (const other of tabs) {
    const on = other === tab;
    other.setAttribute("aria-selected", on);
    other.tabIndex = on ? 0 : -1;
    $(other.getAttribute("aria-controls")).hidden = !on;
  }
  $("menu").style.visibility = tab === tabs[0] ? "" : "hidden";
  server.watch(tab === tabs[1]);
}

async function nameModel() {
  try {
    const [{ id, max_model_len }] = await client.models();
    $("model").textContent = `${id} · ${max_model_len.toLocaleString()} tokens of context`;
  } catch (error) {
    $("model").textContent = error.message;
    setTimeout(nameModel, 2000);
  }
}

const dark = matchMedia("(prefers-color-scheme: dark)");
setTheme(localStorage.getItem(THEME) ?? (dark.matches ? "dark" : "light"));
dark.addEventListener("change", () => {
  if (localStorage.getItem(THEME) === null) setTheme(dark.matches ? "dark" : "light");
});
$("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem(THEME, theme);
  setTheme(theme);
});
for (const tab of tabs) {
  tab.addEventListener("click", () => selectTab(tab));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = tabs[1 - tabs.indexOf(tab)];
    selectTab(other);
    other.focus();
  });
}
chat.start();
server.start();
nameModel();
$("input").focus();
