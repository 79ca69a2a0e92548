// The event log: whether this router follows it, and the stream of each rank in it.

import { inOrder, Poll, rowsOf } from "./api.js";
import { age, badge, bytes, clock, count, figures, go, h, message, name, numbers, panel, rankColumn, rankId, seconds, total, UNKNOWN } from "./parts.js";
import { Table } from "./table.js";

const MARKS = 200;

export class EventLogView extends Poll {
  title = "Event log";
  path = "/v1/event-log";
  everyMs = 2000;
  table = new Table({
    label: "Streams of ranks", key: rankId, columns: COLUMNS, sorted: "State", empty: "No rank has published yet.",
    open: (each) => go("workers", each.worker_id),
  });
  marks = new Table({
    label: "What happened, newest first", key: (each) => each.key, columns: MARK_COLUMNS, empty: "Nothing has happened since the router began.",
    open: (each) => this.app.showTime(each.at_s),
  });

  draw() {
    const { live } = this.app, { found } = this;
    if (!found) return this.unread("The event log is not shown.");
    const marks = (live.now.history?.marks ?? []).filter((each) => !live.past || each.at_s <= live.at).slice(-MARKS).reverse();
    return [
      live.past && message("", "Streams are shown as they are now.", "What happened is shown up to the chosen time."),
      this.outdated("These figures are not current."),
      !found.connected && message("bad", "The router has no connection to the event log.", "Ranks become DEGRADED until it is back; requests are routed all the while."),
      found.catching_up && message("warn", "The index is catching up.", found.catching_up),
      summary(found),
      panel("streams", "Streams of ranks", this.table.with(inOrder(rowsOf(found.ranks)))),
      panel("marks", "What happened", h("p", { class: "muted" }, "Enter shows the fleet of that time."),
        this.marks.with(marks.map((each, at) => ({ ...each, key: `${each.at_s} ${each.kind} ${each.worker_id} ${at}` })))),
    ];
  }
}

function summary({ connected, reconnects, applied_seq: applied, ranks, snapshot, journal }) {
  const stale = ranks.stale.filter(Boolean).length, lag = total(ranks.seq.map((seq, at) => Math.max(0, ranks.logged_seq[at] - seq)));
  const lost = journal && total(Object.values(journal.lost));
  return figures(
    ["Log", connected ? "connected" : "away", `${count(reconnects)} reconnections`, connected ? "" : "bad"],
    ["Applied", count(applied), "Number of the newest message that is applied"],
    ["Behind by", count(lag), "Batches known to be in the log that are not applied yet", lag > 100 ? "warn" : ""],
    ["Not current", count(stale), "Streams whose state in the index is uncertain", stale ? "warn" : ""],
    ["Snapshot", snapshot?.age_s == null ? UNKNOWN : `${age(snapshot.age_s)} ago`, snapshot?.bytes == null ? "" : `${bytes(snapshot.bytes)}, up to message ${count(snapshot.stream_seq)}`],
    ["Journal written", count(journal?.written)],
    ["Journal waiting", count(journal?.waiting)],
    ["Journal lost", count(lost), "Records that a replay will miss", lost ? "bad" : ""]);
}

const counted = (text, field, hint, phone) => numbers(text, field, "72px", count, { hint, phone });
const COLUMNS = [
  rankColumn("minmax(100px, 1fr)"),
  { name: "State", width: "minmax(96px, 1fr)", phone: "84px", cell: (each) => (each.stale ? badge(each.stale, "warn") : badge("current", "good")), sort: (each) => each.stale },
  numbers("Seq", "seq", "80px", count, { phone: "60px", hint: "Number of the newest batch that is applied" }),
  numbers("In log", "logged_seq", "80px", count, { hint: "Number of the newest batch known to be in the log" }),
  counted("Batches", "applied", "Batches that were applied"),
  counted("Gaps", "gaps", "Numbers that were missing", "48px"),
  counted("Replays", "replays", "Missing batches requested again"),
  counted("Repairs", "repairs", "Repairs after digests differed"),
  counted("Dumps", "resyncs", "The whole state requested"),
  counted("Digests", "digest_mismatches", "Digests that differed"),
  { name: "Healed in", width: "80px", align: "end", cell: (each) => (each.heals ? seconds(each.last_healing_s) : UNKNOWN), sort: (each) => (each.heals ? each.last_healing_s : null), hint: "The last recovery took" },
];
const MARK_COLUMNS = [
  { name: "Time", width: "76px", phone: "62px", cell: (each) => clock(each.at_s) },
  { name: "Kind", width: "minmax(110px, 1fr)", cell: (each) => badge(each.kind.replaceAll("_", " "), "muted") },
  { name: "What", width: "4fr", phone: "3fr", cell: (each) => name(each.text) },
];
