"""A coroutine without a task: callbacks resume it, in their own turn of the event loop.

A task would resume it in a later turn, and would cost three times as much CPU.
"""

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar, cast

T = TypeVar("T")


class CallbackCoroutine:
    """Runs one coroutine, which awaits `until_resumed` and `later`; a base of the class that has the coroutine."""

    is_over = False
    _coroutine: Coroutine[Any, Any, None] | None = None
    _is_running = False
    _awaited: "asyncio.Future[Any] | None" = None
    _early: tuple[Any] | None = None

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run the coroutine up to its first wait."""
        self._coroutine = coroutine
        self._step(None)

    @types.coroutine
    def until_resumed(self) -> "Generator[None, Any, Any]":
        """Suspend the coroutine until `resume`; return what that is given, or was given already."""
        early, self._early = self._early, None
        return (yield) if early is None else early[0]

    async def later(self, found: "T | asyncio.Future[T]") -> T:
        """Return what was found, now or later; `stop` cancels the future."""
        if not isinstance(found, asyncio.Future):
            return found
        self._awaited = found
        found.add_done_callback(self._done)
        del found  # its error would refer to itself
        try:
            return cast("T", await self.until_resumed())
        finally:
            self._awaited = None

    def _done(self, future: "asyncio.Future[Any]") -> None:
        if not self.is_over and not future.cancelled():
            error = future.exception()
            self._step(future.result() if error is None else None, error)

    def resume(self, came: Any = None) -> None:  # noqa: ANN401 - what the coroutine waits for
        """Go on with the coroutine, which waits for this or is about to."""
        if self._is_running:  # what was asked is answered at once
            self._early = (came,)
        elif not self.is_over:
            self._step(came)

    def _step(self, came: Any, error: BaseException | None = None) -> None:  # noqa: ANN401
        coroutine = self._coroutine
        assert coroutine is not None
        self._is_running = True
        try:
            if error is None:
                coroutine.send(came)
            else:
                coroutine.throw(error)
        except StopIteration:
            return
        finally:
            self._is_running = False
        if self.is_over:
            coroutine.close()

    def stop(self) -> None:
        """Nothing more is run."""
        self.is_over = True
        if self._awaited is not None:
            self._awaited.cancel()
        if self._coroutine is not None and not self._is_running:
            self._coroutine.close()
