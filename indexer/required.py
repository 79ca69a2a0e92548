"""Ends the process with one sentence without the extra `router` or the C++ core; imported before what needs them."""

from kv_runtime.extras import require, require_built

require("router", "indexer", "the index")
require_built("indexer", "indexer.native")
