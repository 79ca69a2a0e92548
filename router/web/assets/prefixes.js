// The radix tree of all workers: which prefixes are held, where, how large, how old and how hot they are.

import { get, Poll, TIERS } from "./api.js";
import { age, bar, count, facts, figures, h, link, message, name, rankId, select, short, UNKNOWN } from "./parts.js";
import { Table } from "./table.js";

const PAGE = 100;
const HOLDERS = 64;
const ORDERS = { subtree: "size with all behind", heat: "heat", recent: "last use", blocks: "length" };

export class PrefixesView extends Poll {
  title = "Prefixes";
  order = "subtree";
  holders = new Table({
    label: "Holders of the selected prefix", key: rankId, open: (each) => this.app.go(["workers", each.worker_id]),
    columns: HOLDER_COLUMNS, isWhole: true, empty: "No rank holds it now.",
  });
  table = new Table({
    label: "Prefixes", key: (row) => row.key, select: (row) => this.choose(row), open: (row) => this.opened(row), columns: COLUMNS,
    empty: "No prefix is held.",
    tree: {
      level: (row) => row.level, isOpen: (row) => (row.node && row.node.children > 0 ? this.branches.has(row.node.last) : null),
      expand: (row) => this.expand(row.node.last), collapse: (row) => this.collapse(row.node.last),
    },
  });

  open([behind]) {
    this.behind = behind ?? null;
    this.begin();
  }

  /** The slider moved. */
  moved() {
    this.begin();
  }

  /** Read the tree anew. */
  begin() {
    this.at = this.app.live.past?.at ?? null;
    this.branches = new Map(); // children by the block they are behind; null: the roots
    this.selected = null;
    if (this.at === null) super.open();
    else this.close();
  }

  /** Read what is open; what is longer than a page is read once. */
  async ask(signal) {
    for (const behind of new Set([this.behind, ...this.branches.keys()])) {
      const branch = this.branches.get(behind);
      if (branch?.nodes.length > PAGE && !branch.isMoreWanted) continue;
      try {
        await this.load(behind, branch?.isMoreWanted ? branch.nodes : [], signal);
      } catch (error) {
        if (error.status !== 404 || behind === this.behind) throw error;
        this.branches.delete(behind);
      }
    }
    return this.branches;
  }

  /** Read the next children behind a block after `known` ones. */
  async load(behind, known, signal) {
    const query = new URLSearchParams({ order_by: this.order, limit: String(PAGE), ranks: String(HOLDERS), offset: String(known.length) });
    if (behind !== null) query.set("behind", behind);
    const found = await get(`/v1/prefix-tree?${query}`, signal);
    this.branches.set(behind, { nodes: [...known, ...found.nodes], total: found.total });
    if (behind === this.behind) this.path = found.path;
    this.outline = found.outline;
  }

  expand(last) {
    this.branches.set(last, { nodes: [], total: 0, isReading: true });
    this.app.redraw();
    this.hurry();
  }

  collapse(last) {
    this.branches.delete(last);
    this.app.redraw();
  }

  choose(row) {
    this.show({ selected: row?.node ?? null });
  }

  opened(row) {
    if (row.more !== undefined) {
      this.branches.get(row.more).isMoreWanted = true;
      this.hurry();
    } else if (row.node) this.choose(row);
  }

  // ------------------------------------------------------------------------------------------- drawing

  draw() {
    const shown = this.branches.get(this.behind);
    if (this.at !== null) return message("", "The tree of the past is not kept.", `"indexer at --time ${new Date(1000 * this.at).toISOString()}" shows what ranks held then.`);
    if (!shown) return this.unread(this.problem?.status === 404 ? "This prefix is not in the tree." : "The tree is not shown.", h("p", null, link(["prefixes"], "All prefixes")));
    const rows = this.rows(this.behind, 1);
    return [
      this.outlined(),
      this.outdated("The tree is not current."),
      h("div", { key: "tools", class: "tools" },
        select("order", "Order by", ORDERS, this.order, (order) => {
          this.order = order;
          this.begin();
        }),
        h("span", { class: "muted" }, `${count(shown.total)} ${this.behind === null ? "roots" : "prefixes behind this one"}`)),
      this.behind !== null && crumbs(this.path ?? [], this.behind),
      h("div", { key: "split", class: "split" }, this.table.with(rows), this.detail()),
    ];
  }

  rows(behind, level) {
    const branch = this.branches.get(behind);
    if (!branch) return [];
    const rows = branch.nodes.flatMap((node) => [{ key: node.last, node, level, largest: this.outline?.blocks ?? 0 }, ...(node.last === behind ? [] : this.rows(node.last, level + 1))]);
    const missing = branch.total - branch.nodes.length;
    if (branch.isReading) rows.push({ key: `reading ${behind}`, level, text: "Reading." });
    else if (missing > 0) rows.push({ key: `more ${behind}`, level, more: behind, text: `${count(missing)} more: press Enter` });
    return rows;
  }

  outlined() {
    const { outline } = this;
    return figures(
      ["Blocks", count(outline.blocks), "Different blocks of all ranks"],
      ["Nodes", count(outline.nodes), "Chains without a fork"],
      ["Roots", this.behind === null ? count(this.branches.get(null).total) : UNKNOWN],
      ["Requests counted", count(outline.heat_requests), "Each counts half after a minute"],
      ["Sizes from", `${age(outline.age_s)} ago`, `It took ${age(outline.took_s)} to count them`]);
  }

  detail() {
    const node = this.selected;
    if (!node) return h("aside", { class: "panel detail", "aria-label": "Selected prefix" }, h("p", { class: "muted" }, "Select a prefix to see its holders."));
    const isPartial = node.holders > node.ranks.length;
    return h("aside", { class: "panel detail", "aria-label": "Selected prefix" },
      h("h2", null, "Prefix ", h("span", { class: "mono" }, hashTail(node.last))),
      node.use?.text && h("pre", null, node.use.text),
      facts([
        ["Models", node.use?.models.join(", ") || UNKNOWN],
        ["Tenants", node.use?.tenants.join(", ") || UNKNOWN],
        ["Last block", h("span", { class: "mono wrap" }, node.last)],
        ["First block", h("span", { class: "mono wrap" }, node.first)],
        ["Length", `${count(node.blocks)} blocks, ${count(node.depth_blocks)} from the root`],
        ["With all behind", `${count(node.subtree_blocks)} blocks`],
        ["Heat", node.heat === null ? UNKNOWN : `${node.heat.toFixed(2)} requests`],
        ["Used", node.used_ago_s === null ? UNKNOWN : `${age(node.used_ago_s)} ago`],
        ["Stored", `${age(node.stored_ago_s)} ago`],
      ]),
      node.children > 0 && h("p", null, link(["prefixes", node.last], `Show only the ${count(node.children)} behind it`)),
      h("h3", null, `${count(node.holders)} ${node.holders === 1 ? "holder" : "holders"}${isPartial ? `, the deepest ${node.ranks.length} of them` : ""}`),
      this.holders.with(node.ranks.map((each) => ({ ...each, of: node.blocks }))));
  }
}

function crumbs(path, behind) {
  return h("nav", { key: "crumbs", class: "crumbs", "aria-label": "Way from the root" }, h("ol", null,
    h("li", { key: "root" }, link(["prefixes"], "all prefixes")),
    path.map((each) => h("li", { key: each.last }, each.last === behind ? h("span", { "aria-current": "page", class: "mono" }, hashTail(each.last)) : link(["prefixes", each.last], hashTail(each.last), { class: "mono" }), h("span", { class: "muted" }, ` ${short(each.blocks)} bl`)))));
}

function hashTail(hash) {
  return hash.length > 9 ? `…${hash.slice(-8)}` : hash;
}

function prefix(row) {
  const indent = { "padding-inline-start": `${(row.level - 1) * 14}px` };
  if (!row.node) return h("span", { class: "muted", style: indent }, row.text);
  const { node } = row;
  return h("span", { class: "prefix", style: indent, title: node.last },
    h("span", { class: "twisty", "aria-hidden": "true" }, node.children ? "▸" : ""), node.use?.text ? name(node.use.text) : h("span", { class: "mono" }, hashTail(node.last)), node.children > 0 && h("span", { class: "muted" }, ` ${short(node.children)}`));
}

/** Tenants of the newest requests; without tenants their models. */
function users(use) {
  return use?.tenants.length ? use.tenants : (use?.models ?? []);
}

const heatShare = (node) => Math.min(1, Math.log2(1 + (node.heat ?? 0)) / 6);
const inNode = (cell) => (row) => (row.node ? cell(row.node, row) : "");
const COLUMNS = [
  { name: "Prefix", width: "minmax(140px, 2fr)", phone: "minmax(128px, 2fr)", cell: prefix, hint: "Its text where prompts are kept, or the end of the hash of its last block; how many prefixes are behind it" },
  { name: "Used by", width: "minmax(90px, 1fr)", cell: inNode(({ use }) => name(users(use).join(", ") || UNKNOWN)), hint: "Tenants, or without them models, of the newest requests through it" },
  { name: "Length", width: "64px", align: "end", cell: inNode((node) => count(node.blocks)), hint: "Blocks of the chain, to the next fork" },
  { name: "Depth", width: "64px", align: "end", cell: inNode((node) => short(node.depth_blocks)), hint: "Blocks from the root" },
  { name: "Size", width: "minmax(86px, 1fr)", phone: "80px", align: "end", cell: inNode((node, row) => [bar([[node.subtree_blocks, "accent"]], row.largest, `${count(node.subtree_blocks)} blocks with all behind`), h("span", { class: "number" }, short(node.subtree_blocks))]), hint: "Blocks with all behind it" },
  { name: "Holders", width: "68px", phone: "52px", align: "end", cell: inNode((node) => count(node.holders)), hint: "Ranks that hold its first block" },
  { name: "Heat", width: "minmax(72px, 1fr)", align: "end", cell: inNode((node) => (node.heat === null ? UNKNOWN : [bar([[heatShare(node), "accent"]], 1, `${node.heat.toFixed(2)} requests`), h("span", { class: "number" }, node.heat.toFixed(1))])), hint: "Requests through it; each counts half after a minute" },
  { name: "Used", width: "64px", phone: "46px", align: "end", cell: inNode((node) => age(node.used_ago_s)), hint: "Since the newest request through it" },
  { name: "Stored", width: "64px", align: "end", cell: inNode((node) => age(node.stored_ago_s)), hint: "Since the newest store of one of its blocks" },
];

const HOLDER_COLUMNS = [
  { name: "Rank", width: "minmax(70px, 1fr)", cell: (each) => name(rankId(each)) },
  { name: "GPU", width: "minmax(76px, 1fr)", cell: (each) => [bar([[each.blocks.gpu, "accent"]], each.of, `${each.blocks.gpu} of ${each.of} blocks`), h("span", { class: "number" }, short(each.blocks.gpu))], hint: "Leading blocks of the chain on its GPU" },
  ...TIERS.slice(1).map((tier) => ({ name: { host: "Host", disk: "Disk", external: "Ext." }[tier], width: "36px", align: "end", cell: (each) => short(each.blocks[tier]), hint: "Leading blocks on this medium or a faster one" })),
];
