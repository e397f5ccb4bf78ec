"use strict";
// Unpacks and searches the answers, and shows some at a time. Text from documents is only ever inserted as text.
(async () => {
  const PAGE = 50;
  const at = (id) => document.getElementById(id);
  const body = at("rows"), count = at("count"), query = at("query"), only = at("only"), more = at("more");
  let docs;
  try {
    const packed = Uint8Array.from(atob(at("data").textContent.trim()), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    docs = JSON.parse(await new Response(stream).text());
  } catch (error) {
    count.textContent = "This browser cannot show the answers: it lacks DecompressionStream (in all browsers since 2023).";
    return;
  }
  const total = docs.id.length;
  let haystack = null, shown = PAGE, order = "id", down = false, found = [];
  const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);

  const select = () => {
    const words = query.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (words.length && haystack === null) {
      haystack = docs.id.map((id, n) => `${id}\n${docs.question[n]}\n${docs.answer[n]}`.toLowerCase());
    }
    found = [];
    for (let n = 0; n < total; n++) {
      if (only.value === "done" && docs.failed[n]) continue;
      if (only.value === "failed" && !docs.failed[n]) continue;
      if (words.every((word) => haystack[n].includes(word))) found.push(n);
    }
    const by = docs[order];
    found.sort((a, b) => (down ? -1 : 1) * compare(by[a], by[b]) || a - b);
    shown = PAGE;
    show();
  };

  // Marks are ranges of characters, of which JavaScript's strings have several units for some.
  const mark = (inner, text, marks) => {
    const characters = [...text];
    let at = 0;
    inner.replaceChildren();
    for (const [start, stop] of marks) {
      const marked = document.createElement("mark");
      marked.textContent = characters.slice(start, stop).join("");
      inner.append(characters.slice(at, start).join(""), marked);
      at = stop;
    }
    inner.append(characters.slice(at).join(""));
  };

  const cell = (row, text, kind, about = {}) => {
    const made = document.createElement("td");
    made.className = kind;
    for (const [name, words] of Object.entries({ question: about.question, text, ended: about.ended })) {
      if (!words && name !== "text") continue;
      const inner = document.createElement("div");
      inner.className = name;
      inner.textContent = words;
      if (name === "text" && about.marks?.length) mark(inner, words, about.marks);
      made.append(inner);
    }
    row.append(made);
  };

  const show = () => {
    const rows = found.slice(0, shown).map((n) => {
      const row = document.createElement("tr");
      if (docs.failed[n]) row.classList.add("failed");
      row.tabIndex = 0;
      cell(row, docs.id[n], "id");
      cell(row, docs.failed[n] ? "" : docs.tokens[n].toLocaleString("en"), "n");
      cell(row, docs.failed[n] ? "" : Math.floor(100 * docs.seen[n]) + "%", docs.seen[n] < 1 ? "n part" : "n");
      cell(row, docs.failed[n] || docs.ttft[n] < 0 ? "" : docs.ttft[n].toFixed(2) + " s", "n");
      cell(row, docs.unsupported[n] < 0 ? "" : docs.unsupported[n], "n");
      const about = { question: docs.question[n], ended: docs.ended[n], marks: docs.marks[n] };
      cell(row, (docs.failed[n] ? "failed: " : "") + docs.answer[n], "answer", about);
      return row;
    });
    body.replaceChildren(...rows);
    count.textContent = `${found.length.toLocaleString("en")} of ${total.toLocaleString("en")} documents`;
    more.hidden = shown >= found.length;
  };

  const toggle = (event) => {
    const row = event.target.closest("tr");
    if (row && !String(getSelection())) row.classList.toggle("open");
  };
  let timer;
  query.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(select, 120); });
  only.addEventListener("change", select);
  more.addEventListener("click", () => { shown += 4 * PAGE; show(); });
  body.addEventListener("click", toggle);
  body.addEventListener("keydown", (event) => { if (event.key === "Enter") toggle(event); });
  for (const button of document.querySelectorAll("#answers th button")) {
    button.addEventListener("click", () => {
      down = order === button.dataset.by ? !down : false;
      order = button.dataset.by;
      select();
    });
  }
  select();
  document.documentElement.dataset.ready = "yes";
})();
