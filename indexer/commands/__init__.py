"""The commands that inspect the log and the index; `indexer/__main__.py` adds them."""
