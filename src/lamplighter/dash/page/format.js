// Small pieces: elements from plain text (never from markup), numbers, times.
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, to] of Object.entries(value)) made.style.setProperty(key, to);
    else if (name in made && name !== "list") made[name] = value;
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) if (child !== null && child !== undefined && child !== false) made.append(child);
  return made;
}

export function short(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return (value / 1e9).toPrecision(3) + "G";
  if (size >= 1e6) return (value / 1e6).toPrecision(3) + "M";
  if (size >= 1e4) return (value / 1e3).toPrecision(3) + "k";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  if (size !== 0 && size < 1e-3) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !isFinite(seconds)) return "–";
  if (seconds < 10) return (seconds ? seconds.toFixed(1) : "0") + " s";
  const whole = Math.floor(seconds + 1e-6), pad = (n) => String(n).padStart(2, "0");
  if (whole < 60) return whole + " s";
  const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  if (hours >= 48) return Math.floor(hours / 24) + " d " + (hours % 24) + " h";
  return hours ? `${hours}:${pad(minutes)}:${pad(whole % 60)}` : `${minutes}:${pad(whole % 60)}`;
}

export function bytes(count) {
  for (const unit of ["B", "KB", "MB", "GB"]) {
    if (Math.abs(count) < 1000) return (unit === "B" ? count : count.toFixed(1)) + " " + unit;
    count /= 1000;
  }
  return count.toFixed(1) + " TB";
}

export const clock = (t) => (t ? new Date(t * 1000).toLocaleTimeString("en-GB") : "");
export const day = (t) => (t ? new Date(t * 1000).toLocaleDateString("en-CA") : "");
export const money = (usd) => (usd === null || usd === undefined ? "–" : "$" + (usd < 1 ? usd.toFixed(4) : usd.toFixed(2)));

export function badge(run) {
  const kind = run.live ? (run.stale ? "stale" : "live") : run.state;
  const words = run.live ? (run.stale ? "stale" : run.state === "running" ? "live" : run.state) : run.state;
  return el("span", { className: "badge " + kind.replace(/[^a-z]/g, "") }, words);
}

export function colours() {
  const dark = getComputedStyle(document.documentElement).getPropertyValue("--bg").trim() === "#14161a";
  // Told apart by the colour-blind too, of each kind, also by how light they are (a test computes it).
  return dark
    ? ["#56b4e9", "#f0b040", "#d8f0a8", "#d83060", "#607800", "#a84890", "#9090ff", "#ff78a8"]
    : ["#0072b2", "#d47f00", "#780048", "#301878", "#a89060", "#483000", "#d83078", "#9090c0"];
}

export const AXES = [["step", "by step"], ["tokens", "by tokens"], ["time", "by time"], ["usd", "by dollars"]];

export function choice(title, options, chosen) {
  const made = el("select", { "aria-label": title, onchange: () => chosen(made.value) }, options.map(([value, text]) => el("option", { value }, text)));
  return made;
}

export function numbers({ x, y }) {
  return { x: Float64Array.from(x), y: Float64Array.from(y, (value) => (value === null ? NaN : value)) };
}
