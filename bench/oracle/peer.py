"""`python -m bench.oracle.peer`: finds where the choice of the peer's own selection service flips.

    first    {"version": ...}, or {"absent": why} and it ends
    then     a request line and a response line, both JSON, until stdin ends
    request  {"serve": {variable: value}, "events": [endpoint, endpoint]}  a service with these weights; two workers
             {"await": [prompt, ...]}                                      until the service knows what is held of these
             {"flip": [prompt, load], "base": first token}                 see `grid.py`
    response the result, or {"error": why}

A service returns the winner and logs its cost. It draws the winner of a tie, so each selection is repeated.
Standard library only, beside the peer.
"""

import asyncio
import json
import os
import re
import sys
from importlib import import_module, metadata
from pathlib import Path
from tempfile import mkstemp
from typing import TYPE_CHECKING, Any, TextIO

from bench.oracle.grid import BLOCK_SIZE, TAINT, Flip, Held, OracleLoad, OraclePrompt, Outcome, flip

if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGE = "ai-dynamo-runtime"
LOG_FILTER = "error,dynamo_kv_router::scheduling::selector=info"
_MODEL = "m"
_FIRST, _SECOND = 1, 2
_SELECTIONS = 24
"""A tie is missed once in 2^23 times."""
_LOAD_BASE = 1 << 30
"""The first token of load that belongs to no prompt."""
_HELD_S, _POLL_S = 10.0, 0.01
_COST = re.compile(r"worker_id=(\d+).*?logit=(\S+)")


class PeerService:
    """One service at a time, with two workers; both are known by the events that they publish."""

    def __init__(self, log: Path) -> None:
        self._make: Callable[..., Any] = import_module("dynamo._core").SelectionService
        self._log = log
        self._fresh_token = _LOAD_BASE

    async def serve(self, environment: dict[str, str], endpoints: list[str]) -> None:
        """Start a new service with these weights."""
        os.environ.update(environment)
        self._service = self._make(indexer_threads=1)
        for worker, endpoint in zip((_FIRST, _SECOND), endpoints, strict=True):
            await self._service.upsert_worker(
                {
                    "worker_id": worker,
                    "model_name": _MODEL,
                    "block_size": BLOCK_SIZE,
                    "endpoint": f"http://127.0.0.1:{worker}",
                    "data_parallel_start_rank": 0,
                    "data_parallel_size": 1,
                    "kv_events_endpoints": {0: endpoint},
                    "taints": [TAINT] if worker == _FIRST else [],
                }
            )

    async def until_held(self, prompts: list[tuple[int, OraclePrompt]]) -> None:
        """Wait until every prompt (with the token that it begins with) is held as given."""
        async with asyncio.timeout(_HELD_S):
            for base, prompt in prompts:
                held = [prompt.first.depths[:3], prompt.second.depths[:3]]
                while await self._held(base, prompt) != held:  # noqa: ASYNC110 - the service has no notification
                    await asyncio.sleep(_POLL_S)

    async def _held(self, base: int, prompt: OraclePrompt) -> list[tuple[int, ...]]:
        scores = await self._service.overlap_scores({"model_name": _MODEL, "token_ids": _tokens(base, prompt.tokens)})
        fields = ("device_blocks", "host_pinned_blocks", "disk_blocks")
        by_worker = {each["worker_id"]: tuple(each[field] for field in fields) for each in scores["workers"]}
        return [by_worker.get(worker, (0, 0, 0)) for worker in (_FIRST, _SECOND)]

    async def outcome(self, base: int, prompt: OraclePrompt, load: OracleLoad, blocks: int) -> Outcome:
        """Return the winners while the first worker has `blocks` of extra load."""
        booked = [
            *await self._book(_FIRST, _tokens(base, min(load.shared, blocks) * BLOCK_SIZE), load, blocks),
            *await self._book(_SECOND, [], load._replace(tail=0), load.second_blocks),
        ]
        request: dict[str, Any] = {"model_name": _MODEL, "token_ids": _tokens(base, prompt.tokens)}
        if prompt.preferred:
            taints = {"preferred_taints": {TAINT: prompt.preferred}, "required_taints": []}
            request["routing_constraints"] = taints
        os.truncate(self._log, 0)
        won = {(await self._service.select(request))["worker_id"] for _ in range(_SELECTIONS)}
        costs = self._costs()
        for selection in booked:
            await self._service.free_reservation(selection)
        return Outcome(_FIRST in won, _SECOND in won, costs.get(_FIRST), costs.get(_SECOND))

    async def _book(self, worker: int, shared: list[int], load: OracleLoad, blocks: int) -> list[str]:
        if not blocks:
            return []
        fresh = blocks * BLOCK_SIZE - len(shared) + load.tail
        tokens = [*shared, *_tokens(self._fresh_token, fresh)]
        self._fresh_token += fresh
        booked = {"model_name": _MODEL, "token_ids": tokens, "allowed_worker_ids": [worker]}
        selection = (await self._service.select_and_reserve(booked))["selection_id"]
        if load.kind == "decode":
            await self._service.prefill_complete(selection)
        return [selection]

    def _costs(self) -> dict[int, float]:
        """Return the winners' costs of what was logged since."""
        return {int(worker): float(cost) for worker, cost in _COST.findall(self._log.read_text())}


def _tokens(base: int, count: int) -> list[int]:
    return list(range(base, base + count))


def _prompt(fields: list[Any]) -> OraclePrompt:
    blocks, tail, first, second, preferred = fields
    return OraclePrompt(blocks, tail, Held(*first), Held(*second), preferred)


async def _answer(peer: PeerService, request: dict[str, Any]) -> dict[str, Any]:
    if "serve" in request:
        await peer.serve(request["serve"], request["events"])
        return {}
    if "await" in request:
        await peer.until_held([(base, _prompt(fields)) for base, fields in request["await"]])
        return {}
    prompt, load = _prompt(request["flip"][0]), OracleLoad(*request["flip"][1])
    return (await _flip(peer, request["base"], prompt, load))._asdict()


async def _flip(peer: PeerService, base: int, prompt: OraclePrompt, load: OracleLoad) -> Flip:
    """Return the flip: `grid.flip` requests one load at a time, and this loop computes it."""
    loop = asyncio.get_running_loop()

    def outcome_at(blocks: int) -> Outcome:
        return asyncio.run_coroutine_threadsafe(peer.outcome(base, prompt, load, blocks), loop).result()

    return await asyncio.to_thread(flip, outcome_at)


async def _live(answers: TextIO, log: Path) -> None:
    try:
        peer = PeerService(log)
    except ImportError as error:
        _write(answers, {"absent": str(error)})
        return
    _write(answers, {"version": metadata.version(PACKAGE)})
    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            _write(answers, await _answer(peer, json.loads(line)))
        except Exception as error:  # noqa: BLE001 - the other side shows it, whatever it is
            _write(answers, {"error": f"{type(error).__name__}: {error}"})


def _write(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")


def main() -> None:
    """Answer until the other side has nothing more to ask."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    number, name = mkstemp()
    os.close(number)
    log = Path(name)
    appended = os.open(log, os.O_WRONLY | os.O_APPEND)  # so that what is cut off stays cut off
    os.dup2(appended, 1)
    os.dup2(appended, 2)
    os.environ |= {"DYN_LOG": LOG_FILTER, "DYN_SDK_DISABLE_ANSI_LOGGING": "1"}
    try:
        asyncio.run(_live(answers, log))
    finally:
        log.unlink()


if __name__ == "__main__":
    main()
