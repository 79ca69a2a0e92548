"""The files of a sweep: one JSON object a run, written whole or not at all.

DIR/NAME.json    a run that was measured; NAME is the run's
DIR/.NAME.part   what a killed process was writing; the next one writes over it
"""

import os
from pathlib import Path

import msgspec

from bench.sweep.figures import RunFigures
from bench.sweep.plan import RunInputs

FORMAT = 1


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file. `versions` and `machine` are those of the measurement; `began` is in UTC."""

    format: int = FORMAT
    inputs: RunInputs
    figures: RunFigures
    versions: dict[str, str]
    machine: str
    began: str
    took_s: float
    """With starting the fleet and warming up."""


class ResultInvalid(Exception):
    """A file cannot be read as a run; the message has the file, the found and the allowed."""


_decoder = msgspec.json.Decoder(RunRecord)


def write(directory: Path, record: RunRecord) -> Path:
    """Return the file, which has the record, also after a power failure; it is never there in part."""
    file, part = directory / f"{record.inputs.name}.json", directory / f".{record.inputs.name}.part"
    with part.open("wb") as to:
        to.write(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
        to.flush()
        os.fsync(to.fileno())
    part.replace(file)
    return file


def read(directory: Path, *, but: str = "") -> dict[str, RunRecord]:
    """Return the runs of a directory by their names, in the order of their files; the file named `but` is left out.

    Raises:
        ResultInvalid: a file is none of a sweep's.
    """
    found = {}
    for file in sorted(file for file in directory.glob("*.json") if file.name != but):
        try:
            record = _decoder.decode(file.read_bytes())
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ResultInvalid(f"{file}: found no run of a sweep ({error}), allowed what the sweep writes") from None
        if record.format != FORMAT:
            raise ResultInvalid(f"{file}: format: found {record.format}, allowed {FORMAT}")
        found[record.inputs.name] = record
    return found
