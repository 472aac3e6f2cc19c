"use strict";
(() => {
  const live = document.getElementById("live");
  const say = (text, on) => {
    live.textContent = text;
    document.body.classList.toggle("stale", !on);
  };
  const waiting = new Map(); // what arrived while text was selected there
  const show = (el, html) => {
    const selection = document.getSelection();
    if (!selection.isCollapsed && el.contains(selection.anchorNode)) {
      waiting.set(el, html);
      return;
    }
    waiting.delete(el);
    el.innerHTML = html; // of the server, which has escaped all that is not its own
  };
  document.addEventListener("selectionchange", () => {
    for (const [el, html] of [...waiting]) show(el, html);
  });
  const events = new EventSource("events");
  events.onopen = () => say("live", true);
  events.onerror = () => say(events.readyState === EventSource.CLOSED ? "not live: reload" : "disconnected", false);
  for (const name of ["clock", "summary", "problems", "identities", "upstreams", "servers", "names", "events", "roots"]) {
    events.addEventListener(name, (e) => show(document.getElementById(name), e.data));
  }
})();
