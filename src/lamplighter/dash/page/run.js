// One run: what it does now, its panels, its verdicts, samples, checkpoints, where the time went.
import { Chart } from "./chart.js";
import { AXES, badge, bytes, choice, clock, colours, day, duration, el, money, numbers, short } from "./format.js";

export function showRun(main, source, id, go, confirm, toast) {
  // Two axes: the one that is chosen, and the clock's, which cards, ranks and iterations always have.
  const axis = (x) => { const made = { charts: new Set(), hover: null, range: null, log: false, smooth: 0, x, zoom: (range) => { made.range = range; reset.disabled = !shared.range && !wall.range; load(); } }; return made; };
  const shared = axis("step"), wall = axis("wall"), charts = () => [...shared.charts, ...wall.charts];
  const state = { told: null, panels: [], curves: {}, clocked: {}, newest: 0, lost: false, asked: 0, asking: false, filled: {}, events: new Map(), loads: 0, refreshing: false, again: false, closed: false };
  const parts = Object.fromEntries(["head", "tiles", "flags", "why", "controls", "panels", "cards", "ranks", "time", "ledger", "plan", "checkpoints", "samples", "scores", "settings"].map((name) => [name, el("section", { id: "part-" + name })]));
  parts.tiles.className = "card tiles"; parts.panels.className = "panels"; parts.controls.className = "bar";
  parts.tiles.style.minHeight = "82px"; parts.head.style.minHeight = "40px";
  const reset = el("button", { type: "button", disabled: true, onclick: () => { wall.range = null; shared.zoom(null); } }, "Reset zoom");
  const pair = (...names) => el("div", { className: "two" }, names.map((name) => parts[name]));
  const stage = el("div", { className: "stack" },
    ["head", "tiles", "flags", "why", "controls", "panels", "cards", "ranks"].map((name) => parts[name]),
    pair("time", "samples"), parts.ledger, pair("plan", "checkpoints"), parts.scores, parts.settings);
  controls();

  function controls() {
    const by = choice("x axis", AXES, (value) => { shared.x = value; shared.range = null; reset.disabled = !wall.range; load(); });
    state.dollars = [...by.options].find((one) => one.value === "usd");
    const smooth = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, "aria-label": "Smoothing", oninput: () => { shared.smooth = wall.smooth = Number(smooth.value); for (const chart of charts()) { chart.smoothed = null; chart.plan(); } } });
    const log = el("input", { type: "checkbox", onchange: () => { shared.log = wall.log = log.checked; for (const chart of charts()) chart.plan(); } });
    const logX = el("input", { type: "checkbox", onchange: () => { shared.logX = logX.checked; for (const chart of shared.charts) chart.plan(); } });
    const clip = el("input", { type: "checkbox", onchange: () => { shared.clip = wall.clip = clip.checked; for (const chart of charts()) chart.plan(); } });
    parts.controls.replaceChildren(by, el("label", { className: "bar small soft" }, "Smoothing", smooth), el("label", { className: "bar small soft" }, log, "Log axis"), el("label", { className: "bar small soft" }, logX, "Log x"), el("label", { className: "bar small soft" }, clip, "Ignore outliers"), reset, el("span", { className: "soft small hint" }, "Drag to zoom, shift-drag to move, double-click to see all"));
  }

  // ---- now
  // Made once: a button that were replaced between press and release would never hear of its click.
  const buttons = [
    ["why", "Why?", () => ""],
    ["save", "Save now", (name) => `Save a checkpoint of ${name} now? The run goes on.`],
    ["stop", "Stop", (name) => `Stop ${name}? Everything is saved first; the same command resumes it.`],
  ].map(([kind, text, words]) => el("button", {
    type: "button", id: "do-" + kind, className: kind === "stop" ? "danger" : "",
    onclick: async () => { const question = words(state.told.name); if (!question || (await confirm(question))) act(kind); },
  }, text));

  function head() {
    const run = state.told;
    if (!parts.head.childElementCount) {
      parts.head.append(el("div", { className: "bar" },
        source.live && el("a", { href: "#/", "aria-label": "All runs" }, "← Runs"),
        el("h1", {}, run.name), badge(run), el("span", { id: "age", className: "soft small" }), el("span", { className: "grow" }),
        source.live && buttons));
    }
    for (const button of buttons) button.hidden = !run.live;
    for (const button of buttons) button.disabled = !run.live || (button.id === "do-why" && state.asking);
    tick();
  }

  function tick() {
    const run = state.told, age = parts.head.querySelector("#age");
    if (!run || !age) return;
    const seconds = Math.max(0, Date.now() / 1000 + source.skew - (state.newest || run.newest_t)), stale = run.live && seconds > 10;
    age.textContent = state.lost ? "the page has lost its server: what you see is old" : run.newest_t ? `newest point ${seconds < 2 && run.live ? "just now" : duration(seconds) + " old"}${stale ? " · stale" : ""}` : "no points yet";
    const mark = parts.head.querySelector(".badge");
    const fresh = badge({ ...run, stale: run.live && (stale || run.stale || state.lost) });
    if (mark && !mark.isEqualNode(fresh)) mark.replaceWith(fresh);
  }

  function tiles() {
    const run = state.told, phases = run.phases, since = phases.since && run.live ? Date.now() / 1000 + source.skew - phases.since : null;
    const tile = (name, value, more = "") => el("div", { className: "tile" }, el("span", {}, name), el("b", { title: String(value) }, value), el("span", { title: String(more) }, more || " "));
    const over = run.live && ["finished", "stopped", "failed"].includes(run.state); // its parent still has something to send
    const held = run.live && (run.stall || run.stale); // then neither a phase nor a time left means anything
    const watched = run.verb === "watch", some = (known, made) => (known || !watched ? [made] : []); // of a command that is not ours, what it tells
    const bar = run.steps ? el("progress", { max: run.steps, value: run.step || 0 }) : null;
    const open = Math.max(0, (run.step || 0) - (run.durable_step || 0)), safe = !run.step ? "" : open ? `${short(open)} not saved yet` : "all is saved";
    const of = run.budget?.usd ? ` of ${money(run.budget.usd)}` : "";
    parts.tiles.replaceChildren(
      held ? tile("Now", run.stall ? "stalled" : "no word", run.stall || "status.json is not written any more") : tile("Now", run.live && !over ? phases.current || run.phase || "starting" : run.state, over ? "the last records are being sent" : !run.live ? run.outcome : watched ? run.now : `for ${duration(since)}${phases.usual_s ? `, last time ${duration(phases.usual_s)}` : ""}`),
      el("div", { className: "tile" }, el("span", {}, "Step"), el("b", { id: "step" }, short(run.step) + (run.steps ? ` / ${short(run.steps)}` : "")), bar || el("span", {}, " ")),
      tile("Time left", run.live && !held ? duration(run.eta_s) : "–", `spent ${duration(run.spent_s)}`),
      ...some(run.loss !== null, tile("Loss", short(run.loss), "of the last step")), ...some(run.val_loss !== null, tile("Validation", short(run.val_loss), run.best_val_loss !== null ? `best ${short(run.best_val_loss)}` : "")),
      ...some(run.tokens_per_s !== null, tile("Tokens/s", short(run.tokens_per_s), `${short(run.tokens)} tokens`)), ...some(run.usd_per_hour, tile("Cost", run.usd_per_hour ? money(run.usd) + of : "–", !run.usd_per_hour ? "no price is set" : run.live && run.end_usd ? `${money(run.end_usd)} at end` : `${money(run.usd_per_hour)} an hour`)),
      ...some(false, tile("Safe to step", short(run.durable_step), safe)), ...mirrored(run, tile), ...trackers(run.track),
      ...(run.attempt > 1 ? [tile("Attempt", short(run.attempt), run.ledger.redone_steps ? `${short(run.ledger.redone_steps)} steps redone` : "no step twice")] : []));
  }

  // The step that is safe on another machine or disk as well, of a run that has such a copy.
  function mirrored(run, tile) {
    const behind = Math.max(0, (run.durable_step || 0) - (run.mirrored_step || 0));
    return run.mirrored_step === null || run.mirrored_step === undefined ? [] : [tile("Mirrored to step", short(run.mirrored_step), behind ? `${short(behind)} steps behind what is safe here` : "as far as what is safe here")];
  }

  // The one that is furthest behind, or in trouble.
  function trackers(all) {
    if (!all.length) return [];
    const worst = all.reduce((one, other) => (other.problem && !one.problem ? other : !one.problem && other.lag > one.lag ? other : one)), names = all[0].to;
    return [el("div", { className: "tile", id: "trackers" }, el("span", {}, all.length > 1 ? "Trackers" : "Tracker"), el("b", {}, worst.lag ? `${short(worst.lag)} ${worst.lag === 1 ? "step" : "steps"}` : "up to date"),
      el("span", { title: all.map((one) => `${one.to}: ${one.problem || `at step ${one.step}`}`).join("\n") }, worst.problem ? `${worst.to}: ${worst.problem}` : worst.lag ? `behind: ${worst.to}` : all.length > 1 ? `all ${all.length}` : names))];
  }

  function flags() {
    const run = state.told, standing = run.flags.map((cause) => [...run.timeline].reverse().find((one) => one.cause === cause)).filter(Boolean), cards = [];
    if (run.damage) cards.push(note("This run is damaged", run.damage, "what can be read is shown; lamp checkpoints RUN says what is safe"));
    if (run.damaged_lines) cards.push(note("Damaged lines", `${run.damaged_lines === 1 ? "A line of metrics.jsonl is no record and is" : `${run.damaged_lines} lines of metrics.jsonl are no records and are`} left out`, "a killed writer tears at most one"));
    if (run.events_problem) cards.push(note("What happened is not known", run.events_problem, ""));
    if (run.config_problem) cards.push(note("The settings cannot be read", run.config_problem, ""));
    if (!run.live && run.state === "lost") cards.push(note("This run is dead", "its parent was killed: nobody wrote the end", `step ${short(run.durable_step)} is safe; run the same command again`));
    if (run.stall && run.live) cards.push(note("Stalled", run.stall, "Why? shows every stack"));
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
        const large = el("button", { type: "button", className: "large", title: "Larger, or as before", "aria-label": `Enlarge ${panel.title}`, onclick: () => large.closest(".panel").classList.toggle("wide") }, "⤢");
        const card = el("section", { className: "card panel" + (i === 0 ? " wide" : ""), id: "panel-" + i, "aria-label": panel.title }, el("header", {}, el("h2", {}, panel.title), el("span", { className: "unit" }, panel.unit), value, large), host, legend, el("details", {}, el("summary", {}, "What is normal here"), told));
        return { panel, card, value, told, legend, chart: new Chart(host, panel.by ? wall : shared, { title: panel.title, scale: panel.scale, empty: "reading …" }) };
      });
      const grouped = (group) => state.panels.filter(({ panel }) => (panel.group || "") === group).map(({ card }) => card);
      parts.panels.replaceChildren(...grouped(""));
      place(parts.cards, "Cards", grouped("gpu"), state.table = el("div", { className: "card scroll" }));
      place(parts.ranks, "Ranks", grouped("rank"));
      if (!grouped("").length) parts.panels.replaceChildren(el("p", { className: "empty" }, el("strong", {}, "No numbers yet"), state.told.live ? `It is in: ${state.told.phases.current || "its start"}. The first panel appears with the first step.` : "This run has made no step."));
    }
    if (state.told.cards.length) state.table.replaceChildren(...table("", ["card", "in use", "on average", "memory", "hottest", "energy", "slowed down by"], state.told.cards.map(gpu)));
    state.panels.forEach((one, i) => {
      const now = wanted[i], up = now.flags.filter((flag) => state.told.flags.includes(flag));
      one.told.replaceChildren(el("p", {}, now.normal), el("p", {}, "Seen: " + now.seen), el("p", {}, now.flags.length ? "Watched by: " + now.flags.join(", ") + (up.length ? `. UP NOW: ${up.join(", ")}` : ". None is up.") : "No red flag watches it."));
    });
  }

  const place = (part, title, cards, ...before) => { part.className = "stack"; part.replaceChildren(...(cards.length ? [el("h2", {}, title + " ", el("span", { className: "soft small" }, "by the clock, from the start of the run")), ...before, el("div", { className: "panels" }, cards)] : [])); };
  const gpu = (one) => [`${one.card}${one.name ? " " + one.name : ""}`, percent(one.util), percent(one.mean_util), `${short(one.memory_gb, 3)}${one.total_gb ? ` of ${short(one.total_gb, 3)}` : ""} GB`, one.hottest_c === null ? "–" : `${short(one.hottest_c)} °C`, one.kwh === null ? "–" : `${short(one.kwh, 3)} kWh`, one.slowed.map(({ by, seconds }) => `${by} ${duration(seconds)}`).join(", ") || "nothing"];
  const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(0)} %`);

  // What happened, at its place on an axis: verdicts, and where an attempt began or went back.
  const TURNS = ["resumed", "went back", "rolled back"];
  const happened = (x) => state.told.timeline.filter((one) => (one.kind === "verdict" || TURNS.includes(one.kind)) && Number.isFinite(one.at[x])).slice(-80)
    .map((one) => ({ x: one.at[x], loud: one.kind === "verdict", label: one.kind === "verdict" ? [one.why.match(/Xid \d+/)?.[0], `${one.state}: ${one.cause}`].filter(Boolean).join(" · ") : one.why }));

  function draw() {
    const palette = colours(), moments = { wall: happened("wall"), [shared.x]: happened(shared.x) };
    for (const { panel, chart, value, legend } of state.panels) {
      const known = panel.by ? state.clocked : state.curves;
      const curves = panel.curves.filter((name) => known[name]).map((name, i) => ({ ...known[name], label: label(name), colour: palette[i % palette.length], dash: i < palette.length ? [] : [5, 3], sparse: name.startsWith("eval/") })), marks = [];
      if (panel.id === "loss" && state.told.floor !== null) marks.push({ y: state.told.floor, label: "entropy bound " + short(state.told.floor) });
      if (panel.id === "loss" && state.told.band.length && shared.x === "step") marks.push({ line: state.told.band, label: "expected" });
      chart.options.empty = "no numbers here";
      chart.set(curves, { marks, moments: moments[panel.by || shared.x], bands: panel.bands });
      const ends = (panel.group ? curves : curves.slice(0, 1)).map(({ y }) => y.findLast((one) => one === one) * (panel.scale || 1)).filter((one) => one === one).sort((a, b) => a - b);
      value.textContent = [...new Set([ends[0], ends[ends.length - 1]].filter((one) => one !== undefined).map((one) => short(one)))].join(" to ");
      legend.replaceChildren(...(curves.length > 1 ? curves.map((curve) => el("span", {}, el("i", { style: { "border-color": curve.colour } }), curve.label)) : []));
    }
  }
  const label = (name) => name.includes("@") ? name.split("@")[1].replace("gpu", "card ").replace("rank", "rank ") : ({ "train/loss": "training", "eval/val_loss": "validation" }[name] || name.replace(/^(train|sys|eval)\//, ""));

  // ---- below
  // A part is made anew only when what it shows has changed: what somebody opened or scrolled to stays as it is.
  function fill(name, value, make) {
    const key = JSON.stringify([value, colours()[0]]);
    if (state.filled[name] === key) return;
    state.filled[name] = key;
    const made = make();
    parts[name].className = made.length ? "card" : "";
    parts[name].replaceChildren(...made);
  }

  function below() {
    const run = state.told;
    fill("time", run.timeline, () => timeline(run.timeline));
    fill("ledger", [run.ledger, run.usd_per_hour], () => ledger(run.ledger, run.usd_per_hour));
    fill("plan", run.plan, () => table("The plan, and what came true", ["", "planned", "seen", ""], run.plan.map(planned)));
    fill("checkpoints", run.checkpoints, () => table("Checkpoints", ["checkpoint", "files", "loss", "validation", "size", "saved", run.checkpoints.some((one) => !one.valid) ? "what is wrong" : ""], run.checkpoints.map(checkpoint)));
    fill("samples", run.samples, () => samples(run.samples));
    fill("scores", run.evaluations, () => table("Evaluations", ["task", "score", "value", "step", "items", "chance", "", "checkpoints before"], scored(run.evaluations)));
    const filled = (value) => Object.keys(value).length > 0;
    fill("settings", [run.command, run.config, run.environment], () => [
      run.command && el("p", {}, el("span", { className: "soft" }, "Command "), el("code", {}, run.command)),
      filled(run.config) && folded("Settings", el("pre", {}, JSON.stringify(run.config, null, 1))),
      filled(run.environment) && folded("Environment of each attempt", el("pre", {}, JSON.stringify(run.environment, null, 1)))].filter(Boolean));
  }

  const folded = (title, ...body) => el("details", {}, el("summary", {}, title), ...body);
  const unit = (value, name) => (value === null ? "–" : name === "$" ? money(value) : name === "s" ? duration(value) : `${short(value)} ${name}`);
  const signed = (share) => (share ? `${share > 0 ? "+" : ""}${share} %` : "as planned"); // never a -0 %
  const difference = ({ seen, planned }) => (seen !== null && planned ? signed(Math.round((100 * seen) / planned - 100)) : "");
  const planned = (one) => [one.name, unit(one.planned, one.unit), unit(one.seen, one.unit), difference(one)];
  const checkpoint = (one) => [one.name + (one.best ? " ★ best" : ""), one.valid ? "valid" : "invalid", short(one.loss), short(one.val_loss), bytes(one.bytes), clock(one.t), one.valid ? "" : one.reason];
  // A line for each score: of the newest checkpoint, and behind it how it was before.
  function scored(all) {
    const found = new Map(), key = (one) => `${one.task}\n${one.name}`;
    for (const one of [...all].sort((a, b) => (a.step || 0) - (b.step || 0) || a.t - b.t)) found.set(key(one), [...(found.get(key(one)) || []), one]);
    return [...found.values()].map((of) => evaluation(of));
  }
  const before = (of) => of.slice(-6, -1).map((one) => `${short(one.value)} (${short(one.step)})`).join(", ");
  const evaluation = (of, one = of[of.length - 1]) => [one.task, one.name, short(one.value) + (one.stderr ? ` ± ${short(one.stderr, 2)}` : ""), short(one.step), short(one.n), short(one.chance), one.interval ? `95 %: ${short(one.interval[0])} to ${short(one.interval[1])}` : one.verdict, before(of)];

  function table(title, heads, rows) {
    if (!rows.length) return [];
    const line = (tag, texts) => el("tr", {}, texts.map((text, i) => el(tag, { className: i ? "num" : tag === "td" ? "name" : "" }, text)));
    return [title && el("h2", {}, title), el("div", { className: "scroll" }, el("table", {}, el("thead", {}, line("th", heads)), el("tbody", {}, rows.map((row) => line("td", row)))))];
  }

  // An event that is still there keeps its element, and with it the stacks that somebody reads.
  function timeline(events) {
    if (!events.length) return [el("h2", {}, "What happened"), el("p", { className: "soft" }, "Nothing worth a word yet.")];
    const before = state.events;
    state.events = new Map();
    const items = [...events].reverse().slice(0, 120).map((one) => {
      const key = JSON.stringify(one), item = before.get(key) || event(one);
      state.events.set(key, item);
      return item;
    });
    return [el("h2", {}, "What happened"), el("ol", { className: "time", tabIndex: 0, "aria-label": "What happened" }, items)];
  }

  const event = (one) => el("li", {},
    el("div", { className: "when" }, clock(one.t), el("br"), one.step !== null ? "step " + short(one.step) : day(one.t)),
    one.kind === "verdict" ? verdict(one) : el("div", {}, el("p", {}, one.why)));

  function verdict(one) {
    const body = el("pre", {}, "…");
    const opened = async ({ target }) => {
      if (target.open && body.textContent === "…") body.textContent = await source.stacks(id, one.stacks).catch((error) => error.message);
    };
    return el("div", { className: "verdict" },
      el("p", {}, `${one.state}: ${one.cause}`), el("p", {}, "why: " + one.why), one.next && el("p", { className: "soft" }, "next: " + one.next),
      one.evidence?.length > 0 && el("p", { className: "soft small" }, one.evidence.join(" · ")),
      one.stacks && el("details", { ontoggle: opened }, el("summary", {}, "Stacks"), body));
  }

  function ledger({ wall_s, parts: spent, unexplained_s }, price) {
    if (!spent.length) return [];
    const palette = colours(), sum = (list) => list.reduce((all, one) => all + one.seconds, 0), all = Math.max(wall_s, sum(spent)) || 1;
    const rows = spent.slice(0, palette.length), rest = spent.slice(palette.length); // no colour twice
    if (rest.length) rows.push({ name: `${rest.length} more`, seconds: sum(rest) });
    if (unexplained_s > 0.05) rows.push({ name: "unexplained", seconds: unexplained_s });
    const tone = (i) => (rows[i].name === "unexplained" ? "var(--faint)" : palette[i] || "var(--line)");
    const share = (one) => (100 * one.seconds) / all, words = (one) => `${one.name} ${duration(one.seconds)}`;
    return [
      el("h2", {}, `Where the time went: ${duration(all)}${price ? `, ${money((all / 3600) * price)}` : ""}`),
      el("div", { className: "ledger", role: "img", "aria-label": rows.map(words).join(", ") },
        rows.map((one, i) => el("span", { title: words(one), style: { width: share(one) + "%", background: tone(i) } }))),
      el("div", { className: "keys" }, rows.map((one, i) => el("span", {}, el("i", { style: { background: tone(i) } }), words(one) + " ",
        el("span", { className: "soft" }, `${share(one).toFixed(1)} %`))))];
  }

  function samples(found) {
    if (!found.length) return [];
    const text = el("pre"), title = el("span", { className: "soft small" }), last = found.length - 1;
    const show = (at) => { text.textContent = found[at].text; title.textContent = `step ${short(found[at].step)}`; };
    const slide = el("input", { type: "range", min: 0, max: last, value: last, "aria-label": "Sample through time", oninput: () => show(Number(slide.value)) });
    show(last);
    return [el("div", { className: "bar" }, el("h2", {}, "Samples through time"), slide, title), text];
  }

  // ---- life
  async function load() {
    const turn = ++state.loads, names = (by) => [...new Set(state.told.panels.filter((panel) => Boolean(panel.by) === by).flatMap((panel) => panel.curves))];
    const ask = async (wanted, { x, range }) => (wanted.length ? (await source.series([id], wanted, x, range))[id]?.curves || {} : {});
    const told = await Promise.all([ask(names(false), shared), ask(names(true), wall)]);
    if (turn !== state.loads || state.closed) return; // another zoom was asked for meanwhile
    [state.curves, state.clocked] = told.map((curves) => Object.fromEntries(Object.entries(curves).map(([name, curve]) => [name, numbers(curve)])));
    draw();
  }

  // One question at a time: on a busy machine an answer may take longer than the pause between two.
  async function refresh() {
    if (state.refreshing) { state.again = true; return; }
    state.refreshing = true;
    try {
      do { state.again = false; await refreshOnce(); } while (state.again && !state.closed);
    } finally {
      state.refreshing = false; state.asked = Date.now();
    }
  }

  async function refreshOnce() {
    let told;
    try {
      told = await source.run(id);
    } catch (error) {
      if (state.closed) return;
      if (state.told && !error.status) { state.lost = true; tick(); return; } // the server is away: what is there stays, marked as old
      main.replaceChildren(el("p", { className: "empty" }, el("strong", {}, "This run cannot be shown"), error.message, el("br"), el("a", { href: "#/" }, "All runs")));
      return;
    }
    if (state.closed) return; // somebody looks at something else by now
    state.told = told;
    state.dollars.disabled = !told.usd_per_hour;
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
    if (!state.refreshing && Date.now() - state.asked > 3000) refresh();
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
    if (kind === "why") { await why(); return; }
    try {
      const answer = await source.ask(id, kind);
      toast(kind === "save" ? (answer.step ? `Saving step ${answer.step}` : "There is no step to save yet") : "Stopping: the last step is saved first");
    } catch (error) { toast(error.message); }
  }

  // In a place of its own: it stays until it is closed, whatever else is drawn anew.
  async function why() {
    const text = el("pre", { "aria-live": "polite" }, "Asking the run for its stacks …");
    const close = el("button", { type: "button", onclick: () => parts.why.replaceChildren() }, "Close");
    parts.why.replaceChildren(el("div", { className: "card" },
      el("div", { className: "bar" }, el("h2", {}, "Why? Asked at " + clock(Date.now() / 1000)), el("span", { className: "grow" }), close), text));
    state.asking = true; head();
    try {
      text.textContent = (await source.ask(id, "why")).text || "It has nothing to say.";
    } catch (error) {
      text.textContent = error.message;
    } finally {
      state.asking = false; head();
    }
  }

  refresh();
  const stop = source.follow([id], {
    runs: ([run]) => {
      if (!run || !state.told) return;
      const changed = state.told.live !== run.live || state.told.state !== run.state;
      Object.assign(state.told, run);
      if (changed) refresh(); else { tiles(); tick(); }
    },
    rows: (told) => { if (state.told) rows(told); },
    lost: () => { state.lost = true; tick(); },
    back: () => { if (state.lost) { state.lost = false; refresh(); } },
  });
  const timer = setInterval(() => { tick(); if (state.told?.live) tiles(); }, 1000);
  const close = () => { state.closed = true; stop(); clearInterval(timer); for (const { chart } of state.panels) chart.close(); };
  return { close, redraw: () => { if (state.told) { draw(); below(); } }, shared, wall };
}
