"""Both tables of loads have one contract: every answer is that of a naive list of chains, and of the other table."""

from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_protocol.codec import pack_u64
from router import native
from router.fleet.load_table import ROW_MAX, LoadTable, PythonLoadTable, new_load_table
from router.prompt.chains import BLOCK_BYTES
from tests.support.amount import examples
from tests.unit.properties.test_chains import Naive, packed

Make = Callable[[], LoadTable]
ROWS = (1, 2, 77)
ASKED = (77, 0, 5, 1, 2)
"""Rows that are asked for: known ones in another order, that of unknown ranks, and one without anything."""

numbers = st.integers(0, 1 << 40)
steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(ROWS), packed),
        st.integers(0, 99),
        st.tuples(st.just("put"), st.sampled_from(ROWS), numbers, numbers, numbers),
        st.tuples(st.just("epoch"), st.sampled_from(ROWS), st.sampled_from([0, 7, (1 << 64) - 1])),
    ),
    max_size=40,
)


def native_table() -> LoadTable:
    built = native.load()
    if built is None:
        pytest.skip("the extension was not built")
    table: LoadTable = built.LoadTable()
    return table


IMPLEMENTATIONS = pytest.mark.parametrize("make", [native_table, PythonLoadTable], ids=["native", "python"])


class NaiveTable:
    """Chains block by block, and the numbers that were put last."""

    def __init__(self) -> None:
        self.chains = Naive()
        self.numbers: dict[int, tuple[int, int, int]] = {}
        self.epochs: dict[int, int] = {}

    def columns(self, chain: bytes) -> list[int]:
        known = [self.numbers.get(row, (0, 0, 0)) for row in ASKED]
        blocks = [each[2] + self.chains.blocks(str(row)) for row, each in zip(ASKED, known, strict=True)]
        depths = self.chains.depths(chain)
        shared = [depths.get(str(row), 0) for row in ASKED]
        return [*(each[0] for each in known), *(each[1] for each in known), *blocks, *shared]

    def expected(self, chain: bytes, epochs: tuple[int, ...]) -> list[int] | None:
        depths = self.chains.depths(chain)
        found = [
            depths.get(str(row), 0) * (self.epochs.get(row, 0) == epoch)
            for row, epoch in zip(ASKED, epochs, strict=True)
        ]
        return found if any(found) else None


def numbers_of(data: bytes | None) -> list[int] | None:
    return None if data is None else array("q", data).tolist()


def rows_of(*rows: int) -> bytes:
    return array("q", rows).tobytes()


def run(make: Make, script: list[Any]) -> None:
    """Do all of it to both; then remove the chains that are left, and nothing is."""
    table, naive, there = make(), NaiveTable(), list[tuple[int, bytes, int]]()
    asked = {b"", *(step[1] for step in script if isinstance(step, tuple) and isinstance(step[1], bytes))}
    asked |= {*(chain + pack_u64((7,)) for chain in asked), *(chain[:-BLOCK_BYTES] for chain in asked)}
    for step in [*script, *range(len(script))]:
        match step:
            case ("put", row, *three):
                table.put(row, *three)
                naive.numbers[row] = (three[0], three[1], three[2])
            case ("epoch", row, epoch):
                table.set_epoch(row, epoch)
                naive.epochs[row] = epoch
            case (row, chain):
                end = table.add(row, chain)
                assert end > 0
                there.append((row, chain, end))
                naive.chains.count(str(row), chain, 1)
            case number if there:
                row, chain, end = there.pop(number % len(there))
                table.remove(end)
                naive.chains.count(str(row), chain, -1)
        check(table, naive, asked)
        assert table.is_empty() == (not there)
        assert table.node_count() <= 2 * len({chain for _, chain, _ in there if chain})
    assert table.is_empty()


def check(table: LoadTable, naive: NaiveTable, asked: set[bytes]) -> None:
    assert [table.blocks(row) for row in ROWS] == [naive.chains.blocks(str(row)) for row in ROWS]
    for chain in asked:
        assert numbers_of(table.columns(rows_of(*ASKED), chain)) == naive.columns(chain)
        for epochs in ((0,) * len(ASKED), (7, 7, 0, (1 << 64) - 1, 7)):
            assert numbers_of(table.expected(rows_of(*ASKED), chain, epochs)) == naive.expected(chain, epochs)


@IMPLEMENTATIONS
@given(script=steps)
@settings(max_examples=examples(300), deadline=None)
def test_every_answer_is_that_of_a_naive_list(make: Make, script: list[Any]) -> None:
    run(make, script)


@IMPLEMENTATIONS
def test_an_end_is_removed_once_and_what_is_no_end_changes_nothing(make: Make) -> None:
    table = make()
    end = table.add(3, pack_u64((1, 2, 3)))
    kept = table.add(3, pack_u64((1, 2)))
    table.remove(end)
    for wrong in (end, kept + 1, 0, 1 << 33):
        with pytest.raises(KeyError):
            table.remove(wrong)
    assert (table.blocks(3), table.node_count()) == (2, 1)


@IMPLEMENTATIONS
@pytest.mark.parametrize("row", [-1, 0, ROW_MAX + 1])
def test_a_row_out_of_range_is_refused(make: Make, row: int) -> None:
    table = make()
    calls: list[Callable[[], object]] = [
        lambda: table.add(row, b""),
        lambda: table.blocks(row),
        lambda: table.put(row, 0, 0, 0),
        lambda: table.set_epoch(row, 0),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=rf"row: found {row}, allowed 1\.\.{ROW_MAX}"):
            call()
    assert numbers_of(table.columns(rows_of(row), b"")) == [0, 0, 0, 0]


@IMPLEMENTATIONS
def test_what_is_no_packed_numbers_is_refused(make: Make) -> None:
    table = make()
    for call in (
        lambda: table.add(1, b"1234"),
        lambda: table.columns(b"", b"1"),
        lambda: table.expected(b"", b"1", ()),
    ):
        with pytest.raises(ValueError, match=r"chain: found \d, allowed a multiple of 8 bytes"):
            call()
    with pytest.raises(ValueError, match="rows: found 3, allowed"):
        table.columns(b"123", b"")
    with pytest.raises(ValueError, match="epochs: found 1, allowed as many as rows"):
        table.expected(b"", b"", (1,))
    assert table.is_empty()


def test_the_native_table_serves_where_it_was_built() -> None:
    built = native.load()
    assert isinstance(new_load_table(), PythonLoadTable if built is None else built.LoadTable)


# ---------------------------------------------------------------- the harness sees what is wrong

A, AB, ABC = (pack_u64(each) for each in ((1,), (1, 2), (1, 2, 3)))
SCRIPT = [("epoch", 1, 7), ("put", 2, 1, 2, 3), (1, ABC), (2, AB), (1, A), (1, ABC), 0, (2, pack_u64((1, 2, 4))), 1, 0]


@pytest.mark.planted
def test_a_planted_bug_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    run(PythonLoadTable, SCRIPT)
    monkeypatch.setattr(PythonLoadTable, "set_epoch", lambda _table, _row, _epoch: None)
    with pytest.raises(AssertionError):
        run(PythonLoadTable, SCRIPT)
