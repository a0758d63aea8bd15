// The page: which view, theme, questions before anything is done.
import { showCompare } from "./compare.js";
import { el } from "./format.js";
import { showRun } from "./run.js";
import { showRuns } from "./runs.js";
import { FileSource, LiveSource } from "./source.js";

const inlined = document.getElementById("data");
const source = inlined ? new FileSource(JSON.parse(inlined.textContent)) : new LiveSource();
const main = document.getElementById("main");
let view = null;

const go = (hash) => { location.hash = hash; };

function toast(text) {
  const box = document.getElementById("toast");
  box.textContent = text; box.classList.add("on");
  setTimeout(() => box.classList.remove("on"), 4000);
}

function confirm(text) {
  const dialog = document.getElementById("ask");
  document.getElementById("ask-text").textContent = text;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

function route() {
  view?.close();
  const before = main.firstChild; // where the answer takes long, what was there must not stand under another address
  setTimeout(() => { if (before && main.firstChild === before) main.replaceChildren(el("p", { className: "empty" }, "Reading the run folders …")); }, 250);
  const [, kind, rest = ""] = location.hash.match(/^#\/(\w*)\/?(.*)$/) || [];
  document.getElementById("where").textContent = "";
  try {
    if (inlined) view = showRun(main, source, source.data.run.id, go, confirm, toast);
    else if (kind === "run") view = showRun(main, source, decodeURIComponent(rest), go, confirm, toast);
    else if (kind === "compare") view = showCompare(main, source, rest.split("|").map(decodeURIComponent));
    else view = showRuns(main, source, go);
  } catch (error) {
    view = null;
    main.replaceChildren(el("p", { className: "empty" }, el("strong", {}, "There is no such page"), el("a", { href: "#/" }, "All runs")));
  }
  window.lampView = view;
}

function theme(next) {
  if (next) document.documentElement.dataset.theme = next;
  else delete document.documentElement.dataset.theme;
  view?.redraw();
}
let kept = null;
try { kept = localStorage.getItem("lamp-theme"); } catch { kept = null; }
theme(kept);
document.getElementById("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.documentElement).getPropertyValue("--bg").trim() === "#14161a", next = dark ? "light" : "dark";
  try { localStorage.setItem("lamp-theme", next); } catch { kept = next; }
  theme(next);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view?.redraw());
if (!inlined) window.addEventListener("hashchange", route);
route();
