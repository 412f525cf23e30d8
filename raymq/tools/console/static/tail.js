"use strict";
// The live tail: rows made of text nodes, newest on top. While it is paused, rows wait; they come when it goes on.
(() => {
  const ROWS_MAX = 500;
  const tail = document.querySelector("[data-tail]");
  if (!tail) return;
  const part = (name) => tail.querySelector(`[data-${name}]`);
  const [rows, state, skippedLine, errorLine, pause] = ["rows", "state", "skipped", "error", "pause"].map(part);
  let paused = false, waiting = [], shown = 0, skipped = 0;

  const cell = (row, text, name) => {
    const data = row.insertCell();
    const isolated = data.appendChild(document.createElement("bdi"));
    isolated.textContent = text;
    if (name) data.className = name;
    return data;
  };

  const add = (message) => {
    const row = rows.insertRow(0);
    cell(row, new Date(Number(message.stored)).toISOString().slice(0, 19).replace("T", " "), "nowrap");
    const place = cell(row, "", "nowrap");
    const link = place.firstChild.appendChild(document.createElement("a"));
    link.textContent = message.place;
    link.href = tail.dataset.messages + message.address;
    cell(row, message.tags);
    cell(row, message.keys);
    cell(row, message.body, "body");
  };

  const show = () => {
    if (!paused) {
      waiting.forEach(add);
      shown += waiting.length;
      waiting = [];
      while (rows.rows.length > ROWS_MAX) rows.deleteRow(-1);
    }
    skippedLine.textContent = skipped ? `${skipped.toLocaleString("en")} skipped` : "";
    state.textContent = paused ? `Paused, ${waiting.length} new` : `Live, ${shown.toLocaleString("en")} shown`;
  };

  const fail = (text) => {
    errorLine.textContent = text.replaceAll("`", "");
    errorLine.hidden = !text;
  };

  const source = new EventSource(tail.dataset.tail);
  source.addEventListener("open", () => fail(""));
  source.addEventListener("error", () => {
    state.textContent = source.readyState === EventSource.CLOSED ? "Ended" : "Connecting again …";
    if (source.readyState === EventSource.CLOSED) fail("The console has ended this tail; load the page again.");
  });
  source.addEventListener("messages", (event) => {
    const news = JSON.parse(event.data);
    waiting.push(...news.messages);
    skipped += news.skipped;
    if (waiting.length > ROWS_MAX) skipped += waiting.splice(0, waiting.length - ROWS_MAX).length;
    fail(news.error);
    show();
  });
  source.addEventListener("refused", (event) => {
    source.close();
    fail(JSON.parse(event.data).error);
    state.textContent = "Ended";
  });
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.textContent = paused ? "Go on" : "Pause";
    show();
  });
  part("clear").addEventListener("click", () => { rows.replaceChildren(); shown = 0; skipped = 0; waiting = []; show(); });
  addEventListener("pagehide", () => source.close());
})();
