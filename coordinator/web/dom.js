// Elements without markup: whatever comes from the network becomes text, never HTML.

const SVG = "http://www.w3.org/2000/svg";

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An HTML element. Strings among the children become text nodes. */
export function h(tag, attributes, ...children) {
  return build(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function s(tag, attributes, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

/** Text that is only written when it changed, so that a reader's selection and place survive. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A part of the page that is made anew only when what it shows changed. */
export function region(element, render) {
  let shown;
  return (value) => {
    const now = JSON.stringify(value);
    if (now === shown) return;
    shown = now;
    const focused = element.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
    element.replaceChildren(...[render(value)].flat().filter(Boolean));
    if (focused) element.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  };
}

/** A value, or "-" with the reason why there is none. `value` is {text} or {none: reason}. */
export function shown(value, attributes) {
  if (value.none === undefined) return h("span", attributes, value.text);
  return h("span", { class: "none", title: value.none }, "-", h("span", { class: "unseen" }, ` (${value.none})`));
}

/** Says something to those who do not see the screen. */
export function speak(text) {
  const spoken = document.getElementById("spoken");
  if (spoken) spoken.textContent = text;
}
