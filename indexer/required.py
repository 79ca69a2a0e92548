"""Ends the process with one sentence if the extra `router` or the C++ core is missing; to be imported before both."""

from kv_runtime.extras import require, require_built

require("router", "indexer", "the index")
require_built("indexer", "indexer.native")
