"""Stores in `state.dir` what was learnt of each model's speed and answers, so that a restarted router has it.

    rates.json   {"version": 1, "models": [[model, prefill, decode, output_tokens, answers], ...]}

The file is written every `WRITE_S` and when the router stops, if anything was learnt since. A file that cannot be used
is logged and ignored: the router learns everything again.
"""

import asyncio
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import structlog

from kv_protocol.errors import UNDECODABLE
from kv_protocol.journal import LearntRates, RatesRestored
from kv_runtime.clock import Clock
from kv_runtime.files import replace_file
from router.decision.routing import Routing

WRITE_S = 60.0
MODELS_MAX = 1024
_BYTES_MAX = 1 << 20
_log = structlog.get_logger("router")


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file."""

    version: Literal[1]
    models: Annotated[tuple[LearntRates, ...], msgspec.Meta(max_length=MODELS_MAX)]


class RatesStore:
    """The stored rates of one router; without a directory nothing is stored."""

    def __init__(self, directory: str, routing: Routing, clock: Clock) -> None:
        """The directory must exist: `PolicyStore.restore` makes it."""
        self._path = Path(directory) / "rates.json" if directory else None
        self._routing, self._clock = routing, clock
        self._written: tuple[LearntRates, ...] = ()

    def restore(self) -> None:
        """Apply the rates in the file, if there is one that can be used."""
        models = self._read()
        if models:
            self._routing.apply(RatesRestored(now_s=self._clock.now(), models=models))
            self._written = models
            _log.info("rates_restored", path=str(self._path), models=len(models))

    def _read(self) -> tuple[LearntRates, ...]:
        if self._path is None or not self._path.exists():
            return ()
        try:
            with self._path.open("rb") as file:
                data = file.read(_BYTES_MAX + 1)
            if len(data) > _BYTES_MAX:
                raise msgspec.ValidationError(f"found over {_BYTES_MAX} bytes")
            return msgspec.json.decode(data, type=_Stored).models
        except (OSError, *UNDECODABLE) as error:
            _log.warning("rates_not_restored", path=str(self._path), reason=str(error))
            return ()

    async def run(self, stop: asyncio.Event) -> None:
        """Write the file every `WRITE_S` until `stop` is set, and once more then. Writes do not overlap."""
        is_last = False
        while not is_last:
            await self._clock.wait(stop, WRITE_S)
            is_last = stop.is_set()
            await self._write()

    async def _write(self) -> None:
        models = self._routing.state.learnt()[:MODELS_MAX]
        if self._path is None or models == self._written:
            return
        data = msgspec.json.encode(_Stored(1, models))
        try:
            await asyncio.to_thread(replace_file, self._path, data)  # a disk may be slow
        except OSError as error:
            _log.warning("rates_not_written", path=str(self._path), reason=str(error))
        else:
            self._written = models
