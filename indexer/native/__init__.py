"""The C++ core of the index.

No index runs without it: importing this package fails if it is missing, damaged, or built for another machine.
"""

try:
    from indexer.native import _core as core
except ImportError as error:
    raise ImportError(f"the index's C++ extension is missing ({error})") from error

__all__ = ["core"]
