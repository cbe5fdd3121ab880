// What is asked of the coordinator, and who asks: the session's cookie goes by itself, changes carry its csrf word.

export class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

/** Nobody answered. */
export class NoAnswer extends Error {}

const SECONDS_MAX = 15;
const PAGES_MAX = 50;

let session = null;

async function ask(path, options = {}) {
  let reply;
  try {
    reply = await fetch(path,
      { ...options, signal: AbortSignal.timeout(1000 * SECONDS_MAX), credentials: "same-origin" });
  } catch (error) {
    throw new NoAnswer(error.name === "TimeoutError" ? `no answer within ${SECONDS_MAX} s` : "no connection");
  }
  if (reply.ok) return reply.status === 204 ? null : reply.json().catch(() => null);
  let detail = `the answer was ${reply.status} ${reply.statusText}`;
  try {
    detail = (await reply.json()).detail ?? detail;
  } catch {
    // not one of our own problems: a proxy's page, for example
  }
  throw new Problem(reply.status, String(detail).slice(0, 600));
}

export const get = (path) => ask(path);

/** A list, whole: as it comes, or page by page. */
export async function list(path) {
  const found = [];
  let next = null;
  for (let page = 0; page < PAGES_MAX; page += 1) {
    const reply = await ask(next === null ? path : withQuery(path, "cursor", next));
    if (Array.isArray(reply)) return reply;
    found.push(...reply.items);
    next = reply.next ?? null;
    if (next === null) break;
  }
  return found;
}

/** One page of a list: {items, next}. */
export async function page(path) {
  const reply = await ask(path);
  return Array.isArray(reply) ? { items: reply, next: null } : { items: reply.items, next: reply.next ?? null };
}

export function withQuery(path, name, value) {
  return `${path}${path.includes("?") ? "&" : "?"}${name}=${encodeURIComponent(value)}`;
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

const MAY = {
  operator: new Set(["suspend", "restore", "pause", "resume", "stop", "invite"]),
  researcher: new Set(["pause", "resume", "stop"]),
};

/** Whether the page offers this to whoever is signed in. The coordinator decides in the end. */
export const may = (what) => MAY[session?.role]?.has(what) ?? false;
