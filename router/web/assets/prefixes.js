// The radix tree of all workers, one level at a time: which prefixes are held, where, how large, how old and how hot.

import { Poll, TIERS } from "./api.js";
import { age, bar, count, facts, figures, go, h, link, message, name, rankId, select, short, UNKNOWN } from "./parts.js";
import { Table } from "./table.js";

const PAGE = 100;
const HOLDERS = 64;
const OFFSET_MAX = 10000; // the largest that the endpoint allows
const ORDERS = { subtree: "size with all behind", heat: "heat", recent: "last use", blocks: "length" };

export class PrefixesView extends Poll {
  title = "Prefixes";
  order = "subtree";
  holders = new Table({
    label: "Holders of the selected prefix", key: rankId, open: (each) => go("workers", each.worker_id),
    columns: HOLDER_COLUMNS, isWhole: true, empty: "No rank holds it now.",
  });
  table = new Table({
    label: "Prefixes", key: (node) => node.last, select: (node) => this.show({ selected: node.last }),
    open: (node) => node.children > 0 && go("prefixes", node.last), columns: COLUMNS, empty: "No prefix is held.",
  });

  get path() {
    const query = new URLSearchParams({ order_by: this.order, limit: String(PAGE), ranks: String(HOLDERS), offset: String(this.offset) });
    if (this.behind !== null) query.set("behind", this.behind);
    return `/v1/prefix-tree?${query}`;
  }

  open([behind]) {
    this.behind = behind ?? null;
    this.turn({ offset: 0 });
  }

  /** Read another page, or in another order. */
  turn(changed) {
    Object.assign(this, { selected: null, ...changed });
    this.moved();
  }

  /** Read the tree, which is always that of now; read nothing while a past time is shown. */
  moved() {
    if (this.app.live.past) this.close();
    else super.open();
  }

  // ------------------------------------------------------------------------------------------- drawing

  draw() {
    const { found, behind } = this, { past } = this.app.live;
    if (past) return message("", "The tree of the past is not kept.", `"indexer at --time ${new Date(1000 * past.at).toISOString()}" shows what ranks held then.`);
    if (!found) return this.unread(this.problem?.status === 404 ? "This prefix is not in the tree." : "The tree is not shown.", h("p", null, link(["prefixes"], "All prefixes")));
    return [
      outlined(found.outline),
      this.outdated("The tree is not current."),
      h("div", { key: "tools", class: "tools" },
        select("order", "Order by", ORDERS, this.order, (order) => this.turn({ order, offset: 0 })),
        h("span", { class: "muted" }, `${count(found.total)} ${behind === null ? "roots" : "prefixes behind this one"}`),
        (found.total > PAGE || this.offset > 0) && this.pages(found.total)),
      behind !== null && crumbs(found.path, behind),
      h("div", { key: "split", class: "split" }, this.table.with(found.nodes.map((node) => ({ ...node, largest: found.outline.blocks }))), this.detail(found.nodes.find((node) => node.last === this.selected))),
    ];
  }

  pages(total) {
    const { offset } = this, next = offset + PAGE, button = (text, to, isEnd) => h("button", { type: "button", disabled: isEnd ? true : undefined, onclick: () => this.turn({ offset: to }) }, text);
    return [button("Previous", offset - PAGE, offset === 0), h("span", { class: "muted" }, `${count(offset + 1)} to ${count(Math.min(total, next))}`), button("Next", next, next >= total || next > OFFSET_MAX)];
  }

  detail(node) {
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
      node.children > 0 && h("p", null, link(["prefixes", node.last], `Show the ${count(node.children)} behind it`)),
      h("h3", null, `${count(node.holders)} ${node.holders === 1 ? "holder" : "holders"}${isPartial ? `, the deepest ${node.ranks.length} of them` : ""}`),
      this.holders.with(node.ranks.map((each) => ({ ...each, of: node.blocks }))));
  }
}

function outlined(outline) {
  return figures(
    ["Blocks", count(outline.blocks), "Different blocks of all ranks"],
    ["Nodes", count(outline.nodes), "Chains without a fork"],
    ["Requests counted", count(outline.heat_requests), "Each counts half after a minute"],
    ["Sizes from", `${age(outline.age_s)} ago`, `It took ${age(outline.took_s)} to count them`]);
}

function crumbs(path, behind) {
  return h("nav", { key: "crumbs", class: "crumbs", "aria-label": "Way from the root" }, h("ol", null,
    h("li", { key: "root" }, link(["prefixes"], "all prefixes")),
    path.map((each) => h("li", { key: each.last }, each.last === behind ? h("span", { "aria-current": "page", class: "mono" }, hashTail(each.last)) : link(["prefixes", each.last], hashTail(each.last), { class: "mono" }), h("span", { class: "muted" }, ` ${short(each.blocks)} bl`)))));
}

function hashTail(hash) {
  return hash.length > 9 ? `…${hash.slice(-8)}` : hash;
}

function prefix(node) {
  return h("span", { class: "prefix", title: node.last }, node.use?.text ? name(node.use.text) : h("span", { class: "mono" }, hashTail(node.last)),
    node.children > 0 && link(["prefixes", node.last], `▸ ${short(node.children)}`, { title: "Show those behind it", tabindex: "-1" }));
}

const heatShare = (node) => Math.min(1, Math.log2(1 + (node.heat ?? 0)) / 6);
const COLUMNS = [
  { name: "Prefix", width: "minmax(140px, 2fr)", phone: "minmax(128px, 2fr)", cell: prefix, hint: "Its text where prompts are kept, or the end of the hash of its last block; how many prefixes are behind it" },
  { name: "Used by", width: "minmax(90px, 1fr)", cell: ({ use }) => name(use?.tenants.join(", ") || use?.models.join(", ") || UNKNOWN), hint: "Tenants, or without them models, of the newest requests through it" },
  { name: "Length", width: "64px", align: "end", cell: (node) => count(node.blocks), hint: "Blocks of the chain, to the next fork" },
  { name: "Depth", width: "64px", align: "end", cell: (node) => short(node.depth_blocks), hint: "Blocks from the root" },
  { name: "Size", width: "minmax(86px, 1fr)", phone: "80px", align: "end", cell: (node) => [bar([[node.subtree_blocks, "accent"]], node.largest, `${count(node.subtree_blocks)} blocks with all behind`), h("span", { class: "number" }, short(node.subtree_blocks))], hint: "Blocks with all behind it" },
  { name: "Holders", width: "68px", phone: "52px", align: "end", cell: (node) => count(node.holders), hint: "Ranks that hold its first block" },
  { name: "Heat", width: "minmax(72px, 1fr)", align: "end", cell: (node) => (node.heat === null ? UNKNOWN : [bar([[heatShare(node), "accent"]], 1, `${node.heat.toFixed(2)} requests`), h("span", { class: "number" }, node.heat.toFixed(1))]), hint: "Requests through it; each counts half after a minute" },
  { name: "Used", width: "64px", phone: "46px", align: "end", cell: (node) => age(node.used_ago_s), hint: "Since the newest request through it" },
  { name: "Stored", width: "64px", align: "end", cell: (node) => age(node.stored_ago_s), hint: "Since the newest store of one of its blocks" },
];

const HOLDER_COLUMNS = [
  { name: "Rank", width: "minmax(70px, 1fr)", cell: (each) => name(rankId(each)) },
  { name: "GPU", width: "minmax(76px, 1fr)", cell: (each) => [bar([[each.blocks.gpu, "accent"]], each.of, `${each.blocks.gpu} of ${each.of} blocks`), h("span", { class: "number" }, short(each.blocks.gpu))], hint: "Leading blocks of the chain on its GPU" },
  ...TIERS.slice(1).map((tier) => ({ name: { host: "Host", disk: "Disk", external: "Ext." }[tier], width: "36px", align: "end", cell: (each) => short(each.blocks[tier]), hint: "Leading blocks on this medium or a faster one" })),
];
