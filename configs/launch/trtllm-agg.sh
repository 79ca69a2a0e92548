#!/bin/bash
# NATS, a router and workers with TensorRT-LLM in the agent's process, on this machine.
#   configs/launch/trtllm-agg.sh --model /models/qwen3-0.6b --workers 2 -- --served-name qwen3-0.6b
#
#   --workers N            how many; 1
#   --gpus N               of each worker; 1
#   --engine-args FILE     of TensorRT-LLM: configs/engines/
declare -A option=([workers]=1 [gpus]=1 [engine-args]='')
. "$(dirname "$0")/trtllm.bash"
start_router --set "nats.port=${option[nats-port]}"
for number in $(seq "${option[workers]}"); do start_worker aggregated "$number" "${option[gpus]}" "${option[engine-args]}"; done
until_one_ends
