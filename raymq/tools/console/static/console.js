"use strict";
// The console's own script: charts, times in the reader's zone, confirmation of deletions. Without it all pages work.

(() => {
  const BYTES = ["B", "KiB", "MiB", "GiB", "TiB"];

  const THOUSANDS = ["", "K", "M", "B", "T"];

  const POWERS_OF_TWO = Array.from({ length: 50 }, (_, power) => 2 ** power);

  const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600];

  const DIGITS_MAX = 3;

  const scaled = (value, step, units) => {
    let unit = 0;
    while (Math.abs(value) >= step && unit < units.length - 1) { value /= step; unit += 1; }
    return [value, units[unit]];
  };
  const asBytes = (value) => { const [number, unit] = scaled(value, 1024, BYTES); return [number, ` ${unit}`]; };
  const asNumber = (value) => (value >= 10000 ? scaled(value, 1000, THOUSANDS) : [value, ""]);

  // All labels of an axis have as many digits as the label that needs most, so that no two ticks have the same label.
  const tickLabels = (ticks, format) => {
    const parts = ticks.map(format);
    const isExact = (digits) => parts.every(([number]) => Math.abs(number - number.toFixed(digits)) < 1e-6);
    let digits = 0;
    while (digits < DIGITS_MAX && !isExact(digits)) digits += 1;
    return parts.map(([number, unit]) => `${Number(number.toFixed(digits)).toLocaleString("en", { maximumFractionDigits: digits })}${unit}`);
  };

  // Ticks less than a minute apart have seconds.
  const timeLabels = (ticks, step) => ticks.map((tick) => new Date(tick * 1000).toISOString().slice(11, step < 60 ? 19 : 16));

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const draw = (plot, data) => {
    const names = plot.dataset.series.split(" ").map((pair) => pair.split(":"));
    const format = plot.dataset.unit === "bytes" ? asBytes : asNumber;
    const columns = [data.at_s, ...names.map(([key]) => data[key])];
    if (plot.chart) { plot.chart.setData(columns); return; }
    const axis = { stroke: color("--dim"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const strokes = [color("--accent"), color("--second")];
    plot.chart = new uPlot({
      width: plot.clientWidth,
      height: 180,
      cursor: { y: false },
      legend: { live: false, show: names.length > 1 },
      scales: { y: { range: (chart, low, high) => [0, Math.max(high || 0, 1) * 1.1] } },
      tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
      axes: [
        { ...axis, size: 30, space: (chart, index, low, high) => (high - low < 600 ? 64 : 48), incrs: SECONDS, values: (chart, ticks, index, space, step) => timeLabels(ticks, step) },
        { ...axis, incrs: plot.dataset.unit === "bytes" ? POWERS_OF_TWO : undefined, size: 64, values: (chart, ticks) => tickLabels(ticks, format) },
      ],
      series: [{}, ...names.map(([, label], index) => ({
        label, stroke: strokes[index], width: 1.5, points: { show: false },
        fill: index === 0 ? `${strokes[0]}1a` : undefined, dash: index ? [5, 3] : undefined,
      }))],
    }, columns, plot);
  };

  const refreshCharts = async () => {
    const plots = [...document.querySelectorAll("[data-chart]")];
    for (const address of new Set(plots.map((plot) => plot.dataset.chart))) {
      const answer = await fetch(address, { headers: { Accept: "application/json" } }).catch(() => null);
      if (!answer || !answer.ok) continue;
      const data = await answer.json();
      plots.filter((plot) => plot.dataset.chart === address).forEach((plot) => draw(plot, data));
    }
  };

  const redraw = () => document.querySelectorAll("[data-chart]").forEach((plot) => {
    if (plot.chart) { plot.chart.destroy(); plot.chart = null; }
  });

  // While a refresh is slow, the cluster's state is not known: the page must not go on to say that all is well.
  const SLOW_MS = 1000;
  const slow = new WeakMap();
  const beginRefresh = (event) => {
    const live = event.target;
    if (!(live instanceof Element)) return;
    clearTimeout(slow.get(live));
    slow.set(live, setTimeout(() => live.classList.add("unsure"), SLOW_MS));
  };
  const endRefresh = (event) => {
    const live = event.target;  // the document, if the element has gone
    if (!(live instanceof Element)) return;
    clearTimeout(slow.get(live));
    live.classList.remove("unsure");
  };

  // Times are UTC on the page; the reader's own time is in the tooltip.
  const addLocalTimes = (event) => {
    const time = event.target.closest && event.target.closest("time[datetime]");
    if (time && !time.title) time.title = `${new Date(time.dateTime).toLocaleString()} here`;
  };

  // Tables: a box that filters rows by their first cell, and heads that sort. Both are kept when a table is refreshed.
  const filterRows = (box) => {
    const wanted = box.value.trim().toLowerCase();
    const table = document.getElementById(box.dataset.filter);
    if (!table) return;
    for (const row of table.tBodies[0].rows) {
      row.hidden = wanted !== "" && !row.cells[0].textContent.toLowerCase().includes(wanted);
    }
  };

  const sorted = new Map();

  const valueOf = (row, column) => {
    const cell = row.cells[column];
    if (!cell) return "";
    const text = cell.dataset.value === undefined ? cell.textContent.trim() : cell.dataset.value;
    return text !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
  };

  const compare = (one, other) => {
    if (typeof one === "number" && typeof other === "number") return one - other;
    return String(one).localeCompare(String(other));
  };

  const sortRows = (table) => {
    const wish = sorted.get(table.id);
    if (!wish) return;
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, index) => {
      if (index === wish.column) head.setAttribute("aria-sort", wish.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    const rows = [...table.tBodies[0].rows].map((row) => [valueOf(row, wish.column), row]);
    rows.sort((one, other) => (wish.down ? -1 : 1) * compare(one[0], other[0]));
    table.tBodies[0].append(...rows.map(([, row]) => row));
  };

  const sortByHead = (button) => {
    const head = button.closest("th");
    const table = button.closest("table");
    const before = sorted.get(table.id);
    const again = before && before.column === head.cellIndex;
    sorted.set(table.id, { column: head.cellIndex, down: again ? !before.down : head.classList.contains("n") });
    sortRows(table);
  };

  const refreshTables = () => {
    document.querySelectorAll("table[id]").forEach(sortRows);
    document.querySelectorAll("[data-filter]").forEach(filterRows);
  };

  document.addEventListener("DOMContentLoaded", () => {
    document.addEventListener("input", (event) => { if (event.target.dataset.filter) filterRows(event.target); });
    document.addEventListener("click", (event) => {
      const button = event.target.closest("[data-sort]");
      if (button) sortByHead(button);
    });
    document.addEventListener("htmx:after:swap", refreshTables);
    document.addEventListener("htmx:before:request", beginRefresh);
    document.addEventListener("htmx:finally:request", endRefresh);
    refreshTables();
    document.addEventListener("mouseover", addLocalTimes);
    if (document.querySelector("[data-chart]")) {
      refreshCharts();
      setInterval(refreshCharts, 10000);
      addEventListener("resize", () => { redraw(); refreshCharts(); });
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { redraw(); refreshCharts(); });
    }
  });
})();
