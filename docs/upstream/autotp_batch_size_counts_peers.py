# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: with AutoTP, train_batch_size counts the tensor-parallel ranks, which share one batch."""

from autotp_groups_outlive_engine import COLUMN, Model
from reproduce import run, zero3


def check():
    engine = zero3(Model(), tensor_parallel={"autotp_size": 2, "partition_config": COLUMN})
    right = engine.train_micro_batch_size_per_gpu() * engine.dp_world_size
    seen = engine.train_batch_size()
    return seen != right, f"2 ranks share a micro-batch of 1: train_batch_size is {seen}, and should be {right}"


if __name__ == "__main__":
    run(check, processes=2)
