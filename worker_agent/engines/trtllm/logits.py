"""Logits processors by name, as TensorRT-LLM calls them: one request, one beam, in place.

    the engine calls     (request id, logits of shape (1, 1, vocabulary), [tokens so far], stream, client id)
    a processor gets     (tokens so far, logits of shape (vocabulary,)), and changes these in place
    stream               a CUDA stream's address: the processor's work is queued there; None: no stream
    an error, or any     the logits stay as before this processor, and the error is counted by its name; the processors
    other shape          after it still run

A name stands for `package.module:factory`; the factory takes no arguments and returns a processor. Each request has its
own processors, built at their first call: the engine gets only the specification, so that it can be sent to an engine
process. Errors are then counted and logged in that process.

Source: NVIDIA/TensorRT-LLM, `tensorrt_llm/sampling_params.py` (`LogitsProcessor`), `SURFACE.md` of the fake.
"""

import importlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import structlog

from worker_agent.port.types import EngineError

_log = structlog.get_logger("logits")
_BEAM = (1, 1)


Processor = Callable[[Sequence[int], Any], None]
"""Changes logits in place, one for each token of the vocabulary; the tokens so far begin with the prompt."""
Factory = Callable[[], Processor]


class LogitsAdapter:
    """One processor of one request, with the engine's signature; it raises nothing, and counts errors by `name`."""

    def __init__(self, name: str, specification: str, errors_total: Counter[str]) -> None:
        self._name, self._specification = name, specification
        self._errors_total = errors_total
        self._processor: Processor | None = None

    def __call__(
        self,
        req_id: int,
        logits: Any,  # noqa: ANN401 - an array of the engine's kind
        token_ids: list[list[int]],
        stream_ptr: int | None,
        client_id: int | None,
    ) -> None:
        """Change `logits` in place, or leave them unchanged."""
        del req_id, client_id
        before = None
        try:
            with stream_of(stream_ptr):
                before = logits.clone() if hasattr(logits, "clone") else logits.copy()  # torch's name, and numpy's
                self._apply(logits, token_ids)
        except Exception as error:  # noqa: BLE001  the engine would die of it, and all requests with it
            self._undo(logits, before, stream_ptr, error)

    def _apply(self, logits: Any, token_ids: list[list[int]]) -> None:  # noqa: ANN401 - as above
        shape = tuple(logits.shape)
        if len(shape) != len(_BEAM) + 1 or shape[:2] != _BEAM or len(token_ids) != 1:
            found = f"found logits of shape {shape} and {len(token_ids)} sequences"
            raise ValueError(f"{found}, allowed (1, 1, vocabulary) and 1: one request, one beam")
        if self._processor is None:
            self._processor = factory_at(self._name, self._specification)()
        self._processor(token_ids[0], logits[0, 0])

    def _undo(self, logits: Any, before: Any, stream_ptr: int | None, error: Exception) -> None:  # noqa: ANN401
        if before is not None:
            with stream_of(stream_ptr):
                logits[...] = before
        self._errors_total[self._name] += 1
        _log.warning("logits_processor_failed", processor=self._name, reason=f"{type(error).__name__}: {error}")


def factory_at(name: str, specification: str) -> Factory:
    """Return the factory named by `package.module:factory`; raise `EngineError`."""
    module, _, attribute = specification.partition(":")
    where = f"logits_processors.{name}: found {specification!r}"
    if not module or not attribute:
        raise EngineError(f"{where}, allowed package.module:factory")
    try:
        factory: Factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise EngineError(f"{where}, which cannot be loaded: {error}") from error
    if not callable(factory):
        raise EngineError(f"{where}, which is a {type(factory).__name__}, allowed a factory without arguments")
    return factory


def stream_of(stream_ptr: int | None) -> AbstractContextManager[Any]:
    """Return a context in which the processor's work is queued on the engine's CUDA stream, if there is one."""
    if stream_ptr is None:
        return nullcontext()
    cuda = importlib.import_module("torch").cuda
    stream: AbstractContextManager[Any] = cuda.stream(cuda.ExternalStream(stream_ptr))
    return stream
