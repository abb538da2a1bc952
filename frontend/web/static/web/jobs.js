// Keeps the rows of the jobs list as the server has them.
import { openStream, throttled } from "./live.js";

const list = document.getElementById("jobs");
const changed = new Set();

function shown() {
  return [...list.querySelectorAll("tr[data-job]")].map((row) => row.dataset.job);
}

async function refresh() {
  const ids = [...changed];
  changed.clear();
  if (!ids.length) return;
  const answer = await fetch(`${list.dataset.rows}?ids=${ids.join(",")}`);
  if (!answer.ok || answer.redirected) return;
  const { rows, newest } = await answer.json();
  if (list.tagName !== "TBODY") {
    if (newest.length) location.reload(); // the first job: there is a table now
    return;
  }
  for (const [id, html] of Object.entries(rows)) place(id, rowOf(html), newest);
}

function rowOf(html) {
  const holder = document.createElement("template");
  holder.innerHTML = html;
  return holder.content.querySelector("tr");
}

// A job that is shown is replaced; a new one goes to its place on the newest page, which keeps its length.
function place(id, fresh, newest) {
  const row = list.querySelector(`tr[data-job="${id}"]`);
  if (row) {
    const focused = row.contains(document.activeElement);
    row.replaceWith(fresh);
    if (focused) fresh.querySelector("a").focus();
  } else if ("newest" in list.dataset && newest.includes(id)) {
    const after = newest.slice(newest.indexOf(id) + 1).find((other) => shown().includes(other));
    list.insertBefore(fresh, after ? list.querySelector(`tr[data-job="${after}"]`) : null);
    while (list.children.length > newest.length) list.lastElementChild.remove();
  }
}

const refreshSoon = throttled(refresh, 1000);

function heard({ ids }) {
  for (const id of ids ?? shown()) changed.add(id);
  refreshSoon();
}

openStream(list.dataset.stream, { on: { jobs: heard } });
