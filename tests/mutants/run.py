"""Plants one small bug after the other in a copy of the product: a test must see each. `make mutants` runs all.

    python -m tests.mutants.run [PART ...] [-j COPIES] [--with TESTS ...]

PART is a part of a mutant's name, or of its file's (`fold.toml`); without any all are run. The mutants are in the
`*.toml` files beside this module: a name that says the bug, the file, the old text, the new text, and tests of which
one must fail; by default those that the table `[tests]` at the head names for the file. They must pass on a copy
without a bug. Searches draw the same examples in each run.

    caught     a test failed, crashed, or ran for ever
    escaped    all passed
    spoilt     no test could run: no programmer would keep that bug

C++ mutants share a copy whose extension is built anew for each. The exit status is 1 if one is not caught, or if an old
text is not found exactly once.
"""

import queue
import re
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import click
import msgspec

from tests.mutants.copied_product import CopiedProduct

ROOT = Path(__file__).parents[2]
KINDS = {
    "tests/unit/properties": "property",
    "tests/unit": "unit",
    "tests/contract": "contract",
    "tests/simulation": "simulation",
    "tests/system": "system",
}
RUN_S, BASE_S = 180.0, 1800.0
"""Limits of the run of one mutant, and of the run without one."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_VERDICTS = {None: "caught", 0: "escaped", 1: "caught"}
"""By pytest's exit status; below 0 a signal ended it: caught. Any other: it could not run the tests."""


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One bug: in `file` it replaces `old` by `new`; one of `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    subject: str
    """The name of its own file, without the suffix."""

    @property
    def is_native(self) -> bool:
        """Whether the extension must be built again."""
        return self.file.endswith((".cpp", ".hpp"))


class Outcome(msgspec.Struct, frozen=True):
    """What came of a mutant; `test` failed first."""

    mutant: Mutant
    verdict: str
    test: str = ""
    seconds: float = 0.0

    @property
    def kind(self) -> str:
        """The kind of the test that failed first."""
        return next((kind for folder, kind in KINDS.items() if self.test.startswith(folder + "/")), "")


def load(folder: Path, root: Path, parts: Sequence[str] = ()) -> list[Mutant]:
    """Return the mutants of which a name has one of `parts`. All are checked; a bad one ends the program."""
    read = [(path.stem, tomllib.loads(path.read_text())) for path in sorted(folder.glob("*.toml"))]
    mutants = [
        msgspec.convert({"tests": told.get("tests", {}).get(each["file"]), "subject": subject} | each, Mutant)
        for subject, told in read
        for each in told["mutant"]
    ]
    counts = Counter(each.name for each in mutants)
    faults = [f"{name}: {count} mutants have this name" for name, count in counts.items() if count > 1]
    for each in mutants:
        count = (root / each.file).read_text().count(each.old) if (root / each.file).is_file() else 0
        if count != 1:
            faults.append(f"{each.subject}: {each.name}: the old text is in {each.file} {count} times, not once")
    if faults:
        sys.exit("\n".join(faults))
    return [each for each in mutants if not parts or any(part in f"{each.subject}.toml {each.name}" for part in parts)]


def _check(copy: CopiedProduct, tests: Sequence[str]) -> None:
    status, printed = copy.test(tests, BASE_S)
    if status != 0:
        sys.exit(f"{printed}\nwithout a mutant the tests must pass")


def _try_out(copy: CopiedProduct, mutant: Mutant, tests: Sequence[str]) -> Outcome:
    """Plant the bug, run the tests, and put everything back."""
    began_s = time.monotonic()
    copy.plant(mutant.file, mutant.old, mutant.new)
    try:
        is_built = not mutant.is_native or copy.build()
        status, printed = copy.test(tests, RUN_S) if is_built else (2, "")
    finally:
        copy.restore(mutant.file)
    verdict = "caught" if status is not None and status < 0 else _VERDICTS.get(status, "spoilt")
    failed = _FAILED.search(printed)
    test = "" if verdict != "caught" else failed[1] if failed else tests[0]
    return Outcome(mutant, verdict, test, time.monotonic() - began_s)


def outcomes(root: Path, mutants: Sequence[Mutant], copies: int = 1, others: Sequence[str] = ()) -> Iterator[Outcome]:
    """Yield what came of each mutant; `others` are the tests to run instead of each mutant's own."""

    def tests_of(chosen: Sequence[Mutant]) -> list[str]:
        return list(others) or list(dict.fromkeys(test for each in chosen for test in each.tests))

    native, rest = [each for each in mutants if each.is_native], [each for each in mutants if not each.is_native]
    runs = [Future[Outcome]() for _ in native]
    free: queue.SimpleQueue[CopiedProduct] = queue.SimpleQueue()

    def try_one(mutant: Mutant) -> Outcome:
        copy = free.get()
        try:
            return _try_out(copy, mutant, tests_of([mutant]))
        finally:
            free.put(copy)

    def try_native(copy: CopiedProduct) -> None:
        for mutant, run in zip(native, runs, strict=True):
            try:
                run.set_result(_try_out(copy, mutant, tests_of([mutant])))
            except BaseException as error:  # noqa: BLE001 - raised again where the outcome is read
                run.set_exception(error)

    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch, ThreadPoolExecutor(copies) as pool:
        try:
            if native:
                copy = CopiedProduct(root, Path(scratch) / "native")
                copy.build()
                _check(copy, tests_of(native))
                pool.submit(try_native, copy)
            for number in range(copies if rest else 0):
                copy = CopiedProduct(root, Path(scratch) / str(number))
                if number == 0:
                    _check(copy, tests_of(rest))
                free.put(copy)
            for run in (*runs, *[pool.submit(try_one, each) for each in rest]):
                yield run.result()
        finally:
            pool.shutdown(cancel_futures=True)


@click.command(help=__doc__)
@click.argument("parts", nargs=-1)
@click.option("-j", "copies", default=1, help="how many copies run side by side")
@click.option("--with", "others", multiple=True, help="tests to run instead of each mutant's own")
def main(parts: tuple[str, ...], copies: int, others: tuple[str, ...]) -> None:
    """Try the mutants out, and print what came of each."""
    found = list[Outcome]()
    for each in outcomes(ROOT, load(Path(__file__).parent, ROOT, parts), copies, others):
        found.append(each)
        row = f"{each.verdict:8}{each.kind:11}{each.seconds:4.0f} s  {each.mutant.subject}: {each.mutant.name}"
        click.echo(f"{row}  [{each.test}]" if each.test else row)
    kinds = Counter(each.kind for each in found if each.verdict == "caught")
    click.echo(f"{len(found)} mutants, {kinds.total()} caught: {', '.join(f'{n} {kind}' for kind, n in kinds.items())}")
    sys.exit(kinds.total() < len(found))


if __name__ == "__main__":
    main()
