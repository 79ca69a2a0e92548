"""Writes the golden journals again: `python -m tests.golden.make_journals`, for a cost that is changed on purpose.

Each is a random life (`tests/unit/properties/router_life.py`) as the bytes of its journal, gzipped: its records as one
message of the format of `kv_protocol/journal.py`.
"""

import asyncio
import gzip

from kv_protocol.journal import encode_record, pack_journal
from tests.support.paths import RECORDINGS
from tests.unit.properties.router_life import POLICIES, journal

JOURNALS = {"journal_kv.msgpack.gz": "kv", "journal_predicted_ttft.msgpack.gz": "predicted-ttft"}
SEED = 1


def main() -> None:
    for name, policy in JOURNALS.items():
        records = asyncio.run(journal(SEED, POLICIES[policy]))[1]
        message = pack_journal(1, 1, len(records), *map(encode_record, records))
        (RECORDINGS / name).write_bytes(gzip.compress(message, mtime=0))


if __name__ == "__main__":
    main()
