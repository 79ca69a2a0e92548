"""What a leaving worker hands over, against a plain reading of the rules."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_protocol.codec import pack_u64
from kv_protocol.hashing import Hashing
from router.drain.warming import HALF_LIFE_S, HotPrefix, PromptHolding, hot_prefixes
from router.prompt.chains import ENTRY_BYTES, TOKEN_BYTES, EncodedPrompt, RecentPrompt, RecentPrompts
from tests.support.amount import examples

BLOCK_SIZE = 4
NOW_S = 10_000.0
ENOUGH_TOKENS = 10_000

Path = tuple[int, ...]
"""A prefix: what each of its blocks says."""


class World(NamedTuple):
    """Prompts with the time at which each was asked, what the worker and what all others hold, and a budget."""

    asked: list[tuple[Path, float]]
    held: frozenset[Path]
    elsewhere: frozenset[Path]
    budget_tokens: int

    def prompts(self) -> list[PromptHolding]:
        """Return them as an index and a clock would tell."""
        return [
            PromptHolding(_recent(at, path, received_s), _depth(path, self.held), _depth(path, self.elsewhere))
            for at, (path, received_s) in enumerate(self.asked)
        ]

    def heat(self) -> dict[Path, float]:
        """Return the heat of every block that the worker alone holds."""
        heat: dict[Path, float] = {}
        for path, received_s in self.asked:
            for part in _prefixes(path):
                if part in self.held and part not in self.elsewhere:
                    heat[part] = heat.get(part, 0.0) + 2.0 ** -((NOW_S - received_s) / HALF_LIFE_S)
        return heat


def _prefixes(path: Path) -> Iterator[Path]:
    return (path[:end] for end in range(1, len(path) + 1))


def _recent(at: int, path: Path, received_s: float) -> RecentPrompt:
    """Return the prompt of this path; its model says at which place it was asked."""
    hashes = pack_u64([_hash(part) for part in _prefixes(path)])
    return RecentPrompt(str(at), "", "", EncodedPrompt(b"", 0, Hashing(BLOCK_SIZE), hashes), received_s)


def _hash(part: Path) -> int:
    """Return a number that no other prefix has."""
    return int("1" + "".join(map(str, part)))


def _depth(path: Path, held: frozenset[Path]) -> int:
    return sum(part in held for part in _prefixes(path))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    paths = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=8))
    half_lives = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 4.0]), min_size=len(paths), max_size=len(paths)))

    def some() -> frozenset[Path]:
        cuts = [draw(st.integers(0, len(path))) for path in paths]
        return frozenset(part for path, cut in zip(paths, cuts, strict=True) for part in _prefixes(path[:cut]))

    asked = [(path, NOW_S - age * HALF_LIFE_S) for path, age in zip(paths, half_lives, strict=True)]
    return World(asked, some(), some(), draw(st.integers(0, 60)))


def listed(world: World, **changed: Any) -> list[HotPrefix]:
    told = {"block_size": BLOCK_SIZE, "budget_tokens": world.budget_tokens} | changed
    return [prefix for _, prefix in hot_prefixes(world.prompts(), NOW_S, **told)]


def _path(world: World, prefix: HotPrefix) -> Path:
    return world.asked[int(prefix.model)][0][: prefix.blocks]


def faults(world: World, found: list[HotPrefix]) -> list[str]:
    """Return which rules a list breaks."""
    heat, broken, seen = world.heat(), [], set[Path]()
    values = []
    for prefix in found:
        path = _path(world, prefix)
        new = [part for part in _prefixes(path) if part not in world.elsewhere and part not in seen]
        if not set(new) <= world.held:
            broken.append("the worker does not hold it")
        if len(new) != prefix.new_blocks or not new:
            broken.append("a block counts that is held elsewhere, or was listed before")
        if sum(heat.get(part, 0.0) for part in new) != pytest.approx(prefix.heat):
            broken.append("the heat is not the sum of its new blocks'")
        values.append(prefix.heat / max(1, prefix.new_blocks))
        seen.update(new)
    paths = [_path(world, prefix) for prefix in found]
    if any(path[: len(other)] == other for path in paths for other in paths if path is not other):
        broken.append("what another prefix begins with is listed too")
    if any(later > earlier * (1 + 1e-9) for earlier, later in pairwise(values)):
        broken.append("what is worth less comes first")
    if len(seen) * BLOCK_SIZE > world.budget_tokens:
        broken.append("the budget is exceeded")
    most = sum(sorted(heat.values(), reverse=True)[: world.budget_tokens // BLOCK_SIZE])
    if sum(heat.get(part, 0.0) for part in seen) < most * (1 - 1e-9):
        broken.append("more heat could be had for the budget")
    return broken


@given(world=worlds())
@settings(max_examples=examples(400))
def test_the_list_keeps_every_rule(world: World) -> None:
    assert faults(world, listed(world)) == []


@given(world=worlds())
def test_with_enough_tokens_every_exclusive_block_is_listed(world: World) -> None:
    found = listed(world, budget_tokens=ENOUGH_TOKENS)
    assert sum(prefix.new_blocks for prefix in found) == len(world.heat())


def test_the_cold_tail_of_a_hot_prefix_comes_after_what_is_hotter() -> None:
    asked = [((*[0] * 9, tail), NOW_S - tail) for tail in range(5)] + [((1, 1), NOW_S - 0.5)] * 3
    held = frozenset(part for path, _ in asked for part in _prefixes(path))
    found = listed(World(asked, held, frozenset(), ENOUGH_TOKENS))
    assert [prefix.new_blocks for prefix in found] == [10, 2, 1, 1, 1, 1]


def _asked(number: int, tokens: int) -> RecentPrompt:
    prompt = EncodedPrompt(bytes(TOKEN_BYTES * tokens), tokens, Hashing(BLOCK_SIZE), b"")
    return RecentPrompt("m", "", "", prompt, float(number))


@given(sizes=st.lists(st.integers(0, 300)), bytes_max=st.integers(0, 4000))
def test_kept_are_as_many_of_the_newest_as_fit(sizes: list[int], bytes_max: int) -> None:
    recent, fit, size_bytes = RecentPrompts(bytes_max), list[RecentPrompt](), 0
    for number, tokens in enumerate(sizes):
        recent.add(_asked(number, tokens))
    for each in reversed([_asked(number, tokens) for number, tokens in enumerate(sizes) if tokens]):
        if size_bytes + len(each.prompt.ids) + ENTRY_BYTES > bytes_max:
            break
        size_bytes += len(each.prompt.ids) + ENTRY_BYTES
        fit.append(each)
    assert (recent.newest_first(), recent.size_bytes) == (fit, size_bytes)
