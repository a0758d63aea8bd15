// One run: what it does now, its panels, its verdicts, samples, checkpoints, where the time went.
import { Chart } from "./chart.js";
import { badge, bytes, clock, colours, day, duration, el, money, short } from "./format.js";
import { numbers } from "./runs.js";

export function showRun(main, source, id, go, confirm, toast) {
  const shared = { charts: new Set(), hover: null, range: null, log: false, smooth: 0, x: "step", zoom: (range) => { shared.range = range; reset.disabled = !range; load(); } };
  const state = { told: null, panels: [], curves: {}, newest: 0, lost: false, asked: 0 };
  const parts = Object.fromEntries(["head", "tiles", "flags", "controls", "panels", "time", "ledger", "plan", "checkpoints", "samples", "scores", "settings"].map((name) => [name, el("section", { id: "part-" + name })]));
  parts.tiles.className = "card tiles"; parts.panels.className = "panels"; parts.controls.className = "bar";
  parts.panels.style.minHeight = "760px"; parts.tiles.style.minHeight = "82px"; parts.head.style.minHeight = "40px";
  const reset = el("button", { type: "button", disabled: true, onclick: () => shared.zoom(null) }, "Reset zoom");
  const stage = el("div", { className: "stack" }, Object.values(parts));
  controls();

  function controls() {
    const axis = el("select", { "aria-label": "x axis", onchange: () => { shared.x = axis.value; shared.range = null; reset.disabled = true; load(); } }, ...[["step", "by step"], ["tokens", "by tokens"], ["time", "by time"], ["usd", "by dollars"]].map(([value, text]) => el("option", { value }, text)));
    const smooth = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, "aria-label": "Smoothing", oninput: () => { shared.smooth = Number(smooth.value); for (const chart of shared.charts) { chart.smoothed = null; chart.plan(); } } });
    const log = el("input", { type: "checkbox", onchange: () => { shared.log = log.checked; for (const chart of shared.charts) chart.plan(); } });
    parts.controls.replaceChildren(axis, el("label", { className: "bar small soft" }, "Smoothing", smooth), el("label", { className: "bar small soft" }, log, "Log axis"), reset, el("span", { className: "soft small" }, "Drag to zoom, shift-drag to move, double-click to see all"));
  }

  // ---- now
  function head() {
    const run = state.told;
    const button = (kind, text, words, danger) => el("button", { type: "button", id: "do-" + kind, className: danger ? "danger" : "", disabled: !run.live, onclick: async () => { if (!words || (await confirm(words))) act(kind); } }, text);
    const age = el("span", { id: "age", className: "soft small" });
    parts.head.replaceChildren(el("div", { className: "bar" }, source.live && el("a", { href: "#/", "aria-label": "All runs" }, "← Runs"), el("h1", {}, run.name), badge(run), age, el("span", { className: "grow" }), source.live && [button("why", "Why?"), button("save", "Save now", `Save a checkpoint of ${run.name} now? The run goes on.`), button("stop", "Stop", `Stop ${run.name}? Everything is saved first; the same command resumes it.`, true)]));
    tick();
  }

  function tick() {
    const run = state.told, age = parts.head.querySelector("#age");
    if (!run || !age) return;
    const seconds = Math.max(0, Date.now() / 1000 + source.skew - (state.newest || run.newest_t)), stale = run.live && seconds > 10;
    age.textContent = state.lost ? "the page has lost its server: what you see is old" : run.newest_t ? `newest point ${seconds < 2 && run.live ? "just now" : duration(seconds) + " old"}${stale ? " · stale" : ""}` : "no points yet";
    const mark = parts.head.querySelector(".badge");
    if (mark && run.live) mark.replaceWith(badge({ ...run, stale: stale || run.stale || state.lost }));
  }

  function tiles() {
    const run = state.told, phases = run.phases, since = phases.since && run.live ? Date.now() / 1000 + source.skew - phases.since : null;
    const tile = (name, value, more = "") => el("div", { className: "tile" }, el("span", {}, name), el("b", { title: String(value) }, value), el("span", { title: String(more) }, more || " "));
    const bar = run.steps ? el("progress", { max: run.steps, value: run.step || 0 }) : null;
    const safe = run.mirrored_step ? `mirrored to step ${short(run.mirrored_step)}` : run.step ? `${short(Math.max(0, run.step - (run.durable_step || 0)))} steps not saved yet` : "";
    const of = run.budget?.usd ? ` of ${money(run.budget.usd)}` : "";
    parts.tiles.replaceChildren(
      tile("Now", run.live ? phases.current || run.phase || "starting" : run.state, run.live ? `for ${duration(since)}${phases.usual_s ? `, last time ${duration(phases.usual_s)}` : ""}` : run.outcome),
      el("div", { className: "tile" }, el("span", {}, "Step"), el("b", { id: "step" }, short(run.step) + (run.steps ? ` / ${short(run.steps)}` : "")), bar || el("span", {}, " ")),
      tile("Time left", run.live ? duration(run.eta_s) : "–", `spent ${duration(run.spent_s)}`),
      tile("Loss", short(run.loss), "of the last step"), tile("Validation", short(run.val_loss), run.best_val_loss !== null ? `best ${short(run.best_val_loss)}` : ""),
      tile("Tokens/s", short(run.tokens_per_s), `${short(run.tokens)} tokens`), tile("Cost", run.usd_per_hour ? money(run.usd) + of : "–", run.end_usd ? `${money(run.end_usd)} at the end` : run.usd_per_hour ? "" : "set budget.usd_per_hour"),
      tile("Safe to step", short(run.durable_step), safe), ...run.track.map((one) => tile(one.to, `${short(one.lag)} behind`, one.problem || `at step ${short(one.step)}`)),
      tile("Attempt", short(run.attempt), `${short(run.ledger.redone_steps)} steps done twice`));
  }

  function flags() {
    const run = state.told, standing = run.flags.map((cause) => [...run.timeline].reverse().find((one) => one.cause === cause)).filter(Boolean), cards = [];
    if (run.damage) cards.push(note("This run is damaged", run.damage, "what can be read is shown; lamp checkpoints RUN says what is safe"));
    if (run.damaged_lines) cards.push(note("Damaged lines", `${run.damaged_lines} lines of metrics.jsonl are no records and are left out`, "a killed writer tears at most one"));
    if (run.config_problem) cards.push(note("The settings cannot be read", run.config_problem, ""));
    if (!run.live && run.state === "lost") cards.push(note("This run is dead", "its parent was killed: nobody wrote the end", `step ${short(run.durable_step)} is safe; run the same command again`));
    if (run.stall) cards.push(note("Stalled", run.stall, "Why? shows every stack"));
    for (const one of standing) cards.push(note(`Red flag: ${one.cause}, since step ${short(one.step)}`, one.why, one.next));
    parts.flags.className = "stack";
    parts.flags.replaceChildren(...cards);
  }
  const note = (title, why, next) => el("div", { className: "card flag" }, el("strong", {}, title), el("p", {}, why || ""), next && el("p", { className: "next" }, "next: " + next));

  // ---- panels
  function panels() {
    const wanted = state.told.panels, key = JSON.stringify(wanted.map((one) => [one.id, one.curves]));
    if (key !== state.key) {
      state.key = key;
      for (const { chart } of state.panels) chart.close();
      state.panels = wanted.map((panel, i) => {
        const host = el("div", { className: "plot" }), value = el("span", { className: "value num" }), told = el("div"), legend = el("div", { className: "legend" });
        const card = el("section", { className: "card panel" + (i === 0 ? " wide" : ""), id: "panel-" + i, "aria-label": panel.title }, el("header", {}, el("h2", {}, panel.title), el("span", { className: "unit" }, panel.unit), value), host, legend, el("details", {}, el("summary", {}, "What is normal here"), told));
        return { panel, card, value, told, legend, chart: new Chart(host, shared, { title: panel.title, scale: panel.scale }) };
      });
      parts.panels.replaceChildren(...state.panels.map(({ card }) => card));
      if (!wanted.length) parts.panels.replaceChildren(el("p", { className: "empty" }, el("strong", {}, "No numbers yet"), state.told.live ? `It is in: ${state.told.phases.current || "its start"}. The first panel appears with the first step.` : "This run has made no step."));
    }
    state.panels.forEach((one, i) => {
      const now = wanted[i], up = now.flags.filter((flag) => state.told.flags.includes(flag));
      one.told.replaceChildren(el("p", {}, now.normal), el("p", {}, "Seen: " + now.seen), el("p", {}, now.flags.length ? "Watched by: " + now.flags.join(", ") + (up.length ? `. UP NOW: ${up.join(", ")}` : ". None is up.") : "No red flag watches it."));
    });
  }

  function draw() {
    const palette = colours();
    for (const { panel, chart, value, legend } of state.panels) {
      const curves = panel.curves.filter((name) => state.curves[name]).map((name, i) => ({ ...state.curves[name], label: label(name), colour: palette[i % palette.length], sparse: name.startsWith("eval/") })), marks = [];
      if (panel.id === "loss" && state.told.floor !== null) marks.push({ y: state.told.floor, label: "entropy bound " + short(state.told.floor) });
      if (panel.id === "loss" && state.told.band.length && shared.x === "step") marks.push({ line: state.told.band, label: "expected" });
      chart.set(curves, marks);
      const first = curves[0], last = first && first.y.length ? first.y[first.y.length - 1] * (panel.scale || 1) : null;
      value.textContent = last === null || Number.isNaN(last) ? "" : short(last);
      legend.replaceChildren(...(curves.length > 1 ? curves.map((curve) => el("span", {}, el("i", { style: { "border-color": curve.colour } }), curve.label)) : []));
    }
  }
  const label = (name) => ({ "train/loss": "training", "eval/val_loss": "validation" }[name] || name.replace(/^(train|sys|eval)\//, ""));

  // ---- below
  function below() {
    const run = state.told, palette = colours();
    parts.time.className = "card";
    parts.time.replaceChildren(el("h2", {}, "What happened"), run.timeline.length ? el("ol", { className: "time" }, [...run.timeline].reverse().slice(0, 120).map((one) => el("li", {}, el("div", { className: "when" }, clock(one.t), el("br"), one.step !== null ? "step " + short(one.step) : day(one.t)), one.kind === "verdict" ? verdict(one) : el("div", {}, el("p", {}, one.why))))) : el("p", { className: "soft" }, "Nothing worth a word yet."));
    const { wall_s, parts: spent, unexplained_s } = run.ledger, all = Math.max(wall_s, spent.reduce((sum, one) => sum + one.seconds, 0)) || 1;
    const rows = [...spent.slice(0, 9), ...(spent.length > 9 ? [{ name: `${spent.length - 9} more`, seconds: spent.slice(9).reduce((sum, one) => sum + one.seconds, 0) }] : []), ...(unexplained_s > 0.05 ? [{ name: "unexplained", seconds: unexplained_s }] : [])];
    const tone = (i) => (rows[i].name === "unexplained" ? "var(--faint)" : palette[i % palette.length]);
    parts.ledger.className = "card";
    parts.ledger.replaceChildren(el("h2", {}, `Where the time went: ${duration(all)}${run.usd_per_hour ? `, ${money((all / 3600) * run.usd_per_hour)}` : ""}`), el("div", { className: "ledger", role: "img", "aria-label": rows.map((one) => `${one.name} ${duration(one.seconds)}`).join(", ") }, rows.map((one, i) => el("span", { title: `${one.name}: ${duration(one.seconds)}`, style: { width: (100 * one.seconds) / all + "%", background: tone(i) } }))), el("div", { className: "keys" }, rows.map((one, i) => el("span", {}, el("i", { style: { background: tone(i) } }), `${one.name} ${duration(one.seconds)} `, el("span", { className: "soft" }, `${((100 * one.seconds) / all).toFixed(1)} %`)))));
    card(parts.plan, "The plan, and what came true", run.plan.length && grid(["", "planned", "seen", ""], run.plan.map((one) => [one.name, unit(one.planned, one.unit), unit(one.seen, one.unit), one.seen !== null && one.planned ? `${one.seen >= one.planned ? "+" : ""}${((100 * one.seen) / one.planned - 100).toFixed(0)} %` : ""])));
    card(parts.checkpoints, "Checkpoints", run.checkpoints.length && grid(["checkpoint", "loss", "validation", "size", "saved", ""], run.checkpoints.map((one) => [one.name + (one.best ? " ★ best" : ""), short(one.loss), short(one.val_loss), bytes(one.bytes), clock(one.t), one.valid ? "valid" : "invalid: " + one.reason])));
    samples();
    card(parts.scores, "Evaluations", run.evaluations.length && grid(["task", "score", "step", "value", "chance", ""], run.evaluations.map((one) => [one.task, one.name, short(one.step), short(one.value) + (one.stderr ? ` ± ${short(one.stderr, 2)}` : ""), short(one.chance), one.interval ? `95 %: ${short(one.interval[0])} to ${short(one.interval[1])}` : one.verdict])));
    parts.settings.className = "card";
    parts.settings.replaceChildren(el("details", {}, el("summary", {}, "Settings"), el("pre", {}, JSON.stringify(run.config, null, 1))), el("details", {}, el("summary", {}, "Environment of each attempt"), el("pre", {}, JSON.stringify(run.environment, null, 1))));
  }
  const unit = (value, name) => (value === null ? "–" : name === "$" ? money(value) : `${short(value)} ${name}`);
  const card = (part, title, body) => { part.className = body ? "card" : ""; part.replaceChildren(...(body ? [el("h2", {}, title), body] : [])); };
  const grid = (heads, rows) => el("div", { className: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, heads.map((text, i) => el("th", { className: i ? "num" : "" }, text)))), el("tbody", {}, rows.map((row) => el("tr", {}, row.map((text, i) => el("td", { className: i ? "num" : "name" }, text)))))));

  function verdict(one) {
    const body = el("pre", {}, "…");
    const more = one.stacks && el("details", { ontoggle: async (event) => { if (event.target.open && body.textContent === "…") body.textContent = await source.stacks(id, one.stacks).catch((error) => error.message); } }, el("summary", {}, "Stacks"), body);
    return el("div", { className: "verdict" }, el("p", {}, `${one.state}: ${one.cause}`), el("p", {}, "why: " + one.why), one.next && el("p", { className: "soft" }, "next: " + one.next), one.evidence?.length > 0 && el("p", { className: "soft small" }, one.evidence.join(" · ")), more);
  }

  function samples() {
    const found = state.told.samples;
    if (!found.length) { parts.samples.className = ""; parts.samples.replaceChildren(); return; }
    if (state.samples === found.length) return;
    state.samples = found.length;
    const text = el("pre"), title = el("span", { className: "soft small" });
    const slide = el("input", { type: "range", min: 0, max: found.length - 1, value: found.length - 1, "aria-label": "Sample through time", oninput: () => show(Number(slide.value)) });
    const show = (at) => { text.textContent = found[at].text; title.textContent = `step ${short(found[at].step)}`; };
    show(found.length - 1);
    parts.samples.className = "card";
    parts.samples.replaceChildren(el("div", { className: "bar" }, el("h2", {}, "Samples through time"), slide, title), text);
  }

  // ---- life
  async function load() {
    const names = [...new Set(state.told.panels.flatMap((panel) => panel.curves))], told = (await source.series([id], names, shared.x, shared.range))[id];
    state.curves = Object.fromEntries(Object.entries(told?.curves || {}).map(([name, curve]) => [name, numbers(curve)]));
    draw();
  }

  async function refresh() {
    try {
      state.told = await source.run(id);
    } catch (error) {
      main.replaceChildren(el("p", { className: "empty" }, el("strong", {}, "This run cannot be shown"), error.message, el("br"), el("a", { href: "#/" }, "All runs")));
      return;
    }
    head(); tiles(); flags(); panels(); below();
    if (!stage.isConnected) main.replaceChildren(stage); // as a whole: nothing moves when a part of it comes later
    await load();
  }

  function rows(told) {
    if (told.again) { refresh(); return; }
    state.newest = told.t;
    const last = told.rows[told.rows.length - 1];
    if (last) {
      Object.assign(state.told, { step: last.step, loss: last["train/loss"], tokens_per_s: last["train/tok_per_sec"], tokens: last["train/tokens"] });
      tiles();
    }
    if (shared.x === "step" && !shared.range) { append(told.rows); draw(); }
    if (Date.now() - state.asked > 3000) { state.asked = Date.now(); refresh(); }
    tick();
  }

  function append(rows) {
    for (const [name, curve] of Object.entries(state.curves)) {
      const fresh = rows.filter((row) => name in row && (!curve.x.length || row.step > curve.x[curve.x.length - 1]));
      if (!fresh.length) continue;
      const x = new Float64Array(curve.x.length + fresh.length), y = new Float64Array(x.length);
      x.set(curve.x); y.set(curve.y);
      fresh.forEach((row, i) => { x[curve.x.length + i] = row.step; y[curve.x.length + i] = row[name] === null ? NaN : row[name]; });
      state.curves[name] = { x, y };
    }
  }

  async function act(kind) {
    try {
      const answer = await source.ask(id, kind);
      if (kind === "why") { const text = el("pre", {}, answer.text); parts.flags.prepend(el("div", { className: "card" }, el("div", { className: "bar" }, el("h2", {}, "Why?"), el("span", { className: "grow" }), el("button", { type: "button", onclick: (event) => event.target.closest(".card").remove() }, "Close")), text)); }
      else toast(kind === "save" ? (answer.step ? `Saving step ${answer.step}` : "There is no step to save yet") : "Stopping: the last step is saved first");
    } catch (error) { toast(error.message); }
  }

  refresh();
  const stop = source.follow([id], {
    runs: ([run]) => { if (!run || !state.told) return; const ended = state.told.live !== run.live || state.told.state !== run.state; Object.assign(state.told, run); if (ended) refresh(); else { tiles(); tick(); } },
    rows: (told) => state.told && rows(told), lost: () => { state.lost = true; tick(); }, back: () => { state.lost = false; },
  });
  const timer = source.live ? setInterval(() => { if (state.told) { tick(); if (state.told.live) tiles(); } }, 1000) : 0;
  return { close: () => { stop(); clearInterval(timer); for (const { chart } of state.panels) chart.close(); }, redraw: () => { draw(); if (state.told) below(); }, shared };
}
