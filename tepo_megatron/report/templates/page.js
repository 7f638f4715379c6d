// Draws the charts of the page, each of which holds its own values.
for (const figure of document.querySelectorAll("figure")) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  makeChart(figure, data, data.x);
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
