// An EventSource that is open only while the page can be seen: a browser allows six connections per host, and
// pages in the background would use them up. What was missed is replayed from the last id on return.

const WORDS = { live: "Live", lost: "Reconnecting", paused: "Paused", off: "Not live: reload the page", over: "Finished" };

function show(state) {
  const badge = document.querySelector("[data-live]");
  if (!badge) return;
  badge.dataset.state = state;
  badge.textContent = WORDS[state];
}

export function openStream(url, { after = null, on, onReopen = () => {} }) {
  let source = null;
  let seen = after;
  let over = false;
  let openings = 0;

  function open() {
    if (over || source) return;
    source = new EventSource(seen === null ? url : `${url}?after=${seen}`);
    source.onopen = () => {
      show("live");
      if (openings++) onReopen();
    };
    source.onerror = () => show(source?.readyState === EventSource.CLOSED ? "off" : "lost");
    for (const [type, heard] of Object.entries(on)) {
      source.addEventListener(type, (event) => {
        if (event.lastEventId) seen = event.lastEventId;
        heard(JSON.parse(event.data));
      });
    }
    source.addEventListener("end", () => {
      over = true;
      close();
      show("over");
    });
  }

  function close() {
    source?.close();
    source = null;
  }

  function follow() {
    if (document.hidden) {
      close();
      if (!over) show("paused");
    } else {
      open();
    }
  }

  document.addEventListener("visibilitychange", follow);
  addEventListener("pagehide", close);
  addEventListener("pageshow", follow);
  follow();
}

// Does `work` after `ms`, and again after as many as it answers with, while the page can be seen. What it gives
// back does the work at once; a failure is tried again.
export function poll(work, ms) {
  let timer = null;
  let working = false;
  let again = false;

  async function go() {
    clearTimeout(timer);
    again = working;
    if (working || document.hidden) return;
    working = true;
    try {
      ms = await work();
      show("live");
    } catch (error) {
      console.warn(error.message);
      show("lost");
    }
    working = false;
    if (again) go();
    else timer = setTimeout(go, ms);
  }

  function follow() {
    if (document.hidden) {
      clearTimeout(timer);
      show("paused");
    } else {
      go();
    }
  }

  document.addEventListener("visibilitychange", follow);
  show("live");
  timer = setTimeout(go, ms);
  return go;
}

// Calls `work` at once and then at most every `ms`, the last call never lost.
export function throttled(work, ms) {
  let timer = null;
  let again = false;
  return () => {
    if (timer) {
      again = true;
      return;
    }
    work();
    timer = setTimeout(function tick() {
      timer = null;
      if (again) {
        again = false;
        work();
        timer = setTimeout(tick, ms);
      }
    }, ms);
  };
}
