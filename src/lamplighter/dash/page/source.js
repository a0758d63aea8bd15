// Where the numbers come from: the server, or the data that stands in a report.html.
export class LiveSource {
  constructor() { this.live = true; this.skew = 0; }

  async get(path, parameters = []) {
    const query = new URLSearchParams(parameters).toString();
    const answer = await fetch(path + (query ? "?" + query : ""), { credentials: "same-origin" });
    if (!answer.ok) {
      const words = (await answer.json().catch(() => ({})))?.error?.message || `the server says ${answer.status}`;
      throw Object.assign(new Error(words), { status: answer.status });
    }
    return (answer.headers.get("content-type") || "").startsWith("application/json") ? answer.json() : answer.text();
  }

  runs() { return this.get("/api/runs"); }
  async run(id) { const told = await this.get("/api/run", [["run", id]]); this.skew = told.t - Date.now() / 1000; return told; }
  compare(ids) { return this.get("/api/compare", ids.map((id) => ["run", id])); }
  stacks(id, name) { return this.get("/api/stacks", [["run", id], ["name", name]]); }
  series(ids, names, x, range) {
    const window = range ? [["low", range[0]], ["high", range[1]]] : [];
    return this.get("/api/series", [...ids.map((id) => ["run", id]), ["names", names.join(",")], ["x", x], ...window]);
  }

  async ask(id, kind) {
    const answer = await fetch("/api/ask", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ run: id, kind }) });
    const told = await answer.json();
    if (!answer.ok) throw new Error(told?.error?.message || "it did not answer");
    return told;
  }

  follow(ids, heard) {
    const stream = new EventSource("/events?" + new URLSearchParams(ids.map((id) => ["run", id])));
    stream.addEventListener("runs", (event) => heard.runs?.(JSON.parse(event.data)));
    stream.addEventListener("rows", (event) => heard.rows?.(JSON.parse(event.data)));
    stream.onerror = () => heard.lost?.();
    stream.onopen = () => heard.back?.();
    return () => stream.close();
  }
}

export class FileSource {
  constructor(data) { this.data = data; this.live = false; this.skew = 0; }
  async runs() { return { runs: [this.data.run], dirs: [] }; }
  async run() { return this.data.run; }
  async series(ids, names, x) {
    const { axes } = this.data, curves = x === "wall" ? this.data.by_clock : this.data.curves, found = {};
    for (const name of names) {
      const curve = curves[name];
      if (!curve) continue;
      const at = x === "wall" ? curve.x : x === "step" ? curve.x : curve.x.map((step) => axes[x]?.[nearestAt(axes.step, step)] ?? step);
      found[name] = { x: at, y: curve.y };
    }
    return { [ids[0]]: { curves: found, rows: this.data.rows, newest_t: this.data.run.newest_t } };
  }
  async stacks(id, name) { return this.data.stacks?.[name] || "not kept in this file; it is in the run's folder: stacks/" + name; }
  follow() { return () => {}; }
}

function nearestAt(steps, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) { const middle = (low + high) >> 1; if (steps[middle] < step) low = middle + 1; else high = middle; }
  return low;
}
