// Numbers with their units. What was not measured is {none: reason}, never 0.

const some = (value) => value !== null && value !== undefined && Number.isFinite(value);

/** Wraps a formatter: null becomes "-" with the reason. */
const measured = (format) => (value, reason = "not measured yet") =>
  some(value) ? { text: format(value) } : { none: reason };

/** About three digits. */
export function digits(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e7)) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

export const number = measured(digits);
export const count = measured((value) => value.toLocaleString("en"));
export const percent = measured((value) => `${digits(100 * value)} %`);
export const rate = measured((value) => `${digits(value)} rollouts/s`);
export const tokenRate = measured((value) => `${digits(value)} tokens/s`);
export const nats = measured((value) => `${digits(value)} nats`);

/** 0.42 s, 12.3 s, 2 min 05 s, 3 h 10 min, 2 d 4 h. */
export function span(seconds) {
  if (seconds < 100) return `${digits(Math.round(seconds * 100) / 100)} s`;
  const two = (value) => String(Math.floor(value)).padStart(2, "0");
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${two(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${two((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}
export const duration = measured(span);
export const ago = measured((value) => (value < 1 ? "now" : `${span(Math.floor(value))} ago`));

/** Bytes as people count them. */
export const bytes = measured((value) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (value >= 1024 && place < units.length - 1) [value, place] = [value / 1024, place + 1];
  return `${digits(value)} ${units[place]}`;
});

/** Dollars: cents, or three digits of what is less than one. */
export const dollars = measured((value) => {
  const [sign, size] = [value < 0 ? "-" : "", Math.abs(value)];
  if (size >= 0.01 || size === 0) return `${sign}$${size.toFixed(2)}`;
  return `${sign}$${size.toFixed(Math.min(9, 2 - Math.floor(Math.log10(size))))}`;
});

/** The price of 1,000 rollouts, as its account has it. */
export function rho(node) {
  if (!node.price_hour) return { none: "a volunteer: it has no price" };
  if (node.rho_dollars === null) return { none: "it is not activated, or its speed is not measured yet" };
  return { text: `$${digits(1000 * node.rho_dollars)} / 1000` };
}

/** An instant, in the reader's own time. */
export function clock(wallSeconds) {
  const date = new Date(1000 * wallSeconds);
  const two = (value) => String(value).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return { day, time: `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`,
    iso: date.toISOString() };
}

/** The end of a peer id: its beginning is the same for all. */
export const short = (peer) => (peer.length > 14 ? `...${peer.slice(-8)}` : peer);
