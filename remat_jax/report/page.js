const body = document.querySelector("#rows tbody");
const rows = [...body.rows];
const heads = [...document.querySelectorAll("#rows th")];
const words = rows.map(row => row.textContent.toLowerCase());
const filter = document.querySelector("#filter"), failed = document.querySelector("#failed");

function sort(column, descending) {
  const value = row => row.cells[column].dataset.value;
  const isNumber = rows.every(row => row.cells[column].classList.contains("number"));
  const compare = isNumber ? (a, b) => value(a) - value(b) : (a, b) => value(a).localeCompare(value(b), "en", { numeric: true });
  body.append(...[...rows].sort((a, b) => (descending ? compare(b, a) : compare(a, b))));
  heads.forEach((head, index) => head.setAttribute("aria-sort", index !== column ? "none" : descending ? "descending" : "ascending"));
}

function choose() {
  const word = filter.value.toLowerCase();
  let shown = 0;
  rows.forEach((row, index) => {
    row.hidden = !words[index].includes(word) || (failed.checked && !row.classList.contains("failed"));
    shown += !row.hidden;
  });
  document.querySelector("#count").textContent = `${shown} of ${rows.length}`;
}

heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => sort(column, head.getAttribute("aria-sort") === "ascending")));
filter.addEventListener("input", choose);
failed.addEventListener("change", choose);
