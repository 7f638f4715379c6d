"use strict";
// The live page: asks what has changed and shows it. Text of a run is only ever set as text, never as markup.
const LEVELS = 4, TOKENS = 1000; // shades of a colour; tokens of a page

const spans = (found) => found.map(([kind, text]) => el("span", { className: kind, textContent: text }));
const note = (textContent, kind = "") => el("p", { className: `note ${kind}`, textContent });
const button = (textContent, onclick, disabled = false) => el("button", { type: "button", textContent, onclick, disabled });
const ask = async (path, options = {}) => {
  const query = new URLSearchParams(Object.entries(options).filter(([, value]) => value !== null && value !== ""));
  const answer = await fetch(`${path}?${query}`);
  if (!answer.ok) throw new Error((await answer.text()).slice(0, 300));
  const found = await answer.json();
  if (found.error) throw new Error(found.error);
  return found;
};

// The tokens of one sample, coloured by one of their numbers; a click audits a token.
class Tokens {
  constructor(path, place, step, sample) {
    Object.assign(this, { path, place, step, sample });
  }
  async show(first) {
    try {
      this.found = await ask(`${this.path}/tokens`, { step: this.step, place: this.sample, first });
    } catch (error) {
      this.place.append(note(error.message, "error"));
      return;
    }
    const { tokens, numbers, count } = this.found;
    this.names = Object.keys(numbers);
    this.numbers = el("div", { className: "numbers", ariaLive: "polite" });
    this.key = el("span");
    this.cells = tokens.map((token) => el("span", { className: "token", role: "button", tabIndex: -1 }, spans(token)));
    this.by = el("select", { ariaLabel: "colour by", onchange: () => this.color() },
      this.names.map((value) => el("option", { value, textContent: value })));
    const text = el("pre", { dir: "auto" }, this.cells), end = first + tokens.length;
    chooseToken(text, this.cells, (i) => this.choose(i), false);
    const pages = count > tokens.length ? [
      button("earlier tokens", () => this.show(Math.max(0, first - TOKENS)), !first),
      button("later tokens", () => this.show(end), end >= count),
      `tokens ${first} to ${end - 1} of ${count}`] : [];
    const controls = el("div", { className: "controls" }, [el("label", {}, ["colour by", this.by]), this.key, ...pages]);
    this.place.replaceChildren(controls,
      ...(this.found.note ? [note(this.found.note)] : []), el("div", { className: "split" }, [text, this.numbers]));
    this.color();
  }
  color() {
    const center = this.by.value === "ratio" ? 1 : 0;
    const values = (this.found.numbers[this.by.value] ?? []).map((value) => (value ?? center) - center);
    const largest = values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
    this.cells.forEach((cell, i) => {
      cell.classList.remove(...[...cell.classList].filter((name) => /^(up|down)\d$/.test(name)));
      const level = largest ? Math.max(1, Math.round(LEVELS * Math.abs(values[i]) / largest)) : 0;
      if (values[i]) cell.classList.add(`${values[i] > 0 ? "up" : "down"}${level}`);
    });
    const shades = `green: above ${center}, red: below, darkest at ± ${+largest.toPrecision(3)}`;
    this.key.textContent = largest ? shades : `all are ${center}`;
  }
  choose(i) {
    const { sequence, first, ids, numbers } = this.found;
    const rows = this.names.map((name) => [name, numbers[name][i] ?? "–"]);
    this.numbers.replaceChildren(`token ${first + i}, id ${ids[i]}`, table(["", "value"], rows));
    if (sequence !== null) this.audit(`${sequence}:${first + i}`);
  }
  async audit(token) {
    const printed = el("pre", { className: "audit", textContent: "auditing …" });
    this.numbers.append(el("p", {}, [el("code", { textContent: `tepo audit --step ${this.step} --token ${token}` })]), printed);
    try {
      printed.textContent = (await ask(`${this.path}/audit`, { step: this.step, token })).text;
    } catch (error) {
      printed.textContent = error.message;
    }
  }
}

// The samples of one run, some of one step at a time.
const ORDERS = { recorded: "as recorded", best: "best first", worst: "worst first", longest: "longest first" };
class Samples {
  constructor(path) {
    this.path = path;
    this.asked = { step: null, order: "recorded", page: 0 };
    const to = (change) => this.go({ page: 0, ...change() });
    const typed = () => to(() => ({ step: this.step.value || null }));
    this.step = el("input", { type: "number", min: 1, ariaLabel: "step", onchange: typed });
    this.before = button("◀", () => to(() => ({ step: this.found.before })));
    this.after = button("▶", () => to(() => ({ step: this.found.after })));
    this.order = el("select", { ariaLabel: "order", onchange: () => to(() => ({ order: this.order.value })) },
      Object.entries(ORDERS).map(([value, textContent]) => el("option", { value, textContent })));
    this.back = button("earlier samples", () => to(() => ({ page: this.found.page - 1 })));
    this.next = button("more samples", () => to(() => ({ page: this.found.page + 1 })));
    this.where = el("span");
    this.list = el("div", { className: "samples" });
    this.notes = el("div");
    const newest = button("newest", () => to(() => ({ step: null })));
    this.controls = el("div", { className: "controls", hidden: true }, [
      el("label", {}, ["step", this.before, this.step, this.after]), newest, this.order, this.back, this.next, this.where]);
    this.open = button("show samples", () => this.go({}));
    this.root = el("div", {}, [this.open, this.notes, this.controls, this.list]);
  }
  async go(change) {
    Object.assign(this.asked, change);
    this.root.ariaBusy = "true";
    try {
      this.found = await ask(`${this.path}/samples`, this.asked);
      this.show();
    } catch (error) {
      this.notes.replaceChildren(note(error.message, "error"));
    }
    this.root.ariaBusy = "false";
  }
  show() {
    const { steps, step, before, after, page, pages, mean, notes, samples } = this.found;
    this.open.hidden = steps > 0;
    this.controls.hidden = !steps;
    this.notes.replaceChildren(...notes.map((text) => note(text)));
    if (!steps) return;
    this.step.value = step;
    this.before.disabled = before === null;
    this.after.disabled = after === null;
    this.back.disabled = page <= 0;
    this.next.disabled = page + 1 >= pages;
    this.where.textContent = `page ${page + 1} of ${pages.toLocaleString("en")}, mean reward ${mean ?? "–"}`;
    this.list.replaceChildren(...samples.map((it) => this.card(it, step)));
  }
  card(it, step) {
    const text = el("div", {}, [el("pre", { dir: "auto" }, spans(it.response))]);
    const open = button("tokens with their numbers", () => {
      open.parentElement.remove();
      card.classList.add("opened");
      new Tokens(this.path, text, step, it.place).show(0);
    });
    const reward = el("mark", { className: it.right ? "right" : "wrong", textContent: it.facts[0] });
    const facts = it.facts.slice(1).map((textContent) => el("small", { textContent }));
    const card = el("details", { className: "sample", open: true }, [
      el("summary", {}, [el("b", { textContent: it.title }), reward, ...facts]),
      ...(it.prompt.length ? [el("pre", { className: "asked", dir: "auto" }, spans(it.prompt))] : []), text,
      ...(it.answer.length ? [el("p", {}, ["gold answer ", el("code", { dir: "auto" }, spans(it.answer))])] : []),
      el("div", { className: "controls" }, [open])]);
    return card;
  }
}

// The runs.
const RUNS = new Map(), [main, contents, state] = ["runs", "contents", "state"].map((id) => document.getElementById(id));
const section = (name, id, children) => el("section", { id }, [el("h2", { textContent: name }), ...children]);
const makeRun = (place) => {
  const id = `run-${place}`, run = { id, samples: new Samples(`runs/${place}`), link: el("a", { href: `#${id}` }) };
  for (const part of ["servers", "charts", "figures"]) run[part] = el("div");
  run.head = el("header");
  const samples = section("Samples", `${id}-samples`, [run.samples.root]);
  main.append(el("article", { id }, [run.head, run.servers, run.charts, samples, run.figures]));
  contents.append(run.link);
  RUNS.set(place, run);
  return run;
};
const ago = (seconds) => {
  const [size, unit] = seconds < 90 ? [1, "s"] : seconds < 5400 ? [60, "min"] : [3600, "h"];
  return `${Math.round(seconds / size)} ${unit}`;
};
const sayState = ({ state: { ended, died, written, now }, asked, dot, said }) => {
  dot.className = `dot ${ended ? "ended" : died ? "died" : written === null ? "" : "running"}`;
  const passed = now - written + (performance.now() - asked) / 1000;
  const step = written === null ? "no step yet" : `last step ${ago(Math.max(0, passed))} ago`;
  said.textContent = ended ? "ended" : died ? `not running (${step}); tepo resume goes on` : step;
};
const showRun = (place, data) => {
  const run = RUNS.get(place) ?? makeRun(place);
  const [dot, said] = [el("span", { className: "dot" }), el("span")];
  Object.assign(run, { state: data.state, asked: performance.now(), dot, said });
  run.link.replaceChildren(swatch(data.color), data.name);
  const facts = data.facts.map((textContent) => el("span", { textContent }));
  run.head.replaceChildren(
    el("h1", { textContent: data.name }),
    el("p", { className: "facts" }, [el("span", {}, [dot, said]), ...facts]),
    ...data.notes.map((text) => note(text)));
  sayState(run);
  const servers = table(["", "state", "most requests at once", "tokens per second", "restarts"], data.servers);
  run.servers.replaceChildren(...(data.servers.length ? [section("Servers", `${run.id}-servers`, [servers])] : []));
  const figures = table(["", "first", "at the end", "lowest", "highest"], data.table);
  run.figures.replaceChildren(...(data.table.length ? [section("Figures", `${run.id}-figures`, [figures])] : []));
  data.sections.forEach(({ name, charts }, i) => {
    const made = () => section(name, `${run.id}-${i}`, [el("div", { className: "charts" })]);
    const part = run.charts.children[i] ?? run.charts.appendChild(made());
    showCharts(part.querySelector(".charts"), charts, data.x);
  });
};
const showComparison = ({ charts, x }) => {
  let grid = document.querySelector("#comparison .charts");
  if (!grid) {
    grid = el("div", { className: "charts many" });
    main.prepend(el("article", { id: "comparison" }, [el("header", {}, [el("h1", { textContent: "Side by side" })]), grid]));
    contents.querySelector("strong").after(el("a", { href: "#comparison", textContent: "Side by side" }));
  }
  showCharts(grid, charts, x);
};

let seen = [];
const sayDrawn = () => { document.body.dataset.drawn = performance.now().toFixed(); }; // read by tests and benchmarks
const look = async () => {
  let wait = 5;
  try {
    const found = await ask("runs", { seen: seen.join(",") });
    wait = found.wait;
    if (!seen.length) main.replaceChildren();
    for (const [place, data] of Object.entries(found.runs)) showRun(+place, data);
    if (found.comparison) showComparison(found.comparison);
    if (!seen.length) requestAnimationFrame(() => requestAnimationFrame(sayDrawn));
    seen = found.versions;
    state.textContent = "";
    document.title = `${[...RUNS.values()].map((run) => run.link.textContent).join(", ")} – tepo watch`;
  } catch (error) {
    state.textContent = `No answer from tepo watch (${error.message}); asking again.`;
  }
  RUNS.forEach(sayState);
  const next = () => document.hidden ? document.addEventListener("visibilitychange", look, { once: true }) : look();
  setTimeout(next, 1000 * wait);
};
look();
