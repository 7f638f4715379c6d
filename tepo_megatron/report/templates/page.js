// Draws the charts of the page, each of which holds its own values.
for (const figure of document.querySelectorAll("figure")) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  makeChart(figure, data, data.x);
}

// Shows every number of the token that is clicked, or to which the arrow keys move.
for (const sample of document.querySelectorAll(".tokens")) {
  const { names, tokens } = JSON.parse(sample.querySelector("script").textContent);
  const cells = [...sample.querySelectorAll(".token")], panel = sample.querySelector(".numbers");
  chooseToken(sample, cells, (number) => {
    const tables = tokens[number].updates.map(([update, rows]) => table(
      [`update ${update}`, "training used", "in fp64"], rows.map(([name, used, again]) => [names[name], used, again])));
    panel.replaceChildren(tokens[number].place, ...tables);
  }, true);
}
