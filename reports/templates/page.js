// Draws the figures, makes the tables sortable, and lets one row of filters act on all of them.
"use strict";
(async () => {
  const data = (id) => JSON.parse(document.getElementById(id).textContent);
  const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const config = { responsive: true, displayModeBar: false };

  // ---- figures
  const figures = data("figure-data");
  const plots = new Map();
  const colours = () => ({
    "font.color": ink("--ink"),
    "xaxis.gridcolor": ink("--line"), "yaxis.gridcolor": ink("--line"),
    "xaxis.zerolinecolor": ink("--line"), "yaxis.zerolinecolor": ink("--line"),
  });
  // What is inside a closed fold is drawn when it opens.
  const draw = async () => {
    for (const [id, figure] of Object.entries(figures)) {
      const place = document.getElementById(id);
      if (plots.has(id) || !place.offsetParent) continue;
      plots.set(id, { place, shown: figure.data.map((trace) => trace.visible ?? true) });
      await Plotly.newPlot(place, figure.data, figure.layout, config);
      await Plotly.relayout(place, colours());
    }
  };
  await draw();
  for (const fold of document.querySelectorAll("details")) fold.addEventListener("toggle", draw);
  const relayout = (update) => Promise.all([...plots.values()].map(({ place }) =>
    place.offsetParent ? Plotly.relayout(place, update(place)) : null));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => relayout(colours));
  // A printed page has no dark ground, and columns of its own width, which no script is told.
  addEventListener("beforeprint", () => {
    for (const fold of document.querySelectorAll("details:not(.cases)")) fold.open = true;
    draw();
    relayout((place) => ({ ...colours(), width: place.closest(".one") ? 960 : 285 }));
  });
  addEventListener("afterprint", () => relayout(() => ({ ...colours(), autosize: true, width: null })));

  // ---- tables
  const source = document.getElementById("tables-script").textContent;
  const address = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
  const { jQuery } = await import(address);
  URL.revokeObjectURL(address);
  const DataTable = jQuery.fn.dataTable;
  DataTable.ext.errMode = "throw";
  const number = (value) => {
    const found = /data-value="([^"]*)"/.exec(value) ?? [null, value.replace(/<[^>]*>|,/g, "")];
    const read = Number(found[1].replace("inf", "Infinity"));
    return found[1] === "" || found[1] === "–" ? -Infinity : Number.isNaN(read) ? (found[1] === "nan" ? -Infinity : Infinity) : read;
  };
  const sortable = (value, kind) => (kind === "sort" || kind === "type" ? number(value) : value);
  const tables = [];
  for (const table of document.querySelectorAll("table.figures[data-names]")) {
    const heads = [...table.tHead.rows[0].cells];
    const numeric = heads.flatMap((head, i) => (head.querySelector(".number") ? [i] : []));
    tables.push({
      columns: JSON.parse(table.dataset.names),
      api: new DataTable(table, {
        paging: false, info: false, order: [], autoWidth: false,
        layout: { topStart: null, topEnd: null, bottomStart: null, bottomEnd: null },
        columnDefs: [{ targets: numeric, type: "num", className: "dt-type-numeric", render: sortable }],
      }),
    });
  }

  // ---- the rows themselves
  const rows = data("row-data");
  const escaped = DataTable.render.text().display;
  const shownMargin = (value) => (value === null ? "–" : typeof value === "number" ? String(Number(value.toPrecision(3))) : value);
  const renderNumber = (value, kind) => {
    if (kind === "sort" || kind === "type") return value === null ? -Infinity : typeof value === "number" ? value : Infinity;
    return Number.isInteger(value) ? value.toLocaleString("en") : shownMargin(value);
  };
  const columns = rows.columns.map(([name, heading, numeric], i) => ({
    data: i, title: heading, ...(numeric ? { type: "num", render: renderNumber } : { render: escaped }),
    createdCell: (cell, value, row) => {
      const margin = name === "margin_max" && (typeof value === "string" || value > 1);
      const bad = (name === "verdict" && value.startsWith("✗")) || (name === "mismatched" && value > 0) || margin;
      if (bad) cell.classList.add("bad");
      if (name === "margin_max" && typeof value === "number") cell.title = String(value);
    },
  }));
  columns.push({ data: null, title: "replay", orderable: false, searchable: false, defaultContent: '<button type="button" class="copy">copy</button>' });
  if (rows.rows.length) {
    const table = document.getElementById("rows");
    const api = new DataTable(table, {
      data: rows.rows, columns, deferRender: true, order: [], autoWidth: false, pageLength: 25,
      layout: { topStart: "info", topEnd: "search", bottomStart: "pageLength", bottomEnd: "paging" },
      language: { entries: { _: "rows", 1: "row" } },
    });
    tables.push({ columns: rows.columns.map(([name]) => name), api });
    table.addEventListener("click", (event) => {
      const button = event.target.closest("button.copy");
      if (button) copy(button, rows.replay[api.row(button.closest("tr")).data().at(-1)]);
    });
  }

  // ---- copying
  async function copy(button, text) {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // Where the page may not use the clipboard (an old browser, a frame): the text is selected to be copied by hand.
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    button.dataset.copied = text;
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  }
  for (const button of document.querySelectorAll(".line .copy")) {
    button.addEventListener("click", () => copy(button, button.parentElement.querySelector("code").textContent));
  }

  // ---- filters
  const selects = [...document.querySelectorAll(".filters select")];
  // One after the other: figures take a moment, and an older choice must not end after a newer one.
  let applied = Promise.resolve();
  const apply = () => { applied = applied.then(applyNow); return applied; };
  const applyNow = async () => {
    const wanted = Object.fromEntries(selects.filter((s) => s.value).map((s) => [s.name, s.value]));
    for (const select of selects) select.classList.toggle("chosen", Boolean(select.value));
    for (const { columns: names, api } of tables) {
      names.forEach((name, i) => {
        if (selects.some((s) => s.name === name)) api.column(i).search(wanted[name] ?? "", { exact: Boolean(wanted[name]) });
      });
      api.draw();
    }
    const matches = (of) => Object.entries(wanted).every(([name, value]) => !(name in of) || of[name].includes(value));
    for (const element of document.querySelectorAll("[data-of]")) element.hidden = !matches(JSON.parse(element.dataset.of));
    for (const fold of document.querySelectorAll("details.cases")) fold.open ||= Object.keys(wanted).length > 0;
    await draw();
    const cases = [...document.querySelectorAll(".case")];
    const count = document.getElementById("case-count");
    const left = cases.filter((one) => !one.hidden).length;
    if (count) count.textContent = left < cases.length ? `The filters leave ${left} of these ${cases.length}. ` : "";
    for (const [, { place, shown }] of plots) {
      if (!place.offsetParent) continue;
      const visible = place.data.map((trace, i) => {
        const meta = Object.fromEntries(Object.entries(trace.meta ?? {}).map(([name, value]) => [name, [value]]));
        return matches(meta) ? shown[i] : false;
      });
      if (visible.some((v, i) => v !== (place.data[i].visible ?? true))) await Plotly.restyle(place, { visible });
      Plotly.Plots.resize(place);
    }
    document.documentElement.dataset.filtered = JSON.stringify(wanted);
  };
  for (const select of selects) select.addEventListener("change", apply);
  document.getElementById("reset").addEventListener("click", () => {
    for (const select of selects) select.value = "";
    apply();
  });
  document.documentElement.dataset.ready = "yes";
})();
