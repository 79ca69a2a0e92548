"""`indexer verify`: compares the live index with the mirrors of all ranks."""

import sys
from collections import Counter

import click
import msgspec

from indexer.commands.options import (
    DIFFERENT,
    NOT_DONE,
    index_url_option,
    timeout_option,
    with_settings,
)
from indexer.config import IndexerSettings
from indexer.service.difference import BlockDifference, RankVerdict
from indexer.service.index_client import IndexClient
from indexer.service.log_lines import short
from indexer.service.verification import Mirrors, fleet_slugs, verdicts
from kv_protocol.fleet_gate import FleetGate
from kv_runtime.clock import Clock
from kv_runtime.event_log import connected_log
from kv_runtime.process import print_json, print_lines, run_to_end

_EXAMPLES = 10


@click.command()
@with_settings
@index_url_option
@timeout_option
@click.option("--examples", type=click.IntRange(0, 1_000_000), default=_EXAMPLES, show_default=True,
              help="how many differing blocks of a kind are shown of a rank")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="print one JSON object at the end")
def verify(
    *, settings: IndexerSettings, index_url: str, timeout_s: float, examples: int, as_json: bool, **_: object
) -> None:
    """Compare the live index with every rank's own mirror, block by block.

    The fleet goes on meanwhile: if a mirror is further in its stream than the index, the batches between are requested
    and applied to the index's blocks before the two are compared.

    \b
    equal         the same blocks, on the same media, behind the same parents, at the same place
    differs       some blocks are missing in the index, surplus there, on other media, or
                  behind another parent: their numbers and the first of each are shown
    digest        the blocks are equal, but the index's own digest of them is wrong
    behind        the mirror is further, and no longer has the batches between
    beyond        the index is further than its mirror
    other_epoch   they are in different lives of the rank's stream
    unanswered    the index knows the rank, its mirror does not answer
    unknown       the mirror answers, the index does not know the rank

    The exit code is 0 if all are equal, 1 if one is not, 2 if the comparison failed or no rank is known.

    \b
    Example:  indexer verify --nats-url nats://127.0.0.1:4222 --index-url http://127.0.0.1:8001
    """  # noqa: D301  (click reads the character, not its name)

    def show(verdict: RankVerdict) -> None:
        if not as_json:
            print_lines(*_lines(verdict))

    async def work() -> list[RankVerdict]:
        found = list[RankVerdict]()
        clock, token = Clock(), settings.control.token.get_secret_value()
        async with connected_log(settings.nats, "indexer") as log:
            mirrors = Mirrors(log, timeout_s)
            await mirrors.start()
            async with IndexClient(index_url, token=token, timeout_s=timeout_s) as index:
                await index.ranks()  # fails early if the index is not there
                slugs = await fleet_slugs(log, clock, FleetGate(settings.nats.fleet_secrets), timeout_s)
                async for each in verdicts(index, mirrors, clock, slugs, timeout_s=timeout_s, examples_max=examples):
                    show(each)
                    found.append(each)
        return found

    found = run_to_end(work)
    is_equal = bool(found) and all(each.verdict == "equal" for each in found)
    if as_json:
        print_json(msgspec.json.encode({"equal": is_equal, "ranks": found}))
    else:
        counts = Counter(each.verdict for each in found)
        told = ", ".join(f"{n} {word}" for word, n in counts.items()) or "none known, nothing was compared"
        print_lines(f"{len(found)} ranks: {told}")
    if not is_equal:
        sys.exit(DIFFERENT if found else NOT_DONE)


def _lines(verdict: RankVerdict) -> list[str]:
    blocks = ", ".join(f"{count} {medium}" for medium, count in verdict.blocks.items() if count) or "none"
    reason = f"; {verdict.reason}" if verdict.reason else ""
    stale = f"; stale: {verdict.stale}" if verdict.stale else ""
    rank = f"{verdict.worker_id}/{verdict.dp_rank}"
    index = mirror = ""
    if verdict.index_epoch:
        index = f"index at {verdict.index_seq} of {short(verdict.index_epoch)}"
    if verdict.mirror_epoch:
        other = f" of {short(verdict.mirror_epoch)}" if verdict.index_epoch != verdict.mirror_epoch else ""
        mirror = f"mirror at {verdict.mirror_seq}{other}"
    positions = f"{index or 'not in the index'}, {mirror or 'no mirror'}"
    head = f"{rank}  {verdict.verdict}  {positions}, blocks: {blocks}{reason}{stale}"
    return [head, *map(_example, verdict.examples)]


def _example(block: BlockDifference) -> str:
    parents = f"behind {_hash(block.parent)}"
    if block.kind == "parent":
        parents = f"behind {_hash(block.index_parent)} in the index, {_hash(block.parent)} in the mirror"
    media = (
        f"index: {', '.join(block.index_media) or 'not held'}; mirror: {', '.join(block.mirror_media) or 'not held'}"
    )
    return f"    {block.kind}  {block.sequence_hash} {parents}; {media}"


def _hash(sequence_hash: int | None) -> str:
    return "nothing" if sequence_hash is None else str(sequence_hash)
