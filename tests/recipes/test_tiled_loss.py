# SPDX-License-Identifier: Apache-2.0
"""The loss in tiles: its value, its gradients and its memory, without an engine."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from shared.tiled_loss import IGNORED, tile_head, tiled_loss
from tests.memory import peak_of_tensors
from tests.recipes.recipes import RECIPES

WIDTH, VOCABULARY = 24, 512


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)


def both(samples: int, length: int, tiles: int, ignored: float = 0.2, dtype: torch.dtype = torch.float32):
    """Loss, and gradients of hidden states and weight; in tiles, and as Transformers has it."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(samples, length, WIDTH, generator=generator).to(dtype)
    labels = torch.randint(0, VOCABULARY, (samples, length), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < ignored] = IGNORED
    results = []
    for tiled in (True, False):
        model, states = Model().to(dtype), hidden.clone().requires_grad_()
        if tiled:
            tile_head(model, tiles)
            loss = model.lm_head(states, labels)
        else:
            loss = ForCausalLMLoss(model.lm_head(states), labels, VOCABULARY)
        (loss * 0.25).backward()  # as under accumulation
        results.append((loss.detach(), states.grad, model.lm_head.weight.grad))
    return zip(*results, strict=True)


@pytest.mark.parametrize(("samples", "length", "tiles"), [(1, 64, 4), (1, 61, 4), (3, 64, 4), (2, 7, 7), (1, 9, 7)])
def test_loss_and_gradients_are_transformers_own(samples, length, tiles):
    for ours, theirs in both(samples, length, tiles):
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()
        assert theirs.norm() > 0


def test_in_bf16_the_weights_gradient_is_rounded_once_for_each_tile():
    (loss, plain_loss), (hidden, plain_hidden), (weight, plain_weight) = both(1, 64, 16, dtype=torch.bfloat16)
    assert loss.item() == pytest.approx(plain_loss.item(), rel=1e-6)
    assert torch.equal(hidden, plain_hidden)
    assert (weight - plain_weight).float().norm() <= 1e-2 * plain_weight.float().norm()


def test_tiles_of_nothing_but_ignored_tokens_count_for_nothing():
    generator = torch.Generator().manual_seed(2)
    hidden, labels = torch.randn(1, 32, WIDTH, generator=generator), torch.full((1, 32), IGNORED)
    labels[0, 20:24] = torch.tensor([5, 6, 7, 8])
    model = Model()
    expected = ForCausalLMLoss(model.lm_head(hidden), labels, VOCABULARY)
    tile_head(model, 8)
    assert model.lm_head(hidden, labels).item() == pytest.approx(expected.item(), rel=1e-6)


def test_logits_without_labels_are_as_before():
    model, hidden = Model(), torch.randn(2, 5, WIDTH)
    before = model.lm_head(hidden)
    names = list(model.state_dict())
    tile_head(model, 2)
    assert torch.equal(model.lm_head(hidden), before)
    assert list(model.state_dict()) == names


def test_a_batch_takes_one_call_of_the_head_however_many_tiles():
    # Under ZeRO-3 its weight is gathered for each call.
    recipe = RECIPES["glm45air"]
    model = recipe.MODEL_CLASS(recipe.tiny_config(2))
    tile_head(model, 4)
    calls = []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    ids = torch.arange(48).reshape(2, 24)
    batch = {"input_ids": ids, "labels": ids}
    loss = tiled_loss(model, batch)
    loss.backward()
    assert len(calls) == 1
    model.lm_head.__class__ = nn.Linear
    assert loss.item() == pytest.approx(model(**batch).loss.item(), rel=1e-6)


def test_memory_is_a_tiles():
    length, tiles = 512, 16
    hidden, labels = torch.randn(1, length, WIDTH), torch.randint(0, VOCABULARY, (1, length))
    peaks = []
    for number in (None, tiles):
        model, states = Model(), hidden.clone().requires_grad_()
        if number:
            tile_head(model, number)
        with peak_of_tensors() as peak:
            loss = (
                model.lm_head(states, labels) if number else ForCausalLMLoss(model.lm_head(states), labels, VOCABULARY)
            )
            loss.backward()
        peaks.append(peak.tensors)
    logits = 4 * length * VOCABULARY
    assert peaks[0] > 2 * logits
    assert peaks[1] < logits / 2
