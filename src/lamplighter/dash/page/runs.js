// All runs: a table to sort, filter and search, and the curves of those that are chosen, over each other.
import { Chart } from "./chart.js";
import { AXES, badge, choice, colours, duration, el, money, numbers, short } from "./format.js";

const COLUMNS = [
  ["name", "Run"], ["state", "State"], ["step", "Step"], ["loss", "Loss"], ["val_loss", "Validation"],
  ["tokens_per_s", "Tokens/s"], ["usd", "Cost"], ["age_s", "Age"],
];
const WHICH = [["", "All runs"], ["live", "Live"], ["finished", "Finished"], ["rest", "Needs a look"]];
const OVERLAID = [["train/loss", "Training loss", "nats per token"], ["eval/val_loss", "Validation loss", "nats per token"], ["train/tok_per_sec", "Tokens per second", "tokens/s"], ["train/dt_ms", "Step time", "ms"]];
const FIRST_CHOSEN = 5, MOST_DRAWN = 12;

export function showRuns(main, source, go) {
  const state = { rows: [], sort: "age_s", down: false, text: "", only: "", chosen: new Set(), drawn: "", lines: new Map(), drawing: false, again: false, closed: false };
  const shared = { charts: new Set(), hover: null, range: null, log: false, smooth: 0.6, x: "step", zoom: (range) => { shared.range = range; redraw(); } };

  const search = el("input", { type: "search", placeholder: "Search by name, state, phase", "aria-label": "Search runs", oninput: () => { state.text = search.value.toLowerCase(); fill(); } });
  const only = choice("Which runs", WHICH, (value) => { state.only = value; fill(); });
  const axis = choice("x axis", AXES, (value) => { shared.x = value; shared.range = null; redraw(); });
  const compare = el("button", { type: "button", disabled: true, onclick: () => go("#/compare/" + [...state.chosen].map(encodeURIComponent).join("|")) }, "Compare");
  // Made once, as the lines below are: what is replaced under somebody's finger or focus does not hear the key or the click.
  const heads = COLUMNS.map(([name, title], i) => {
    const button = el("button", { type: "button", onclick: () => { state.down = state.sort === name && !state.down; state.sort = name; fill(); } }, title);
    return { name, title, button, cell: el("th", { className: i > 1 ? "num" : "" }, button) };
  });
  const body = el("tbody");
  const table = el("table", { className: "runs" }, el("thead", {}, el("tr", {}, el("th"), heads.map(({ cell }) => cell))), body);
  const smooth = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: shared.smooth, "aria-label": "Smoothing", oninput: () => { shared.smooth = Number(smooth.value); for (const chart of shared.charts) { chart.smoothed = null; chart.plan(); } } });
  const log = el("input", { type: "checkbox", onchange: () => { shared.log = log.checked; for (const chart of shared.charts) chart.plan(); } });
  const logX = el("input", { type: "checkbox", onchange: () => { shared.logX = logX.checked; for (const chart of shared.charts) chart.plan(); } });
  const plots = OVERLAID.map(([name, title, unit]) => {
    const host = el("div", { className: "plot" });
    const card = el("div", { className: "card panel" }, el("header", {}, el("h2", {}, title), el("span", { className: "unit" }, unit)), host);
    return { name, card, chart: new Chart(host, shared, { title, empty: "reading …" }) };
  });
  const legend = el("div", { className: "legend" });
  let overlay = null;
  const stage = el("div", { className: "stack" },
    el("div", { className: "bar" }, el("h1", {}, "Runs"), el("span", { className: "grow" }), search, only, compare),
    el("div", { className: "card scroll" }, table),
    overlay = el("div", { className: "stack" }, el("div", { className: "bar" }, axis, el("label", { className: "bar small soft" }, "Smoothing", smooth), el("label", { className: "bar small soft" }, log, "Log axis"), el("label", { className: "bar small soft" }, logX, "Log x"), legend),
    el("section", { className: "panels half", "aria-label": "Curves of the chosen runs" }, plots.map(({ card }) => card))));

  function matches(run) {
    if (state.text && ![run.name, run.state, run.phase, run.dir].join(" ").toLowerCase().includes(state.text)) return false;
    if (state.only === "live") return run.live;
    if (state.only === "finished") return run.state === "finished";
    return !state.only || (!run.live && run.state !== "finished") || run.stale || run.flags.length > 0;
  }

  function shown() { // what has no number stands last, in either direction
    const none = (value) => value === null || value === undefined, way = state.down ? -1 : 1;
    return state.rows.filter(matches).sort((one, other) => {
      const a = one[state.sort], b = other[state.sort];
      return none(a) || none(b) ? none(a) - none(b) : (a < b ? -1 : a > b ? 1 : 0) * way;
    });
  }

  function fill() {
    for (const { name, title, button, cell } of heads) {
      const sorted = state.sort === name;
      button.textContent = title + (sorted ? (state.down ? " ↓" : " ↑") : "");
      cell.setAttribute("aria-sort", sorted ? (state.down ? "descending" : "ascending") : "none");
    }
    const rows = shown(), lines = rows.map(line);
    if (!rows.length) {
      const [title, words] = state.rows.length ? ["No run is like that", "Another word, or all runs."] : ["No runs here yet", "Start one in a terminal:  lamp demo"];
      lines.push(el("tr", {}, el("td", { colSpan: COLUMNS.length + 1 }, el("p", { className: "empty" }, el("strong", {}, title), words))));
    }
    if (lines.length !== body.children.length || lines.some((one, i) => one !== body.children[i])) body.replaceChildren(...lines);
  }

  // The element of a run, with its cells as they are now.
  function line(run) {
    let made = state.lines.get(run.id);
    if (!made) {
      const box = el("input", { type: "checkbox", "aria-label": "Choose " + run.name, onchange: () => choose(run.id, box.checked) });
      const swatch = el("span", { className: "swatch" }), flags = el("span", { className: "soft small" }), place = el("span", { className: "soft small" }), damage = el("div", { className: "soft small" });
      const name = el("td", { className: "name wide" }, swatch, el("a", { href: "#/run/" + encodeURIComponent(run.id) }, run.name), place, flags, damage);
      const cells = ["step", "loss", "val", "tok/s", "cost", "age"].map((label) => el("td", { className: "num", "data-l": label }));
      const mark = el("td");
      made = { box, swatch, place, flags, damage, cells, mark, whole: el("tr", {}, el("td", {}, box), name, mark, cells) };
      state.lines.set(run.id, made);
    }
    const rank = [...state.chosen].indexOf(run.id), palette = colours(), of = run.steps ? ` / ${short(run.steps)}` : "";
    made.box.checked = rank >= 0;
    made.swatch.hidden = rank < 0;
    if (rank >= 0) made.swatch.style.setProperty("background", palette[rank % palette.length]);
    say(made.flags, run.flags.length ? "  ⚑ " + run.flags.join(", ") : "");
    say(made.damage, run.damage);
    say(made.place, state.rows.some((one) => one.dir !== run.dir) ? `  ${run.dir}` : ""); // of several folders, which one
    const fresh = badge(run);
    if (!made.mark.firstChild?.isEqualNode(fresh)) made.mark.replaceChildren(fresh);
    const texts = [short(run.step) + of, short(run.loss), short(run.val_loss), short(run.tokens_per_s), run.usd ? money(run.usd) : "–", duration(run.age_s)];
    texts.forEach((text, i) => say(made.cells[i], text));
    return made.whole;
  }
  const say = (element, text) => { if (element.textContent !== text) element.textContent = text; };

  function choose(id, wanted) {
    if (wanted) state.chosen.add(id); else state.chosen.delete(id);
    compare.disabled = state.chosen.size < 2;
    fill(); redraw();
  }

  // One question at a time: where answers take longer than the pause between two steps, a newer one must not drop each older one.
  async function redraw() {
    if (state.drawing) { state.again = true; return; }
    state.drawing = true;
    try {
      do { state.again = false; await redrawOnce(); } while (state.again && !state.closed);
    } finally {
      state.drawing = false;
    }
  }

  function called(id) { // of two that have the same name, in which folder
    const run = state.rows.find((one) => one.id === id);
    return state.rows.some((one) => one.id !== id && one.name === run.name) ? `${run.name} (${run.dir})` : run.name;
  }

  async function redrawOnce() {
    const chosen = [...state.chosen].filter((id) => state.rows.some((run) => run.id === id)), ids = chosen.slice(0, MOST_DRAWN);
    const told = ids.length ? await source.series(ids, plots.map(({ name }) => name), shared.x, shared.range) : {};
    if (state.closed) return; // somebody looks at something else by now
    const palette = colours(), named = ids.map((id, i) => ({ id, colour: palette[i % palette.length], label: called(id) }));
    const seen = new Set();
    for (const { name, chart } of plots) {
      const drawn = named.filter(({ id }) => told[id]?.curves[name]);
      drawn.forEach(({ id }) => seen.add(id));
      chart.options.empty = ids.length ? "none of the chosen runs has it" : "choose runs above";
      chart.set(drawn.map(({ id, label, colour }) => ({ ...numbers(told[id].curves[name]), label, colour, sparse: name.startsWith("eval/") })));
    }
    legend.replaceChildren(...named.filter(({ id }) => seen.has(id)).map(({ label, colour }) => el("span", {}, el("i", { style: { "border-color": colour } }), label)),
      ...(chosen.length > ids.length ? [el("span", {}, `the first ${ids.length} of ${chosen.length} that were chosen`)] : []));
  }

  function take(rows) {
    if (state.closed) return; // somebody looks at something else by now
    const first = !state.rows.length;
    state.rows = rows;
    overlay.hidden = !rows.length;
    if (first) for (const run of rows.filter((one) => !one.damage && one.step).sort((one, other) => (one.loss === null) - (other.loss === null)).slice(0, FIRST_CHOSEN)) state.chosen.add(run.id);
    compare.disabled = state.chosen.size < 2;
    fill();
    const key = JSON.stringify([...state.chosen].map((id) => [id, rows.find((one) => one.id === id)?.step]));
    if (key !== state.drawn) { state.drawn = key; redraw(); }
    if (!stage.isConnected) main.replaceChildren(stage); // as a whole: nothing moves when a part of it comes later
  }

  const fail = (error) => state.closed || main.replaceChildren(el("p", { className: "empty" }, el("strong", {}, "The runs cannot be read"), error.message));
  source.runs().then(({ runs, dirs, models = [] }) => { if (!state.closed) { document.getElementById("where").textContent = dirs.join(" · "); take(runs); stage.append(...evaluated(models)); } }).catch(fail);
  const stop = source.follow([], { runs: take });
  const close = () => { state.closed = true; stop(); for (const { chart } of plots) chart.close(); };
  return { close, redraw: () => { fill(); redraw(); }, shared };
}

// Models that are no runs, and what lamp eval found out about them.
function evaluated(models) {
  const line = (model) => (one, i) => el("tr", {}, [i ? "" : model.name, one.task, one.name].map((text) => el("td", {}, text)),
    [one.value.toFixed(4) + (one.stderr === null ? "" : ` ± ${one.stderr.toFixed(4)}`), short(one.n), one.chance === null ? "–" : one.chance.toFixed(4)].map((text) => el("td", { className: "num" }, text)), el("td", {}, one.verdict));
  const heads = ["Model", "task", "score", "value", "items", "chance", ""].map((text, i) => el("th", { className: i > 2 && i < 6 ? "num" : "" }, text));
  return models.length ? [el("div", { className: "card scroll" }, el("h2", {}, "Other models that were evaluated"), el("table", {}, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, models.flatMap((model) => model.evaluations.map(line(model))))))] : [];
}
