"""Ends the process with one sentence if the extra `router` is missing; imported before modules that need it."""

from kv_runtime.extras import require

require("router", "indexer", "the index")
