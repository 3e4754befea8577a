// Keeps an open page up to date: each live block comes by server-sent events when it changes.
//
// Elements stay and take on their new content, so that focus, selection, scrolling and what was
// typed, checked or unfolded survive. Nothing changes under a pointer that is about to click.
// Without this file, pages are read and forms are sent all the same.
"use strict";
(() => {
  const QUIET_MS = 10_000; // so long after the last movement, what lies under the pointer may change
  const LOST_MS = 4_000, AGAIN_MS = 3_000; // a stream ends now and then, and comes back sooner
  const root = document.documentElement, banner = document.getElementById("live_error");
  const places = [...document.querySelectorAll("[data-live]")];
  const waiting = new Map(); // live blocks that have changed, with their new HTML
  let source, again, lost, hiding, touched = -QUIET_MS, isPressed = false;

  // Taking on new content
  const keyOf = (node) => {
    if (node.nodeType !== Node.ELEMENT_NODE) return "";
    if (node.id || node.dataset.key) return node.id || node.dataset.key;
    if (node.matches("input")) return `${node.type} ${node.name} ${node.getAttribute("value") ?? ""}`;
    if (!node.matches("tr, li, .tile")) return "";
    const mark = node.querySelector("input[type=checkbox], a[href]");
    return mark ? mark.getAttribute("href") ?? mark.value : "";
  };
  const isSame = (one, other) => one.nodeName === other.nodeName && keyOf(one) === keyOf(other);

  function change(node, fresh) {
    if (node.isEqualNode(fresh)) return;
    if (node.nodeType !== Node.ELEMENT_NODE) {
      if (!fresh.data.startsWith(node.data)) node.data = fresh.data;
      else node.appendData(fresh.data.slice(node.data.length)); // a selection stays
      return;
    }
    for (const { name } of [...node.attributes, ...fresh.attributes]) {
      const value = fresh.getAttribute(name);
      if (name === "open" || node.getAttribute(name) === value) continue; // the user unfolds
      if (value === null) node.removeAttribute(name);
      else node.setAttribute(name, value);
    }
    changeChildren(node, fresh);
  }

  function changeChildren(parent, fresh) {
    const isAtEnd = parent.scrollTop + parent.clientHeight >= parent.scrollHeight - 4;
    const kept = new Set([...fresh.childNodes].map(keyOf)).add("");
    for (const child of [...parent.childNodes]) if (!kept.has(keyOf(child))) child.remove();
    let at = parent.firstChild;
    const drop = () => { const gone = at; at = at.nextSibling; gone.remove(); };
    for (const wanted of [...fresh.childNodes]) {
      let found = at;
      const isElement = wanted.nodeType === Node.ELEMENT_NODE;
      while (found && !isSame(found, wanted)) found = isElement ? found.nextSibling : null;
      if (!found) { parent.insertBefore(wanted, at); continue; }
      while (at !== found && !keyOf(at)) drop();
      if (at === found) at = at.nextSibling;
      else parent.insertBefore(found, at);
      change(found, wanted);
    }
    while (at) drop();
    if (parent.dataset.follow !== undefined && isAtEnd) parent.scrollTop = parent.scrollHeight;
  }

  function isInUse(place) {
    if (isPressed || performance.now() - touched > QUIET_MS) return isPressed;
    const selection = getSelection();
    return (!selection.isCollapsed && selection.containsNode(place, true))
      || place.querySelector(":is(a, button, input, select, summary, label):hover") !== null;
  }

  function renew() {
    for (const [place, html] of waiting) {
      if (isInUse(place)) continue;
      waiting.delete(place);
      const fresh = document.createElement("template");
      fresh.innerHTML = html;
      const hadFocus = place.contains(document.activeElement);
      changeChildren(place, fresh.content);
      if (!hadFocus || place.contains(document.activeElement)) continue;
      place.tabIndex = -1; // what had the focus is gone
      place.focus({ preventScroll: true });
    }
  }
  setInterval(() => { if (waiting.size) renew(); }, 250);

  // Being connected
  const clock = () => new Date().toLocaleTimeString();
  function tell(problem) {
    if (problem ? banner.dataset.problem === problem : !root.classList.contains("is-stale")) return;
    clearTimeout(hiding);
    banner.textContent = problem
      ? `${problem} What you see is from ${clock()}; trying again.` : `Up to date again since ${clock()}.`;
    banner.dataset.problem = problem;
    banner.classList.toggle("bad", Boolean(problem));
    root.classList.toggle("is-stale", Boolean(problem));
    banner.hidden = false;
    if (!problem) hiding = setTimeout(() => { banner.hidden = true; }, 5_000);
  }

  function connect() {
    if (source || document.hidden || !places.length) return;
    clearTimeout(again);
    source = new EventSource(location.href);
    source.addEventListener("live_error", ({ data }) => { lost = clearTimeout(lost); tell(data); });
    for (const place of places) {
      source.addEventListener(place.id, ({ data }) => { waiting.set(place, data); renew(); });
    }
    source.onerror = () => {
      lost ??= setTimeout(() => tell("The board does not answer."), LOST_MS);
      if (source.readyState !== EventSource.CLOSED) return; // the browser tries again by itself
      source = undefined;
      again = setTimeout(connect, AGAIN_MS);
      // Who is not logged in any more is led to the login.
      fetch(location.href, { method: "HEAD", redirect: "manual" })
        .then((answer) => { if (answer.type === "opaqueredirect") location.reload(); }).catch(() => {});
    };
  }

  function rest() {
    clearTimeout(again);
    lost = clearTimeout(lost);
    source = source?.close();
  }

  addEventListener("pagehide", rest);
  addEventListener("pageshow", connect);
  addEventListener("visibilitychange", () => (document.hidden ? rest() : connect()));
  addEventListener("pointermove", () => { touched = performance.now(); }, { passive: true });
  addEventListener("pointerdown", () => { isPressed = true; });
  for (const end of ["pointerup", "pointercancel", "dragend", "blur"]) {
    addEventListener(end, () => setTimeout(() => { isPressed = false; }, 50)); // after the click
  }

  // Small comforts
  const here = new URL(location.href);
  if (here.searchParams.has("done")) { // told once, not again at each reload
    here.searchParams.delete("done");
    history.replaceState(history.state, "", here);
  }
  document.addEventListener("change", ({ target }) => { // <input type="checkbox" data-all="id">
    if (!target.dataset.all) return;
    for (const one of document.getElementsByName(target.dataset.all)) one.checked = target.checked;
  });
  if (document.querySelector("[data-retry]") && !location.pathname.includes("/do/")) {
    const retry = (answer) => answer.ok && location.reload();
    setInterval(() => fetch(location.href, { method: "HEAD" }).then(retry, () => {}), AGAIN_MS);
  }
  connect();
})();
