const part = id => document.getElementById(id);
const FACETS = ["model", "gpu", "ranks", "variant"], NEIGHBOURS = 5;
const TICKS = [0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 1, 1.02, 1.05, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100, 1000];
const times = value => `${value.toFixed(value < 1.2 ? 3 : 2)}x`;
let marks = [], mine = 0;

// ----------------------------------------------------------------------------------------------
// Figure: gain by ceiling, on axes that are linear near 1x and logarithmic further out

const gpus = [...new Set(data.marks.map(mark => data.rows[mark.row].gpu))].sort();
const COLORS = ["graph", "compile", "graph3", "eager"];
const looks = gpus.map((gpu, index) => ({label: gpu, color: COLORS[index % 4], hollow: index % 2 === 1}));
const ends = axis => {
  const all = [...data.marks.map(mark => mark[axis]), mine || 1];
  return [0.98 * Math.min(1, ...all), 1.1 * Math.max(1.2, ...all)];
};
// A tick stands so far from the one before that their texts do not touch.
function ticks(made, index, least, most) {
  const kept = [], room = index ? 18 : 44, at = value => made.valToPos(value, index ? "y" : "x");
  const wanted = TICKS.filter(value => value >= least && value <= most);
  for (const value of [1, ...wanted]) if (kept.every(each => Math.abs(at(each) - at(value)) >= room)) kept.push(value);
  return kept.sort((one, other) => one - other);
}

function drawMine(made) {
  if (!mine) return;
  const {ctx, bbox: {top, height, left}} = made, size = 7 * devicePixelRatio;
  const x = made.valToPos(mine, "x", true), y = made.valToPos(mine, "y", true);
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = color("ink");
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([4, 4]);
  ctx.beginPath();
  ctx.moveTo(x, top + height);
  ctx.lineTo(x, y);
  ctx.stroke();
  ctx.translate(x, y);
  ctx.rotate(Math.PI / 4);
  ctx.fillRect(-size / 2, -size / 2, size, size);
  ctx.rotate(-Math.PI / 4);
  ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
  // Left of the line there is room, but at the very edge.
  const is_left = x > left + 12 * size;
  ctx.textAlign = is_left ? "right" : "left";
  ctx.fillText("your step", is_left ? -size : size, -size);
  ctx.restore();
}

const BEND = 0.02, bent = {
  distr: 100, fwd: value => Math.asinh((value - 1) / BEND), bwd: value => 1 + BEND * Math.sinh(value),
};
const figure = data.marks.length ? chart(part("figure"), figureValues(), {
  scales: {x: {time: false, range: () => ends("x"), ...bent}, y: {range: () => ends("y"), ...bent}},
  axes: [{label: "step / busy: the ceiling", size: 22}, {label: "gain", size: 44}].map(axis => ({
    splits: ticks, filter: (_, at) => at, values: (_, at) => at.map(value => `${value}x`), ...axis,
  })),
  series: [
    {stroke: () => color("ink"), width: 1.5, spanGaps: true, points: {show: false}},
    ...looks.map(look => ({paths: () => null, points: {
      show: true, size: 9, width: 2,
      stroke: () => color(look.color), fill: () => color(look.hollow ? "paper" : look.color),
    }})),
  ],
  hooks: {draw: [drawMine]},
}) : null;

function figureValues() {
  const line = ends("x"), rows = [{x: line[0]}, ...marks, {x: line[1]}];
  const own = gpus.map(gpu => rows.map(mark => mark.y && data.rows[mark.row].gpu === gpu ? mark.y : null));
  return [rows.map(mark => mark.x), rows.map(mark => mark.y ? null : mark.x), ...own];
}

let forget = () => {};
if (figure) {
  key(part("legend"), looks);
  forget = reach(figure, part("figure"), "Gain by ceiling; Enter shows a point's run", () => marks, mark => {
    part("point").replaceChildren();
    add(part("point"), "span", `${mark.text.replaceAll("\n", "; ")}. `);
    link(part("point"), data.runs[mark.run]);
    choose(mark.run);
  });
} else {
  part("figure").textContent = "No graph on a GPU has a gain and a busy time.";
}

// ----------------------------------------------------------------------------------------------
// Filters and table

const filters = FACETS.map(name => {
  const select = part(name);
  const values = [...new Set(data.rows.map(row => row[name]))];
  values.sort((one, other) => typeof one === "number" ? one - other : one.localeCompare(other));
  for (const value of values) add(select, "option", value, {value});
  select.addEventListener("change", update);
  return select;
});
const fits = row => filters.every(({id, value}) => value === "" || String(row[id]) === value);

function update() {
  const rows = data.rows.filter(fits);
  marks = data.marks.filter(mark => fits(data.rows[mark.row]));
  part("rows").replaceChildren();
  for (const row of rows) {
    const own = add(part("rows"), "tr"), [workload, ...cells] = row.cells;
    const button = add(add(own, "td"), "button", workload, {type: "button", title: "blocks of its newest run"});
    button.addEventListener("click", () => { choose(row.run); part("run").focus(); });
    const variant = add(own, "td", cells.shift(), {class: "text"});
    if (row.note) add(variant, "small", row.note);
    add(add(own, "td", cells.shift(), {class: "text"}), "small", row.hosts);
    cells.forEach(cell => add(own, "td", cell));
  }
  part("count").textContent = rows.length
    ? `${rows.length} of ${data.rows.length} rows, ${marks.length} of ${data.marks.length} points`
    : "No row is like this.";
  redraw();
}

function redraw() {
  forget();
  if (figure) figure.setData(figureValues());
  compare();
}

// ----------------------------------------------------------------------------------------------
// The reader's own step

function compare() {
  const step = part("step").valueAsNumber, busy = part("busy").valueAsNumber, most = step / busy;
  const is_typed = step > 0 && busy > 0 && most < 1e4, is_step = is_typed && most >= 0.95;
  if (mine !== (is_step ? most : 0)) {
    mine = is_step ? most : 0;
    if (figure) figure.setData(figureValues());
  }
  const far = mark => Math.abs(Math.log(mark.x / most));
  const near = is_step ? [...marks].sort((one, other) => far(one) - far(other)).slice(0, NEIGHBOURS) : [];
  part("said").textContent = is_step
    ? `A graph of your step can gain ${times(Math.max(1, most))} at most.`
      + (near.length ? " Measured steps nearest to it:" : "")
    : is_typed ? "The GPU cannot be busy for longer than the step takes."
    : part("step").value + part("busy").value === "" ? "" : "Type both times in ms, above 0.";
  part("near").hidden = !near.length;
  part("neighbours").replaceChildren();
  for (const mark of near) {
    const own = add(part("neighbours"), "tr"), row = data.rows[mark.row];
    const numbers = [times(mark.x), `${mark.y.toFixed(3)}x`, digits(mark.base), digits(mark.busy)];
    for (const text of [row.cells[0], row.variant, row.cells[2]]) add(own, "td", text, {class: "text"});
    for (const number of numbers) add(own, "td", number);
    link(add(own, "td", "", {class: "text"}), data.runs[mark.run], "file");
  }
}
part("step").addEventListener("input", compare);
part("busy").addEventListener("input", compare);
part("own").addEventListener("submit", event => event.preventDefault());

// ----------------------------------------------------------------------------------------------
// Blocks of a chosen run

let shown = null;
const link = (where, run, text = run.path) => add(where, "a", text, {href: run.href});

function choose(index) {
  const run = data.runs[index];
  part("run").value = index;
  if (shown) shown.drop();
  shown = null;
  part("about").replaceChildren();
  add(part("about"), "span", `${run.text}: `);
  link(part("about"), run);
  part("blocks").replaceChildren();
  if (run.blocks.lines.length) shown = blocks(part("blocks"), run.blocks);
  else part("blocks").textContent = "No variant of this run has a time.";
}

data.runs.forEach((run, value) => add(part("run"), "option", run.name, {value}));
part("run").addEventListener("change", event => choose(event.target.value));
update();
choose(Math.max(0, data.runs.findIndex(run => run.blocks.lines.length)));
