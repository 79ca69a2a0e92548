#!/bin/bash
# In an allocation of Slurm, on its first node: NATS and a router there, and workers, which Slurm places.
#   configs/launch/trtllm-multinode.sh --model /models/r1 --prefill-gpus 8 --decode-gpus 16 \
#     --prefill-args configs/engines/deepseek-r1/simple-prefill.yaml --decode-args configs/engines/deepseek-r1/wide-ep-decode.yaml
# One task is one GPU. Needs nats-server. Tokens of NATS and of the workers are made for this run. It has not run on a cluster.
#
#   --prefill N, --decode N            workers; 1 of each
#   --prefill-gpus N, --decode-gpus N  of each worker, beyond those of a node a multiple of them; 1
#   --node-gpus N                      of each node; 8
#   --prefill-args FILE, --decode-args FILE   of TensorRT-LLM, with a cache_transceiver_config; every node sees them
#   --host NAME            of this node, as the others reach it; the name that it has
declare -A option=([prefill]=1 [decode]=1 [prefill-gpus]=1 [decode-gpus]=1 [prefill-args]='' [decode-args]='' [node-gpus]=8)
option[host]=$(hostname)
. "$(dirname "$0")/trtllm.bash"
token() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
KVROUTER_NATS__CREDENTIALS=$(token) worker_token=$(token)
export KVROUTER_NATS__CREDENTIALS
url=nats://${option[host]}:${option[nats-port]}
store=$(mktemp -d)
(umask 077 && cat > "$store/nats.conf" <<END
listen: 0.0.0.0:${option[nats-port]}
jetstream {store_dir: "$store"}
authorization {token: "$KVROUTER_NATS__CREDENTIALS"}
END
)
nats-server --config "$store/nats.conf" & servers+=($!)
KVROUTER_DATA__WORKER_TOKEN=$worker_token start_router --nats-url "$url"

# `trtllm-llmapi-launch` starts the engine's processes of all tasks behind the first one.
# Source: NVIDIA/TensorRT-LLM, `examples/llm-api/llm_mgmn_trtllm_serve.sh`; Slurm's `srun`, --exact.
start_step() {  # start_step ROLE NUMBER GPUS ENGINE_ARGUMENTS
  local nodes=$((($3 + option[node-gpus] - 1) / option[node-gpus])) tasks
  tasks=$(($3 / nodes))
  KVROUTER_WORKER__TOKEN=$worker_token srun --exact --mpi=pmix --nodes="$nodes" --ntasks-per-node="$tasks" --gpus-per-node="$tasks" \
    trtllm-llmapi-launch worker-agent serve --engine trtllm --role "$1" --worker-id "$1-$2" --model "${option[model]}" \
    --nats-url "$url" --port 0 --publish-kv-events --publish-metrics --set worker.host=0.0.0.0 \
    ${4:+--extra-engine-args "$4"} "${worker_flags[@]}" & workers+=($!)
}

for role in prefill decode; do
  for number in $(seq "${option[$role]}"); do start_step "$role" "$number" "${option[$role-gpus]}" "${option[$role-args]}"; done
done
until_one_ends
