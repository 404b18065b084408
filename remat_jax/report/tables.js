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
