// What is asked of the coordinator, and who asks: the session's cookie goes by itself, changes carry its csrf word.

import { NEEDS, ROLES } from "./rules.js";

export class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

/** Nobody answered. */
export class NoAnswer extends Error {}

const SECONDS_MAX = 15;
const PAGE_ITEMS = 1000;
const PAGES_MAX = 50;

let session = null;

async function send(path, options = {}) {
  let reply;
  try {
    reply = await fetch(path,
      { ...options, signal: AbortSignal.timeout(1000 * SECONDS_MAX), credentials: "same-origin" });
  } catch (error) {
    throw new NoAnswer(error.name === "TimeoutError" ? `no answer within ${SECONDS_MAX} s` : "no connection");
  }
  if (reply.ok) return reply;
  let detail = `the answer was ${reply.status} ${reply.statusText}`;
  try {
    detail = (await reply.json()).detail ?? detail;
  } catch {
    // not one of our own problems: a proxy's page, for example
  }
  throw new Problem(reply.status, String(detail).slice(0, 600));
}

async function ask(path, options) {
  const reply = await send(path, options);
  return reply.status === 204 ? null : reply.json().catch(() => null);
}

export const get = (path) => ask(path);

/** One page of a list: {items, next}, where `next` is the path of the page behind it, or null. */
export async function page(path) {
  const reply = await send(path);
  const body = await reply.json();
  const link = (reply.headers.get("Link") ?? "").match(/<(\/v1\/[^>]*)>; *rel="?next"?/);
  return { items: body, next: link ? link[1] : null };
}

/** A list, whole: as it comes, or page by page. */
export async function list(path) {
  const found = [];
  let next = `${path}?limit=${PAGE_ITEMS}`;
  for (let pages = 0; next !== null && pages < PAGES_MAX; pages += 1) {
    const reply = await page(next);
    found.push(...reply.items);
    next = reply.next;
  }
  return found;
}

/** A change. Raises Problem with the coordinator's words. */
export function change(path, body, method = "POST") {
  const headers = { "Content-Type": "application/json" };
  if (session?.csrf) headers["X-CSRF-Token"] = session.csrf;
  return ask(path, { method, headers, body: JSON.stringify(body) });
}

/** Who is signed in: {name, role, csrf}, or null. */
export async function lookUpSession() {
  try {
    const reply = await ask("/v1/session");
    session = reply?.csrf ? reply : null;
  } catch (error) {
    if (error instanceof NoAnswer) throw error;
    session = null;
  }
  return session;
}

export const currentSession = () => session;

export async function signIn(token) {
  session = await change("/v1/session", { token });
  return session;
}

export async function signOut() {
  await change("/v1/session", {}, "DELETE");
  session = null;
}

/** Whether whoever is signed in may make this change, "POST /v1/...": by the coordinator's own table. */
export function may(route) {
  const least = ROLES.indexOf(NEEDS[route]);
  return session !== null && least >= 0 && ROLES.indexOf(session.role) >= least;
}
