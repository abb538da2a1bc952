// An EventSource that is open only while the page can be seen: a browser allows six connections per host, and
// pages in the background would use them up. What was missed is replayed from the last id on return.

const WORDS = { live: "Live", lost: "Reconnecting", paused: "Paused", off: "Not live: reload the page", over: "Finished" };

export function openStream(url, { after = null, on, onReopen = () => {} }) {
  const badge = document.querySelector("[data-live]");
  let source = null;
  let seen = after;
  let over = false;
  let openings = 0;

  function show(state) {
    if (!badge) return;
    badge.dataset.state = state;
    badge.textContent = WORDS[state];
  }

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
