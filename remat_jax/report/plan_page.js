const data = JSON.parse(document.querySelector("#data").textContent);
const chart = document.querySelector("#chart"), slider = document.querySelector("#at");
const box = { left: 64, top: 24 };
const all = [...data.points, ...data.named];
const range = (values, share) => {
  const low = Math.min(...values), high = Math.max(...values), room = (high - low || Math.abs(high) || 1) * share;
  return [Math.max(0, low - room), high + room];
};
const [left, right] = range([...all.map(one => one.device), data.budget], 0.06);
// One that is far slower would press all others together: it is drawn at the upper edge, with its time.
const slowest = 1.25 * Math.max(data.base_seconds, ...data.points.map(one => one.seconds));
const [below, above] = range([...all.map(one => Math.min(one.seconds, slowest)), data.base_seconds], 0.1);
const x = bytes => box.left + (box.right - box.left) * (bytes - left) / (right - left);
const y = seconds => Math.max(box.top, box.bottom - (box.bottom - box.top) * (seconds - below) / (above - below));
const units = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
const times = [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]];
const unitOf = (list, most) => list.find(([, size]) => most >= size) || list[list.length - 1];

function draw(name, attributes, text) {
  const node = document.createElementNS(chart.namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return chart.appendChild(node);
}

function ticks(low, high, size, about) {
  const raw = (high - low) / size / about, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find(factor => factor * power >= raw) * power, found = [];
  for (let at = Math.ceil(low / size / step) * step; at * size <= high; at += step) found.push([at * size, +at.toPrecision(6)]);
  return found;
}

function axes() {
  const few = Math.max(3, Math.round((box.right - box.left) / 130)), [unit, size] = unitOf(units, right), [time, second] = unitOf(times, above);
  for (const [value, text] of ticks(left, right, size, few)) {
    draw("line", { class: "axis", x1: x(value), x2: x(value), y1: box.top, y2: box.bottom });
    draw("text", { class: "grey", x: x(value), y: box.bottom + 18, "text-anchor": "middle" }, text);
  }
  for (const [value, text] of ticks(below, above, second, 6)) {
    draw("line", { class: "axis", x1: box.left, x2: box.right, y1: y(value), y2: y(value) });
    draw("text", { class: "grey", x: box.left - 8, y: y(value) + 4, "text-anchor": "end" }, text);
  }
  draw("text", { x: (box.left + box.right) / 2, y: box.bottom + 40, "text-anchor": "middle" }, `device memory, ${unit}`);
  draw("text", { x: 16, y: (box.top + box.bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 16 ${(box.top + box.bottom) / 2})` }, `estimated step, ${time}`);
  draw("line", { class: "budget", x1: x(data.budget), x2: x(data.budget), y1: box.top, y2: box.bottom });
  draw("text", { class: "budget-text", x: x(data.budget), y: box.top - 8, "text-anchor": "middle" }, "budget");
}

function labels(points) {
  const taken = [];
  for (const one of [...points].sort((a, b) => a.seconds - b.seconds)) {
    const text = one.seconds > above ? `${one.name} ↑ ${(one.seconds / unitOf(times, above)[1]).toPrecision(3)}` : one.name;
    const width = 6.6 * text.length, turned = x(one.device) + 12 + width > box.right;
    const start = turned ? x(one.device) - 10 - width : x(one.device) + 10;
    let top = y(one.seconds) + 4;
    while (taken.some(([s, w, t]) => start < s + w && s < start + width && Math.abs(t - top) < 13)) top += y(one.seconds) > box.top ? -13 : 13;
    taken.push([start, width, top]);
    draw("text", { x: start, y: top }, text);
  }
}

let here;

// In the window's own pixels, so that letters keep their size on a small screen.
function paint() {
  const { width, height } = chart.getBoundingClientRect();
  if (!width) return;
  box.right = width - 20;
  box.bottom = height - 50;
  chart.replaceChildren();
  chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
  axes();
  draw("path", { class: "line", d: data.points.map((one, index) => `${index ? "L" : "M"}${x(one.device)} ${y(one.seconds)}`).join("") });
  for (const one of data.named) {
    draw("circle", { class: `named ${one.compiled ? "compiled" : ""}`, cx: x(one.device), cy: y(one.seconds), r: 5 }).append(title(`${one.name}: ${one.says}`));
  }
  data.points.forEach((one, index) => {
    const point = draw("circle", { class: `own ${one.compiled ? "compiled" : ""}`, cx: x(one.device), cy: y(one.seconds), r: 5 });
    point.append(title(one.says));
    point.addEventListener("click", () => go(index));
  });
  labels(data.named);
  here = draw("circle", { class: "here", r: 10 });
  mark();
}

function mark() {
  const point = data.points[+slider.value];
  here?.setAttribute("cx", x(point.device));
  here?.setAttribute("cy", y(point.seconds));
}

function title(text) {
  const node = document.createElementNS(chart.namespaceURI, "title");
  node.textContent = text;
  return node;
}

function element(name, attributes = {}, ...children) {
  const node = Object.assign(document.createElement(name), attributes);
  node.append(...children);
  return node;
}

function partOf(part, largest) {
  const stack = element("span", { className: "stack", ariaHidden: "true" });
  for (const action of ["save", "offload", "recompute"]) {
    const bar = element("i", { className: action });
    bar.style.width = `${100 * part.bytes[action] / largest}%`;
    stack.append(bar);
  }
  const said = `${part.texts.save} saved, ${part.texts.offload} offloaded, ${part.texts.recompute} computed again`;
  const name = element("span", {}, element("b", { textContent: part.where }));
  const summary = element("summary", {}, name, stack, element("small", { textContent: `${said}; takes ${part.costs} more` }));
  const head = element("tr", {}, ...["residual", "action", "of one layer", "computing it again"].map(text => element("th", { scope: "col", textContent: text })));
  const rows = part.rows.map(row => element("tr", {}, ...row.map(text => element("td", { textContent: text }))));
  const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
  return element("details", {}, summary, element("p", { className: "hint", textContent: part.policy }), element("div", { className: "wide" }, table));
}

function go(index) {
  const point = data.points[index], largest = Math.max(1, ...point.parts.map(part => part.bytes.save + part.bytes.offload + part.bytes.recompute));
  slider.value = index;
  const isOverOnHost = data.host_budget !== null && point.host > data.host_budget;
  const over = point.device > data.budget ? "; over the budget" : isOverOnHost ? "; over the budget of host memory" : "";
  const says = (index === data.chosen ? "The plan: " : "") + point.says + over;
  slider.setAttribute("aria-valuetext", says);
  document.querySelector("#says").textContent = says;
  mark();
  document.querySelector("#figures").replaceChildren(...point.figures.map(([name, text]) =>
    element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: text }))));
  document.querySelector("#parts").replaceChildren(...point.parts.map(part => partOf(part, largest)));
}

slider.max = data.points.length - 1;
slider.addEventListener("input", () => go(+slider.value));
document.querySelector("#back").addEventListener("click", () => go(data.chosen));
go(data.chosen);
new ResizeObserver(paint).observe(chart);
