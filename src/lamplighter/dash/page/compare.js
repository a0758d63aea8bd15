// Runs beside each other: curves, numbers, sentences, what differs in settings and environment.
import { Chart } from "./chart.js";
import { badge, colours, duration, el, numbers } from "./format.js";

export function showCompare(main, source, ids) {
  const shared = { charts: new Set(), hover: null, range: null, log: false, smooth: 0.6, x: "tokens", zoom: (range) => { shared.range = range; draw(); } };
  const names = ["train/loss", "eval/val_loss", "eval/val_bpb"], titles = ["Training loss", "Validation loss", "Bits per byte"];
  const plots = names.map((name, i) => ({ name, title: titles[i], host: el("div", { className: "plot" }) }));
  const body = el("div", { className: "stack" }, el("p", { className: "empty" }, "Comparing …")), legend = el("div", { className: "legend" });
  const stage = el("div", { className: "stack" }, el("div", { className: "bar" }, el("a", { href: "#/" }, "← Runs"), el("h1", {}, "Comparison"), legend), el("section", { className: "panels" }, plots.map(({ title, host }) => el("div", { className: "card panel" }, el("header", {}, el("h2", {}, title), el("span", { className: "unit" }, "by tokens")), host))), body);
  for (const plot of plots) plot.chart = new Chart(plot.host, shared, { title: plot.title });

  let called = ids.map((id) => id.split("/").slice(1).join("/"));
  async function draw() {
    const told = await source.series(ids, names, shared.x, shared.range), palette = colours();
    for (const { name, chart } of plots) chart.set(ids.map((id, i) => ({ i, id, curve: told[id]?.curves[name] })).filter(({ curve }) => curve).map(({ i, id, curve }) => ({ ...numbers(curve), label: called[i], colour: palette[i % palette.length], sparse: name.startsWith("eval/") })));
    legend.replaceChildren(...called.map((name, i) => el("span", {}, el("i", { style: { "border-color": palette[i % palette.length] } }), name)));
  }
  let closed = false, timer = 0;
  // How old each one's newest point is; of runs that go on, everything is asked for again.
  const age = ({ state, live, age_s }) => el("th", { className: "num small" }, badge({ state, live, stale: live && age_s > 10 }), el("br"), el("span", { className: "soft" }, `newest point ${duration(age_s)} old`));
  const fail = (error) => closed || main.replaceChildren(el("p", { className: "empty" }, el("strong", {}, "These runs cannot be compared"), error.message));

  const load = () => source.compare(ids).then(async (told) => {
    if (told.names.length === ids.length) called = told.names;
    await draw();
    const head = (words) => el("thead", {}, el("tr", {}, words.map((text, i) => el("th", { className: i ? "num" : "", title: text }, text))));
    const list = (title, rows) => rows.length > 0 && el("section", { className: "card" }, el("h2", {}, title), el("div", { className: "scroll" }, el("table", { className: "compared" }, head(["", ...told.names]), el("tbody", {}, rows.map((row) => el("tr", {}, el("td", {}, row.name), row.values.map((text) => el("td", { className: "num" }, text))))))));
    body.replaceChildren(
      ...(told.same_tokenizer ? [] : [el("div", { className: "card flag" }, el("strong", {}, "The tokenizers differ or are not known"), el("p", {}, "A loss per token may not be the same thing in these runs. Compare bits per byte only."))]),
      el("section", { className: "card" }, el("div", { className: "scroll" }, el("table", { id: "compared", className: "compared" }, head(["", ...told.names, "difference"]), el("thead", {}, el("tr", {}, el("th"), told.states.map(age), el("th"))), el("tbody", {}, told.rows.map((row) => el("tr", {}, el("td", {}, row.name), row.words.map((text, i) => el("td", { className: "num" + (row.best.includes(i) ? " best" : "") }, text)), el("td", { className: "num soft" }, row.difference))))))),
      el("section", { className: "card" }, told.says.map((one) => el("p", {}, el("strong", {}, one.name + ". "), one.text))),
      ...(told.unread_settings.length ? [el("section", { className: "card" }, el("p", {}, `The settings are not compared: config.yaml of ${told.unread_settings.join(", ")} cannot be read.`))] : []),
      ...[list("What differs in the settings", told.config), list("What differs in the environment", told.environment)].filter(Boolean));
    if (closed) return;
    if (!stage.isConnected) main.replaceChildren(stage);
    if (told.states.some(({ live }) => live)) timer = setTimeout(load, 4000);
  }).catch(fail);
  load();
  return { close: () => { closed = true; clearTimeout(timer); for (const { chart } of plots) chart.close(); }, redraw: draw, shared };
}
