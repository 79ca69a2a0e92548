"""The one place where tests reach private names of the product: planted bugs.

A planted bug breaks the product on purpose; the test proves that a check finds it. A bug is a subclass, or a faulty
argument of a constructor, where that is simple. Otherwise it changes a private name by `inside` and `plant`. Tests
that plant no bug read the product through its public interface, and use neither function.
"""

from typing import Any

import pytest


def inside(target: object, name: str) -> Any:
    """Return the private attribute of `target`, which a planted bug changes or calls."""
    return getattr(target, name)


def plant(target: object, name: str, replacement: object, patch: pytest.MonkeyPatch | None = None) -> None:
    """Replace the attribute of `target`: until the test of `patch` ends, or for the life of `target`.

    Raises:
        AttributeError: the product has no such attribute any more, so the bug would not be planted.
    """
    getattr(target, name)
    if patch is None:
        setattr(target, name, replacement)
    else:
        patch.setattr(target, name, replacement)
