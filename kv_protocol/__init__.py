"""Words and bytes that all processes share: ids, events, codecs, hashes, subjects.

Pure: no I/O, no clock, no randomness. What is decided here is decided for every process at once, so a change of a byte
wants a new version number and a decision record.
"""
