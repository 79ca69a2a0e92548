"""What a parent does with its memory before it forks."""

import gc
import subprocess
import sys

from router.processes.shared_pages import file_mappings, shared_pages

_IN_A_PROCESS_OF_ITS_OWN = """
import numpy, msgspec, ctypes
from router.processes.shared_pages import file_mappings, unmap_library_pages

def resident():
    return sum(each.resident_bytes for each in file_mappings() if each.permissions[1] == "-")

before, written = resident(), [each for each in file_mappings() if each.own_bytes]
unmap_library_pages()
after = resident()
assert {(each.start, each.own_bytes) for each in file_mappings()} >= {(each.start, each.own_bytes) for each in written}
assert numpy.linalg.inv(numpy.eye(3)).trace() == 3.0
assert msgspec.json.decode(b"[1]") == [1]
print(before, after)
"""


def test_libraries_have_fewer_pages_mapped_and_work_as_before() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _IN_A_PROCESS_OF_ITS_OWN], check=True, capture_output=True, text=True, timeout=60
    )
    before, after = map(int, ran.stdout.split())
    assert after < before / 2


def test_mappings_have_their_sizes_and_what_differs_from_the_file() -> None:
    found = file_mappings()
    assert all(0 <= each.own_bytes <= each.size and each.resident_bytes <= each.size for each in found)
    assert any(each.permissions == "r-xp" and not each.own_bytes for each in found)
    assert any(each.own_bytes for each in found)


def test_the_collector_leaves_alone_what_was_there_until_the_block_ends() -> None:
    with shared_pages():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
