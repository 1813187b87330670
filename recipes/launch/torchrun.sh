#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Start a recipe on several nodes by torchrun: the same command on each node.
#
#   HEAD=node0 recipes/launch/torchrun.sh recipes/glm45air.py --config recipes/configs/glm45air_4x8.yaml
#
#   HEAD            Name or address of the first node, where the nodes meet. Required.
#   NNODES, GPUS    Nodes, and processes on each (4 and 8).
#   PORT, RUN_ID    Where on HEAD they meet (29500), and under which name (zero3); two runs at once need different ones.
#   LOCAL_ADDR      This node's address, where the others can't reach its own host name.
#   RDZV_CONF       Further settings of the rendezvous, such as is_host=1 where HEAD is a name that HEAD doesn't know.
#   PYTHON          python by default.
#   NETWORK, IFNAME See network.sh.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ -z "${HEAD:-}" ] || [ $# -eq 0 ]; then
    echo "HEAD=NODE [NNODES=4] [GPUS=8] $0 recipes/NAME.py [options of the recipe]" >&2
    exit 2
fi
NNODES=${NNODES:-4}
GPUS=${GPUS:-8}
# shellcheck source=recipes/launch/network.sh
source "$here/network.sh"

arguments=(
    --nnodes "$NNODES"
    --nproc-per-node "$GPUS"
    --rdzv-backend c10d
    --rdzv-endpoint "$HEAD:${PORT:-29500}"
    --rdzv-id "${RUN_ID:-zero3}"
    # A restart by torchrun would keep this node's agent; whoever starts the nodes starts them all again, with --resume.
    --max-restarts 0
)
if [ -n "${LOCAL_ADDR:-}" ]; then
    arguments+=(--local-addr "$LOCAL_ADDR")
fi
if [ -n "${RDZV_CONF:-}" ]; then
    arguments+=(--rdzv-conf "$RDZV_CONF")
fi
# Last, so that they overrule what a YAML file says.
exec "${PYTHON:-python}" -m torch.distributed.run "${arguments[@]}" "$@" --num_nodes "$NNODES" --devices "$GPUS"
