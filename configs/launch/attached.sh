#!/bin/sh
# A vLLM that runs with --enable-prefix-caching and --kv-events-config. Its model's directory is readable here, or in TEXT.
exec router ${TEXT:+--text "$TEXT"} \
  --worker "${VLLM:-http://127.0.0.1:8100},kv-events=${KV_EVENTS:-tcp://127.0.0.1:5557},replay-endpoint=${REPLAY:-tcp://127.0.0.1:5558}" "$@"
