"""Columns of ledger and predictions, by rank."""

from collections.abc import Iterable

from kv_protocol.ids import WorkerRank
from router.fleet.ledger import Ledger
from router.fleet.predictions import Predictions


def shared_blocks(ledger: Ledger, chain: bytes) -> dict[WorkerRank, int]:
    """Return for each rank with any how many blocks of the chain its active requests use."""
    ranks = tuple(ledger.loads())
    column = ledger.columns(ranks, chain).shared_blocks.tolist()
    return {rank: blocks for rank, blocks in zip(ranks, column, strict=True) if blocks}


def expected_blocks(
    predictions: Predictions, chain: bytes, now_s: float, ranks: tuple[WorkerRank, ...], epochs: Iterable[int]
) -> dict[WorkerRank, tuple[int, int]]:
    """Return for each rank with any the epoch in which blocks of the chain are expected, and how many."""
    found = dict[WorkerRank, tuple[int, int]]()
    for epoch in epochs:
        column = predictions.column(chain, ranks, (epoch,) * len(ranks), now_s)
        for rank, blocks in zip(ranks, () if column is None else column.tolist(), strict=column is not None):
            if blocks:
                found[rank] = epoch, blocks
    return found
