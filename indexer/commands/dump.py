"""`indexer dump`: what ranks hold, or held, block by block, as lines of JSON.

json       for each rank a line of its place and figures, then one for each block, parents first
columns    for each rank one line: its `RankState` (`indexer/follow/checkpoint.py`) in JSON, columns in base64
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

import click
import msgspec

from indexer.commands.options import (
    NotWritten,
    chosen_ranks,
    index_url_option,
    ranks_option,
    timeout_option,
    with_settings,
)
from indexer.config import IndexerSettings
from indexer.follow.checkpoint import RankState
from indexer.follow.fold import IndexFold
from indexer.native.index import make_index
from indexer.service.history import NEWEST, named_snapshot
from indexer.service.index_client import IndexClient
from kv_protocol.ids import WorkerRank
from kv_runtime.event_log import connected_log
from kv_runtime.process import run_to_end

Shape = Literal["json", "columns"]
SHAPES: tuple[Shape, ...] = ("json", "columns")

_encode = msgspec.json.Encoder().encode


@click.command()
@with_settings
@index_url_option
@timeout_option
@click.option("--snapshot", metavar=f"NAME|{NEWEST}", help="not the live index, but this snapshot of the log's")
@ranks_option
@click.option("--format", "shape", type=click.Choice(SHAPES), default=SHAPES[0], show_default=True,
              help="json: a line a block; columns: a line a rank, blocks in packed columns")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="write to this file, not to the terminal")
@click.option("--force", is_flag=True, help="replace the file if there is one")
def dump(
    *,
    settings: IndexerSettings,
    index_url: str,
    timeout_s: float,
    snapshot: str | None,
    ranks: tuple[WorkerRank, ...],
    shape: Shape,
    out: Path | None,
    force: bool,
    **_: object,
) -> None:
    """Write what the live index holds of each rank, or what a snapshot says, parents before their children.

    The blocks of a rank are of one moment; the ranks of the live index are read one after the other. A file is written
    completely or not at all.

    \b
    Examples:  indexer dump --out blocks.jsonl
               indexer dump --snapshot newest --rank w0/0 --format columns
    """  # noqa: D301

    async def from_index(to: IO[bytes]) -> None:
        token = settings.control.token.get_secret_value()
        async with IndexClient(index_url, token=token, timeout_s=timeout_s) as index:
            for rank in sorted(chosen_ranks(ranks, (await index.ranks()).ranks)):
                state = await index.state(rank)
                if state is not None:  # the rank may have left meanwhile
                    to.writelines(state_lines(state, shape))

    async def from_snapshot(to: IO[bytes], name: str) -> None:
        async with connected_log(settings.nats, "indexer") as log:
            fold = (await named_snapshot(log, name, IndexFold(make_index(settings.index)))).fold
        for rank in sorted(chosen_ranks(ranks, fold.ranks())):
            state = fold.state(rank)
            assert state is not None
            to.writelines(state_lines(state, shape))

    with _target(out, force=force) as to:
        run_to_end(lambda: from_index(to) if snapshot is None else from_snapshot(to, snapshot))


@contextmanager
def _target(out: Path | None, *, force: bool) -> Iterator[IO[bytes]]:
    """Yield the file to write to, which gets the name `out` once it is complete; without `out`, standard output."""
    if out is None:
        yield sys.stdout.buffer
        return
    if out.exists() and not force:
        raise NotWritten(f"--out: found {out}, which is there; allowed a new file, or --force")
    part = out.with_name(f"{out.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as file:
            yield file
        part.replace(out)
    except OSError as error:
        raise NotWritten(f"--out: found {out}, which cannot be written: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)


def state_lines(state: RankState, shape: Shape) -> Iterator[bytes]:
    """Yield the lines of a rank, each with its line end."""
    if shape == "columns":
        yield _encode(state) + b"\n"
        return
    rank = state.rank._asdict()
    yield _encode({**state.place(), "blocks": state.block_counts}) + b"\n"
    for block in state.blocks():
        media = [tier.name.lower() for tier in block.tiers]
        row = {**rank, "sequence_hash": block.sequence_hash, "parent": block.parent, "media": media}
        yield _encode(row) + b"\n"
