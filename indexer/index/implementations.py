"""Chooses the implementation of the index: the only module that knows both.

    index.implementation   the extension is there     it is not
    --------------------   ------------------------   ---------------------------------------
    auto                   native                     python, and a warning in the log
    native                 native                     `ConfigurationError`, which says what to do
    python                 python                     python

An extension that is there but cannot be loaded counts as not there; the reason is told.
"""

import secrets
from typing import Literal

import structlog

from indexer.index.prefix_index import PrefixIndex
from indexer.index.reference import ReferenceIndex
from kv_runtime.config import ConfigurationError, IndexSection

_HOW_TO_BUILD = "to see why it was not built: .venv/bin/pip install -v --no-deps -e ."

ImplementationName = Literal["native", "python"]

_log = structlog.get_logger("indexer")


def make_index(settings: IndexSection) -> tuple[ImplementationName, PrefixIndex]:
    """Return an empty index as `settings` ask for, and which it is.

    Raises:
        ConfigurationError: it is the native one, and that is not there.
    """
    if settings.implementation == "python":
        return "python", _python(settings)
    try:
        return "native", _native(settings)
    except ImportError as error:
        if settings.implementation == "native":
            problem = f"index.implementation: found native, which cannot be loaded ({error}); {_HOW_TO_BUILD}"
            raise ConfigurationError([problem]) from error
        _log.warning("native_index_missing", reason=str(error), hint=_HOW_TO_BUILD)
        return "python", _python(settings)


def _python(settings: IndexSection) -> PrefixIndex:
    return ReferenceIndex(
        parked_blocks_max=settings.parked_blocks_max,
        parked_ttl_s=settings.parked_ttl_s,
        memory_bytes_max=settings.memory_bytes_max,
    )


def _native(settings: IndexSection) -> PrefixIndex:
    from indexer.native.index import NativeIndex  # noqa: PLC0415 - a missing extension is no error until it is asked for

    return NativeIndex(
        parked_blocks_max=settings.parked_blocks_max,
        parked_ttl_s=settings.parked_ttl_s,
        memory_bytes_max=settings.memory_bytes_max,
        seed=secrets.randbits(64),  # hashes are made of prompts: nobody shall know which of them lie together
    )
