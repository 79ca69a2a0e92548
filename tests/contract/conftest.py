import pytest

from indexer.index.prefix_index import PrefixIndex
from tests.contract.indexes import IMPLEMENTATIONS, MakeIndex, with_ranks


@pytest.fixture(params=list(IMPLEMENTATIONS.values()), ids=list(IMPLEMENTATIONS))
def make_index(request: pytest.FixtureRequest) -> MakeIndex:
    made: MakeIndex = request.param
    return made


@pytest.fixture
def index(make_index: MakeIndex) -> PrefixIndex:
    """Return an empty index that knows the ranks 0, 1 and 2."""
    return with_ranks(make_index())
