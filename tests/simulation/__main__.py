"""Many seeds, on all cores, until one fails.

    .venv/bin/python -m tests.simulation --seeds 100000 --from 2000

It says now and then how far it is; of the first seed that fails, what is wrong, and the command that repeats it. Then
it ends with 1; with 0 where none fails.
"""

import os
import sys
import time
from argparse import ArgumentParser
from multiprocessing import Pool

from tests.simulation.seeds import failure

TOLD_EVERY_S = 10.0
_AT_ONCE = 8


def search(first: int, seeds: int, processes: int) -> int:
    """Return 0 where all of so many seeds from `first` on are well, else 1."""
    began_s = told_s = time.monotonic()
    with Pool(processes) as pool:
        for done, found in enumerate(pool.imap(failure, range(first, first + seeds), _AT_ONCE), 1):
            now_s = time.monotonic()
            if found:
                print(f"after {done} seeds, {now_s - began_s:.0f} s:\n{found}")
                pool.terminate()
                return 1
            if now_s - told_s >= TOLD_EVERY_S or done == seeds:
                told_s = now_s
                print(f"{done} of {seeds} seeds are well, {done / (now_s - began_s):.1f}/s", flush=True)
    return 0


def main() -> int:
    """Search as the command line says."""
    parser = ArgumentParser(prog="tests.simulation", description="live through many worlds")
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="how many at once")
    arguments = parser.parse_args()
    return search(arguments.first, arguments.seeds, arguments.processes)


if __name__ == "__main__":
    sys.exit(main())
