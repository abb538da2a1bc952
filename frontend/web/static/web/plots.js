// Plotly in the page's theme.

const CONFIG = { displayModeBar: false, responsive: true };

function colour(token) {
  const probe = document.createElement("span");
  probe.style.color = `var(${token})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

// What a figure leaves to the theme, as Plotly's dotted names.
export function themed() {
  const [text, muted, line, raised] = ["--text", "--muted", "--line", "--raised"].map(colour);
  const family = getComputedStyle(document.body).fontFamily;
  const axis = (name) => ({
    [`${name}.gridcolor`]: line,
    [`${name}.linecolor`]: line,
    [`${name}.tickfont.color`]: muted,
    [`${name}.title.font.color`]: muted,
  });
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    "font.family": family,
    "font.size": 11,
    "font.color": text,
    "hoverlabel.bgcolor": raised,
    "hoverlabel.bordercolor": line,
    "hoverlabel.font.color": text,
    "hoverlabel.font.family": family,
    ...axis("xaxis"),
    ...axis("yaxis"),
  };
}

function withTheme(layout) {
  const full = structuredClone(layout);
  for (const [name, value] of Object.entries(themed())) {
    const parts = name.split(".");
    let at = full;
    for (const part of parts.slice(0, -1)) at = at[part] ??= {};
    at[parts.at(-1)] = value;
  }
  return full;
}

// Traces that say so are drawn in the colour of the text.
function inked(traces) {
  const ink = colour("--text");
  return traces.map((trace) =>
    trace.meta === "ink"
      ? { ...trace, line: { ...trace.line, color: ink }, marker: { ...trace.marker, color: ink } }
      : trace,
  );
}

export function draw(plot, figure) {
  plot.classList.remove("waiting");
  return Plotly.react(plot, inked(figure.data), withTheme(figure.layout), CONFIG);
}

export async function getJson(url) {
  const answer = await fetch(url);
  if (!answer.ok || answer.redirected) throw new Error(`${url}: ${answer.status}`);
  return answer.json();
}
