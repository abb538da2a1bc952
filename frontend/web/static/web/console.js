// What every page has: theme, relative times, copy buttons, forms that submit when changed.

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function announceTheme() {
  document.dispatchEvent(new CustomEvent("theme-changed"));
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", announceTheme);

document.addEventListener("click", (event) => {
  if (event.target.closest("[data-theme-toggle]")) {
    const theme = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    localStorage.setItem("theme", theme);
    announceTheme();
  }
  const copy = event.target.closest("[data-copy]");
  if (copy) copyText(copy);
});

// A button that htmx handles would swallow a click that comes before htmx is there: it waits, disabled.
htmx.onLoad((part) => {
  for (const button of part.querySelectorAll("button[data-ready]")) button.disabled = false;
});

async function copyText(button) {
  const text = document.querySelector(button.dataset.copy).textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select and copy by hand";
  }
  setTimeout(() => (button.textContent = "Copy"), 1600);
}

// A reload must ask for the page again, not repeat the POST that answered with it; and the way back must not
// find in the browser's memory what was shown once.
const shownOnce = document.querySelector("[data-shown-once]");
if (shownOnce) {
  history.replaceState(null, "", location.href);
  addEventListener("pagehide", () => shownOnce.remove());
}

document.addEventListener("change", (event) => {
  event.target.closest("[data-submit-on-change]")?.submit();
});

function ago(seconds) {
  if (seconds < 10) return "just now";
  if (seconds >= 86400) return `${Math.floor(seconds / 86400)} d ago`;
  if (seconds >= 3600) return `${Math.floor(seconds / 3600)} h ago`;
  if (seconds >= 60) return `${Math.floor(seconds / 60)} min ago`;
  return `${Math.floor(seconds)} s ago`;
}

setInterval(() => {
  for (const time of document.querySelectorAll("time[data-ago]")) {
    time.textContent = ago((Date.now() - Date.parse(time.dateTime)) / 1000);
  }
}, 10000);
