#!/bin/sh
# Starts one pod of an engine that spans several nodes. Node 0 waits for the others and starts the agent behind mpirun; the others
# serve ssh, by which mpirun reaches them. LeaderWorkerSet sets LWS_*. Arguments are those of `worker-agent`.
set -eu
port=2222
if [ "$LWS_WORKER_INDEX" != 0 ]; then
  ssh-keygen -q -t ed25519 -N '' -f /tmp/host_key
  exec /usr/sbin/sshd -D -e -p "$port" -h /tmp/host_key -o UsePAM=no -o StrictModes=no -o PidFile=none \
    -o AuthorizedKeysFile=/etc/mpi/authorized_keys
fi
options="-p $port -i /etc/mpi/id_ed25519 -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
leader=${LWS_LEADER_ADDRESS%%.*} domain=${LWS_LEADER_ADDRESS#*.}
hosts="$LWS_LEADER_ADDRESS:$GPUS_PER_NODE" index=1
while [ "$index" -lt "$LWS_GROUP_SIZE" ]; do
  host="$leader-$index.$domain"
  until getent hosts "$host" > /dev/null; do sleep 2; done  # its name, then its ssh
  # shellcheck disable=SC2086 # the options are words
  until ssh $options "$host" true; do sleep 2; done
  hosts="$hosts,$host:$GPUS_PER_NODE" index=$((index + 1))
done
exec mpirun -np $((LWS_GROUP_SIZE * GPUS_PER_NODE)) --host "$hosts" --mca plm_rsh_args "$options" \
  -x PATH -x LD_LIBRARY_PATH -x TRTLLM_ENABLE_PDL trtllm-llmapi-launch worker-agent "$@"
