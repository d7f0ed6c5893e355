// Small helpers to build and update the page. Text is always set as text, never parsed as HTML.

export const byId = (id) => document.getElementById(id);

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setClass(element, name) {
  if (element.className !== name) element.className = name;
}

// Keeps one element per key, in the order of the items: focus and selection stay where they are.
export class Keyed {
  constructor(parent, create) {
    this.parent = parent;
    this.create = create;
    this.kept = new Map();
  }

  update(items, keyOf) {
    const wanted = new Map(items.map((item) => [keyOf(item), item]));
    for (const [key, entry] of this.kept) {
      if (!wanted.has(key)) {
        entry.element.remove();
        this.kept.delete(key);
      }
    }
    let place = this.parent.firstElementChild;
    for (const [key, item] of wanted) {
      let entry = this.kept.get(key);
      if (!entry) {
        entry = this.create(item);
        this.kept.set(key, entry);
      }
      entry.update(item);
      if (entry.element === place) place = place.nextElementSibling;
      else this.parent.insertBefore(entry.element, place);
    }
  }
}

export function toast(text, kind = "note") {
  const element = h("p", { class: `toast ${kind}` }, text);
  byId("toasts").append(element);
  setTimeout(() => element.remove(), kind === "error" ? 12000 : 6000);
}

// Resolves to the comment ("" without a field) once confirmed, to null when dismissed.
export function ask({ title, text, yes, field = false }) {
  const dialog = byId("dialog");
  byId("dialog-title").textContent = title;
  byId("dialog-text").textContent = text;
  byId("dialog-yes").textContent = yes;
  byId("dialog-field").hidden = !field;
  byId("dialog-comment").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  byId(field ? "dialog-comment" : "dialog-yes").focus();
  return new Promise((resolve) => {
    const done = () => resolve(dialog.returnValue === "yes" ? byId("dialog-comment").value.trim() : null);
    dialog.addEventListener("close", done, { once: true });
  });
}
