// A line chart on a canvas: gaps, log axis, smoothing, zoom, one crosshair over all charts of a page, keys.
import { colours, duration, short } from "./format.js";

const LEFT = 56, RIGHT = 12, TOP = 8, BOTTOM = 24;

export class Chart {
  constructor(host, shared, options = {}) {
    this.host = host; this.shared = shared; this.options = options;
    this.curves = []; this.marks = []; this.bands = []; this.moments = [];
    this.base = document.createElement("canvas"); this.over = document.createElement("canvas");
    this.over.tabIndex = 0; this.over.setAttribute("role", "img");
    this.over.setAttribute("aria-label", options.title || "chart");
    host.append(this.base, this.over);
    this.resize = new ResizeObserver(() => this.draw());
    this.resize.observe(host);
    this.listen();
    shared.charts.add(this);
  }

  close() { this.resize.disconnect(); this.shared.charts.delete(this); }

  // marks: lines across; moments: what happened at an x; bands: from an x to another.
  set(curves, { marks = [], moments = [], bands = [] } = {}) { Object.assign(this, { curves, marks, moments, bands, smoothed: null }); this.plan(); }

  // Once in a frame, however often it is asked for.
  plan() {
    if (this.planned) return;
    this.planned = true;
    requestAnimationFrame(() => { this.planned = false; this.draw(); });
  }

  bounds() {
    const { range } = this.shared;
    let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
    for (const { x, length = x.length } of this.curves) if (length) { x0 = Math.min(x0, x[0]); x1 = Math.max(x1, x[length - 1]); }
    if (range) [x0, x1] = range;
    const logX = this.shared.logX && x1 > 0; // then zero has no place: it begins at the first x beyond it
    if (logX && x0 <= 0) x0 = Math.min(x1 / 1.1, ...this.curves.map(({ x }) => x.find((one) => one > 0) ?? x1));
    const log = this.shared.log && this.options.log !== false, scale = this.options.scale || 1;
    const shown = this.shared.smooth > 0 ? this.smooth() : this.curves;
    for (const { x, y } of shown === this.curves ? shown : [...this.curves, ...shown]) {
      const from = Math.max(0, lower(x, x0)), to = Math.min(x.length, lower(x, x1) + 1);
      let low = Infinity, high = -Infinity;
      for (let i = from; i < to; i++) {
        const v = y[i] * scale;
        if (v === v && (!log || v > 0)) { if (v < low) low = v; if (v > high) high = v; }
      }
      if (this.shared.clip && to - from > 20) [low, high] = common(y.subarray(from, to), scale, log, low, high);
      y0 = Math.min(y0, low); y1 = Math.max(y1, high);
    }
    for (const mark of this.marks) if (mark.y !== undefined && y1 > y0) { y0 = Math.min(y0, mark.y); }
    if (!(x1 > x0)) { if (x0 === Infinity) return null; x0 -= 0.5; x1 += 0.5; }
    if (y0 === Infinity) return null;
    if (log) { if (y1 <= y0) { y1 = y0 * 1.1; y0 /= 1.1; } }
    else { const room = (y1 - y0) * 0.06 || Math.abs(y1) * 0.05 || 1; y0 = y0 >= 0 && y0 - room < 0 ? Math.max(0, y0 - room) : y0 - room; y1 += room; }
    return { x0, x1, y0, y1, log, logX, scale };
  }

  smooth() {
    if (this.smoothed && this.smoothedBy === this.shared.smooth) return this.smoothed;
    this.smoothedBy = this.shared.smooth;
    this.smoothed = this.curves.map((curve) => {
      if (curve.sparse) return curve;
      const keep = this.shared.smooth, out = new Float64Array(curve.y.length);
      let mean = 0, weight = 0;
      for (let i = 0; i < out.length; i++) {
        const v = curve.y[i];
        if (v === v) { mean = mean * keep + v * (1 - keep); weight = weight * keep + (1 - keep); }
        out[i] = weight ? mean / weight : NaN;
      }
      return { ...curve, y: out };
    });
    return this.smoothed;
  }

  draw() {
    const width = this.host.clientWidth, height = this.host.clientHeight, ratio = window.devicePixelRatio || 1;
    if (!width || !height) return;
    for (const canvas of [this.base, this.over]) {
      if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
        canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
      }
    }
    const pen = this.base.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const style = getComputedStyle(document.documentElement), tone = (name) => style.getPropertyValue(name).trim();
    pen.font = "11px system-ui, sans-serif"; pen.lineJoin = "round";
    const at = this.at = this.bounds();
    this.size = { width, height };
    if (!at) {
      pen.fillStyle = tone("--faint"); pen.textAlign = "center";
      pen.fillText(this.options.empty || "no numbers yet", width / 2, height / 2);
      this.overlay(); return;
    }
    this.axes(pen, tone);
    pen.save(); pen.beginPath(); pen.rect(LEFT, TOP, width - LEFT - RIGHT, height - TOP - BOTTOM); pen.clip();
    const palette = colours(), faint = this.shared.smooth > 0;
    this.shadeBands(pen, tone);
    for (const moment of this.moments) this.moment(pen, moment, tone);
    for (const mark of this.marks) this.mark(pen, mark, tone);
    const draw = (list, alpha, thick) => list.forEach((curve, i) => {
      pen.globalAlpha = curve.sparse ? 1 : alpha; pen.lineWidth = thick; pen.strokeStyle = pen.fillStyle = curve.colour || palette[i % palette.length];
      pen.setLineDash(curve.dash || []);
      this.line(pen, curve, list.length === 1 && thick > 1);
      pen.setLineDash([]);
    });
    draw(this.curves, faint ? 0.25 : 1, faint ? 1 : 1.6);
    if (faint) draw(this.smooth(), 1, 1.8);
    pen.restore(); pen.globalAlpha = 1;
    this.overlay();
  }

  px(x) {
    const { x0, x1, logX } = this.at, share = logX ? Math.log(x / x0) / Math.log(x1 / x0) : (x - x0) / (x1 - x0);
    return LEFT + share * (this.size.width - LEFT - RIGHT);
  }
  // Back again: which x stands at a column of pixels.
  xAt(px) {
    const { x0, x1, logX } = this.at, share = (px - LEFT) / (this.size.width - LEFT - RIGHT);
    return logX ? x0 * (x1 / x0) ** share : x0 + share * (x1 - x0);
  }
  py(y) {
    const { y0, y1, log } = this.at, span = this.size.height - TOP - BOTTOM;
    const share = log ? Math.log(y / y0) / Math.log(y1 / y0) : (y - y0) / (y1 - y0);
    return TOP + (1 - share) * span;
  }

  // Where there are more points than pixels, each column of pixels gets its lowest and highest.
  line(pen, { x, y, sparse }, shaded = false) {
    const { x0, x1, log, logX, scale } = this.at;
    const from = Math.max(logX ? lower(x, Number.MIN_VALUE) : 0, lower(x, x0) - 1), to = Math.min(x.length, lower(x, x1) + 2);
    const columns = this.size.width - LEFT - RIGHT, many = to - from > 3 * columns;
    const wide = columns / (logX ? Math.log(x1 / x0) : x1 - x0), { y0, y1 } = this.at, high0 = this.size.height - TOP - BOTTOM, tall = high0 / (log ? Math.log(y1 / y0) : y1 - y0);
    pen.beginPath();
    let open = false, column = -1, low = 0, high = 0, last = 0;
    const flush = () => { if (column >= 0) { const at = LEFT + column; if (!open) pen.moveTo(at, low); else pen.lineTo(at, low); pen.lineTo(at, high); pen.lineTo(at, last); open = true; column = -1; } };
    for (let i = from; i < to; i++) {
      const v = y[i] * scale;
      if (v !== v || (log && v <= 0)) { if (many) flush(); open = false; continue; }
      const a = LEFT + (logX ? Math.log(x[i] / x0) : x[i] - x0) * wide, b = TOP + high0 - (log ? Math.log(v / y0) : v - y0) * tall; // px and py, without a call for each point
      if (!many) { if (open) pen.lineTo(a, b); else pen.moveTo(a, b); open = true; continue; }
      const c = Math.round(a - LEFT);
      if (c !== column) { flush(); column = c; low = high = b; }
      if (b < low) low = b;
      if (b > high) high = b;
      last = b;
    }
    flush();
    pen.stroke();
    if (shaded) this.shade(pen, x, y, from, to);
    if (sparse || to - from < 40) for (let i = from; i < to; i++) { const v = y[i] * scale; if (v === v && !(log && v <= 0)) { pen.beginPath(); pen.arc(this.px(x[i]), this.py(v), 2.6, 0, 7); pen.fill(); } }
  }

  // A breath of colour under a curve that is alone; gaps stay gaps.
  shade(pen, x, y, from, to) {
    const { log, scale } = this.at, every = Math.max(1, Math.floor((to - from) / (2 * this.size.width))), base = this.size.height - BOTTOM;
    pen.save(); pen.globalAlpha = 0.07; pen.beginPath();
    let begun = null, last = 0;
    const close = () => { if (begun !== null) { pen.lineTo(last, base); pen.lineTo(begun, base); begun = null; } };
    for (let i = from; i < to; i += every) {
      const v = y[i] * scale;
      if (v !== v || (log && v <= 0)) { close(); continue; }
      last = this.px(x[i]);
      if (begun === null) { begun = last; pen.moveTo(last, this.py(v)); } else pen.lineTo(last, this.py(v));
    }
    close(); pen.fill(); pen.restore();
  }

  mark(pen, mark, tone) {
    pen.strokeStyle = pen.fillStyle = tone("--faint"); pen.lineWidth = 1.2; pen.setLineDash([5, 4]); pen.beginPath();
    if (mark.y !== undefined) { const y = this.py(mark.y); pen.moveTo(LEFT, y); pen.lineTo(this.size.width - RIGHT, y); }
    if (mark.line) mark.line.forEach(([x, y], i) => (i ? pen.lineTo(this.px(x), this.py(y)) : pen.moveTo(this.px(x), this.py(y))));
    pen.stroke(); pen.setLineDash([]);
    const [x, y] = mark.y !== undefined ? [this.at.x0, mark.y] : mark.line[0]; // on the left, where a curve that falls leaves room
    pen.textAlign = "left";
    pen.fillText(mark.label, this.px(x) + 6, this.py(y) - 5);
  }

  shadeBands(pen, tone) { // as one shape: where several cards are slowed down it is not darker
    pen.fillStyle = tone("--warm"); pen.globalAlpha = 0.16; pen.beginPath();
    for (const { from, to } of this.bands) pen.rect(this.px(from), TOP, Math.max(2, this.px(to) - this.px(from)), this.size.height - TOP - BOTTOM);
    pen.fill(); pen.globalAlpha = 1;
  }

  moment(pen, { x, loud }, tone) {
    const { x0, x1 } = this.at;
    if (x < x0 || x > x1) return;
    const at = Math.round(this.px(x)) + 0.5;
    pen.strokeStyle = pen.fillStyle = tone(loud ? "--bad" : "--faint"); pen.globalAlpha = loud ? 0.55 : 0.35; pen.lineWidth = 1;
    pen.setLineDash([2, 3]); pen.beginPath(); pen.moveTo(at, TOP); pen.lineTo(at, this.size.height - BOTTOM); pen.stroke(); pen.setLineDash([]);
    pen.globalAlpha = 1; pen.beginPath(); pen.moveTo(at - 4, TOP); pen.lineTo(at + 4, TOP); pen.lineTo(at, TOP + 6); pen.fill();
  }

  // What stands near the crosshair: what happened there, and why a stretch is shaded.
  near(x) {
    const a = this.px(x), words = this.moments.filter((one) => Math.abs(this.px(one.x) - a) < 6).map((one) => one.label);
    return [...words, ...this.bands.filter((one) => one.from <= x && x <= one.to).map((one) => one.label)].slice(0, 3).map((text) => (text.length > 48 ? text.slice(0, 47) + "…" : text));
  }

  axes(pen, tone) {
    const { x0, x1, y0, y1, log } = this.at, { width, height } = this.size;
    pen.strokeStyle = tone("--line"); pen.fillStyle = tone("--soft"); pen.lineWidth = 1; pen.textAlign = "right"; pen.textBaseline = "middle";
    const rows = log ? logTicks(y0, y1) : ticks(y0, y1, Math.max(2, Math.floor(height / 52))), words = apart(rows);
    rows.forEach((tick, i) => {
      const y = Math.round(this.py(tick)) + 0.5;
      pen.beginPath(); pen.moveTo(LEFT, y); pen.lineTo(width - RIGHT, y); pen.stroke();
      pen.fillText(words[i], LEFT - 7, y);
    });
    pen.textAlign = "center"; pen.textBaseline = "alphabetic";
    const columns = Math.max(2, Math.floor(width / 84));
    for (const tick of this.xTicks(columns)) pen.fillText(this.xWords(tick), Math.min(this.px(tick), width - RIGHT - 12), height - 7);
  }

  xTicks(columns) {
    const { x0, x1, logX } = this.at, unit = this.hours() ? 3600 : 1;
    if (logX && x1 > 2 * x0) return thinned(logTicks(x0 * unit, x1 * unit), columns).map((one) => one / unit);
    return this.hours() ? hourTicks(x0, x1, columns) : ticks(x0, x1, columns);
  }

  hours() { return this.shared.x === "time" || this.shared.x === "wall"; }
  xWords(x) { return this.hours() ? duration(x * 3600) : this.shared.x === "usd" ? "$" + short(x, 3) : short(x, 3); }

  overlay() {
    const ratio = window.devicePixelRatio || 1, pen = this.over.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, this.size?.width || 0, this.size?.height || 0);
    if (!this.at) return;
    const style = getComputedStyle(document.documentElement), tone = (name) => style.getPropertyValue(name).trim();
    if (this.drag && this.drag.to !== undefined) {
      pen.fillStyle = tone("--accent"); pen.globalAlpha = 0.16;
      pen.fillRect(Math.min(this.drag.from, this.drag.to), TOP, Math.abs(this.drag.to - this.drag.from), this.size.height - TOP - BOTTOM); pen.globalAlpha = 1;
    }
    const x = this.shared.hover;
    if (x === null || x < this.at.x0 || x > this.at.x1) return;
    const a = this.px(x), palette = colours(), told = [];
    pen.strokeStyle = tone("--soft"); pen.lineWidth = 1; pen.beginPath(); pen.moveTo(a, TOP); pen.lineTo(a, this.size.height - BOTTOM); pen.stroke();
    const shown = this.shared.smooth > 0 ? this.smooth() : this.curves;
    shown.forEach((curve, i) => {
      const at = nearest(curve.x, x);
      if (at < 0) return;
      const v = curve.y[at] * this.at.scale, colour = curve.colour || palette[i % palette.length];
      if (v === v && !(this.at.log && v <= 0)) { pen.fillStyle = colour; pen.beginPath(); pen.arc(this.px(curve.x[at]), this.py(v), 3.4, 0, 7); pen.fill(); }
      told.push([colour, `${curve.label}  ${v === v ? short(v, 5) : "not finite"}`]);
    });
    pen.font = "11.5px system-ui, sans-serif";
    const lines = [[tone("--soft"), `${this.shared.x === "wall" ? "after" : this.shared.x} ${this.xWords(x)}`], ...told.slice(0, 12), ...this.near(x).map((text) => [tone("--bad"), text])];
    const wide = Math.max(...lines.map(([, text]) => pen.measureText(text).width)) + 20, tall = 16 * lines.length + 8;
    const left = a + wide + 12 > this.size.width ? a - wide - 8 : a + 8;
    pen.fillStyle = tone("--card"); pen.strokeStyle = tone("--line"); pen.beginPath(); pen.rect(left, TOP + 2, wide, tall); pen.fill(); pen.stroke();
    pen.textAlign = "left"; pen.textBaseline = "middle";
    lines.forEach(([colour, text], i) => { pen.fillStyle = i ? colour : tone("--soft"); pen.fillText(text, left + 9, TOP + 14 + 16 * i); });
  }

  listen() {
    const at = (event) => { const box = this.over.getBoundingClientRect(); return Math.min(this.size.width - RIGHT, Math.max(LEFT, event.clientX - box.left)); };
    const hover = (x) => { this.shared.hover = x; for (const chart of this.shared.charts) chart.overlay(); };
    this.over.addEventListener("pointermove", (event) => {
      if (!this.at) return;
      if (this.drag) this.drag.to = at(event);
      if (this.drag?.pan) { move(); return; }
      hover(this.xAt(at(event)));
    });
    // Moved at once, with the points that are there; those of the new stretch are asked for now and then.
    const moved = ([low, high], share) => (this.at.logX ? [low * (high / low) ** share, high * (high / low) ** share] : [low + share * (high - low), high + share * (high - low)]);
    const move = () => {
      const { from, to, range, asked } = this.drag;
      this.shared.range = moved(range, (from - to) / (this.size.width - LEFT - RIGHT));
      for (const chart of this.shared.charts) chart.plan();
      if (performance.now() - asked > 200) { this.drag.asked = performance.now(); this.shared.zoom(this.shared.range); }
    };
    this.over.addEventListener("pointerleave", () => hover(null));
    this.over.addEventListener("pointerdown", (event) => { if (this.at && event.pointerType === "mouse") { this.drag = { from: at(event), pan: event.shiftKey, range: [this.at.x0, this.at.x1], asked: performance.now() }; this.over.setPointerCapture(event.pointerId); } });
    this.over.addEventListener("pointerup", () => {
      const drag = this.drag; this.drag = null;
      if (!drag || drag.to === undefined || Math.abs(drag.to - drag.from) < 6) { this.overlay(); return; }
      if (drag.pan) this.shared.zoom(this.shared.range);
      else this.shared.zoom([this.xAt(drag.from), this.xAt(drag.to)].sort((a, b) => a - b));
    });
    this.over.addEventListener("dblclick", () => this.shared.zoom(null));
    this.over.addEventListener("keydown", (event) => {
      if (!this.at) return;
      const { x0, x1 } = this.at, span = this.size.width - LEFT - RIGHT, middle = this.shared.hover !== null ? this.px(this.shared.hover) : LEFT + span / 2;
      const step = (by) => (event.shiftKey ? this.shared.zoom(moved([x0, x1], by / 5)) : hover(Math.min(x1, Math.max(x0, this.xAt(middle + (by * span) / 50)))));
      const around = (half) => this.shared.zoom([this.xAt(middle - half), this.xAt(middle + half)]);
      const acts = {
        ArrowLeft: () => step(-1), ArrowRight: () => step(1), "+": () => around(span / 4), "=": () => around(span / 4),
        "-": () => around(span), Home: () => this.shared.zoom(null), Escape: () => this.shared.zoom(null),
      };
      if (acts[event.key]) { event.preventDefault(); acts[event.key](); }
    });
    this.over.addEventListener("blur", () => hover(null));
  }
}

function lower(x, value) {
  let low = 0, high = x.length;
  while (low < high) { const middle = (low + high) >> 1; if (x[middle] < value) low = middle + 1; else high = middle; }
  return low;
}

function nearest(x, value) {
  if (!x.length) return -1;
  const at = lower(x, value);
  if (at === 0) return 0;
  return at === x.length || value - x[at - 1] < x[at] - value ? at - 1 : at;
}

export function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough)), steps = [0.5, 1, 2, 5, 10].map((one) => one * power), found = [];
  let step = steps.find((one) => one >= rough);
  if (high - low < 2 * step) step = steps[steps.indexOf(step) - 1]; // one number alone says nothing of a scale
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9 && found.length < 50; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : Number(at.toPrecision(12)));
  return found;
}

// Without the outermost hundredths, where they stand far from the rest: one slow step does not flatten all the others.
function common(y, scale, log, low, high) {
  const found = y.filter((one) => one === one && (!log || one > 0)).sort();
  if (found.length < 20) return [low, high];
  const at = (share) => found[Math.round(share * (found.length - 1))] * scale, room = 0.5 * (at(0.98) - at(0.02));
  return [Math.max(low, at(0.02) - room), Math.min(high, at(0.98) + room)];
}

// In hours, at whole seconds, minutes, hours or days.
function hourTicks(low, high, count) {
  const rough = ((high - low) * 3600) / count, step = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400].find((one) => one >= rough);
  if (rough < 1) return ticks(low * 3600, high * 3600, count).map((one) => one / 3600);
  if (!step) return ticks(low, high, count);
  const found = [];
  for (let at = Math.ceil((low * 3600) / step - 1e-9); at * step <= high * 3600 + 1e-6 && found.length < 50; at++) found.push((at * step) / 3600);
  return found;
}

// No more than there is room for: whole decades where they are enough, else each second, third, ...
function thinned(found, most) {
  if (found.length <= most) return found;
  const decades = found.filter((one) => Math.abs(Math.log10(one) - Math.round(Math.log10(one))) < 1e-9), kept = decades.length > 1 ? decades : found;
  const every = Math.ceil(kept.length / most);
  return kept.filter((_, i) => i % every === 0);
}

// With as many digits as tell them apart.
function apart(found) {
  for (let digits = 3; digits < 9; digits++) {
    const words = found.map((one) => short(one, digits));
    if (new Set(words).size === words.length) return words;
  }
  return found.map(String);
}

function logTicks(low, high) {
  const found = [], decades = Math.log10(high / low);
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const one of decades > 3 ? [1] : decades > 1 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 7, 8]) { const at = one * 10 ** power; if (at >= low && at <= high) found.push(at); }
  return found;
}
