"use strict";
// A name from a run becomes text, never markup. Each chart is read by pointer and by keyboard.

const data = JSON.parse(document.getElementById("data").textContent);
const charts = [];
const color = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const inMs = (_, at) => at.map(ms => `${+ms.toPrecision(6)} ms`);
const digits = ms => ms >= 100 ? ms.toFixed(1) : ms >= 1 ? ms.toFixed(2) : ms.toFixed(3);

function add(where, tag, text = "", attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return where.appendChild(made);
}

function key(where, entries) {
  for (const each of entries) {
    const own = add(where, "span", "", {class: "key"});
    if (each.color) {
      const dot = own.appendChild(document.createElement("i"));
      dot.style.borderColor = `var(--${each.color})`;
      dot.style.background = `var(--${each.color})`;
    }
    own.append(each.label);
  }
}

// A chart that fills the width of an element and is drawn again in the other color scheme.
function chart(where, values, {scales, axes, series, hooks, height, padding = [8, 8, 0, 0]}) {
  const axis = own => ({
    stroke: () => color("faint"), grid: {stroke: () => color("line"), width: 1}, ticks: {show: false}, gap: 4,
    font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif", labelSize: 18, labelGap: 0, ...own,
  });
  const size = () => ({width: Math.max(180, where.clientWidth), height: Math.round(height(where.clientWidth))});
  const options = {
    ...size(), scales, hooks, axes: axes.map(axis), series: [{}, ...series],
    legend: {show: false}, cursor: {show: false}, padding,
  };
  const made = new uPlot(options, values, where);
  charts.push(made);
  made.fit = () => made.setSize(size());
  return made;
}

addEventListener("resize", () => charts.forEach(each => each.fit()));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach(each => each.redraw()));

// Names points of a chart, {x, y, text} sorted by x: under the pointer, or by arrow keys.
function reach(made, where, label, points) {
  const ring = add(made.over, "div", "", {class: "ring"});
  const tip = add(made.over, "div", "", {class: "tip", role: "status"});
  let at = -1;
  const place = each => [made.valToPos(each.x, "x"), made.valToPos(each.y, "y")];
  const show = index => {
    at = index;
    ring.hidden = tip.hidden = at < 0;
    if (at < 0) return;
    const [x, y] = place(points[at]);
    ring.style.left = `${x}px`;
    ring.style.top = `${y}px`;
    tip.textContent = points[at].text;
    tip.style.left = tip.style.top = "0";
    tip.style.left = `${Math.max(0, Math.min(x + 10, made.over.clientWidth - tip.offsetWidth))}px`;
    tip.style.top = `${y > tip.offsetHeight + 12 ? y - tip.offsetHeight - 10 : y + 12}px`;
  };
  const nearest = event => {
    const box = made.over.getBoundingClientRect();
    let best = -1, least = 24;
    points.forEach((each, index) => {
      const [x, y] = place(each), far = Math.hypot(event.clientX - box.left - x, event.clientY - box.top - y);
      if (far < least) [best, least] = [index, far];
    });
    return best;
  };
  show(-1);
  made.over.addEventListener("pointermove", event => show(nearest(event)));
  made.over.addEventListener("pointerleave", () => show(-1));
  made.over.addEventListener("click", event => show(nearest(event)));
  where.tabIndex = 0;
  where.setAttribute("role", "group");
  where.setAttribute("aria-label", `${label}. Arrow keys go from point to point.`);
  where.onblur = () => show(-1);
  where.onkeydown = event => {
    const last = points.length - 1, to = {ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: last}[event.key];
    if (to !== undefined && last >= 0) show(Math.max(0, Math.min(last, to)));
    else if (event.key === "Escape") show(-1);
    else return;
    event.preventDefault();
  };
  made.hooks.setSize = [() => show(at)];
}

// Mean step of each block of a run in the order of time.
function blocks(where, own) {
  const {lines, cycles, busy} = own, most = 1.08 * Math.max(...lines.flatMap(line => line.y));
  const begins = cycles.map((cycle, place) => place && cycles[place - 1] === cycle ? -1 : place).filter(at => at >= 0);
  const ticks = made => {
    const each = Math.ceil(26 * begins.length * devicePixelRatio / made.bbox.width);
    return begins.filter((_, index) => index % each === 0);
  };
  const processes = Math.max(0, ...busy);
  key(where, lines);
  if (processes) key(where, [{label: `shaded: beside ${processes} busy processes`}]);
  const values = lines.map(line => {
    const ys = cycles.map(() => null);
    line.x.forEach((place, index) => { ys[place] = line.y[index]; });
    return ys;
  });
  const shade = made => {
    made.ctx.fillStyle = color("band");
    const {top, height} = made.bbox, at = place => made.valToPos(place - 0.5, "x", true);
    busy.forEach((number, place) => number && made.ctx.fillRect(at(place), top, at(place + 1) - at(place) + 1, height));
  };
  const box = add(where, "div", "", {class: "chart"});
  const made = chart(box, [cycles.map((_, place) => place), ...values], {
    scales: {x: {time: false, range: [-0.7, cycles.length - 0.3]}, y: {range: [0, most]}},
    axes: [
      {
        label: "cycle", size: 22, splits: ticks, space: 22, grid: {show: false},
        values: (_, at) => at.map(place => cycles[place] + 1),
      },
      {values: inMs, size: 66},
    ],
    series: lines.map(line => ({
      stroke: () => color(line.color), width: 1, spanGaps: true,
      points: {show: true, size: 6, fill: () => color(line.color)},
    })),
    hooks: {drawClear: [shade]}, height: width => Math.min(300, 180 + 0.15 * width),
  });
  const points = lines.flatMap(line => line.x.map((place, index) => ({
    x: place, y: line.y[index], text: `${line.name}, cycle ${cycles[place] + 1}: ${digits(line.y[index])} ms`,
  }))).sort((one, other) => one.x - other.x);
  reach(made, box, "Mean step of each block in the order of time", points);
}

// Busy intervals of one profiled step of each variant, one below the other.
function timelines(where, lines) {
  const longest = Math.max(...lines.map(line => line.length));
  lines.forEach((line, index) => {
    add(where, "div", line.text, {class: "faint over"});
    const draw = made => {
      const at = ms => made.valToPos(ms, "x", true), {top, height} = made.bbox;
      made.ctx.fillStyle = color("band");
      made.ctx.fillRect(at(0), top, at(line.length) - at(0), height);
      made.ctx.fillStyle = color(line.color);
      for (const [begin, end] of line.spans) {
        made.ctx.fillRect(at(begin), top, Math.max(0.2, at(end) - at(begin)), height);
      }
    };
    const is_last = index === lines.length - 1;
    const box = add(where, "div", "", {role: "img", "aria-label": `busy intervals of ${line.name}`});
    chart(box, [[0, longest], [null, null]], {
      scales: {x: {time: false, range: [0, longest]}, y: {range: [0, 1]}},
      axes: [{show: is_last, grid: {show: false}, size: 22, values: inMs}, {show: false}],
      series: [{}], hooks: {draw: [draw]}, padding: [2, 22, 0, 16],
      height: () => is_last ? 42 : 20,
    });
  });
}

const parts = name => document.querySelectorAll(`.${name}`);
const drawn = data.builds.filter(build => build.blocks.lines.length);
const profiled = data.builds.filter(build => build.timelines.length);
drawn.forEach((build, index) => blocks(parts("blocks")[index], build.blocks));
profiled.forEach((build, index) => timelines(parts("timelines")[index], build.timelines));
