"""The C++ core of the index, where it could be built."""
