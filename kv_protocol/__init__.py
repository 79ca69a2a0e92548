"""Types and wire formats that all processes share: ids, events, codecs, hashes, subjects.

Pure: no I/O, no clock, no randomness. All processes depend on these bytes: a change of a wire format needs a new
version number and a decision record.
"""
