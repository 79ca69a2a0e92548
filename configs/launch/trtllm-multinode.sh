#!/bin/bash
# In an allocation of Slurm, on its first node: NATS and a router there, and workers that span nodes.
#   configs/launch/trtllm-multinode.sh --model /models/r1 --out /shared/r1 --prefill 2 8 --decode 1 16 --gpu b200 --precision nvfp4
# Needs nats-server. Tokens of NATS and of the workers are made for this run.
#
#   --out DIR              for files of engine arguments and the script that starts the workers; every node sees it
#   --host NAME            of this node, as the others reach it; the name that it has
#   all other flags are those of `worker-agent config slurm`
declare -A option=([out]='' [host]=$(hostname))
takes_flags=yes
. "$(dirname "$0")/trtllm.bash"
token() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
KVROUTER_NATS__CREDENTIALS=$(token) worker_token=$(token)
export KVROUTER_NATS__CREDENTIALS
url=nats://${option[host]}:${option[nats-port]}
worker-agent config slurm --model "${option[model]}" --nats-url "$url" --output "${option[out]:?--out: the directory of this run}" \
  "${flags[@]}" -- "${worker_flags[@]}"
store=$(mktemp -d)
(umask 077 && cat > "$store/nats.conf" <<END
listen: 0.0.0.0:${option[nats-port]}
jetstream {store_dir: "$store"}
authorization {token: "$KVROUTER_NATS__CREDENTIALS"}
END
)
nats-server --config "$store/nats.conf" & servers+=($!)
KVROUTER_DATA__WORKER_TOKEN=$worker_token start_router --nats-url "$url"
KVROUTER_WORKER__TOKEN=$worker_token bash "${option[out]}/start.sh" & workers+=($!)
until_one_ends
