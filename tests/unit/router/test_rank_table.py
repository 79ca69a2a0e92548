from kv_protocol.ids import WorkerRank
from router.fleet.rank_table import RankTable

RANKS = tuple(WorkerRank(f"w{number}", 0) for number in range(200))
A, B, C = RANKS[:3]


def test_every_rank_has_its_own_numbers_however_many_there_are() -> None:
    table = RankTable("q", (0, 0))
    for number, rank in enumerate(RANKS):
        table.put(table.row(rank), number, -number)
    assert table.columns(RANKS).tolist() == [list(range(200)), [-number for number in range(200)]]
    assert set(table) == set(RANKS)


def test_a_rank_that_is_not_known_or_has_none_yet_has_the_first_numbers() -> None:
    table = RankTable("d", (1.5, 2.5))
    table.put(table.row(A), 7.0, 8.0)
    table.row(B)
    assert table.columns((C, B, A)).tolist() == [[1.5, 1.5, 7.0], [2.5, 2.5, 8.0]]


def test_a_rank_that_was_removed_begins_anew() -> None:
    table, ranks = RankTable("q", (0,)), (A, B)
    table.put(table.row(A), 7)
    table.put(table.row(B), 8)
    table.remove(A)
    assert table.columns(ranks).tolist() == [[0, 8]]
    table.row(C)
    assert table.columns((*ranks, C)).tolist() == [[0, 8, 0]]


def test_an_equal_tuple_of_ranks_is_answered_alike() -> None:
    table = RankTable("q", (0,))
    table.put(table.row(A), 7)
    assert [table.columns((A, B)).tolist() for _ in range(200)] == [[[7, 0]]] * 200
