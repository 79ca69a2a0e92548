"""Fates of frames: seeded, about a fifth of them bad, each kind as likely as the others."""

import pytest

from bench.capture.publisher import CHAOS_RATIO, Chaos, Fate


@pytest.mark.parametrize("seed", [0, 1, (1 << 64) - 1])
def test_a_fifth_of_frames_suffers_and_each_kind_is_as_likely(seed: int) -> None:
    chaos, frames = Chaos(seed), 30_000
    fates = [chaos.fate() for _ in range(frames)]
    for fate in (Fate.DROPPED, Fate.DUPLICATED, Fate.REORDERED):
        assert fates.count(fate) / frames == pytest.approx(CHAOS_RATIO / 3, rel=0.1), f"seed {seed}, {fate}"


def test_a_seed_always_draws_the_same_and_another_draws_others() -> None:
    first, again, other = ([chaos.fate() for _ in range(100)] for chaos in (Chaos(7), Chaos(7), Chaos(8)))
    assert first == again
    assert first != other
