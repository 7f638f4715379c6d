"use strict";
// Draws the charts of chart.py. `xs` are the lists of steps that their series name by index.
// Text is only ever set as text, never as markup.
const SVG = "http://www.w3.org/2000/svg", MARGIN = { left: 52, right: 10, top: 6, bottom: 20 };

const el = (tag, options = {}, children = []) => {
  const made = Object.assign(document.createElement(tag), options);
  made.append(...children);
  return made;
};
const shape = (tag, attributes, parent) => {
  const made = parent.appendChild(document.createElementNS(SVG, tag));
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
};
const swatch = (color) => {
  const made = el("i");
  made.style.background = color;
  return made;
};

const table = (heads, rows) => el("div", { className: "scroll" }, [el("table", {}, [
  el("thead", {}, [el("tr", {}, heads.map((textContent) => el("th", { textContent })))]),
  el("tbody", {}, rows.map((row) => el("tr", {}, row.map((textContent) => el("td", { textContent }))))),
])]);
// Lets a click, or the arrow keys and Enter, choose one of the tokens in `parent`. `atOnce`: an arrow chooses, too.
const chooseToken = (parent, cells, show, atOnce) => {
  const focus = (to) => cells.forEach((cell, i) => { cell.tabIndex = i === to ? 0 : -1; });
  const choose = (to) => {
    cells.forEach((cell, i) => cell.classList.toggle("chosen", i === to));
    focus(to);
    show(to);
  };
  focus(0);
  cells.forEach((cell, i) => { cell.onclick = () => choose(i); });
  parent.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Enter: 0, " ": 0 }[event.key], from = cells.indexOf(event.target);
    if (move === undefined || from < 0) return;
    event.preventDefault();
    const to = Math.min(cells.length - 1, Math.max(0, from + move));
    (atOnce || !move ? choose : focus)(to);
    cells[to].focus();
  });
};

// Lists the values at the step under the pointer. `read` returns what the plot shows, or nothing.
const followPointer = (plot, read) => {
  const rule = plot.appendChild(el("div", { className: "rule" })), tip = plot.appendChild(el("div", { className: "tip" }));
  const hide = () => { rule.hidden = tip.hidden = true; };
  hide();
  const written = (value, percent) => value === null ? "–" : percent ? `${+(100 * value).toPrecision(4)}%` : `${value}`;
  const nearest = (steps, step) => {
    let best = 0;
    steps.forEach((s, i) => { if (Math.abs(s - step) < Math.abs(steps[best] - step)) best = i; });
    return best;
  };
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("pointermove", (event) => {
    const axis = read(), area = plot.getBoundingClientRect();
    if (!axis?.series.length) return;
    const [left, top, right, bottom] = axis.box, [low, high] = axis.limits;
    const x = (event.clientX - area.left) / area.width, y = (event.clientY - area.top) / area.height;
    if (x < left || x > right || y < top || y > bottom) return hide();
    const asked = low + (x - left) / (right - left) * (high - low);
    const steps = axis.series.map((s) => s.x[nearest(s.x, asked)]);
    const step = steps[nearest(steps, asked)], place = left + (step - low) / (high - low) * (right - left);
    const rows = axis.series.filter((s) => s.x.includes(step)).map(({ label, color, x: steps, y: values }) => {
      const shown = values.map((row) => written(row[steps.indexOf(step)], axis.percent)).join(" … ");
      return el("div", {}, [swatch(color), label, el("b", { textContent: shown })]);
    });
    tip.replaceChildren(`step ${step}`, ...rows);
    rule.hidden = tip.hidden = false;
    Object.assign(rule.style, { left: `${100 * place}%`, top: `${100 * top}%`, height: `${100 * (bottom - top)}%` });
    const toTheRight = { left: `calc(${100 * place}% + 10px)`, right: "auto" };
    const toTheLeft = { left: "auto", right: `calc(${100 * (1 - place)}% + 10px)` };
    Object.assign(tip.style, place < 0.5 ? toTheRight : toTheLeft, { top: `${100 * top}%` });
  });
};

// Returns the function from values to places on a linear axis; a missing value has none.
const scaleOf = ({ scale, linear }) => {
  const outside = (size) => size <= linear ? 0.5 * size / linear : 0.5 + Math.log10(size / linear);
  const place = { log: Math.log10, symlog: (v) => Math.sign(v) * outside(Math.abs(v)) }[scale] ?? ((v) => v);
  return (value) => value === null ? NaN : place(value);
};

const limitsOf = (axis, place) => {
  if (axis.limits) return axis.limits.map(place);
  let low = Infinity, high = -Infinity;
  const see = (value) => {
    const at = place(value);
    if (Number.isFinite(at)) [low, high] = [Math.min(low, at), Math.max(high, at)];
  };
  for (const { y } of axis.series) for (const row of y) row.forEach(see);
  for (const rule of axis.rules) see(rule.y);
  if (low > high) return [0, 1];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.06 || 0.5;
  return [low - room, high + room];
};

const niceTicks = (low, high, most) => {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const size = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / size); i * size <= high + 1e-9 * size; i++) found.push(i * size || 0); // -0 is 0
  return found;
};
const powersOfTen = (first, last, every) => {
  const found = [];
  for (let power = last; power >= first; power -= every) found.unshift(10 ** power);
  return found;
};
const ticksOf = (axis, [low, high], height) => {
  const most = Math.max(2, Math.floor(height / 28));
  if (axis.scale === "log") {
    const first = Math.ceil(low - 1e-9), last = Math.floor(high + 1e-9);
    const powers = powersOfTen(first, last, Math.max(1, Math.ceil((last - first) / most)));
    return powers.length > 1 ? powers : niceTicks(10 ** low, 10 ** high, most).filter((tick) => tick > 0);
  }
  if (axis.scale === "symlog") {
    const first = Math.ceil(Math.log10(axis.linear) - 1e-9), last = Math.floor(Math.log10(axis.limits[1]) + 1e-9);
    const powers = powersOfTen(first, last, Math.max(1, Math.ceil((last - first + 1) / 2)));
    return [...powers.map((v) => -v), 0, ...powers];
  }
  return niceTicks(low, high, most);
};
const tickText = (value, format) => {
  const round = +value.toPrecision(4) || 0, size = Math.abs(round); // -0 is 0
  if (format === "percent") return `${+(100 * round).toPrecision(3)}%`;
  const plain = !size || (size >= 1e-3 && size < 1e6 && format !== "small");
  return plain ? `${round}` : round.toExponential().replace("e+", "e");
};

const pathOf = (points) => {
  let path = "", pen = "M";
  for (const [x, y] of points) {
    if (Number.isFinite(y)) path += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
    pen = Number.isFinite(y) ? "L" : "M";
  }
  return path;
};
const DRAW = {
  line(parent, { color, dash, width, y }, x, X, Y) {
    const dashes = { "--": "6 4", ":": "2 3", "-.": "6 3 2 3" }[dash];
    const points = x.map((step, i) => [X(step), Y(y[0][i])]), known = points.filter(([, at]) => Number.isFinite(at));
    const style = { fill: "none", stroke: color, "stroke-width": width, "stroke-dasharray": dashes ?? "none" };
    shape("path", { d: pathOf(points), ...style }, parent);
    if (x.length > 60 && known.length > 1) return; // a single point has no line
    for (const [cx, cy] of known) shape("circle", { cx, cy, r: 2, fill: color }, parent);
  },
  band(parent, { color, opacity, y }, x, X, Y) {
    const known = x.map((step, i) => [X(step), Y(y[0][i]), Y(y[1][i])]).filter(([, a, b]) => Number.isFinite(a + b));
    if (!known.length) return;
    const edge = [...known.map(([s, a]) => [s, a]), ...known.reverse().map(([s, , b]) => [s, b])];
    shape("path", { d: `${pathOf(edge)}Z`, fill: color, "fill-opacity": opacity }, parent);
  },
  bar(parent, { color, y }, x, X, Y) {
    const middles = x.slice(1).map((step, i) => (X(x[i]) + X(step)) / 2), half = x.length > 1 ? middles[0] - X(x[0]) : 20;
    const sides = [X(x[0]) - half, ...middles, X(x.at(-1)) + half].map((side) => side.toFixed(1));
    const bar = (top, i) => {
      const [from, to] = [y[0][i], top].map((value) => Y(value).toFixed(1));
      return top > y[0][i] ? `M${sides[i]} ${from}V${to}H${sides[i + 1]}V${from}Z` : "";
    };
    shape("path", { d: y[1].map(bar).join(""), fill: color }, parent);
  },
  points(parent, { color, y }, x, X, Y) {
    x.forEach((step, i) => {
      shape("line", { x1: X(step), x2: X(step), y1: Y(y[1][i]), y2: Y(y[2][i]), stroke: color, "stroke-width": 1.5 }, parent);
      shape("circle", { cx: X(step), cy: Y(y[0][i]), r: 4, fill: color }, parent);
    });
  },
};

// Draws values with their error bars in rows, along a horizontal axis.
const drawRows = ({ svg }, axis, width, height) => {
  const values = axis.series.flatMap(({ y }) => y.flat()), low = Math.min(...values), high = Math.max(...values);
  const room = 0.1 * (high - low) || 0.05, begin = low - room, end = high + room;
  const left = MARGIN.right, right = width - MARGIN.right, bottom = height - MARGIN.bottom;
  const X = (value) => left + (value - begin) / (end - begin) * (right - left);
  for (const tick of niceTicks(begin, end, Math.max(2, width / 90))) {
    shape("line", { x1: X(tick), x2: X(tick), y1: 0, y2: bottom, stroke: "var(--grid)" }, svg);
    const made = shape("text", { x: X(tick), y: height - 4, "text-anchor": "middle" }, svg);
    made.textContent = tickText(tick, axis.format);
  }
  axis.series.forEach(({ label, color, y: [[mean], [least], [most]] }, i) => {
    const y = (i + 0.65) / axis.series.length * bottom;
    shape("text", { x: left, y: y - 12 }, svg).textContent = label;
    shape("text", { x: right, y: y - 12, "text-anchor": "end" }, svg).textContent = `${(100 * mean).toFixed(1)}%`;
    shape("line", { x1: X(least), x2: X(most), y1: y, y2: y, stroke: color, "stroke-width": 1.8 }, svg);
    shape("circle", { cx: X(mean), cy: y, r: 4, fill: color }, svg);
  });
};

let clips = 0;
const drawAxis = (block, axis, xs, planned) => {
  const { plot, svg, legend } = block, width = plot.clientWidth, height = plot.clientHeight;
  const left = MARGIN.left, right = width - MARGIN.right, top = MARGIN.top, bottom = height - MARGIN.bottom;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  if (axis.across) return drawRows(block, axis, width, height);
  const place = scaleOf(axis), [low, high] = limitsOf(axis, place);
  const lists = axis.series.map((s) => xs[s.x]).filter((x) => x.length);
  const first = planned ? 0 : Math.min(...lists.map((x) => x[0]));
  const last = Math.max(planned ?? 0, ...lists.map((x) => x.at(-1)));
  const room = 0.012 * (last - first) || 0.5, begin = first - room, end = last + room;
  const X = (step) => left + (step - begin) / (end - begin) * (right - left);
  const Y = (value) => bottom - (place(value) - low) / (high - low) * (bottom - top);
  for (const tick of ticksOf(axis, [low, high], bottom - top)) {
    const y = Y(tick);
    if (!(y >= top - 1 && y <= bottom + 1)) continue;
    shape("line", { x1: left, x2: right, y1: y, y2: y, stroke: "var(--grid)" }, svg);
    shape("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, svg).textContent = tickText(tick, axis.format);
  }
  const steps = block.isLast && lists.length ? niceTicks(begin, end, Math.max(2, width / 90)).filter(Number.isInteger) : [];
  for (const step of steps) {
    shape("text", { x: X(step), y: height - 4, "text-anchor": "middle" }, svg).textContent = step.toLocaleString("en");
  }
  const id = `clip-${++clips}`, clip = shape("clipPath", { id }, svg);
  shape("rect", { x: left, y: top - 2, width: Math.max(0, right - left), height: Math.max(0, bottom - top + 4) }, clip);
  const inside = shape("g", { "clip-path": `url(#${id})` }, svg);
  for (const { y, color, label } of axis.rules) {
    const style = { stroke: color, "stroke-dasharray": label ? "5 3" : "1 3" };
    shape("line", { x1: left, x2: right, y1: Y(y), y2: Y(y), ...style }, inside);
  }
  for (const series of axis.series) DRAW[series.kind](inside, series, xs[series.x], X, Y);
  const values = { bar: ({ y }) => [y[1].map((v, i) => v - y[0][i])], points: ({ y }) => [y[0]] };
  const listed = (s) => ({ label: s.label, color: s.color, x: xs[s.x], y: (values[s.kind] ?? ((it) => it.y))(s) });
  block.listed = {
    box: [left / width, top / height, right / width, bottom / height],
    limits: [begin, end],
    percent: axis.format === "percent",
    series: axis.series.filter((s) => s.label).map(listed),
  };
  const named = new Map([...axis.series, ...axis.rules].filter((s) => s.label).map((s) => [s.label, s.color]));
  legend.replaceChildren(...[...named].map(([label, color]) => el("span", {}, [swatch(color), label])));
};

// A chart is drawn when it comes into view, and again when it has new values or another width.
const CHARTS = new Map(), inWindow = new Set();
const draw = (figure) => {
  const chart = CHARTS.get(figure);
  if (!chart?.stale || !inWindow.has(figure)) return;
  chart.stale = false;
  chart.width = figure.clientWidth;
  chart.blocks.forEach((block, i) => drawAxis(block, chart.data.axes[i], chart.xs, chart.data.end));
};
const views = new IntersectionObserver((entries) => entries.forEach(({ target, isIntersecting }) => {
  inWindow[isIntersecting ? "add" : "delete"](target);
  draw(target);
}), { rootMargin: "300px" });
const sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => {
  const chart = CHARTS.get(target);
  if (!chart || chart.width === target.clientWidth) return;
  chart.stale = true;
  draw(target);
}));
addEventListener("beforeprint", () => CHARTS.forEach((_, figure) => {
  inWindow.add(figure);
  draw(figure);
}));
const forget = (figure) => {
  views.unobserve(figure);
  sizes.unobserve(figure);
  CHARTS.delete(figure);
  inWindow.delete(figure);
};
const makeChart = (figure, data, xs) => {
  const blocks = data.axes.map((_, i) => {
    const block = { plot: el("div", { className: "plot", role: "img", ariaLabel: data.title }), listed: null };
    block.legend = el("div", { className: "legend" });
    block.isLast = i === data.axes.length - 1;
    block.svg = shape("svg", { "aria-hidden": "true" }, block.plot);
    followPointer(block.plot, () => block.listed);
    if (data.axes[i].across) block.plot.style.height = `${40 + 44 * data.axes[i].series.length}px`;
    return block;
  });
  figure.className = `chart${blocks.length > 1 ? " stacked" : ""}`;
  figure.replaceChildren(el("h3", { textContent: data.title }), ...blocks.flatMap(({ legend, plot }) => [legend, plot]),
    el("figcaption", { textContent: data.caption }));
  CHARTS.set(figure, { blocks, data, xs, stale: true });
  views.observe(figure);
  sizes.observe(figure);
};

// Shows charts in a grid. Those that are there are drawn again, so that the page does not jump.
const showCharts = (grid, charts, xs) => {
  const figures = [...grid.children];
  charts.forEach((data, i) => {
    const figure = figures[i] ?? grid.appendChild(el("figure")), chart = CHARTS.get(figure);
    if (chart?.data.title === data.title && chart.blocks.length === data.axes.length) {
      Object.assign(chart, { data, xs, stale: true });
      draw(figure);
    } else {
      forget(figure);
      makeChart(figure, data, xs);
    }
  });
  figures.slice(charts.length).forEach((figure) => { forget(figure); figure.remove(); });
};
