"""Ends the process with one sentence without the extra `router` or the C++ cores; imported before what needs them."""

from kv_runtime.extras import require, require_built

require("router", "router", "the router")
require_built("router", "indexer.native", "router.native")
