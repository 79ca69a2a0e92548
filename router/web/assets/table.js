// A table of any number of rows: only those in sight are elements. One tab stop; arrow keys move in it.

import { h, render } from "./parts.js";

const ROW = 30;
const MORE = 8;
let tables = 0;

export class Table {
  /** `columns`: {name, width, phone?: its width on a phone; absent: not shown there, cell(row), sort?(row), align?: "end",
   *  hint?}; `isWhole`: phones get all columns, and scroll; `isTall`: it takes the rest of the window; `key(row)`; `open(row)`: Enter or a click;
   *  `select(row)`: the arrow keys, and clicks, which then do not open. */
  constructor({ label, columns, key, open, select, sorted, descending = true, isWhole = false, isTall = false, empty = "Nothing to show.", rowClass }) {
    Object.assign(this, { label, columns, key, open, select, sorted, descending, isWhole, isTall, empty, rowClass });
    this.id = `table-${(tables += 1)}`;
    this.rows = [];
    this.selected = null;
    this.place = 0;
    this.element = null;
    this.narrow = matchMedia("(max-width: 700px)");
    this.scrolled = () => this.draw();
  }

  /** Return the description of the table with these rows. */
  with(rows) {
    this.rows = this.sorted ? this.inOrder(rows) : rows;
    this.keepSelection();
    return h("div", {
      key: this.id, class: `table ${this.isTall ? "tall" : ""}`, role: "grid", tabindex: "0", "aria-label": this.label,
      "aria-rowcount": String(this.rows.length + 1), own: true, ref: (element) => this.mounted(element),
    });
  }

  /** If the selected row is gone, select the row that is in its place. */
  keepSelection() {
    if (this.selected === null || !this.rows.length) return;
    const at = this.rows.findIndex((each) => this.key(each) === this.selected);
    if (at >= 0) {
      this.place = at;
      return;
    }
    const row = this.rows[Math.min(this.place, this.rows.length - 1)];
    this.selected = this.key(row);
    this.select?.(row);
  }

  inOrder(rows) {
    const column = this.columns.find((each) => each.name === this.sorted);
    if (!column?.sort) return rows;
    const sign = this.descending ? -1 : 1;
    const values = new Map(rows.map((row) => [row, column.sort(row)]));
    return [...rows].sort((left, right) => sign * compared(values.get(left), values.get(right), sign));
  }

  mounted(element) {
    if (this.element !== element) {
      this.element = element;
      element.addEventListener("scroll", this.scrolled, { passive: true });
      element.addEventListener("keydown", (event) => this.pressed(event));
      element.addEventListener("focus", () => this.focused());
      new ResizeObserver(() => this.draw()).observe(element);
    }
    this.draw();
  }

  draw() {
    if (!this.element?.isConnected) return;
    const isPhone = this.narrow.matches && !this.isWhole;
    const columns = isPhone ? this.columns.filter((each) => each.phone) : this.columns;
    const template = columns.map((each) => (isPhone ? each.phone : each.width)).join(" ");
    const first = Math.max(0, Math.floor((this.element.scrollTop - ROW) / ROW) - MORE);
    const last = Math.min(this.rows.length, first + Math.ceil(this.element.clientHeight / ROW) + 2 * MORE);
    const rows = [];
    for (let at = first; at < last; at += 1) rows.push(this.row(this.rows[at], at, columns, template));
    const height = `${this.rows.length * ROW}px`;
    render(
      this.element,
      h("div", { role: "rowgroup", class: "thead" }, h("div", { role: "row", class: "tr", "aria-rowindex": "1", style: { "grid-template-columns": template } },
        columns.map((each) => this.head(each)))),
      h("div", { role: "rowgroup", class: "tbody", style: { height } },
        rows.length ? rows : h("div", { role: "row", class: "tr nothing", key: "nothing" }, h("div", { role: "gridcell", class: "td" }, this.empty))),
    );
    const active = rows.some((each) => each.properties.id === this.idOf(this.selected)) ? this.idOf(this.selected) : null;
    if (active) this.element.setAttribute("aria-activedescendant", active);
    else this.element.removeAttribute("aria-activedescendant");
  }

  head(column) {
    const isSorted = this.sorted === column.name;
    const order = isSorted ? (this.descending ? "descending" : "ascending") : column.sort ? "none" : undefined;
    const inside = column.sort
      ? h("button", { type: "button", tabindex: "-1", onclick: () => this.sortBy(column.name) }, column.name, h("span", { class: "order", "aria-hidden": "true" }, isSorted ? (this.descending ? "↓" : "↑") : ""))
      : column.name;
    return h("div", { role: "columnheader", key: column.name, class: `td ${column.align ?? ""}`, "aria-sort": order, title: column.hint }, inside);
  }

  row(row, at, columns, template) {
    const key = this.key(row);
    return h("div", {
      key, id: this.idOf(key), role: "row", class: `tr ${key === this.selected ? "selected" : ""} ${this.open || this.select ? "opens" : ""} ${this.rowClass?.(row) ?? ""}`,
      "aria-rowindex": String(at + 2), "aria-selected": String(key === this.selected),
      style: { "grid-template-columns": template, top: `${at * ROW}px` },
      onclick: (event) => this.clicked(event, row),
    }, columns.map((each) => h("div", { role: "gridcell", key: each.name, class: `td ${each.align ?? ""}` }, each.cell(row))));
  }

  idOf(key) {
    return key === null ? null : `${this.id}-${encodeURIComponent(key)}`;
  }

  sortBy(name) {
    this.descending = this.sorted === name ? !this.descending : true;
    this.sorted = name;
    this.rows = this.inOrder(this.rows);
    this.draw();
  }

  clicked(event, row) {
    if (event.target.closest("a, button")) return;
    this.choose(row);
    if (!this.select) this.open?.(row);
  }

  focused() {
    if (this.selected === null && this.rows.length) this.choose(this.rows[0]);
  }

  choose(row) {
    this.selected = this.key(row);
    this.select?.(row);
    this.draw();
  }

  pressed(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || event.target !== this.element) return;
    const at = this.rows.findIndex((each) => this.key(each) === this.selected);
    const page = Math.max(1, Math.floor(this.element.clientHeight / ROW) - 2);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: this.rows.length - 1 }[event.key];
    if (to !== undefined) this.moveTo(to);
    else if (event.key === "Enter" && at >= 0) this.open?.(this.rows[at]);
    else return;
    event.preventDefault();
  }

  moveTo(to) {
    if (!this.rows.length) return;
    const at = Math.max(0, Math.min(this.rows.length - 1, to));
    const top = at * ROW, element = this.element, room = element.clientHeight - ROW;
    if (top < element.scrollTop) element.scrollTop = top;
    else if (top + ROW > element.scrollTop + room) element.scrollTop = top + ROW - room;
    this.choose(this.rows[at]);
  }
}

/** Compare two values; unknown values come last in both orders. */
function compared(left, right, sign) {
  const isLess = left === null || left === undefined, isMore = right === null || right === undefined;
  if (isLess || isMore) return isLess === isMore ? 0 : isLess ? sign : -sign;
  return left < right ? -1 : left > right ? 1 : 0;
}
