"""A bug is planted where the product has what it replaces, and for as long as it should."""

import pytest

from tests.support.planting import inside, plant


class Product:
    _limit = 3

    def allows(self, count: int) -> bool:
        return count <= self._limit


def test_a_bug_is_planted_until_the_test_ends() -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(Product, "_limit", inside(Product, "_limit") - 1, patch)
        assert not Product().allows(3)
    assert Product().allows(3)


def test_a_bug_of_one_object_is_in_no_other() -> None:
    spoilt = Product()
    plant(spoilt, "_limit", 0)
    assert (spoilt.allows(1), Product().allows(1)) == (False, True)


def test_a_name_that_the_product_no_longer_has_is_an_error() -> None:
    with pytest.raises(AttributeError):
        plant(Product(), "_bound", 0)
