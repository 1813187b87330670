# SPDX-License-Identifier: Apache-2.0
"""Loading takes at most one tensor of the files beyond a rank's share, and each rank reads its share and no more."""

from __future__ import annotations

import pickle

import pytest
import torch
from transformers import Glm4MoeForCausalLM

from lightning_zero3 import Zero3FastStrategy
from lightning_zero3.moe.build import build_from_config
from lightning_zero3.moe.load import load_pretrained
from lightning_zero3.moe.safetensors_files import WeightFiles
from lightning_zero3.moe.sharded_build import sharded_build
from tests.distributed.test_build_memory import RESIDENT_SLACK, config_of, sizes
from tests.fits import Language, Sentences, fit
from tests.memory import peak_of_resident_memory, peak_of_tensors

MIB = 1 << 20
# Pages of the files are this process's until a file is closed, which is after as many bytes.
MAPPED = 64 * MIB


class Measured(Language):
    """Loads where its model is built, or into its engine."""

    def __init__(self, folder: str, *, live: bool) -> None:
        super().__init__(None)
        self.folder, self.live = folder, live

    def load(self) -> None:
        with peak_of_tensors() as self.peak:
            self.report = load_pretrained(self, self.folder)

    def configure_model(self) -> None:
        if self.some_odd_name is None:
            self.some_odd_name = build_from_config(Glm4MoeForCausalLM, config_of(96, 12))
            if not self.live:
                self.load()

    def on_fit_start(self) -> None:
        if self.live:
            self.load()


def largest(folder: str) -> int:
    return max(tensor.nbytes for tensor in WeightFiles(folder).tensors.values())


def told(folder: str) -> int:
    """Bytes by which two ranks agree on the files; gloo's thread may let go of them after the collective is over."""
    pickled, length = len(pickle.dumps((WeightFiles(folder).fingerprint(), None))), 8
    return (1 + 2) * (pickled + length)


def live_tensors(folder: str, live: bool) -> dict[str, int]:
    module = Measured(folder, live=live)
    strategy = Zero3FastStrategy(expert_parallel_size=2 if live else None)
    fit(module, Sentences(64), strategy, steps=1, precision="bf16-mixed")
    share = sum(parameter.ds_tensor.numel() * 4 for parameter in module.some_odd_name.parameters())
    return {"peak": module.peak.tensors, "share": share, "read": module.report.bytes_read}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("memory"))
    torch.manual_seed(3)
    Glm4MoeForCausalLM(config_of(96, 12)).save_pretrained(path, max_shard_size="4MB", save_original_format=False)
    return path


@pytest.mark.parametrize("live", [False, True])
def test_tensors_that_live_while_loading(ranks, folder, live):
    for seen in ranks(2).run(live_tensors, folder, live):
        # The share was there before; a tensor of the files is mapped, not copied, and counts whole all the same.
        assert 0 < seen["peak"] <= largest(folder) + told(folder) < seen["share"] / 3
        assert abs(seen["read"] - seen["share"]) < 0.01 * seen["share"]


def resident(folder: str) -> dict[str, int]:
    with sharded_build({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}):
        model = build_from_config(Glm4MoeForCausalLM, config_of(384, 18))
        with peak_of_resident_memory() as peak:
            report = load_pretrained(model, folder)
    return {**sizes(model), "peak": peak.resident, "one": largest(folder), "read": report.bytes_read}


@pytest.mark.slow
def test_resident_memory_while_loading(ranks, tmp_path):
    torch.manual_seed(3)
    Glm4MoeForCausalLM(config_of(384, 18)).save_pretrained(tmp_path, max_shard_size="100MB")
    seen = ranks(2).run(resident, str(tmp_path))
    for each in seen:
        allowed = each["one"] + MAPPED + RESIDENT_SLACK
        assert allowed < each["whole"] / 3
        assert each["peak"] <= allowed, each["peak"] / MIB
    # Between them they have read every element, once.
    assert sum(each["read"] for each in seen) - seen[0]["whole"] < 0.01 * seen[0]["whole"]
