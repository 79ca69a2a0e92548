"""Indexes beside the mirrors of all ranks, compared as `indexer verify` does, though both go on meanwhile."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from indexer.service.difference import RankVerdict
from indexer.service.index_client import IndexClient, IndexUnavailable
from indexer.service.verification import Mirrors, verdicts
from kv_protocol import subjects
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog

_ANSWER_S = 1.0
_LOOK_S = 0.05
_SHOWN = 3


async def until_equal(
    nats_urls: Sequence[str],
    indexes: Mapping[str, str],
    model: str,
    ranks: Iterable[WorkerRank],
    *,
    within_s: float,
    moved: bool,
) -> None:
    """Return once every index (name and URL) was proven equal to the mirror of every rank, without a doubt of its own.

    What is proven is not looked at again. With `moved` an index is proven only by what came to the mirror after it was
    asked first: something has to.

    Raises:
        AssertionError: not within `within_s`; it says what still differed.
    """
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + within_s
    slugs = dict.fromkeys(ranks, subjects.model_slug(model))
    unproven = {(name, rank): "not asked" for name in indexes for rank in slugs}
    began_at = dict[WorkerRank, tuple[int, int]]()
    while unproven:
        for name in {name for name, _ in unproven}:
            for found in await _verdicts(nats_urls, indexes[name], slugs):
                rank = WorkerRank(found.worker_id, found.dp_rank)
                if moved and found.mirror_epoch:
                    began_at.setdefault(rank, (found.mirror_epoch, found.mirror_seq))
                if (name, rank) in unproven:
                    unproven[name, rank] = _doubt(found, began_at.get(rank))
        unproven = {pair: why for pair, why in unproven.items() if why}
        if unproven and loop.time() > ends_s:
            shown = [f"{name}, {rank}: {why}" for (name, rank), why in unproven.items()]
            raise AssertionError("\n".join([f"not equal within {within_s} s", *shown]))
        await Clock().sleep(_LOOK_S)


async def _verdicts(nats_urls: Sequence[str], url: str, slugs: dict[WorkerRank, str]) -> list[RankVerdict]:
    """Return the verdict on every rank of which something answers; none where the log or the index is away."""
    try:
        log = await EventLog.connect(",".join(nats_urls), name="proof", confirm_s=_ANSWER_S)
    except BrokerUnavailable:
        return []
    try:
        mirrors = Mirrors(log, _ANSWER_S)
        await mirrors.start()
        async with IndexClient(url, token="", timeout_s=_ANSWER_S) as index:
            compared = verdicts(index, mirrors, Clock(), slugs, timeout_s=0.0, examples_max=_SHOWN)
            return [found async for found in compared]
    except (BrokerUnavailable, IndexUnavailable):
        return []
    finally:
        await log.close()


def _doubt(found: RankVerdict, began_at: tuple[int, int] | None) -> str:
    """Return why this proves nothing; empty: it proves equality. `began_at`: where the mirror was at first."""
    if found.verdict != "equal" or found.stale:
        return f"{found}"
    is_old = began_at is not None and found.index_epoch == began_at[0] and found.index_seq <= began_at[1]
    return f"it is at {found.index_seq}, where the mirror was at first" if is_old else ""
