"""Chooses the implementation of the index: the only module that knows both.

    index.implementation   with the extension         without it
    --------------------   ------------------------   ---------------------------------------
    auto                   native                     python, and a warning in the log
    native                 native                     `ConfigurationError` with a hint
    python                 python                     python

An extension that cannot be loaded counts as missing; the reason is logged.
"""

import secrets
from typing import TYPE_CHECKING, Literal

import structlog

from indexer.index.prefix_index import PrefixIndex
from indexer.index.reference import ReferenceIndex
from kv_runtime.config.loading import ConfigurationError
from kv_runtime.config.sections import IndexSection

if TYPE_CHECKING:
    from indexer.native._core import SharedRegion
    from indexer.native.index import NativeIndex

_HOW_TO_BUILD = "to see why it was not built: .venv/bin/pip install -v --no-deps -e ."

ImplementationName = Literal["native", "python"]

_log = structlog.get_logger("indexer")


def make_index(settings: IndexSection) -> tuple[ImplementationName, PrefixIndex]:
    """Return the name of the implementation that `settings` select, and an empty index of it.

    Raises:
        ConfigurationError: the native one is selected and missing.
    """
    if settings.implementation == "python":
        return "python", _python(settings)
    try:
        return "native", native_index(settings)
    except ImportError as error:
        if settings.implementation == "native":
            raise _unloadable("native", error) from error
        _log.warning("native_index_missing", reason=str(error), hint=_HOW_TO_BUILD)
        return "python", _python(settings)


def _python(settings: IndexSection) -> PrefixIndex:
    return ReferenceIndex(
        parked_blocks_max=settings.parked_blocks_max,
        parked_ttl_s=settings.parked_ttl_s,
        memory_bytes_max=settings.memory_bytes_max,
    )


def native_index(settings: IndexSection, region: "SharedRegion | None" = None) -> "NativeIndex":
    """Return an empty native index; raise `ImportError` if the extension is missing."""
    from indexer.native.index import NativeIndex  # noqa: PLC0415 - a missing extension is no error unless it is selected

    return NativeIndex(
        parked_blocks_max=settings.parked_blocks_max,
        parked_ttl_s=settings.parked_ttl_s,
        memory_bytes_max=settings.memory_bytes_max,
        seed=secrets.randbits(64),  # clients choose prompts, and so hashes: they must not predict collisions
        region=region,
    )


def sharing_core(settings: IndexSection) -> "type[SharedRegion]":
    """Return what makes memory for an index that processes share.

    Raises:
        ConfigurationError: the Python index is selected, or the extension is missing.
    """
    if settings.implementation == "python":
        raise ConfigurationError(["index.implementation: found python; an index that processes share is native"])
    try:
        from indexer.native._core import SharedRegion  # noqa: PLC0415 - as above
    except ImportError as error:
        raise _unloadable(f"{settings.implementation}, of which processes share the native one", error) from error
    return SharedRegion


def _unloadable(found: str, error: ImportError) -> ConfigurationError:
    return ConfigurationError(
        [f"index.implementation: found {found}, which cannot be loaded ({error}); {_HOW_TO_BUILD}"]
    )
