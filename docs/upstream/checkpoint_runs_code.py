# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: ``engine.load_checkpoint`` runs whatever code is in a checkpoint's files."""

import os

from reproduce import run, zero3

import torch


class Trap:
    def __reduce__(self):
        return os.makedirs, ("made-by-the-checkpoint", 0o755, True)


def check():
    engine = zero3(torch.nn.Linear(1, 1, bias=False))
    engine.save_checkpoint("checkpoint", tag="tag", client_state={"anything": Trap()})
    before = os.path.isdir("made-by-the-checkpoint")
    try:
        engine.load_checkpoint("checkpoint", tag="tag")
        ended = "load_checkpoint returned"
    except Exception as error:
        ended = f"load_checkpoint raised {type(error).__name__}"
    ran = os.path.isdir("made-by-the-checkpoint")
    return ran and not before, f"{ended}; code in the file has {'run' if ran else 'not run'}"


if __name__ == "__main__":
    run(check)
