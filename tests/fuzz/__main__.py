"""`python -m tests.fuzz seeds DIRECTORY`: write the seed inputs, a directory for each fuzzer.

`python -m tests.fuzz compare DIRECTORY ...`: run the inputs in such directories on the index and the tests'
reference; exit status 1, and the names of the inputs, if they differ.
"""

import sys
from pathlib import Path

from tests.fuzz.seeds import FUZZERS, write


def _compare(fuzzer: str, paths: list[Path]) -> int:
    from indexer.native.index import NativeIndex
    from tests.fuzz.programs import differences
    from tests.reference.index.index import ReferenceIndex

    bad = 0
    for path in paths:
        if found := differences(fuzzer, path.read_bytes(), ReferenceIndex, NativeIndex):
            print(f"{path}: index and reference differ in {', '.join(found)}")
            bad += 1
    print(f"{fuzzer}: index and reference agree on {len(paths) - bad} of {len(paths)} inputs")
    return bad


def main(command: str, directories: list[Path]) -> int:
    """Run a command; return its exit status."""
    if command == "seeds":
        for directory in directories:
            write(directory)
        return 0
    paths = {fuzzer: [path for each in directories for path in sorted((each / fuzzer).iterdir())] for fuzzer in FUZZERS}
    return int(sum(_compare(fuzzer, paths[fuzzer]) for fuzzer in FUZZERS) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], [Path(each) for each in sys.argv[2:]]))
