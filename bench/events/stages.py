"""How old a batch is when it is applied, by stage of its path. Pure.

poll        from the engine's flush until the poller's batch is made
to log      from there until the log has it: the event loop, the consolidator, and `publish`, its last part, from the
            moment at which the message is handed over
to index    from there until the index's client has it
apply       until the index has applied the message
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bench.report import percentile

STAGES = ("poll", "to log", "publish", "to index", "apply")


class SentBatches(NamedTuple):
    """One rank's batches: when the engine flushed the events (batch n is event n - 1), and messages by first seq."""

    flushed_ns: Sequence[int]
    handed_ns: Sequence[tuple[int, int]]


class BatchTimes(NamedTuple):
    """One batch as the index saw it: when its payload was made, stored, delivered and applied."""

    rank: str
    seq: int
    blocks: int
    made_ns: int
    stored_ns: int
    delivered_ns: int
    applied_ns: int


class Age(NamedTuple):
    """Of one batch, in seconds; stages whose start (flush, hand-over) is not known are left out."""

    flushed_ns: int
    total_s: float
    stages_s: Mapping[str, float]


def ages(batches: Sequence[BatchTimes], sent: Mapping[str, SentBatches]) -> list[Age]:
    """Return the age of each batch; without a rank in `sent`, from when its payload was made."""
    return [_age(batch, sent.get(batch.rank)) for batch in batches]


def _age(batch: BatchTimes, sent: SentBatches | None) -> Age:
    stages_ns = {
        "to log": batch.stored_ns - batch.made_ns,
        "to index": batch.delivered_ns - batch.stored_ns,
        "apply": batch.applied_ns - batch.delivered_ns,
    }
    flushed_ns = batch.made_ns
    if sent is not None:
        flushed_ns = sent.flushed_ns[batch.seq - 1]
        at = bisect_right(sent.handed_ns, batch.seq, key=lambda message: message[0]) - 1
        stages_ns |= {"poll": batch.made_ns - flushed_ns, "publish": batch.stored_ns - sent.handed_ns[at][1]}
    stages_s = {stage: lasted_ns / 1e9 for stage, lasted_ns in stages_ns.items()}
    return Age(flushed_ns, (batch.applied_ns - flushed_ns) / 1e9, stages_s)


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return p50, p99 and maximum in milliseconds; zeros without values."""
    of = {"p50": percentile(seconds, 0.50), "p99": percentile(seconds, 0.99), "max": max(seconds, default=0.0)}
    return {name: 1e3 * each for name, each in of.items()}


def medians_ms(of: Sequence[Age]) -> dict[str, float]:
    """Return the median of each stage that is known."""
    known = [stage for stage in STAGES if of and stage in of[0].stages_s]
    return {stage: 1e3 * percentile([age.stages_s[stage] for age in of], 0.50) for stage in known}
