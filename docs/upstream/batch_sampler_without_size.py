# SPDX-License-Identifier: Apache-2.0
"""Lightning: a batch sampler that has no ``batch_size`` fails at set-up, though the size is used for log lines only."""

from reproduce import run, trainer

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, _):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def check():
    seen = {}
    for name, loader in {
        "a list as batch_sampler": DataLoader(torch.ones(3, 1), batch_sampler=[[0, 1], [2]]),
        "batch_size=None": DataLoader(torch.ones(3, 1), batch_size=None),
    }.items():
        for strategy in ("auto", None):
            fitted = trainer(strategy, max_steps=1, use_distributed_sampler=False)
            if strategy is None:
                fitted.strategy.config.pop("train_micro_batch_size_per_gpu", None)  # logging_batch_size_per_gpu="auto"
            try:
                fitted.fit(Module(), loader)
                seen[name] = "trains"
            except Exception as error:
                seen[name] = f"{type(error).__name__}: {str(error)[:80]}"
            if strategy == "auto":
                assert seen[name] == "trains", seen
    return set(seen.values()) != {"trains"}, "; ".join(f"{name}: {what}" for name, what in seen.items())


if __name__ == "__main__":
    run(check)
