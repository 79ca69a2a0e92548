// Block hashes of prompts, the same as those of kv_protocol/hashing.py. Built where the system has xxhash's header, 0.8.1 or
// newer.
#pragma once

#include <nanobind/nanobind.h>

namespace kv {

// `module` says in HAS_XXHASH whether it can hash; if it can, it has `hash_blocks`.
void bind_hashing(nanobind::module_& module);

// `module` gets `chat_pieces`: chats of the byte model as strings (chat_pieces.cpp).
void bind_chat_pieces(nanobind::module_& module);

}  // namespace kv
