// The job page: charts, fragments and events follow the job's stream.
import { openStream, throttled } from "./live.js";
import { draw, getJson, themed } from "./plots.js";

const MAX_EVENTS_PER_TYPE = 60;
const page = document.getElementById("job");
const state = JSON.parse(document.getElementById("figures").textContent);
let lastStep = state.last_step;

// ---------------------------------------------------------------- tabs

const tabs = [...document.querySelectorAll("[role=tab]")];

function select(tab, { focus = false } = {}) {
  for (const other of tabs) {
    const chosen = other === tab;
    other.setAttribute("aria-selected", chosen);
    other.tabIndex = chosen ? 0 : -1;
    document.getElementById(other.getAttribute("aria-controls")).hidden = !chosen;
  }
  if (focus) tab.focus();
  tab.scrollIntoView({ block: "nearest", inline: "nearest" });
  const name = tab.getAttribute("aria-controls");
  history.replaceState(null, "", name === "metrics" ? location.pathname : `#${name}`);
  if (name === "metrics") charts().forEach((plot) => plot.data && Plotly.Plots.resize(plot));
  if (name === "timeline") drawTimeline();
  if (name === "samples" || name === "cost") htmx.trigger(`#${name}`, "open");
}

function isOpen(name) {
  return !document.getElementById(name).hidden;
}

for (const tab of tabs) tab.addEventListener("click", () => select(tab));
document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
  const here = tabs.indexOf(document.activeElement);
  const go = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: tabs.length - 1 }[event.key];
  if (here < 0 || go === undefined) return;
  event.preventDefault();
  select(tabs[(go + tabs.length) % tabs.length], { focus: true });
});

// ---------------------------------------------------------------- charts

function charts() {
  return [...document.querySelectorAll("[data-chart]")];
}

function drawCharts(figures) {
  for (const plot of charts()) drawChart(plot, figures[plot.dataset.chart]);
}

// A chart without a step keeps its words instead of empty axes. What the job's steps never have is not shown,
// nor what is rare and always 0 in it.
function drawChart(plot, figure) {
  const { y } = figure.data.at(-1);
  const card = plot.closest("article");
  if (!y.length) return;
  card.hidden = !y.some((value) => value !== null && value !== undefined && (value !== 0 || !("rare" in card.dataset)));
  if (card.hidden) return;
  if (!plot.data) plot.textContent = "";
  draw(plot, figure);
  showLatest(plot);
}

function showLatest(plot) {
  const place = document.querySelector(`[data-latest="${plot.dataset.chart}"]`);
  const value = plot.data.at(-1).y.at(-1);
  const { tick, digits } = place.dataset;
  place.textContent = value === undefined || value === null ? "–" : tick + value.toFixed(Number(digits));
}

async function extendCharts() {
  if (lastStep < 0) return redrawCharts();
  const { points, cost, last_step } = await getJson(`${page.dataset.points}?after=${lastStep}`);
  let waiting = false;
  for (const plot of charts()) {
    const key = plot.dataset.chart;
    if (key === "cost") {
      drawChart(plot, cost);
    } else if (!plot.data) {
      if (points[key].y.at(-1).some(Boolean)) waiting = true;
    } else if (points[key].x[0].length) {
      const traces = points[key].x.map((_, index) => index);
      await Plotly.extendTraces(plot, points[key], traces, state.max_points);
      showLatest(plot);
    }
  }
  lastStep = last_step;
  if (waiting) await redrawCharts();
}

// A step that was trained again after a loss replaces what is drawn.
async function redrawCharts() {
  const fresh = await getJson(page.dataset.figures);
  lastStep = fresh.last_step;
  drawCharts(fresh.figures);
}

let trainedAgain = false;
let updating = Promise.resolve();
const updateCharts = throttled(() => {
  const work = trainedAgain ? redrawCharts : extendCharts;
  trainedAgain = false;
  updating = updating.then(work).catch((error) => console.warn("charts:", error.message));
}, 500);

// ---------------------------------------------------------------- timeline

const timeline = document.getElementById("timeline-plot");
const waitingForTimeline = timeline.textContent;

async function drawTimeline() {
  const minutes = document.querySelector("[name=minutes]:checked").value;
  const figure = await getJson(`${page.dataset.timeline}?minutes=${minutes}`);
  if (figure.data.length) {
    if (timeline.textContent === waitingForTimeline) timeline.textContent = "";
    timeline.style.height = `${figure.layout.height}px`;
    await draw(timeline, figure);
  }
}

for (const choice of document.querySelectorAll("[name=minutes]")) {
  choice.addEventListener("change", drawTimeline);
}
const updateTimeline = throttled(() => {
  if (isOpen("timeline")) drawTimeline();
}, 2000);

// ---------------------------------------------------------------- events

const events = document.getElementById("event-list");
const eventTemplate = document.getElementById("event-template");

function filterEvents() {
  const boxes = [...document.querySelectorAll("[data-event-filter] input")];
  const hidden = new Set(boxes.filter((box) => !box.checked).map((box) => box.value));
  for (const row of events.children) row.hidden = hidden.has(row.dataset.type);
}

document.querySelector("[data-event-filter]").addEventListener("change", filterEvents);

function addEvent(event) {
  const row = eventTemplate.content.firstElementChild.cloneNode(true);
  row.dataset.type = event.type;
  row.dataset.level = event.level;
  const time = row.querySelector("time");
  time.dateTime = event.at;
  time.title = `${event.at.slice(0, 19).replace("T", " ")} UTC`;
  time.textContent = event.at.slice(11, 19);
  row.querySelector(".tag").textContent = event.type;
  row.querySelector(".said").textContent = event.text;
  row.hidden = !document.querySelector(`[data-event-filter] input[value="${event.type}"]`)?.checked;
  events.prepend(row);
  const alike = events.querySelectorAll(`[data-type="${event.type}"]`);
  if (alike.length > MAX_EVENTS_PER_TYPE) alike[alike.length - 1].remove();
}

// ---------------------------------------------------------------- the stream

const refreshHeader = throttled(() => htmx.trigger("#job-header", "refresh"), 1000);
const refreshSamples = throttled(() => {
  if (isOpen("samples") && document.querySelector("#samples [data-follows]")) htmx.trigger("#samples", "open");
}, 1500);
const refreshCost = throttled(() => {
  if (isOpen("cost")) htmx.trigger("#cost", "open");
}, 3000);

function heard(event) {
  addEvent(event);
  refreshHeader();
}

function follow() {
  openStream(page.dataset.stream, {
    after: page.dataset.seen,
    on: {
      message: heard,
      status: heard,
      cost: heard,
      checkpoint(event) {
        heard(event);
        htmx.trigger("#checkpoints", "refresh");
      },
      metrics(event) {
        heard(event);
        if (event.data.step <= lastStep) trainedAgain = true;
        updateCharts();
        refreshSamples();
      },
      substage(event) {
        heard(event);
        updateTimeline();
        refreshCost();
      },
      touch: refreshHeader,
      end() {
        refreshHeader();
        updateCharts();
      },
    },
  });
}

document.addEventListener("theme-changed", () => {
  const layout = themed();
  for (const plot of [...charts(), timeline]) if (plot.data) Plotly.relayout(plot, layout);
});

drawCharts(state.figures);
filterEvents();
const asked = tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash);
// htmx hears a tab that opens only after it has read the page, which it does at the same event, before us.
if (asked) document.addEventListener("DOMContentLoaded", () => select(asked));
follow();
