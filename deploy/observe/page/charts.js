"use strict";
// Curves, stacked bars, heat maps and sparklines as SVG. Texts become text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";
const COLOURS = 8;
const MARGIN = { top: 8, right: 10, bottom: 22, left: 46 };

function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function draw(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.flat().filter((child) => child !== null).map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

function figure(value) {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return typeof value === "object" ? JSON.stringify(value) : String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size !== 0 && size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(size >= 1 ? 4 : 3)));
}

function extent(lists) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) for (const value of list) {
    if (value === null || value === undefined) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low > high ? [0, 1] : [low, high];
}

// The multiples of 1, 2 or 5 between low and high, about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((times) => times * power >= rough);
  const found = [];
  for (let index = Math.ceil(low / step); index * step <= high + step * 1e-9; index++) found.push(Number((index * step).toPrecision(12)));
  return found;
}

function scale([low, high], [from, to]) {
  const span = high - low || 1;
  return (value) => from + ((value - low) / span) * (to - from);
}

const FRAME_MS = 8;
const waiting = [];
let frameEnd = -1;

// Paints at once as long as this frame has time left, and else in one of the next frames, in the order of the calls.
function inTime(paint) {
  if (frameEnd < 0) { frameEnd = performance.now() + FRAME_MS; requestAnimationFrame(nextFrame); }
  if (!waiting.length && performance.now() < frameEnd) paint(); else waiting.push(paint);
}

function nextFrame() {
  const isDone = !waiting.length;
  frameEnd = isDone ? -1 : performance.now() + FRAME_MS;
  if (isDone) return;
  do waiting.shift()(); while (waiting.length && performance.now() < frameEnd);
  requestAnimationFrame(nextFrame);
}

// Draws again whenever the width of `host` changes. Its function `repaint` does so at once.
function responsive(host, paint) {
  let painted = 0;
  host.repaint = (width) => {
    if (width > 40 && width !== painted) host.replaceChildren(paint((painted = width)));
  };
  new ResizeObserver(() => inTime(() => host.repaint(Math.floor(host.clientWidth)))).observe(host);
}

function rectangle(x, y, width, height) {
  return `M${x.toFixed(1)} ${y.toFixed(1)}h${width.toFixed(2)}v${height.toFixed(1)}h${(-width).toFixed(2)}Z`;
}

function axes(width, height, xs, ys, label, isWhole = false) {
  const right = width - MARGIN.right, bottom = height - MARGIN.bottom;
  const x = scale(xs, [MARGIN.left, right]), y = scale(ys, [bottom, MARGIN.top]);
  const root = draw("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
  for (const tick of ticks(...ys, 4).filter((tick) => !isWhole || Number.isInteger(tick))) {
    root.append(
      draw("line", { class: "axis", x1: MARGIN.left, x2: right, y1: y(tick), y2: y(tick) }),
      draw("text", { x: MARGIN.left - 5, y: y(tick) + 4, "text-anchor": "end" }, figure(tick)),
    );
  }
  for (const tick of ticks(...xs, Math.max(2, width / 90)).filter(Number.isInteger)) {
    root.append(draw("text", { x: x(tick), y: height - 6, "text-anchor": "middle" }, figure(tick)));
  }
  return { root, x, y, bottom, right };
}

function polyline(xs, ys, x, y) {
  let path = "", pen = "M";
  xs.forEach((at, index) => {
    const value = ys[index];
    if (value === null || value === undefined) { pen = "M"; return; }
    path += `${pen}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  });
  return path;
}

function band(xs, low, high, x, y) {
  const known = xs.map((_, index) => index).filter((index) => low[index] !== null && high[index] !== null);
  if (!known.length) return "";
  const point = (index, values) => `${x(xs[index]).toFixed(1)} ${y(values[index]).toFixed(1)}`;
  const there = known.map((index) => point(index, high)), back = known.reverse().map((index) => point(index, low));
  return `M${there.join("L")}L${back.join("L")}Z`;
}

function nearest(xs, value) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < value) low = middle; else high = middle;
  }
  return Math.abs((xs[low] ?? 0) - value) <= Math.abs((xs[high] ?? 0) - value) ? low : high;
}

function card(title, note = "") {
  const host = make("div", { class: "plot" }), legend = make("ul", { class: "legend" });
  const box = make("figure", {}, make("h3", {}, title), legend, host, note ? make("figcaption", {}, note) : null);
  return { box, host, legend };
}

function legendOf(legend, series) {
  const values = series.map(() => make("span"));
  legend.replaceChildren(...series.map((one, index) =>
    make("li", {}, make("span", { class: `swatch f${one.colour % COLOURS}${one.faint ? " faint" : ""}` }), one.name, " ", values[index])));
  return values;
}

function told(series) {
  const known = series.ys.filter((value) => value !== null && value !== undefined);
  if (!known.length) return `${series.name}: no values`;
  const [low, high] = extent([known]);
  return `${series.name}: first ${figure(known[0])}, last ${figure(known[known.length - 1])}, smallest ${figure(low)}, largest ${figure(high)}`;
}

// Moves a cursor by pointer and by arrow keys, and calls `tell` with the place in `xs`, or with null.
function explored(root, area, xs, tell) {
  const cursor = draw("line", { class: "cursor", y1: MARGIN.top, y2: area.bottom, visibility: "hidden" });
  root.append(cursor);
  let at = null;
  const move = (index) => {
    at = index;
    cursor.setAttribute("visibility", at === null ? "hidden" : "visible");
    if (at !== null) for (const end of ["x1", "x2"]) cursor.setAttribute(end, area.x(xs[at]));
    tell(at);
  };
  root.addEventListener("pointermove", (event) => {
    const left = event.clientX - root.getBoundingClientRect().left, [from, to] = [area.x(0), area.x(1)];
    if (xs.length) move(nearest(xs, (left - from) / (to - from)));
  });
  root.addEventListener("pointerleave", () => move(null));
  root.setAttribute("tabindex", "0");
  root.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !xs.length) return;
    event.preventDefault();
    move(Math.min(Math.max((at ?? (by > 0 ? -1 : xs.length)) + by, 0), xs.length - 1));
  });
}

// series: {name, colour, xs, ys, low?, high?, faint?, dots?}; rules: {y, name}; marks: {x, text}; over: lists of further x
function curves(title, series, { rules = [], marks = [], from = null, to = null, over = [], note = "" } = {}) {
  const { box, host, legend } = card(title, note), shown = series.filter((one) => one.ys.some((y) => y !== null));
  if (!shown.length) { host.append(make("p", { class: "quiet" }, "No values.")); return box; }
  const values = legendOf(legend, shown);
  const longest = shown.reduce((best, one) => (one.xs.length > best.xs.length ? one : best));
  let ys = extent([...shown.flatMap((one) => [one.ys, one.low ?? [], one.high ?? []]), rules.map((rule) => rule.y)]);
  ys = [from === null ? ys[0] : Math.min(from, ys[0]), to === null ? ys[1] : Math.max(to, ys[1])];
  if (ys[0] === ys[1]) ys = [ys[0] - 0.5, ys[1] + 0.5];
  const tell = (at) => shown.forEach((one, index) => {
    const place = at === null ? one.ys.findLastIndex((y) => y !== null) : nearest(one.xs, longest.xs[at]);
    values[index].textContent = figure(one.ys[place]) + (at === null || one !== longest ? "" : ` at step ${figure(longest.xs[at])}`);
  });
  tell(null);
  responsive(host, (width) => {
    const area = axes(width, 210, extent([...shown.map((one) => one.xs), ...over]), ys, `${title}. ${shown.map(told).join(". ")}.`);
    for (const mark of marks) area.root.append(draw("line", { class: "mark", x1: area.x(mark.x), x2: area.x(mark.x), y1: MARGIN.top, y2: area.bottom }, draw("title", {}, mark.text)));
    for (const rule of rules) area.root.append(draw("line", { class: "rule", x1: MARGIN.left, x2: area.right, y1: area.y(rule.y), y2: area.y(rule.y) }, draw("title", {}, rule.name)));
    for (const one of shown) area.root.append(...strokes(one, area));
    explored(area.root, area, longest.xs, tell);
    return area.root;
  });
  return box;
}

function strokes(one, { x, y }) {
  const colour = one.colour % COLOURS, drawn = [];
  if (one.low && one.low.length) drawn.push(draw("path", { class: `band f${colour}`, d: band(one.xs, one.low, one.high, x, y) }));
  drawn.push(draw("path", { class: `curve s${colour}${one.faint ? " faint" : ""}`, d: polyline(one.xs, one.ys, x, y) }));
  if (one.dots || one.xs.length === 1) {
    one.xs.forEach((at, index) => one.ys[index] === null || drawn.push(draw("circle", { class: `f${colour}`, cx: x(at), cy: y(one.ys[index]), r: 3.5 })));
  }
  return drawn;
}

// Bars of {first, last} steps; series: {name, colour, ys}, drawn on top of each other.
function stackedBars(title, first, last, series, note = "") {
  const { box, host, legend } = card(title, note), values = legendOf(legend, series);
  if (!first.length) { host.append(make("p", { class: "quiet" }, "No values.")); return box; }
  const sums = first.map((_, at) => series.reduce((sum, one) => sum + one.ys[at], 0));
  const tell = (at) => series.forEach((one, index) => {
    const mean = one.ys.reduce((sum, value) => sum + value, 0) / one.ys.length;
    values[index].textContent = `${figure(at === null ? mean : one.ys[at])} s${at === null ? " on average" : ""}`;
  });
  tell(null);
  const label = `${title}. ${series.map((one, index) => `${one.name}: ${values[index].textContent}`).join(". ")}.`;
  responsive(host, (width) => {
    const area = axes(width, 210, [first[0], last[last.length - 1] + 1], [0, extent([sums])[1] || 1], label);
    const below = first.map(() => 0);
    for (const one of series) {
      const bars = first.map((step, at) => {
        const left = area.x(step), wide = Math.max(area.x(last[at] + 1) - left - (first.length < 60 ? 1 : 0.2), 0.5);
        const bottom = area.y(below[at]), top = area.y((below[at] += one.ys[at]));
        return rectangle(left, top, wide, Math.max(bottom - top, 0));
      });
      area.root.append(draw("path", { class: `f${one.colour}`, d: bars.join("") }));
    }
    explored(area.root, area, first, tell);
    return area.root;
  });
  return box;
}

const SHADES = 24;

// Columns of {first, last} steps, rows of [low, high]; counts[column][row], shaded by their share of the column.
function heatMap(title, map, lines, { bound = null, note = "" } = {}) {
  const { box, host, legend } = card(title, note), shown = lines.filter((line) => line.xs.length);
  const readout = make("li");
  legendOf(legend, shown);
  legend.append(readout);
  if (!map.first.length) { host.append(make("p", { class: "quiet" }, "No values.")); return box; }
  const top = Math.max(map.rows[map.rows.length - 1][1], bound ?? 0) + 0.5, sums = map.trajectories.map((row) => row.reduce((sum, count) => sum + count, 0));
  const label = `${title}. ${shown.map(told).join(". ")}.` + (bound === null ? "" : ` The bound is ${bound}.`);
  const tell = (at) => {
    readout.textContent = at === null ? "" : `step ${figure(map.first[at])}: ` + map.rows.map((row, index) => [row, map.trajectories[at][index]]).filter(([, count]) => count).map(([row, count]) => `${figure(count)} of lag ${rowName(row)}`).join(", ");
  };
  responsive(host, (width) => {
    const area = axes(width, 210, [map.first[0], map.last[map.last.length - 1] + 1], [-0.5, top], label, true);
    const cells = Array.from({ length: SHADES + 1 }, () => []);
    map.first.forEach((step, at) => map.rows.forEach((row, index) => {
      const share = map.trajectories[at][index] / sums[at];
      if (!share) return;
      const left = area.x(step), high = area.y(row[1] + 0.5);
      cells[Math.round(SHADES * Math.sqrt(share))].push(rectangle(left, high, area.x(map.last[at] + 1) - left + 0.3, area.y(row[0] - 0.5) - high));
    }));
    cells.forEach((shade, index) => shade.length && area.root.append(draw("path", { class: "cell", d: shade.join(""), "fill-opacity": (0.1 + (0.75 * index) / SHADES).toFixed(3) })));
    if (bound !== null) area.root.append(draw("line", { class: "rule", x1: MARGIN.left, x2: area.right, y1: area.y(bound), y2: area.y(bound) }, draw("title", {}, `bound: ${bound}`)));
    for (const line of shown) area.root.append(draw("path", { class: "halo", d: polyline(line.xs, line.ys, area.x, area.y) }), ...strokes(line, area));
    explored(area.root, area, map.first, tell);
    return area.root;
  });
  return box;
}

function rowName([low, high]) {
  return low === high ? String(low) : `${low}-${high}`;
}

// In whole units, ten to a pixel: a page draws a thousand points each second, and fractions take five times as long.
function sparkline(values, label) {
  const root = draw("svg", { class: "spark", viewBox: "0 0 1100 220", role: "img", "aria-label": `${label}: last ${figure(values[values.length - 1])}` });
  const x = scale([0, Math.max(values.length - 1, 1)], [20, 1080]), y = scale([0, extent([values])[1] || 1], [200, 20]);
  const points = values.map((value, index) => `${Math.round(x(index))} ${Math.round(y(value))}`);
  root.append(draw("path", { class: "curve s0", d: `M${points.join("L")}` }));
  return root;
}

// columns: [heading, is a number]; rows: lists of texts, numbers or elements
function table(columns, rows, caption = "") {
  const cell = (tag, content, index) => make(tag, { ...(columns[index][1] ? { class: "number" } : {}), ...(tag === "th" ? { scope: "col" } : {}) }, content instanceof Node ? content : figure(content));
  const label = caption || columns.map(([heading]) => heading).join(", ");
  const of = (rows) => make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, make("table", {},
    make("thead", {}, make("tr", {}, columns.map(([heading], index) => cell("th", heading, index)))),
    make("tbody", {}, rows.map((row) => make("tr", {}, row.map((content, index) => cell("td", content, index)))))));
  const zeros = rows.filter(isOfZeros), others = rows.filter((row) => !isOfZeros(row));
  if (!zeros.length) return of(rows);
  const fold = make("details", { class: "zeros" }, make("summary", {}, `${zeros.length === 1 ? "1 row" : `${zeros.length} rows`} of zeros`), of(zeros));
  return make("div", {}, others.length ? of(others) : null, fold);
}

// Whether all that a row says beside its name is zero: a bar of no width and an unknown value say nothing.
function isOfZeros([, ...values]) {
  const said = values.map((value) => (value instanceof Node ? value.textContent : figure(value))).filter((text) => text !== "" && text !== "-");
  return said.length > 0 && said.every((text) => text === "0" || text === "0%");
}
