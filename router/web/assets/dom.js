// Changes the document to match a description of it.
//
// A view is a function from data to descriptions of elements, made by `h`. `render` compares them with the elements that are
// there, keeps what is equal, and so keeps focus, scroll position and selection. Text and attributes are set as such: nothing
// that comes from the network is ever parsed as HTML.

const DESCRIBED = Symbol("described");
const DRAWN = new Set(["svg", "path", "line"]);

/** Describe an element. `properties`: attributes; `class`; `on...`: listeners; `style`: an object; `value`, `checked`: properties;
 *  `key`: what the element is among its siblings; `own`: its children are not compared; `ref`: called with the element after
 *  each change. Children that are null, undefined or false are left out. */
export function h(tag, properties, ...children) {
  return { tag, properties: properties ?? {}, children: children.flat(Infinity).filter(isShown) };
}

/** Make the children of `parent` match. */
export function render(parent, ...children) {
  renderChildren(parent, children.flat(Infinity).filter(isShown));
}

function isShown(child) {
  return child !== null && child !== undefined && child !== false;
}

function renderChildren(parent, wanted) {
  const keyed = new Map();
  for (const node of parent.childNodes) {
    const key = node[DESCRIBED]?.properties.key;
    if (key !== undefined) keyed.set(key, node);
  }
  let next = parent.firstChild;
  for (const each of wanted) {
    const node = reusable(each, keyed, next) ?? created(each);
    if (node === next) next = next.nextSibling;
    else parent.insertBefore(node, next);
    update(node, each);
  }
  while (next !== null) {
    const after = next.nextSibling;
    next.remove();
    next = after;
  }
}

function reusable(wanted, keyed, next) {
  if (typeof wanted !== "object") return next?.nodeType === Node.TEXT_NODE ? next : null;
  const key = wanted.properties.key;
  const found = key === undefined ? next : keyed.get(key);
  const described = found?.[DESCRIBED];
  return described?.tag === wanted.tag && described.properties.key === key ? found : null;
}

function created(wanted) {
  if (typeof wanted !== "object") return document.createTextNode("");
  return DRAWN.has(wanted.tag) ? document.createElementNS("http://www.w3.org/2000/svg", wanted.tag) : document.createElement(wanted.tag);
}

function update(node, wanted) {
  if (typeof wanted !== "object") {
    if (node.data !== String(wanted)) node.data = String(wanted);
    return;
  }
  const before = node[DESCRIBED]?.properties ?? {};
  node[DESCRIBED] = wanted;
  for (const name of Object.keys(before)) if (!(name in wanted.properties)) setProperty(node, name, undefined, before[name]);
  if (!wanted.properties.own) renderChildren(node, wanted.children);
  for (const [name, value] of Object.entries(wanted.properties)) setProperty(node, name, value, before[name]);
  wanted.properties.ref?.(node);
}

/** Clear a canvas of this height; return its context, its width and what its style says of colours. */
export function cleared(canvas, height) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth, style = getComputedStyle(canvas);
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const paint = canvas.getContext("2d");
  paint.scale(ratio, ratio);
  return { paint, width, font: style.fontFamily, colour: (name) => style.getPropertyValue(name) };
}

/** A canvas that is drawn again when its size or the colours change: `draw`. `listen(canvas)`: it is new. */
export class Drawing {
  mounted(canvas) {
    if (this.canvas !== canvas) {
      this.canvas = canvas;
      this.listen(canvas);
      new ResizeObserver(() => this.draw()).observe(canvas);
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    }
    this.draw();
  }
}

function setProperty(node, name, value, before) {
  if (name === "key" || name === "own" || name === "ref") return;
  if (name.startsWith("on")) {
    if (value === before) return;
    if (before) node.removeEventListener(name.slice(2), before);
    if (value) node.addEventListener(name.slice(2), value);
  } else if (name === "style") {
    for (const property of Object.keys(before ?? {})) if (!(property in (value ?? {}))) node.style.removeProperty(property);
    for (const [property, text] of Object.entries(value ?? {})) node.style.setProperty(property, text);
  } else if (name === "value" || name === "checked" || name === "disabled") {
    if (node[name] !== (value ?? "")) node[name] = value ?? "";
  } else if (value === undefined || value === null || value === false) {
    node.removeAttribute(name);
  } else if (value !== before) {
    node.setAttribute(name, value === true ? "" : value);
  }
}
