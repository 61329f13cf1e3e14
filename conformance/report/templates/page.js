"use strict";
// Filters work without this; here they are counted. Pictures are read out, by pointer and by arrow keys.

const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const counted = (n) => n.toLocaleString("en");
const span = (first, size, end, one, many) => {
  const last = Math.min(first + size, end) - 1;
  return last > first ? `${many} ${counted(first)} to ${counted(last)}` : `${one} ${counted(first)}`;
};

// ---- filters

const form = document.querySelector(".filters");
function count() {
  const rows = all("[data-row]");
  const shown = rows.filter((row) => row.getClientRects().length).length;
  document.getElementById("shown").textContent = `${counted(shown)} of ${counted(rows.length)} rows`;
}
if (form) {
  form.addEventListener("change", count);
  form.addEventListener("reset", () => setTimeout(count));
  form.addEventListener("submit", (event) => event.preventDefault());
  count();
}

// ---- pictures

// Runs of cells without a difference are negative numbers.
function expanded(sparse, size) {
  const counts = new Uint32Array(size);
  let at = 0;
  for (const n of sparse) {
    if (n < 0) at -= n;
    else counts[at++] = n;
  }
  return counts;
}

function reader(grid) {
  const { item, view, rows, columns, origin, cell, shape } = grid;
  const items = item === "codes" ? "codes" : "scale bytes";
  const counts = grid.found ? null : expanded(grid.counts, rows * columns);
  return (row, column) => {
    const at = row * columns + column;
    if (grid.found) {
      const [r, c] = [origin[0] + row, origin[1] + column];
      const place = `row ${counted(r)}, column ${counted(c)} (block ${counted(c >> 4)}, lane ${c & 15})`;
      const same = grid.found[at] === grid.expected[at];
      return same ? `${place}: 0x${grid.found[at]}, as expected` : `${place}: found 0x${grid.found[at]}, expected 0x${grid.expected[at]}`;
    }
    const said = `${counted(counts[at])} of ${counted(grid.sizes[0][row] * grid.sizes[1][column])} ${items} differ`;
    if (view === "tile") return `row ${row} of the tiles, lane ${column}: ${said}`;
    if (view === "atom") return `row ${column} of the atoms, block ${row}: ${said}`;
    const across = item === "codes" ? ["column", "columns"] : ["block", "blocks"];
    const place = [
      span(origin[0] + row * cell[0], cell[0], shape[0], "row", "rows"),
      span(origin[1] + column * cell[1], cell[1], shape[1], ...across),
    ];
    return `${place.join(", ")}: ${said}`;
  };
}

function attach(figure, grid) {
  const box = figure.querySelector(".grid");
  const cursor = figure.querySelector(".cursor");
  const readout = figure.querySelector(".readout");
  const read = reader(grid);
  let [row, column] = [0, 0];
  const move = (r, c) => {
    row = Math.max(0, Math.min(grid.rows - 1, r));
    column = Math.max(0, Math.min(grid.columns - 1, c));
    cursor.hidden = false;
    cursor.style.left = `${(100 * column) / grid.columns}%`;
    cursor.style.top = `${(100 * row) / grid.rows}%`;
    readout.textContent = read(row, column);
  };
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-16, 0], PageDown: [16, 0] };
  box.tabIndex = 0;
  box.setAttribute("role", "application");
  box.setAttribute("aria-roledescription", "heat map");
  box.setAttribute("aria-label", `${figure.querySelector("figcaption").textContent}: arrow keys read out the cells`);
  readout.setAttribute("aria-live", "polite");
  readout.textContent = "Point at a cell, or use the arrow keys.";
  box.addEventListener("pointermove", (event) => {
    const image = box.querySelector("img").getBoundingClientRect();
    const part = (at, from, size, cells) => Math.floor(((at - from) / size) * cells);
    move(part(event.clientY, image.top, image.height, grid.rows), part(event.clientX, image.left, image.width, grid.columns));
  });
  box.addEventListener("focus", () => move(row, column));
  box.addEventListener("keydown", (event) => {
    if (event.key === "Home") move(row, 0);
    else if (event.key === "End") move(row, grid.columns - 1);
    else if (event.key in steps) move(row + steps[event.key][0], column + steps[event.key][1]);
    else return;
    event.preventDefault();
  });
}

const grids = JSON.parse(document.getElementById("grids").textContent);
for (const figure of all("[data-grid]")) attach(figure, grids[figure.dataset.grid]);

// ---- paper: browsers that print what is folded up need no help

let folded = [];
window.addEventListener("beforeprint", () => {
  folded = all("details:not([open])");
  for (const one of folded) one.open = true;
});
window.addEventListener("afterprint", () => {
  for (const one of folded) one.open = false;
});
