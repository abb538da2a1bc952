// The operators' page: its parts are asked for again and again, while it can be seen.
import { poll } from "./live.js";
import { draw, getJson } from "./plots.js";

const page = document.getElementById("cluster");
const plot = document.getElementById("cluster-plot");
let shown = JSON.parse(document.getElementById("figure").textContent);

function redraw() {
  if (plot.classList.contains("waiting")) plot.textContent = "";
  plot.style.height = `${shown.figure.layout.height}px`;
  return draw(plot, shown.figure);
}

// A part under the reader's selection or focus stays until they let go of it.
function isInUse(part) {
  const selection = getSelection();
  return part.contains(document.activeElement) || (!selection.isCollapsed && part.contains(selection.anchorNode));
}

async function refresh() {
  const minutes = document.querySelector("[name=minutes]:checked").value;
  shown = await getJson(`${page.dataset.liveParts}?minutes=${minutes}`);
  for (const part of page.querySelectorAll("[data-part]")) {
    if (!isInUse(part)) part.innerHTML = shown.html[part.dataset.part];
  }
  // A new picture would take away what the reader points at.
  if (!plot.matches(":hover")) await redraw();
  return shown.every_ms;
}

const askNow = poll(refresh, shown.every_ms);
for (const choice of document.querySelectorAll("[name=minutes]")) choice.addEventListener("change", askNow);
document.addEventListener("theme-changed", redraw);
redraw();
