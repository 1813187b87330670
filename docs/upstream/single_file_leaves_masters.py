# SPDX-License-Identifier: Apache-2.0
"""Lightning: with ``load_full_weights=True`` masters keep their initialisation, so the first step undoes the load."""

from reproduce import run, stage_3, trainer, weight_of

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader


class Module(pl.LightningModule):
    def __init__(self, value):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(self.layer.weight, value)
        self.seen = []

    def training_step(self, batch, _):
        loss = self.layer(batch).sum()
        self.seen.append(float(loss))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def check():
    batches = DataLoader(torch.ones(1, 1))
    plain = trainer("auto", max_steps=1)
    plain.fit(Module(3.0), batches)
    plain.save_checkpoint("single.ckpt")
    # A single file of the state dict alone, as consolidation of a sharded checkpoint makes it.
    saved = torch.load("single.ckpt", weights_only=False)
    for key in ("loops", "callbacks"):
        saved.pop(key, None)
    torch.save({**saved, "global_step": 0, "epoch": 0, "optimizer_states": [], "lr_schedulers": []}, "single.ckpt")
    module = Module(1.0)
    trainer(stage_3(load_full_weights=True), max_epochs=2).fit(module, batches, ckpt_path="single.ckpt")
    first, after = module.seen[0], float(weight_of(module.layer.weight))
    return (
        after != 3.0,
        f"the file holds 3, the module was built with 1, the rate is 0: the first forward sees "
        f"{first:g}, after the step the weight is {after:g}",
    )


if __name__ == "__main__":
    run(check)
