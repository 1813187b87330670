# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: a shard with a changed bit, and one of another step, load without a word."""

import shutil
from pathlib import Path

from reproduce import run, zero3

import torch

SHARD = "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def step(engine):
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()


def attempt(engine, tag):
    try:
        engine.load_checkpoint("checkpoint", tag=tag)
    except Exception as error:
        return type(error).__name__
    return "loaded"


def check():
    model = torch.nn.Linear(4, 4, bias=False)
    engine = zero3(model, torch.optim.Adam(model.parameters()))
    for tag in ("1", "2", "3"):
        step(engine)
        engine.save_checkpoint("checkpoint", tag=tag)
    first = Path("checkpoint", "1", SHARD)
    content = bytearray(first.read_bytes())
    weights = torch.load(first, weights_only=False)["optimizer_state_dict"]["fp32_flat_groups"][0]
    content[content.find(weights.detach().numpy().tobytes()) + 3] ^= 1
    first.write_bytes(content)
    shutil.copyfile(Path("checkpoint", "3", SHARD), Path("checkpoint", "2", SHARD))
    bit, mixed = attempt(engine, "1"), attempt(engine, "2")
    return "loaded" in (bit, mixed), (
        f"a bit of a weight changed: {bit}; the optimizer file of step 3 beside the model file of step 2: {mixed}"
    )


if __name__ == "__main__":
    run(check)
