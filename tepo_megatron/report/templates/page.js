"use strict";
// Lists the values at the step under the pointer. Text is only ever set as text. `read` returns the axes of the plot.
const followPointer = (plot, read) => {
  const rule = plot.appendChild(document.createElement("div"));
  const tip = plot.appendChild(document.createElement("div"));
  rule.className = "rule";
  tip.className = "tip";
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
    const axes = read(), area = plot.getBoundingClientRect();
    const x = (event.clientX - area.left) / area.width, y = (event.clientY - area.top) / area.height;
    const axis = axes.find((a) => x >= a.box[0] && x <= a.box[2] && y >= a.box[1] && y <= a.box[3]);
    if (!axis || !axis.series.length) return hide();
    const [left, top, right, bottom] = axis.box, [low, high] = axis.limits;
    const asked = low + (x - left) / (right - left) * (high - low);
    const steps = axis.series.map((s) => s.x[nearest(s.x, asked)]);
    const step = steps[nearest(steps, asked)];
    const place = left + (step - low) / (high - low) * (right - left);
    tip.replaceChildren(`step ${step}`);
    for (const series of axis.series) {
      const at = series.x.indexOf(step);
      if (at < 0) continue;
      const row = tip.appendChild(document.createElement("div"));
      const swatch = row.appendChild(document.createElement("i"));
      swatch.style.background = series.color;
      row.append(series.label);
      const values = series.y.map((y) => written(y[at], axis.percent));
      row.appendChild(document.createElement("b")).textContent = values.join(" … ");
    }
    rule.hidden = tip.hidden = false;
    Object.assign(rule.style, { left: `${100 * place}%`, top: `${100 * top}%`, height: `${100 * (bottom - top)}%` });
    const toTheRight = { left: `calc(${100 * place}% + 10px)`, right: "auto" };
    const toTheLeft = { left: "auto", right: `calc(${100 * (1 - place)}% + 10px)` };
    const beside = place < 0.5 ? toTheRight : toTheLeft;
    Object.assign(tip.style, beside, { top: `${100 * top}%` });
  });
};
for (const plot of document.querySelectorAll(".plot")) {
  const axes = JSON.parse(plot.querySelector("script").textContent);
  followPointer(plot, () => axes);
}

// Shows every number of the token that is clicked, or to which the arrow keys move.
for (const sample of document.querySelectorAll(".tokens")) {
  const { names, tokens } = JSON.parse(sample.querySelector("script").textContent);
  const cells = [...sample.querySelectorAll(".token")], panel = sample.querySelector(".numbers");
  const row = (table, tag, texts) => {
    const line = table.appendChild(document.createElement("tr"));
    for (const text of texts) line.appendChild(document.createElement(tag)).textContent = text;
    return line;
  };
  const show = (number) => {
    const token = tokens[number], table = document.createElement("table");
    cells.forEach((cell, i) => { cell.classList.toggle("chosen", i === number); cell.tabIndex = i === number ? 0 : -1; });
    for (const [update, rows] of token.updates) {
      row(table, "th", [`update ${update}`, "training used", "in fp64"]);
      for (const [name, used, again] of rows) row(table, "td", [names[name], used, again]);
    }
    panel.replaceChildren(token.place, table);
  };
  cells.forEach((cell, number) => cell.addEventListener("click", () => show(number)));
  sample.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Enter: 0, " ": 0 }[event.key], from = cells.indexOf(event.target);
    if (move === undefined || from < 0) return;
    event.preventDefault();
    const to = Math.min(cells.length - 1, Math.max(0, from + move));
    show(to);
    cells[to].focus();
  });
}
