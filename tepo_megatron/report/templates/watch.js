"use strict";
// The live page: asks what has changed and draws it. Text of a run is only ever set as text, never as markup.
const SVG = "http://www.w3.org/2000/svg", MARGIN = { left: 52, right: 10, top: 6, bottom: 20 }, LEVELS = 4;

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
const swatch = (color) => { const made = el("i"); made.style.background = color; return made; };
const spans = (found) => found.map(([kind, text]) => el("span", { className: kind, textContent: text }));
const table = (heads, rows) => el("div", { className: "scroll" }, [el("table", {}, [
  el("thead", {}, [el("tr", {}, heads.map((textContent) => el("th", { textContent })))]),
  el("tbody", {}, rows.map((row) => el("tr", {}, row.map((textContent) => el("td", { textContent }))))),
])]);
const ask = async (path, options = {}) => {
  const query = new URLSearchParams(Object.entries(options).filter(([, value]) => value !== null && value !== ""));
  const answer = await fetch(`${path}?${query}`);
  if (!answer.ok) throw new Error((await answer.text()).slice(0, 300));
  const found = await answer.json();
  if (found.error) throw new Error(found.error);
  return found;
};

// ---- charts ----
// Maps values to numbers on a linear scale.
const scaleOf = (axis) => {
  const linear = axis.linear || 1;
  if (axis.scale === "log") return Math.log10;
  if (axis.scale === "symlog") return (v) => Math.sign(v) * (Math.abs(v) <= linear ? 0.5 * Math.abs(v) / linear : 0.5 + Math.log10(Math.abs(v) / linear));
  return (v) => v;
};
const limitsOf = (axis, scale) => {
  if (axis.limits) return axis.limits.map(scale);
  let low = Infinity, high = -Infinity;
  const see = (v) => { const at = v === null ? NaN : scale(v); if (Number.isFinite(at)) { low = Math.min(low, at); high = Math.max(high, at); } };
  for (const { kind, y } of axis.series) kind === "bar" ? y[0].forEach((v, i) => { see(v); see(v + (y[1][i] ?? 0)); }) : y.forEach((row) => row.forEach(see));
  for (const rule of axis.rules) see(rule.y);
  if (low > high) return [0, 1];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.06 || 0.5;
  return [low - room, high + room];
};
const nice = (low, high, most) => {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const size = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const found = [];
  for (let tick = Math.ceil(low / size) * size; tick <= high + 1e-9 * size; tick += size) found.push(Math.abs(tick) < size / 1e6 ? 0 : tick);
  return found;
};
const ticksOf = (axis, [low, high], height) => {
  const most = Math.max(2, Math.floor(height / 28));
  if (axis.scale === "log") {
    const every = Math.max(1, Math.ceil((high - low) / most));
    const powers = [];
    for (let power = Math.ceil(low - 1e-9); power <= high + 1e-9; power++) if (power % every === 0) powers.push(10 ** power);
    return powers.length > 1 ? powers : nice(10 ** low, 10 ** high, most).filter((tick) => tick > 0);
  }
  if (axis.scale === "symlog") {
    const first = Math.ceil(Math.log10(axis.linear) - 1e-9), last = Math.floor(Math.log10(axis.limits[1]) + 1e-9);
    const every = Math.max(1, Math.ceil((last - first + 1) / 2)), powers = [];
    for (let power = last; power >= first; power -= every) powers.push(10 ** power);
    return [...powers.map((v) => -v), 0, ...powers];
  }
  return nice(low, high, most);
};
const written = (value, format) => {
  if (format === "percent") return `${+(100 * value).toPrecision(3)}%`;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6 || format === "small")) return value.toExponential(size && Math.abs(+value.toPrecision(1) - value) > 1e-9 * size ? 1 : 0);
  return `${+value.toPrecision(4)}`;
};
const pathOf = (points) => {
  let path = "", pen = "M";
  for (const [x, y] of points) {
    if (Number.isFinite(y)) { path += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`; pen = "L"; } else pen = "M";
  }
  return path;
};

const drawAxis = (block, axis, xs) => {
  const { plot, svg, legend } = block, width = plot.clientWidth, height = plot.clientHeight;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const inner = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
  const scale = scaleOf(axis), [low, high] = limitsOf(axis, scale);
  const own = axis.series.map((series) => xs[series.x]).filter((x) => x.length);
  const first = Math.min(...own.map((x) => x[0])), last = Math.max(...own.map((x) => x.at(-1)));
  const room = 0.012 * (last - first) || 0.5, begin = first - room, end = last + room;
  const X = (step) => inner.left + (step - begin) / (end - begin) * (inner.right - inner.left);
  const Y = (v) => { const at = v === null ? NaN : scale(v); return inner.bottom - (at - low) / (high - low) * (inner.bottom - inner.top); };
  for (const tick of ticksOf(axis, [low, high], inner.bottom - inner.top)) {
    const y = Y(tick);
    if (!(y >= inner.top - 1 && y <= inner.bottom + 1)) continue;
    shape("line", { x1: inner.left, x2: inner.right, y1: y, y2: y, stroke: "var(--grid)" }, svg);
    shape("text", { x: inner.left - 6, y: y + 4, "text-anchor": "end" }, svg).textContent = written(tick, axis.format);
  }
  if (block.isLast) for (const tick of own.length ? nice(first, Math.max(last, first + 1), Math.max(2, width / 90)).filter(Number.isInteger) : []) {
    if (tick <= end) shape("text", { x: X(tick), y: height - 4, "text-anchor": "middle" }, svg).textContent = tick.toLocaleString("en");
  }
  const clip = shape("svg", { x: inner.left, y: inner.top, width: Math.max(0, inner.right - inner.left), height: Math.max(0, inner.bottom - inner.top), viewBox: `${inner.left} ${inner.top} ${inner.right - inner.left} ${inner.bottom - inner.top}`, overflow: "hidden" }, svg);
  for (const rule of axis.rules) shape("line", { x1: inner.left, x2: inner.right, y1: Y(rule.y), y2: Y(rule.y), stroke: rule.color, "stroke-dasharray": rule.label ? "5 3" : "1 3" }, clip);
  for (const series of [...axis.series].sort((a, b) => (b.under ?? false) - (a.under ?? false))) drawSeries(clip, series, xs[series.x], X, Y);
  block.listed = [{
    box: [inner.left / width, inner.top / height, inner.right / width, inner.bottom / height], limits: [begin, end], percent: axis.format === "percent",
    series: axis.series.map((s) => ({ label: s.label, color: s.color, x: xs[s.x], y: s.kind === "bar" ? [s.y[1]] : s.kind === "points" ? [s.y[0]] : s.y })),
  }];
  const named = new Map([...axis.series, ...axis.rules].filter((s) => s.label).map((s) => [s.label, s.color]));
  legend.replaceChildren(...[...named].map(([label, color]) => el("span", {}, [swatch(color), label])));
};
const drawSeries = (parent, { kind, color, dash, y }, x, X, Y) => {
  if (kind === "line") {
    const points = x.map((step, i) => [X(step), Y(y[0][i])]);
    const style = dash === "--" ? { "stroke-dasharray": "6 4" } : dash === ":" ? { "stroke-dasharray": "2 3" } : {};
    shape("path", { d: pathOf(points), fill: "none", stroke: color, "stroke-width": 1.6, "stroke-linejoin": "round", ...style }, parent);
    if (x.length <= 60) for (const [cx, cy] of points) if (Number.isFinite(cy)) shape("circle", { cx, cy, r: 2, fill: color }, parent);
  } else if (kind === "band") {
    const known = x.map((step, i) => [step, y[0][i], y[1][i]]).filter(([, a, b]) => a !== null && b !== null);
    const points = [...known.map(([s, a]) => [X(s), Y(a)]), ...known.reverse().map(([s, , b]) => [X(s), Y(b)])];
    if (points.length) shape("path", { d: `${pathOf(points)}Z`, fill: color, "fill-opacity": 0.22 }, parent);
  } else if (kind === "bar") {
    const edge = (i) => (X(x[Math.max(0, i - 1)]) + X(x[Math.min(x.length - 1, i)])) / 2, half = x.length > 1 ? (X(x[1]) - X(x[0])) / 2 : 20;
    let path = "";
    y[1].forEach((value, i) => {
      if (!value) return;
      const left = i ? edge(i) : X(x[0]) - half, right = i + 1 < x.length ? edge(i + 1) : X(x[i]) + half;
      path += `M${left.toFixed(1)} ${Y(y[0][i]).toFixed(1)}V${Y(y[0][i] + value).toFixed(1)}H${right.toFixed(1)}V${Y(y[0][i]).toFixed(1)}Z`;
    });
    shape("path", { d: path, fill: color }, parent);
  } else x.forEach((step, i) => {
    if (y[1][i] !== null) shape("line", { x1: X(step), x2: X(step), y1: Y(y[1][i]), y2: Y(y[2][i]), stroke: color, "stroke-width": 1.5 }, parent);
    if (y[0][i] !== null) shape("circle", { cx: X(step), cy: Y(y[0][i]), r: 4, fill: color }, parent);
  });
};

// A chart is drawn when it comes into view, and again when it has new values or another width.
const CHARTS = new Map(), shown = new Set();
const draw = (figure) => {
  const chart = CHARTS.get(figure);
  if (!chart.stale || !shown.has(figure)) return;
  chart.stale = false;
  chart.blocks.forEach((block, i) => drawAxis(block, chart.data.axes[i], chart.xs));
};
const inView = new IntersectionObserver((entries) => entries.forEach(({ target, isIntersecting }) => {
  isIntersecting ? shown.add(target) : shown.delete(target);
  draw(target);
}), { rootMargin: "300px" });
const resized = new ResizeObserver((entries) => entries.forEach(({ target }) => {
  CHARTS.get(target).stale = true;
  draw(target);
}));
const chartOf = (figure, data, xs) => {
  const blocks = data.axes.map((_, i) => {
    const block = { plot: el("div", { className: "plot", role: "img", ariaLabel: data.title }), legend: el("div", { className: "legend" }), isLast: i === data.axes.length - 1, listed: [] };
    block.svg = shape("svg", { "aria-hidden": "true" }, block.plot);
    followPointer(block.plot, () => block.listed);
    return block;
  });
  figure.className = `chart live${blocks.length > 1 ? " stacked" : ""}`;
  figure.replaceChildren(el("h3", { textContent: data.title }), ...blocks.flatMap(({ legend, plot }) => [legend, plot]), el("figcaption", { textContent: data.caption }));
  CHARTS.set(figure, { blocks, data, xs, stale: true });
  inView.observe(figure);
  resized.observe(figure);
};
const forget = (figure) => { inView.unobserve(figure); resized.unobserve(figure); CHARTS.delete(figure); shown.delete(figure); };
// Updates the charts of a grid. Those that are there stay, so that the page does not jump.
const update = (grid, charts, xs) => {
  const figures = [...grid.children];
  charts.forEach((data, i) => {
    const figure = figures[i] ?? grid.appendChild(el("figure")), chart = CHARTS.get(figure);
    if (chart && chart.data.title === data.title && chart.blocks.length === data.axes.length) Object.assign(chart, { data, xs, stale: true });
    else { if (chart) forget(figure); chartOf(figure, data, xs); }
    draw(figure);
  });
  figures.slice(charts.length).forEach((figure) => { forget(figure); figure.remove(); });
};

// ---- samples and tokens ----
const ORDERS = { recorded: "as recorded", best: "best first", worst: "worst first", longest: "longest first" };
class Samples {
  constructor(place) {
    this.path = `runs/${place}`;
    this.asked = { step: null, order: "recorded", page: 0 };
    const button = (textContent, act) => el("button", { type: "button", textContent, onclick: act });
    this.step = el("input", { type: "number", min: 1, ariaLabel: "step", onchange: () => this.go({ step: this.step.value || null, page: 0 }) });
    this.before = button("◀", () => this.go({ step: this.found.before, page: 0 }));
    this.after = button("▶", () => this.go({ step: this.found.after, page: 0 }));
    this.newest = button("newest", () => this.go({ step: null, page: 0 }));
    this.order = el("select", { ariaLabel: "order", onchange: () => this.go({ order: this.order.value, page: 0 }) },
      Object.entries(ORDERS).map(([value, textContent]) => el("option", { value, textContent })));
    this.back = button("earlier samples", () => this.go({ page: this.found.page - 1 }));
    this.next = button("more samples", () => this.go({ page: this.found.page + 1 }));
    this.where = el("span");
    this.list = el("div", { className: "samples" });
    this.notes = el("div");
    this.controls = el("div", { className: "controls", hidden: true }, [
      el("label", {}, ["step", this.before, this.step, this.after]), this.newest, this.order, this.back, this.next, this.where]);
    this.open = button("show samples", () => this.go({}));
    this.root = el("div", {}, [this.open, this.notes, this.controls, this.list]);
  }
  async go(change) {
    Object.assign(this.asked, change);
    this.open.disabled = true;
    this.open.textContent = "reading …";
    try {
      this.found = await ask(`${this.path}/samples`, this.asked);
    } catch (error) {
      this.notes.replaceChildren(el("p", { className: "note error", textContent: error.message }));
      this.open.disabled = false;
      this.open.textContent = "try again";
      return;
    }
    const f = this.found;
    this.open.hidden = true;
    this.notes.replaceChildren(...f.notes.map((textContent) => el("p", { className: "note", textContent })));
    this.controls.hidden = !f.steps;
    if (!f.steps) return;
    this.step.value = f.step;
    this.before.disabled = f.before === null;
    this.after.disabled = f.after === null;
    this.back.disabled = f.page <= 0;
    this.next.disabled = f.page + 1 >= f.pages;
    this.where.textContent = `page ${f.page + 1} of ${f.pages.toLocaleString("en")}, mean reward ${f.mean ?? "–"}`;
    this.list.replaceChildren(...f.samples.map((it) => this.sample(it, f.step)));
  }
  sample(it, step) {
    const response = el("pre", { dir: "auto" }, spans(it.response)), place = el("div", {}, [response]);
    const open = el("button", { type: "button", textContent: "tokens with their numbers" });
    const card = el("details", { className: "sample", open: true }, [
      el("summary", {}, [el("b", { textContent: it.title }), el("mark", { className: it.right ? "right" : "wrong", textContent: it.facts[0] }),
        ...it.facts.slice(1).map((textContent) => el("small", { textContent }))]),
      el("pre", { className: "asked", dir: "auto" }, spans(it.prompt)), place,
      ...(it.answer.length ? [el("p", {}, ["gold answer ", el("code", { dir: "auto" }, spans(it.answer))])] : []),
      el("div", { className: "controls" }, [open])]);
    open.onclick = () => { open.disabled = true; card.classList.add("opened"); this.tokens(place, step, it.place, 0).finally(() => open.remove()); };
    return card;
  }
  async tokens(place, step, sample, first) {
    let found;
    try {
      found = await ask(`${this.path}/tokens`, { step, place: sample, first });
    } catch (error) {
      place.append(el("p", { className: "note error", textContent: error.message }));
      return;
    }
    const text = el("pre", { dir: "auto" }), numbers = el("div", { className: "numbers", ariaLive: "polite" }), names = Object.keys(found.numbers);
    const key = el("span", { className: "note" });
    const cells = found.tokens.map((token) => el("span", { className: "token", role: "button", tabIndex: -1 }, spans(token)));
    if (cells.length) cells[0].tabIndex = 0;
    const by = el("select", { ariaLabel: "colour by", onchange: () => color() }, names.map((value) => el("option", { value, textContent: value })));
    const color = () => {
      const center = by.value === "ratio" ? 1 : 0, values = found.numbers[by.value] ?? [];
      const largest = Math.max(...values.map((v) => Math.abs((v ?? center) - center)), 0);
      cells.forEach((cell, i) => {
        const value = (values[i] ?? center) - center;
        cell.classList.remove(...[...cell.classList].filter((name) => /^(up|down)\d$/.test(name)));
        if (value && largest) cell.classList.add(`${value > 0 ? "up" : "down"}${Math.max(1, Math.round(LEVELS * Math.abs(value) / largest))}`);
      });
      key.textContent = largest ? `green: above ${center}, red: below, strongest at ${center} ± ${+largest.toPrecision(3)}` : `all are ${center}`;
    };
    const show = (i) => {
      cells.forEach((cell, j) => { cell.classList.toggle("chosen", i === j); cell.tabIndex = i === j ? 0 : -1; });
      const printed = el("pre", { className: "audit", hidden: true });
      const name = `--token ${found.sequence}:${first + i}`;
      const audit = el("button", { type: "button", textContent: `tepo audit --step ${step} ${name}`, disabled: found.sequence === null });
      audit.onclick = () => this.audit(audit, printed, step, `${found.sequence}:${first + i}`);
      numbers.replaceChildren(`token ${first + i}, id ${found.ids[i]}`,
        table(["", "value"], names.map((one) => [one, found.numbers[one][i] ?? "–"])), el("div", { className: "controls" }, [audit]), printed);
      if (found.sequence !== null) audit.click();
      else audit.parentElement.replaceWith(el("p", { className: "note", textContent: found.note }));
    };
    cells.forEach((cell, i) => { cell.onclick = () => show(i); });
    text.onkeydown = (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, Enter: 0, " ": 0 }[event.key], from = cells.indexOf(event.target);
      if (move === undefined || from < 0) return;
      event.preventDefault();
      const to = Math.min(cells.length - 1, Math.max(0, from + move));
      if (move) { cells[from].tabIndex = -1; cells[to].tabIndex = 0; cells[to].focus(); } else show(to);
    };
    text.append(...cells);
    const turn = (textContent, to, disabled) => el("button", { type: "button", textContent, disabled, onclick: () => this.tokens(place, step, sample, to) });
    const size = Math.max(1, found.tokens.length), paged = found.count > size || first;
    place.replaceChildren(el("div", { className: "controls" }, [el("label", {}, ["colour by", by]), key,
      ...(paged ? [turn("earlier tokens", Math.max(0, first - 1000), !first), turn("later tokens", first + size, first + size >= found.count), `tokens ${first} to ${first + size - 1} of ${found.count}`] : [])]),
      ...(found.note ? [el("p", { className: "note", textContent: found.note })] : []), el("div", { className: "split" }, [text, numbers]));
    color();
  }
  async audit(button, printed, step, token) {
    button.disabled = true;
    printed.hidden = false;
    printed.textContent = "auditing …";
    try {
      printed.textContent = (await ask(`${this.path}/audit`, { step, token })).text;
    } catch (error) {
      printed.textContent = error.message;
    }
    button.disabled = false;
  }
}

// ---- runs ----
const RUNS = new Map(), main = document.getElementById("runs"), contents = document.getElementById("contents"), state = document.getElementById("state");
const section = (name, id, children) => el("section", { id }, [el("h2", { textContent: name }), ...children]);
const makeRun = (place) => {
  const run = { head: el("header"), charts: el("div"), servers: el("div"), figures: el("div"), samples: new Samples(place) };
  const id = `run-${place}`;
  run.article = el("article", { id }, [run.head, run.servers, run.charts, section("Samples", `${id}-samples`, [run.samples.root]), run.figures]);
  run.link = el("a", { href: `#${id}` });
  contents.append(run.link);
  main.append(run.article);
  RUNS.set(place, run);
  return run;
};
const ago = (seconds) => seconds < 90 ? `${Math.round(seconds)} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
const sayState = (run) => {
  if (!run.state) return;
  const { ended, written: last } = run.state, now = Date.now() / 1000 - run.offset;
  run.dot.className = `dot ${ended ? "ended" : last !== null ? "running" : ""}`;
  run.said.textContent = ended ? "ended" : last === null ? "no step yet" : `last step ${ago(Math.max(0, now - last))} ago`;
};
const showRun = (place, data) => {
  const run = RUNS.get(place) ?? makeRun(place);
  run.link.replaceChildren(swatch(data.color), data.name);
  run.state = data.state;
  run.offset = Date.now() / 1000 - data.state.now;
  run.dot = el("span", { className: "dot" });
  run.said = el("span");
  run.head.replaceChildren(el("h1", { textContent: data.name }), el("p", { className: "facts" }, [el("span", {}, [run.dot, run.said]), ...data.facts.map((textContent) => el("span", { textContent }))]),
    ...data.notes.map((textContent) => el("p", { className: "note", textContent })));
  sayState(run);
  run.servers.replaceChildren(...(data.servers.length ? [section("Servers", `run-${place}-servers`, [table(["", "state", "most requests at once", "tokens per second", "restarts"], data.servers)])] : []));
  data.sections.forEach((found, i) => {
    const id = `run-${place}-${i}`, grid = document.getElementById(id)?.querySelector(".charts") ?? run.charts.appendChild(section(found.name, id, [el("div", { className: "charts" })])).querySelector(".charts");
    update(grid, found.charts, data.x);
  });
  run.figures.replaceChildren(...(data.table.length ? [section("Figures", `run-${place}-figures`, [table(["", "first", "at the end", "lowest", "highest"], data.table)])] : []));
};
const showComparison = ({ charts, x }) => {
  let grid = document.querySelector("#comparison .charts");
  if (!grid) {
    grid = el("div", { className: "charts many" });
    main.prepend(el("article", { id: "comparison" }, [el("header", {}, [el("h1", { textContent: "Runs side by side" })]), grid]));
    contents.querySelector("strong").after(el("a", { href: "#comparison", textContent: "Side by side" }));
  }
  update(grid, charts, x);
};

let seen = [], began = performance.now();
const look = async () => {
  let wait = 5;
  try {
    const found = await ask("runs", { seen: seen.join(",") });
    wait = found.wait;
    if (!seen.length) main.replaceChildren();
    for (const [place, data] of Object.entries(found.runs)) showRun(+place, data);
    if (found.comparison) showComparison(found.comparison);
    if (!seen.length) requestAnimationFrame(() => { document.body.dataset.drawn = Math.round(performance.now()); });
    seen = found.versions;
    state.textContent = "";
    document.title = `${[...RUNS.values()].map((run) => run.link.textContent).join(", ")} – tepo watch`;
  } catch (error) {
    state.textContent = `No answer from tepo watch (${error.message}); asking again.`;
  }
  RUNS.forEach(sayState);
  setTimeout(() => document.hidden ? addEventListener("visibilitychange", look, { once: true }) : look(), 1000 * wait);
};
look();
