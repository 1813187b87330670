# SPDX-License-Identifier: Apache-2.0
"""A recipe's run ends with a folder that Transformers reads."""

from __future__ import annotations

import json

from transformers import AutoModelForCausalLM

from tests.recipes.test_recipe_resume import text_in, trained


def saves(folder: str) -> str:
    return str(trained(folder, "--max_steps", "2", "--save_hf", "true", "--loss_tiles", "2", ranks=2) / "hugging_face")


def test_the_trained_weights_as_a_hugging_face_folder(ranks, tmp_path):
    text_in(tmp_path)
    written, _ = ranks(2).run(saves, str(tmp_path))
    model, info = AutoModelForCausalLM.from_pretrained(written, output_loading_info=True)
    assert not any(info.values()), info
    with open(f"{written}/config.json") as file:
        assert json.load(file)["architectures"] == [type(model).__name__]
