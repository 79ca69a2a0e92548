"""Coroutines without tasks: a callback resumes one at once, in the same turn of the event loop.

A task would resume one in a later turn, and would cost three times as much CPU.
"""

import asyncio
import types
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar, cast

T = TypeVar("T")


class CallbackCoroutine(ABC):
    """Runs its own coroutines, which await `until_resumed` and `later`. At most one of them waits at a time.

    A coroutine may `run` another one only as its last step.
    """

    is_over = False
    _waiting: Coroutine[Any, Any, None] | None = None
    _awaited: "asyncio.Future[Any] | None" = None
    _early: tuple[Any] | None = None

    def run(self, coroutine: Coroutine[Any, Any, None], value: Any = None) -> None:  # noqa: ANN401 - what it waits for
        """Run the coroutine up to its next wait, or its end."""
        try:
            coroutine.send(value)
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001 - the edge
            self.on_error(error)
            return
        if self.is_over:
            coroutine.close()
        else:
            self._waiting = coroutine

    @abstractmethod
    def on_error(self, error: Exception) -> None:
        """Handle an error that ended the coroutine."""

    @types.coroutine
    def until_resumed(self) -> "Generator[None, Any, Any]":
        """Suspend the coroutine until `resume` is called, unless it was called before; return the value it got."""
        early, self._early = self._early, None
        return (yield) if early is None else early[0]

    async def later(self, found: "T | asyncio.Future[T]") -> T:
        """Return `found`, or its result if it is a future; `stop` cancels the future."""
        if not isinstance(found, asyncio.Future):
            return found
        self._awaited = found
        found.add_done_callback(self._done)
        del found  # its error would refer to itself
        try:
            await self.until_resumed()
            return cast("T", self._awaited.result())
        finally:
            self._awaited = None

    def _done(self, future: "asyncio.Future[Any]") -> None:
        is_cancelled = future.cancelled()
        del future  # its error would refer to itself
        if not is_cancelled:
            self.resume()

    def resume(self, value: Any = None) -> None:  # noqa: ANN401 - what the coroutine waits for
        """Continue the coroutine that waits in `until_resumed`, or is about to."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self.run(waiting, value)
        elif not self.is_over:  # it is resumed before it waits
            self._early = (value,)

    def stop(self) -> None:
        """Run nothing more: cancel the awaited future, and close the waiting coroutine."""
        self.is_over = True
        if self._awaited is not None:
            self._awaited.cancel()
        if self._waiting is not None:
            self._waiting.close()
            self._waiting = None
