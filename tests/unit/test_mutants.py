"""The mutants fit the product, and what plants them says which escape."""

from pathlib import Path

import pytest

from tests.mutants.run import Mutant, Outcome, load, outcomes
from tests.support.paths import ROOT

ADDS, TAKES = "return left + right", "return left - right"
CAUGHT = Mutant("a sum is a difference", "router/sums.py", ADDS, TAKES, ("tests/unit/test_sums.py",), "sums")
ESCAPED = Mutant(
    "nothing tests a product", "router/sums.py", "left * right", "left", ("tests/unit/test_sums.py",), "sums"
)
SPOILT = Mutant(
    "the module is no Python", "router/sums.py", ADDS, "return left +", ("tests/unit/test_sums.py",), "sums"
)


@pytest.fixture
def product(tmp_path: Path) -> Path:
    """Return a product of one module and one test."""
    (tmp_path / "router").mkdir()
    (tmp_path / "router/__init__.py").write_text("")
    (tmp_path / "router/sums.py").write_text(
        "def plus(left, right):\n    return left + right\n\n\ndef times(left, right):\n    return left * right\n"
    )
    (tmp_path / "tests/unit").mkdir(parents=True)
    (tmp_path / "tests/unit/test_sums.py").write_text(
        "from router.sums import plus\n\n\ndef test_a_sum():\n    assert plus(2, 2) == 4\n"
    )
    return tmp_path


def toml(folder: Path, *names: str, old: str = ADDS) -> Path:
    folder.mkdir()
    tests = "[tests]\n'router/sums.py' = ['tests/unit/test_sums.py']\n"
    mutants = [f"[[mutant]]\nname = '{name}'\nfile = 'router/sums.py'\nold = '{old}'\nnew = ''\n" for name in names]
    (folder / "sums.toml").write_text("".join([tests, *mutants]))
    return folder


def test_the_text_of_each_mutant_is_found_once_in_the_product() -> None:
    mutants = load(ROOT / "tests/mutants", ROOT)
    assert all((ROOT / test.partition("::")[0]).exists() for each in mutants for test in each.tests)


@pytest.mark.planted
def test_a_mutant_that_nothing_catches_is_told_from_one_that_a_test_catches(product: Path) -> None:
    found = list(outcomes(product, [CAUGHT, ESCAPED, SPOILT, CAUGHT]))
    assert [(each.verdict, each.kind, each.test) for each in found] == [
        ("caught", "unit", "tests/unit/test_sums.py::test_a_sum"),
        ("escaped", "", ""),
        ("spoilt", "", ""),
        ("caught", "unit", "tests/unit/test_sums.py::test_a_sum"),
    ]


@pytest.mark.planted
def test_tests_that_fail_without_a_mutant_end_the_run(product: Path) -> None:
    (product / "router/sums.py").write_text("def plus(left, right):\n    return left * right + 1\n")
    with pytest.raises(SystemExit, match="without a mutant the tests must pass"):
        list(outcomes(product, [CAUGHT]))


@pytest.mark.parametrize(("old", "count"), [("no such text", 0), ("left", 4)])
def test_a_mutant_whose_text_is_not_there_once_is_named(product: Path, old: str, count: int) -> None:
    with pytest.raises(SystemExit, match=f"sums: a bug: the old text is in router/sums.py {count} times, not once"):
        load(toml(product / "mutants", "a bug", old=old), product)


def test_two_mutants_of_one_name_are_named(product: Path) -> None:
    with pytest.raises(SystemExit, match="a bug: 2 mutants have this name"):
        load(toml(product / "mutants", "a bug", "a bug"), product)


def test_mutants_are_chosen_by_parts_of_their_names_or_of_their_files(product: Path) -> None:
    folder = toml(product / "mutants", "a bug", "another")
    chosen = {part: [each.name for each in load(folder, product, [part])] for part in ("sums.toml", "a b", "nothing")}
    assert chosen == {"sums.toml": ["a bug", "another"], "a b": ["a bug"], "nothing": []}


@pytest.mark.parametrize(
    ("test", "kind"),
    [
        ("tests/unit/properties/test_a.py::test_b", "property"),
        ("tests/contract/test_a.py", "contract"),
        ("tests/simulation/test_worlds.py::test_a", "simulation"),
        ("tests/system/e2e/test_a.py", "system"),
    ],
)
def test_the_kind_of_a_test_is_told_by_its_folder(test: str, kind: str) -> None:
    assert Outcome(CAUGHT, "caught", test).kind == kind
