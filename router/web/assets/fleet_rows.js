// The columns of `/v1/fleet` as one object a rank.

const TRUSTS = ["EXACT", "DEGRADED", "FALLBACK"];
export const TIERS = ["gpu", "host", "disk", "external"];

/** Return a text by which w2 comes before w10. */
export function natural(text) {
  return text.replace(/\d+/g, (digits) => digits.padStart(12, "0"));
}

/** Return the ranks, in the order of their names. */
export function ranksOf(fleet) {
  const order = new Map(), place = (rank) => order.get(rank.id) ?? order.set(rank.id, natural(rank.id)).get(rank.id);
  return rowsOf(fleet).sort((left, right) => (place(left) < place(right) ? -1 : 1));
}

function rowsOf({ workers, ranks, models, roles, reasons }) {
  return ranks.worker.map((worker, at) => {
    const totalBlocks = workers.total_blocks[worker];
    return {
      id: `${workers.worker_id[worker]}/${ranks.dp_rank[at]}`,
      workerId: workers.worker_id[worker],
      dpRank: ranks.dp_rank[at],
      model: models[workers.model[worker]],
      role: roles[workers.role[worker]],
      isDraining: workers.draining[worker],
      unfit: reasons[workers.unfit[worker]] || reasons[ranks.unfit[at]],
      trust: TRUSTS[ranks.trust[at]],
      trustReason: reasons[ranks.trust_reason[at]],
      requests: ranks.active_requests[at],
      activeBlocks: ranks.active_blocks[at],
      queuedTokens: ranks.queued_tokens[at],
      blocks: TIERS.map((tier) => ranks[`${tier}_blocks`][at]),
      totalBlocks,
      fill: totalBlocks ? Math.min(1, ranks.gpu_blocks[at] / totalBlocks) : null,
      prefill: ranks.prefill_factor[at],
      decode: ranks.decode_factor[at],
      hit: ranks.hit_ratio[at],
      ttft: ranks.ttft_s[at],
      itl: ranks.itl_s[at],
    };
  });
}

/** In one word, whether a rank takes new work. */
export function stateOf(rank) {
  return rank.isDraining ? "draining" : rank.unfit ? "unfit" : "fit";
}
