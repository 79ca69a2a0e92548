#!/bin/bash
# NATS, a router, and prefill and decode workers with TensorRT-LLM in the agent's process, on this machine.
#   configs/launch/trtllm-disagg.sh --model /models/qwen3-0.6b --prefill-args configs/engines/qwen3/prefill.yaml \
#     --decode-args configs/engines/qwen3/decode.yaml -- --served-name qwen3-0.6b
#
#   --prefill N, --decode N            workers; 1 of each
#   --prefill-gpus N, --decode-gpus N  of each worker; 1
#   --prefill-args FILE, --decode-args FILE   of TensorRT-LLM, with a cache_transceiver_config
declare -A option=([prefill]=1 [decode]=1 [prefill-gpus]=1 [decode-gpus]=1 [prefill-args]='' [decode-args]='')
. "$(dirname "$0")/trtllm.bash"
start_router --set "nats.port=${option[nats-port]}"
for role in prefill decode; do
  for number in $(seq "${option[$role]}"); do start_worker "$role" "$number" "${option[$role-gpus]}" "${option[$role-args]}"; done
done
until_one_ends
