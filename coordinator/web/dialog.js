// Dialogs: modal, focus stays inside and goes back to where it was.

import { h, say } from "./dom.js";
import { change, signIn } from "./rest.js";

function open(title, ...content) {
  const from = document.activeElement;
  const dialog = h("dialog", { "aria-labelledby": "dialog-title" }, h("h2", { id: "dialog-title" }, title), ...content);
  dialog.addEventListener("close", () => {
    dialog.remove();
    if (from?.isConnected) from.focus();
    else document.getElementById("main")?.focus();
  });
  dialog.addEventListener("keydown", (event) => {
    if (event.key !== "Tab") return;
    const inside = [...dialog.querySelectorAll("button, input, textarea, select, a[href]")].filter((one) =>
      !one.disabled && one.offsetParent);
    const edge = event.shiftKey ? inside[0] : inside[inside.length - 1];
    if (inside.length && document.activeElement === edge) {
      event.preventDefault();
      (event.shiftKey ? inside[inside.length - 1] : inside[0]).focus();
    }
  });
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

/** A form in a dialog. `act(values)` does it; what it throws is shown, and the dialog stays. */
function formDialog({ title, about, fields, verb, tone, act }) {
  const wrong = h("p", { class: "wrong", role: "alert" });
  const confirm = h("button", { type: "submit", class: tone ?? "primary" }, verb);
  const cancel = h("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
  const form = h("form", {
    method: "dialog",
    onsubmit: async (event) => {
      event.preventDefault();
      confirm.disabled = true;
      say(wrong, "");
      try {
        const after = await act(Object.fromEntries(new FormData(form)));
        dialog.close();
        after?.();
      } catch (error) {
        say(wrong, error.message);
        confirm.disabled = false;
        fields.find((field) => field.matches("input, textarea"))?.focus();
      }
    },
  }, ...(about ? [h("p", { id: "dialog-about" }, about)] : []), ...fields, wrong,
    h("div", { class: "buttons" }, cancel, confirm));
  const dialog = open(title, form);
  if (about) dialog.setAttribute("aria-describedby", "dialog-about");
  form.querySelector("input, textarea")?.focus();
}

/** Ask why, then do it. `fields`: what else is asked; `body(values)`: what is sent of that. */
export function askReason({ title, about, verb, path, danger, done, fields = [], body = () => ({}) }) {
  formDialog({
    title, about, verb, tone: danger ? "danger" : "primary",
    fields: [
      h("label", { for: "reason" }, "Reason (kept in the audit log)"),
      h("textarea", { id: "reason", name: "reason", rows: 3, maxlength: 512, required: true }),
      ...fields,
    ],
    act: async ({ reason, ...rest }) => {
      if (!reason.trim()) throw new Error("say why: it is kept in the audit log");
      await change(path, { reason: reason.trim(), ...body(rest) });
      return done;
    },
  });
}

/** How volunteers get in: a join string, shown once. */
export function invite() {
  const number = (id, label, value, max) => [
    h("label", { for: id }, label),
    h("input", { id, name: id, type: "number", min: 1, max, value, required: true }),
  ];
  formDialog({
    title: "Let volunteers in", verb: "Make a join string",
    about: "Whoever has the join string may join with a new node, until it is used up or expired.",
    fields: [...number("uses", "Nodes it lets in", 1, 10000), ...number("hours", "Hours until it expires", 72, 8784)],
    act: async ({ uses, hours }) => {
      const made = await change("/v1/tokens", { uses: Number(uses), expires_hours: Number(hours) });
      return () => {
        const dialog = open("The join string",
          h("p", {}, "It is shown this once. Send it to those whom you let in."),
          h("p", {}, "They paste it behind \u201cecho2-node run --join\u201d."),
          h("textarea", { readonly: true, rows: 4, "aria-label": "join string" }, made.join),
          h("div", { class: "buttons" },
            h("button", { type: "button", class: "primary", onclick: () => dialog.close() }, "Done")));
        dialog.querySelector("textarea").select();
      };
    },
  });
}

export function signInDialog(done) {
  if (document.querySelector("dialog[open]")) return;
  formDialog({
    title: "Sign in", verb: "Sign in",
    about: "With the operator's token that \u201cecho2-coordinator init\u201d printed, or one that an operator made for you.",
    fields: [
      h("label", { for: "token" }, "Token"),
      h("input", { id: "token", name: "token", type: "password", autocomplete: "current-password", required: true,
        maxlength: 512 }),
    ],
    act: async ({ token }) => {
      await signIn(token.trim());
      return done;
    },
  });
}

export const SHORTCUTS_OFF = "echo2-shortcuts-off";

export function help() {
  if (document.querySelector("dialog[open]")) return;
  const off = h("input", { type: "checkbox", id: "shortcuts" });
  off.checked = localStorage.getItem(SHORTCUTS_OFF) === null;
  off.addEventListener("change",
    () => (off.checked ? localStorage.removeItem(SHORTCUTS_OFF) : localStorage.setItem(SHORTCUTS_OFF, "1")));
  const key = (name, what) => h("div", {}, h("dt", {}, h("kbd", {}, name)), h("dd", {}, what));
  const dialog = open("Keys and words",
    h("dl", { class: "keys" },
      key("/", "to the filter"), key("Esc", "empties the filter, closes a dialog"), key("?", "this help"),
      key("\u2190 \u2192", "in a chart: from point to point")),
    h("p", {}, off, " ", h("label", { for: "shortcuts" }, "/ and ? work as keys")),
    h("dl", { class: "words" },
      ...[
        ["mu", "accepted rollouts a second of a node, over the time in which it held work"],
        ["mu_min, mu_target",
          "what the pool must make so that the learner does not wait (equation 2), and what we aim at"],
        ["rho", "what 1,000 rollouts of a paid node cost"],
        ["version lag", "how many training steps older the node's snapshot is than the newest"],
        ["T_bcast, T_train", "from a publication until enough nodes use it; one training step"],
        ["bubble", "the share of its time in which the learner waits"],
        ["staleness", "training steps between the policy that made a rollout and the one that is trained"],
        ["-", "not measured, or there is none; its reason is shown when you point at it"],
      ].map(([word, meaning]) => h("div", {}, h("dt", {}, word), h("dd", {}, meaning)))),
    h("div", { class: "buttons" },
      h("button", { type: "button", class: "primary", onclick: () => dialog.close() }, "Close")));
  dialog.querySelector(".buttons button").focus();
}
