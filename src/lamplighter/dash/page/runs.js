// All runs: a table to sort, filter and search, and the curves of those that are chosen, over each other.
import { Chart } from "./chart.js";
import { badge, colours, duration, el, money, short } from "./format.js";

const COLUMNS = [
  ["name", "Run", (run) => run.name], ["state", "State", (run) => run.state], ["step", "Step", (run) => run.step], ["loss", "Loss", (run) => run.loss],
  ["val_loss", "Validation", (run) => run.val_loss], ["tokens_per_s", "Tokens/s", (run) => run.tokens_per_s], ["usd", "Cost", (run) => run.usd], ["age_s", "Age", (run) => run.age_s],
];

export function showRuns(main, source, go) {
  const state = { rows: [], sort: "age_s", down: false, text: "", only: "", chosen: new Set(), drawn: "" };
  const shared = { charts: new Set(), hover: null, range: null, log: false, smooth: 0.6, x: "step", zoom: (range) => { shared.range = range; redraw(); } };
  const search = el("input", { type: "search", placeholder: "Search by name, state, phase", "aria-label": "Search runs", oninput: () => { state.text = search.value.toLowerCase(); fill(); } });
  const only = el("select", { "aria-label": "Which runs", onchange: () => { state.only = only.value; fill(); } }, ...[["", "All runs"], ["live", "Live"], ["finished", "Finished"], ["rest", "Needs a look"]].map(([value, text]) => el("option", { value }, text)));
  const axis = el("select", { "aria-label": "x axis", onchange: () => { shared.x = axis.value; shared.range = null; redraw(); } }, ...[["step", "by step"], ["tokens", "by tokens"], ["time", "by time"], ["usd", "by dollars"]].map(([value, text]) => el("option", { value }, text)));
  const compare = el("button", { type: "button", disabled: true, onclick: () => go("#/compare/" + [...state.chosen].map(encodeURIComponent).join("|")) }, "Compare");
  const body = el("tbody"), head = el("tr");
  const table = el("table", { className: "runs" }, el("thead", {}, head), body);
  const plots = ["train/loss", "eval/val_loss"].map((name) => ({ name, host: el("div", { className: "plot" }) }));
  const overlay = el("section", { className: "panels", "aria-label": "Curves of the chosen runs" }, plots.map(({ name, host }) => el("div", { className: "card panel" }, el("header", {}, el("h2", {}, name === "train/loss" ? "Training loss" : "Validation loss"), el("span", { className: "unit" }, "nats per token")), host)));
  const legend = el("div", { className: "legend" });
  const stage = el("div", { className: "stack" }, el("div", { className: "bar" }, el("h1", {}, "Runs"), el("span", { className: "grow" }), search, only, axis, compare), el("div", { className: "card scroll" }, table), overlay, legend);
  for (const plot of plots) plot.chart = new Chart(plot.host, shared, { title: plot.name, empty: "choose runs above" });

  function shown() {
    const value = COLUMNS.find(([name]) => name === state.sort)[2];
    return state.rows
      .filter((run) => !state.text || [run.name, run.state, run.phase, run.dir].join(" ").toLowerCase().includes(state.text))
      .filter((run) => !state.only || (state.only === "live" ? run.live : state.only === "finished" ? run.state === "finished" : !run.live && run.state !== "finished" || run.stale || run.flags.length))
      .sort((a, b) => {
        const x = value(a), y = value(b), order = x === null || x === undefined ? 1 : y === null || y === undefined ? -1 : x < y ? -1 : x > y ? 1 : 0;
        return state.down ? -order : order;
      });
  }

  function fill() {
    head.replaceChildren(el("th", {}, el("span", { className: "small" }, "")), ...COLUMNS.map(([name, title], i) => el("th", { className: i > 1 ? "num" : "", "aria-sort": state.sort === name ? (state.down ? "descending" : "ascending") : "none" }, el("button", { type: "button", onclick: () => { state.down = state.sort === name ? !state.down : false; state.sort = name; fill(); } }, title + (state.sort === name ? (state.down ? " ↓" : " ↑") : "")))));
    const rows = shown(), palette = colours(), chosen = [...state.chosen];
    if (!rows.length) {
      body.replaceChildren(el("tr", {}, el("td", { colSpan: COLUMNS.length + 1 }, el("p", { className: "empty" }, el("strong", {}, state.rows.length ? "No run is like that" : "No runs here yet"), state.rows.length ? "Another word, or all runs." : "Start one in a terminal:  lamp demo"))));
      return;
    }
    body.replaceChildren(...rows.map((run) => {
      const box = el("input", { type: "checkbox", checked: state.chosen.has(run.id), "aria-label": "Choose " + run.name, onchange: () => { if (box.checked) state.chosen.add(run.id); else state.chosen.delete(run.id); compare.disabled = state.chosen.size < 2; fill(); redraw(); } });
      const at = chosen.indexOf(run.id), of = run.steps ? ` / ${short(run.steps)}` : "";
      return el("tr", {}, el("td", {}, box),
        el("td", { className: "name wide" }, at >= 0 && el("span", { className: "swatch", style: { background: palette[at % palette.length] } }), el("a", { href: "#/run/" + encodeURIComponent(run.id) }, run.name), run.flags.length > 0 && el("span", { className: "soft small" }, "  ⚑ " + run.flags.join(", ")), run.damage && el("div", { className: "soft small" }, run.damage)),
        el("td", {}, badge(run)), cell("step", short(run.step) + of), cell("loss", short(run.loss)), cell("val", short(run.val_loss)), cell("tok/s", short(run.tokens_per_s)), cell("cost", run.usd ? money(run.usd) : "–"), cell("age", duration(run.age_s)));
    }));
  }
  const cell = (label, text) => el("td", { className: "num", "data-l": label }, text);

  async function redraw() {
    const ids = [...state.chosen].filter((id) => state.rows.some((run) => run.id === id));
    const palette = colours(), told = ids.length ? await source.series(ids, plots.map(({ name }) => name), shared.x, shared.range) : {};
    for (const { name, chart } of plots) chart.set(ids.map((id, i) => ({ id, i, curve: told[id]?.curves[name] })).filter(({ curve }) => curve).map(({ id, i, curve }) => ({ ...numbers(curve), label: nameOf(id), colour: palette[i % palette.length], sparse: name.startsWith("eval/") })));
    legend.replaceChildren(...ids.map((id, i) => el("span", {}, el("i", { style: { "border-color": palette[i % palette.length] } }), nameOf(id))));
  }
  const nameOf = (id) => state.rows.find((run) => run.id === id)?.name || id;

  function take(rows) {
    const first = !state.rows.length;
    state.rows = rows;
    if (first) for (const run of rows.filter((run) => !run.damage && run.step).slice(0, 5)) state.chosen.add(run.id);
    compare.disabled = state.chosen.size < 2;
    fill();
    const key = JSON.stringify([...state.chosen].map((id) => { const run = rows.find((one) => one.id === id); return [id, run?.step]; }));
    if (key !== state.drawn) { state.drawn = key; redraw(); }
    if (!stage.isConnected) main.replaceChildren(stage); // as a whole: nothing moves when a part of it comes later
  }
  source.runs().then(({ runs }) => take(runs)).catch((error) => main.replaceChildren(el("p", { className: "empty" }, el("strong", {}, "The runs cannot be read"), error.message)));
  const stop = source.follow([], { runs: take });
  return { close: () => { stop(); for (const { chart } of plots) chart.close(); }, redraw: () => { fill(); redraw(); }, shared };
}

export function numbers({ x, y }) {
  return { x: Float64Array.from(x), y: Float64Array.from(y, (value) => (value === null ? NaN : value)) };
}
