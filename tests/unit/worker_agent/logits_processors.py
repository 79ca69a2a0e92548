"""Logits processors that configurations of tests name."""

import math
from collections.abc import Sequence
from typing import Any


class _OnlySeven:
    def __call__(self, token_ids: Sequence[int], logits: Any) -> None:
        assert len(token_ids) > 0
        logits[...] = 0.0
        logits[7] = 100.0


class _MasksAllButSeven:
    def __call__(self, token_ids: Sequence[int], logits: Any) -> None:
        assert len(token_ids) > 0
        logits[...] = -math.inf
        logits[7] = 0.0


class _Broken:
    def __call__(self, token_ids: Sequence[int], logits: Any) -> None:
        logits[...] = -1.0
        raise ZeroDivisionError(f"after {len(token_ids)} tokens")


def only_seven() -> _OnlySeven:
    return _OnlySeven()


def masks_all_but_seven() -> _MasksAllButSeven:
    return _MasksAllButSeven()


def broken() -> _Broken:
    return _Broken()


NUMBER = 7
