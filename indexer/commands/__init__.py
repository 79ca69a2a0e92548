"""The commands that look into the log and its index; `indexer/__main__.py` has them all."""
