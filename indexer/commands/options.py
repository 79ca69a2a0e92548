"""Options shared by the commands (log, index, ranks, hashes), and their exit codes.

0    done; `verify`: all equal
1    `verify`: something differs
2    not done: invalid options, unavailable data, or no answer
"""

import re
from collections.abc import Iterable
from pathlib import Path

import click

from indexer.config import IndexerSettings
from indexer.index.prefix_index import IndexFull
from indexer.service.history import NotRetained, SnapshotUnknown
from indexer.service.index_client import IndexUnavailable
from kv_protocol.errors import LimitExceeded, ProtocolError
from kv_protocol.ids import WorkerRank, checked_dp_rank, checked_worker_id
from kv_protocol.splitmix import U64_MASK
from kv_runtime.config.command import Command, takes_settings
from kv_runtime.config.loading import ConfigurationError
from kv_runtime.event_log import BrokerUnavailable
from kv_runtime.process import Stopped

DIFFERENT, NOT_DONE = 1, 2
_DP_RANK = re.compile(r"0|[1-9][0-9]{0,3}")
_HASH = re.compile(r"0x[0-9a-fA-F]{1,16}|0|[1-9][0-9]{0,19}")


class NotWritten(Exception):
    """The file cannot be written, or is there already."""


_EXPECTED = (
    BrokerUnavailable,
    ConfigurationError,
    IndexFull,
    IndexUnavailable,
    NotRetained,
    NotWritten,
    ProtocolError,
    SnapshotUnknown,
    Stopped,
)


def with_settings(command: Command) -> Command:
    """Add `--nats-url` to a command that takes the settings (`takes_settings`).

    An expected error ends the command with `NOT_DONE` and a line with the reason.
    """
    taking = takes_settings(IndexerSettings, "indexer", _EXPECTED, log_level="warning", exit_code=NOT_DONE)
    url = click.option("--nats-url", "nats__url", help="the event log: nats://host:port; its token is nats.credentials")
    return taking(url(command))


def read_rank(text: str) -> WorkerRank:
    """Parse a rank.

    Raises:
        ValueError: the text is not a rank; the message says what is allowed.
    """
    worker_id, _, dp_rank = text.rpartition("/")
    try:
        if _DP_RANK.fullmatch(dp_rank):
            return WorkerRank(checked_worker_id(worker_id), checked_dp_rank(int(dp_rank)))
    except LimitExceeded:
        pass
    raise ValueError(f"found {text!r}, allowed worker/dp_rank, as w0/0")


ranks_option = click.option(
    "--rank",
    "ranks",
    type=read_rank,
    metavar="WORKER/RANK",
    multiple=True,
    help="only this worker rank; several may be named",
)


def chosen_ranks(wanted: tuple[WorkerRank, ...], known: Iterable[WorkerRank]) -> list[WorkerRank]:
    """Return the wanted ranks, or all known ones if none is named; raise `click.BadParameter` for an unknown one."""
    ranks = sorted(known)
    if unknown := [str(rank) for rank in wanted if rank not in ranks]:
        allowed = ", ".join(map(str, ranks)) or "none: there are no ranks"
        raise click.BadParameter(f"found {', '.join(unknown)}, allowed {allowed}", param_hint="--rank")
    return list(wanted) or ranks


def read_hashes(text: str) -> list[int]:
    """Return the sequence hashes in a text, or in the file of that name: decimal or 0x, with commas or blanks between.

    Raises:
        ValueError: it has anything else, or no hash; the message says what is allowed.
    """
    file = Path(text)
    try:
        words = (file.read_text(encoding="utf-8") if file.is_file() else text).replace(",", " ").strip("[] \n").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"found {text!r}, which cannot be read: {error}") from error
    allowed = "sequence hashes (u64, decimal or 0x) with commas between, or a file of them"
    bad = next((word for word in words if not _HASH.fullmatch(word) or int(word, 0) > U64_MASK), None)
    if bad is not None or not words:
        raise ValueError(f"found {bad if bad is not None else text!r}, allowed {allowed}")
    return [int(word, 0) for word in words]


index_url_option = click.option(
    "--index-url",
    default="http://127.0.0.1:8001",
    show_default=True,
    help="the live index: a router's control plane, or `indexer serve`; its token is control.token",
)
timeout_option = click.option(
    "--timeout-s",
    type=click.FloatRange(0.1, 600),
    default=5.0,
    show_default=True,
    help="how long an answer, or the next part of one, may take",
)
