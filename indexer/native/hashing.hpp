// Prompts as strings, and their block hashes, the same as those of kv_protocol/hashing.py. Hashes where the system has
// xxhash's header, 0.8.1 or newer.
#pragma once

#include <nanobind/nanobind.h>

namespace kv {

// `module` says in HAS_XXHASH whether it can hash; if it can, it has `hash_blocks`.
void bind_hashing(nanobind::module_& module);

}  // namespace kv
