"""Structs without garbage collection hold nothing that can refer back to them: such a cycle would never be freed."""

import importlib
import pkgutil
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NewType, Union, get_args, get_origin, get_type_hints

import msgspec

import bench
import indexer
import kv_protocol
import kv_runtime
import router
import worker_agent

PACKAGES = (bench, indexer, kv_protocol, kv_runtime, router, worker_agent)
ATOMS = frozenset({int, float, str, bytes, bool, NoneType})
"""Immutable, as all that may hold them here: tuples, frozen sets, named tuples, frozen structs."""


def is_closed(kind: Any) -> bool:
    """Return whether a value of this type can refer to atoms only."""
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(kind, NewType):
        return is_closed(kind.__supertype__)
    if origin is Annotated:
        return is_closed(arguments[0])
    if origin is Literal:
        return True
    if origin in (Union, UnionType, tuple, frozenset):
        return all(is_closed(each) for each in arguments if each is not Ellipsis)
    if not isinstance(kind, type):
        return False
    if issubclass(kind, msgspec.Struct):
        return bool(kind.__struct_config__.frozen) and holds_atoms(kind)
    return kind in ATOMS or issubclass(kind, Enum) or (issubclass(kind, tuple) and holds_atoms(kind))


def holds_atoms(kind: type) -> bool:
    return all(is_closed(each) for each in get_type_hints(kind, include_extras=True).values())


def subclasses(kind: type[msgspec.Struct]) -> set[type[msgspec.Struct]]:
    direct = kind.__subclasses__()
    return {*direct, *(each for child in direct for each in subclasses(child))}


def test_a_struct_without_garbage_collection_holds_nothing_that_refers_back() -> None:
    for package in PACKAGES:
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    structs = [
        each for each in subclasses(msgspec.Struct) if each.__module__.split(".")[0] in {p.__name__ for p in PACKAGES}
    ]
    assert len(structs) > 300
    open_ended = [each for each in structs if not each.__struct_config__.gc and not holds_atoms(each)]
    assert open_ended == []


def test_structs_that_could_refer_back_are_told_apart() -> None:
    class HoldsAnError(msgspec.Struct):
        cause: Exception | None

    class HoldsAList(msgspec.Struct):
        rows: list[int]

    class HoldsAtoms(msgspec.Struct):
        rows: tuple[tuple[str, float], ...]
        kind: Literal["a"] | None

    assert [holds_atoms(each) for each in (HoldsAnError, HoldsAList, HoldsAtoms)] == [False, False, True]
