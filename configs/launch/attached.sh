#!/bin/sh
# A vLLM that runs with --enable-prefix-caching and --kv-events-config. TEXT: the model's directory.
exec router up --text "${TEXT:?the directory of the model}" \
  --attach "vllm=${VLLM:-http://127.0.0.1:8100},kv-events=${KV_EVENTS:-tcp://127.0.0.1:5557},replay-endpoint=${REPLAY:-tcp://127.0.0.1:5558}" "$@"
