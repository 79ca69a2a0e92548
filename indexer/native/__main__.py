"""`python -m indexer.native`: say how the extension was built; fail if there is none."""

from indexer.native import core

print(f"C++ extension: built, {'with' if core.HAS_XXHASH else 'without'} xxhash")
