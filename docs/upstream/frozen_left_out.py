# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: a checkpoint saved with ``exclude_frozen_parameters=True`` can't be loaded into the same model."""

from reproduce import run, zero3

import torch


def model():
    layers = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    layers[0].requires_grad_(False)
    return layers


def check():
    made = model()
    engine = zero3(made, torch.optim.SGD(made[1].parameters(), lr=0.1))
    engine.save_checkpoint("checkpoint", tag="tag", exclude_frozen_parameters=True)
    try:
        engine.load_checkpoint("checkpoint", tag="tag")
        ended = "loaded"
    except RuntimeError as error:
        ended = "RuntimeError: " + str(error).split("\n\t")[-1].strip()[:100]
    return ended != "loaded", f"saved with exclude_frozen_parameters=True, loaded by the same engine: {ended}"


if __name__ == "__main__":
    run(check)
