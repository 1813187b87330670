# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by torchrun.sh and slurm.sbatch: environment variables of the network between nodes. What is set already stays.
#
#   NETWORK   efa, infiniband or ethernet; by default what /sys/class/infiniband shows.
#   IFNAME    Network interface(s) for TCP, such as eth0: rendezvous, gloo, and NCCL's first contact.
#
# Sources:
#   [nccl]   https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
#   [efa]    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start-nccl.html
#   [fi_efa] https://ofiwg.github.io/libfabric/main/man/fi_efa.7.html
#   [ofi]    https://github.com/aws/aws-ofi-nccl
#   [torch]  https://docs.pytorch.org/docs/stable/distributed.html and .../torch_nccl_environment_variables.html

_network_of_this_node() {
    local device driver found=ethernet
    for device in /sys/class/infiniband/*; do
        [ -e "$device" ] || continue
        driver=$(basename "$(readlink -f "$device/device/driver")")
        if [ "$driver" = efa ]; then
            found=efa
            break
        fi
        found=infiniband
    done
    echo "$found"
}

NETWORK=${NETWORK:-$(_network_of_this_node)}

if [ -n "${IFNAME:-}" ]; then
    # NCCL exchanges addresses over TCP before it uses EFA or InfiniBand, and may pick a container's bridge. A leading "="
    # means this name exactly, not every name that begins with it. [nccl]
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-=$IFNAME}
    # gloo (runs without GPUs) otherwise takes the interface of the host's own name, which is often the loopback. [torch]
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$IFNAME}
fi

# WARN names what failed; for the first run on a cluster set INFO and look for the network that NCCL chose
# ("NET/OFI", "NET/IB" or "NET/Socket": the last one is TCP, and slow). [nccl]
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# A collective that times out (--timeout_seconds) or loses its peer ends the process, so that a scheduler sees it. 1 is
# torch's default; written down since much depends on it. [torch]
export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}

case $NETWORK in
efa)
    # NCCL reaches EFA by the plugin aws-ofi-nccl over libfabric; the plugin must be in LD_LIBRARY_PATH (images and AMIs of
    # AWS have it in /opt/amazon/ofi-nccl or /opt/aws-ofi-nccl). Without it NCCL falls back to TCP without an error. [ofi]
    # Take libfabric's EFA provider, and no other that it may find first. [efa]
    export FI_PROVIDER=${FI_PROVIDER:-efa}
    # GPUDirect RDMA. Newer libfabric uses it where the instance has it; older releases need this on P4d and later. [fi_efa]
    export FI_EFA_USE_DEVICE_RDMA=${FI_EFA_USE_DEVICE_RDMA:-1}
    # Data loaders fork, and memory that is registered with the adapter must survive it. Needed on kernels before 5.15,
    # without effect on newer ones. [efa] [fi_efa]
    export FI_EFA_FORK_SAFE=${FI_EFA_FORK_SAFE:-1}
    # Security groups must let all traffic of the group itself in and out, EFA's too; else the first collective hangs. [efa]
    ;;
infiniband)
    # Which adapters: by default all, also one that is for storage only. Name the compute fabric's, e.g. =mlx5_0,mlx5_3
    # (ibv_devinfo lists them). [nccl]
    if [ -n "${IB_HCA:-}" ]; then
        export NCCL_IB_HCA=${NCCL_IB_HCA:-$IB_HCA}
    fi
    # RoCE only (InfiniBand's protocol over Ethernet): which address of the port. NCCL 2.21 and newer choose by themselves;
    # older ones need the index of the RoCE v2 address, often 3 (show_gids). Never set for true InfiniBand. [nccl]
    if [ -n "${ROCE_GID_INDEX:-}" ]; then
        export NCCL_IB_GID_INDEX=${NCCL_IB_GID_INDEX:-$ROCE_GID_INDEX}
    fi
    # Large fabrics reroute for seconds. Time-outs are 4.096 µs × 2^N, and retried 7 times; NCCL's own 20 are 4.3 s each,
    # 22 are 17 s. [nccl]
    export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-22}
    ;;
ethernet)
    # TCP: works everywhere, and is too slow to train the true sizes.
    ;;
*)
    echo "NETWORK=$NETWORK: efa, infiniband or ethernet." >&2
    exit 2
    ;;
esac
