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
  const known = new Set(shown());
  // A new job belongs on the newest page only, and moves every row: the page is read again.
  if (ids.some((id) => !known.has(id)) && "newest" in list.dataset) {
    location.reload();
    return;
  }
  const mine = ids.filter((id) => known.has(id));
  if (!mine.length) return;
  const answer = await fetch(`${list.dataset.rows}?ids=${mine.join(",")}`);
  if (!answer.ok || answer.redirected) return;
  const { rows } = await answer.json();
  for (const [id, html] of Object.entries(rows)) replace(id, html);
}

function replace(id, html) {
  const row = list.querySelector(`tr[data-job="${id}"]`);
  if (!row) return;
  const holder = document.createElement("template");
  holder.innerHTML = html;
  const fresh = holder.content.querySelector("tr");
  const focused = row.contains(document.activeElement);
  row.replaceWith(fresh);
  if (focused) fresh.querySelector("a").focus();
}

const refreshSoon = throttled(refresh, 1000);

function heard({ ids }) {
  for (const id of ids ?? shown()) changed.add(id);
  refreshSoon();
}

openStream(list.dataset.stream, { on: { jobs: heard } });
