"""Both trees of routed blocks have one contract: equal calls have equal answers, and equal rows in the same order."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_protocol.codec import pack_u64
from kv_protocol.splitmix import choice_index
from router import native
from router.decision import routed_tree
from router.decision.routed_tree import PythonRoutedTree, RoutedTree, StretchAt, new_routed_tree
from tests.support.amount import examples
from tests.support.planting import inside
from tests.unit.properties.test_approximate import chain

Make = Callable[[], RoutedTree]
TTL_S = 10.0

paths = st.lists(st.integers(1, 3), min_size=1, max_size=9).map(tuple)
steps = st.lists(
    st.tuples(st.sampled_from([0.0, 0.5, 4.0, 11.0]), paths | st.just(()), st.sampled_from([1, 5, 12, 1000])),
    max_size=40,
)


def native_tree() -> RoutedTree:
    built = native.load()
    if built is None:
        pytest.skip("the extension was not built")
    tree: RoutedTree = built.RoutedTree()
    return tree


IMPLEMENTATIONS = pytest.mark.parametrize("make", [native_tree, PythonRoutedTree], ids=["native", "python"])


def restored(make: Make, rows: list[StretchAt]) -> RoutedTree:
    tree = make()
    for row in rows:
        tree.restore(*row)
    return tree


def run(make: Make, script: list[tuple[float, tuple[int, ...], int]]) -> list[Any]:
    """Return every answer to the script, in which an empty path means that time is looked at; restore in the middle."""
    tree, now_s, told = make(), 0.0, list[Any]()
    asked = [chain(path) for path in {path for _, path, _ in script} | {(1, 2, 1, 2), (3,)}]
    for request, (advance_s, path, capacity) in enumerate(script, 1):
        now_s += advance_s
        told.append(tree.expire(now_s))
        if path:
            told.append(tree.add(chain(path), now_s + TTL_S, request, capacity))
        told += [tree.block_count(), tree.next_expiry_s()]
        told += [tree.overlap(each, now_s + later_s) for each in asked for later_s in (0.0, 6.0)]
        rows = list(tree.rows())
        told.append(rows)
        if request == len(script) // 2:
            tree = restored(make, rows)
            assert list(tree.rows()) == rows
    return told


def check(make: Make, script: list[tuple[float, tuple[int, ...], int]]) -> None:
    assert run(make, script) == run(PythonRoutedTree, script)


@given(steps)
@settings(max_examples=examples(300), deadline=None)
def test_every_answer_of_the_native_tree_is_that_of_the_reference(
    script: list[tuple[float, tuple[int, ...], int]],
) -> None:
    check(native_tree, script)


@pytest.mark.parametrize("seed", range(3))
def test_after_a_long_run_under_pressure_both_have_the_same_rows(seed: int) -> None:
    trees = native_tree(), PythonRoutedTree()
    for number in range(1500):
        path = tuple(
            1 + choice_index(seed, 3, 100 * number + at) for at in range(1 + choice_index(seed, 9, 3 * number))
        )
        now_s = number * 0.7
        told = [
            (tree.expire(now_s), tree.add(chain(path), now_s + TTL_S, number, 12), tree.block_count()) for tree in trees
        ]
        assert told[0] == told[1], f"seed {seed}, request {number}"
        if number % 50 == 0:
            assert list(trees[0].rows()) == list(trees[1].rows()), f"seed {seed}, request {number}"


@IMPLEMENTATIONS
def test_chains_of_thousands_of_blocks_fork_where_they_differ(make: Make) -> None:
    tree, long = make(), list(range(5000))
    tree.add(pack_u64(long), 1.0, 1, 1 << 20)
    tree.add(pack_u64([*long[:4321], 9, 8]), 2.0, 2, 1 << 20)
    assert tree.block_count() == 5002
    assert [tree.overlap(pack_u64([*long[:cut], 7]), 0.0) for cut in (0, 1, 4320, 4321, 5000)] == [
        0,
        1,
        4320,
        4321,
        5000,
    ]
    assert [len(blocks) // 8 for _, blocks, _, _ in tree.rows()] == [4321, 679, 2]


@IMPLEMENTATIONS
def test_what_is_no_row_of_a_tree_is_refused_with_its_field(make: Make) -> None:
    tree = make()
    tree.restore(-1, pack_u64((1, 2)), 5.0, 1)
    for parent, blocks, message in (
        (0, b"", "blocks: found 0, allowed 1 or more"),
        (0, b"seven b", "blocks: found 7, allowed a multiple of 8 bytes"),
        (1, pack_u64((3,)), "parent: found 1, allowed -1, or an earlier row without such a child"),
        (-2, pack_u64((3,)), "parent: found -2, allowed -1, or an earlier row without such a child"),
        (-1, pack_u64((1, 9)), "parent: found -1, allowed -1, or an earlier row without such a child"),
    ):
        with pytest.raises(ValueError, match=message):
            tree.restore(parent, blocks, 5.0, 2)
    with pytest.raises(ValueError, match="chain: found 3, allowed a multiple of 8 bytes"):
        tree.add(b"abc", 6.0, 3, 10)
    with pytest.raises(ValueError, match="chain: found 3, allowed a multiple of 8 bytes"):
        tree.overlap(b"abc", 0.0)
    assert list(tree.rows()) == [(-1, pack_u64((1, 2)), 5.0, 1)]


def test_the_native_tree_is_used_where_it_was_built() -> None:
    assert type(new_routed_tree()) is type(native_tree())


# ---------------------------------------------------------------- the harness sees what is wrong

SCRIPT = [
    (0.0, (1, 2, 3), 100),
    (1.0, (1, 2, 1, 1), 100),
    (1.0, (2, 2), 100),
    (0.5, (1, 3), 5),
    (9.0, (), 0),
    (0.5, (3,), 2),
]
TREE = inside(routed_tree, "PythonRoutedTree")
ROWS = TREE.rows


@pytest.mark.interpreted
@pytest.mark.planted
def test_a_planted_bug_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    check(native_tree, SCRIPT)
    monkeypatch.setattr(TREE, "rows", lambda tree: sorted(ROWS(tree), key=lambda row: row[1]))
    with pytest.raises(AssertionError):
        check(native_tree, SCRIPT)
