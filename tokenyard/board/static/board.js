// Keeps an open page up to date: each live block comes by server-sent events when it changes.
"use strict";
(() => {
  const live = document.querySelectorAll("[data-live]");
  if (!live.length || !window.EventSource) return;
  const source = new EventSource(location.href);
  for (const place of live) {
    source.addEventListener(place.id, (event) => {
      if (place.contains(document.activeElement) && document.activeElement !== place) return;
      place.innerHTML = event.data;
    });
  }
})();
