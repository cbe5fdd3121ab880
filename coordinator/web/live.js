// Keeps a page up to date: at each word of the event stream where there is one, else every few seconds.

import { NoAnswer, Problem } from "./rest.js";

const POLL_SECONDS = 2;
const POLL_SECONDS_WITH_STREAM = 4;
const STREAM_AGAIN_SECONDS = 5;
const GATHER_SECONDS = 0.4;
const WAIT_SECONDS_MAX = 15;

/**
 * Calls `refresh` again and again; `tell` hears {state: "live" | "away" | "refused" | "broken", since, error, next}.
 * Returns a function that refreshes now.
 */
export function live(refresh, tell, { seconds = POLL_SECONDS, stream = true } = {}) {
  let streaming = false;
  let busy = false;
  let again = false;
  let failures = 0;
  let since = null;
  let timer = 0;

  async function look() {
    if (busy) {
      again = true;
      return;
    }
    busy = true;
    clearTimeout(timer);
    let wait = streaming ? Math.max(seconds, POLL_SECONDS_WITH_STREAM) : seconds;
    try {
      await refresh();
      [failures, since] = [0, null];
      tell({ state: "live" });
    } catch (error) {
      const ours = !(error instanceof NoAnswer || error instanceof Problem);
      if (ours) console.error(error);
      failures += 1;
      since ??= new Date();
      wait = Math.min(WAIT_SECONDS_MAX, seconds * 2 ** Math.min(failures - 1, 4));
      const refused = error instanceof Problem && (error.status === 401 || error.status === 403);
      tell({ state: ours ? "broken" : refused ? "refused" : "away", since, error, next: wait });
    } finally {
      busy = false;
      if (!document.hidden) timer = setTimeout(look, again ? 1000 * GATHER_SECONDS : 1000 * wait);
      again = false;
    }
  }

  function nudge() {
    if (busy) again = true;
    else if (!document.hidden) {
      clearTimeout(timer);
      timer = setTimeout(look, 1000 * GATHER_SECONDS);
    }
  }

  async function follow() {
    for (;;) {
      try {
        const reply = await fetch("/v1/events/stream",
          { headers: { Accept: "text/event-stream" }, credentials: "same-origin" });
        if (reply.ok && reply.body) {
          const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
          streaming = true;
          for (;;) {
            const { done, value } = await reader.read();
            if (done) break;
            if (/^data:/m.test(value)) nudge();
          }
        }
      } catch {
        // it went away: polling goes on, and so does this
      }
      streaming = false;
      nudge();
      await new Promise((resume) => setTimeout(resume, 1000 * STREAM_AGAIN_SECONDS));
    }
  }

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) clearTimeout(timer);
    else look();
  });
  look();
  if (stream) follow();
  return look;
}
