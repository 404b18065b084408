const applyTheme = () => { document.documentElement.dataset.theme = document.querySelector("[name=theme]:checked").value; };
document.querySelectorAll("[name=theme]").forEach(choice => choice.addEventListener("change", applyTheme));
applyTheme();

function sort(table, heads, column, descending) {
  const body = table.tBodies[0], rows = [...body.rows];
  const value = row => row.cells[column].dataset.value;
  const isNumber = rows.every(row => row.cells[column].classList.contains("number"));
  const compare = isNumber ? (a, b) => value(a) - value(b) : (a, b) => value(a).localeCompare(value(b), "en", { numeric: true });
  body.append(...rows.sort((a, b) => (descending ? compare(b, a) : compare(a, b))));
  heads.forEach((head, index) => head.setAttribute("aria-sort", index !== column ? "none" : descending ? "descending" : "ascending"));
}

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => sort(table, heads, column, head.getAttribute("aria-sort") === "ascending")));
}

const filter = document.querySelector("#filter"), failed = document.querySelector("#failed");
if (filter) {
  const rows = [...document.querySelector("#rows tbody").rows], words = rows.map(row => row.textContent.toLowerCase());
  const choose = () => {
    const word = filter.value.toLowerCase();
    let shown = 0;
    rows.forEach((row, index) => {
      row.hidden = !words[index].includes(word) || (failed.checked && !row.classList.contains("failed"));
      shown += !row.hidden;
    });
    document.querySelector("#count").textContent = `${shown} of ${rows.length}`;
  };
  filter.addEventListener("input", choose);
  failed.addEventListener("change", choose);
}

// The slider of a plan's page selects a point of the frontier, and the page shows its figures, its layers and a dashed ring
// around it. The ring around the plan stays.
const selected = plan => {
  const ring = plan.cloneNode();
  ring.setAttribute("stroke-dasharray", "3 3");
  ring.setAttribute("r", 15);
  plan.parentNode.after(ring);
  ring.id = "";
  ring.classList.add("selected");
  return ring;
};
const slider = document.querySelector("#at");
if (slider) {
  const points = document.querySelectorAll("[data-point]");
  const pictures = [...document.querySelectorAll("#frontier svg")].map(svg => ({
    marks: [...svg.querySelectorAll("[data-series='frontier'] circle")],
    ring: selected(svg.querySelector("[data-series='the plan'] circle")),
  }));
  const go = index => {
    slider.value = index;
    points.forEach(point => { point.hidden = point.dataset.point !== slider.value; });
    const { says } = document.querySelector(`[data-point="${slider.value}"][data-says]`).dataset;
    slider.setAttribute("aria-valuetext", says);
    document.querySelector("#says").textContent = says;
    for (const { marks, ring } of pictures) {
      for (const place of ["cx", "cy"]) ring.setAttribute(place, marks[slider.value].getAttribute(place));
    }
  };
  slider.addEventListener("input", () => go(slider.value));
  document.querySelector("#back").addEventListener("click", () => go(slider.defaultValue));
  pictures.forEach(({ marks }) => marks.forEach((mark, index) => mark.addEventListener("click", () => go(index))));
  go(slider.defaultValue);
}
