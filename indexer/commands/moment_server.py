"""Serves the prefix tree of a past moment, on a Unix socket, to the process that started this one.

The parent reads one `MomentProgress` a line on standard output. The process ends when its standard input ends, so that
it does not outlive its parent.
"""

import asyncio
import sys
from pathlib import Path

import msgspec
from aiohttp import web

from indexer.config import IndexerSettings
from indexer.follow.fold import IndexFold
from indexer.native.index import make_index
from indexer.service.history import moment_at, seq_at
from indexer.service.moment import Moment, MomentProgress
from indexer.service.prefix_explorer import PrefixExplorer
from indexer.service.tree_routes import tree_routes
from kv_runtime.clock import SystemClock
from kv_runtime.event_log import EventLog
from kv_runtime.http.acceptor import listening_at_path
from kv_runtime.http.answers import openai_errors
from kv_runtime.http.server import HttpServer
from kv_runtime.process import print_json
from kv_runtime.supervise import until


async def serve_moment(settings: IndexerSettings, log: EventLog, time_ns: int, path: Path) -> None:
    """Restore the index of that time, and serve its tree at `path` until standard input, a pipe, ends.

    Raises:
        NotRetained: the moment is not available.
        IndexFull: `index.memory_bytes_max` does not suffice.
        BrokerUnavailable: the log is away, or dropped messages before they were read.
    """
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    fold = IndexFold(make_index(settings.index), memory_bytes_max=settings.index.memory_bytes_max)
    moment = await until(ended, _restored(log, time_ns, fold))
    if moment is None:
        return
    explorer = PrefixExplorer(fold, SystemClock(), is_past=True)
    app = web.Application(middlewares=[openai_errors])
    app.add_routes(tree_routes(explorer))
    server = HttpServer(app, "localhost", 0)
    await server.start(listening=[listening_at_path(path)])
    read, snapshot = moment.messages_read, moment.snapshot
    _tell(MomentProgress(state="ready", messages=read, of=read, stream_seq=moment.stream_seq, snapshot=snapshot))
    await server.run(ended)


async def _restored(log: EventLog, time_ns: int, fold: IndexFold) -> Moment:
    def tell(messages: int, of: int) -> None:
        _tell(MomentProgress(state="reading", messages=messages, of=of))

    return await moment_at(log, await seq_at(log, time_ns), fold, tell)


def _tell(progress: MomentProgress) -> None:
    print_json(msgspec.json.encode(progress))
