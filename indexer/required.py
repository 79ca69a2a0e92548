"""Imported before anything that needs the extra `router`: without the extra the process ends with one sentence."""

from kv_runtime.extras import require

require("router", "indexer", "the index")
