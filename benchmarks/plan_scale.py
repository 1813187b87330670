# SPDX-License-Identifier: Apache-2.0
"""The recipes' full sizes from 16 to 4,096 ranks, planned: memory, sub-groups, collectives and bytes sent, as charts.

``python benchmarks/plan_scale.py`` writes ``docs/data/plan_scale.json`` and ``docs/images/plan_*.png``. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from lightning_zero3.gpus import gpu
from lightning_zero3.plan.charts import draw_scale
from lightning_zero3.plan.command import setup_of_recipe
from lightning_zero3.plan.scale import scaled

ROOT = Path(__file__).parents[1]
RECIPES = ("glm45air", "qwen35", "minimax_m3")
WORLDS = tuple(1 << power for power in range(4, 13))


def main() -> None:
    """Plan, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    arguments = parser.parse_args()
    found = []
    for recipe in RECIPES:
        start = time.monotonic()
        # MiniMax-M3's attention by a kernel, as in the report; the others have no such choice.
        setup = setup_of_recipe(recipe, nodes=4, devices=8, block_sparse_kernel=recipe == "minimax_m3")
        found.append(scaled(setup, WORLDS, gpu(arguments.gpu)))
        print(f"{found[-1]['title']}: {time.monotonic() - start:.0f} s")
        for point in found[-1]["points"]:
            print(
                f"  {point['ranks']:>5} ranks: {point['between_steps_gib']:8.2f} GiB between steps, "
                f"{point['total_gib']:8.2f} at most, {point['sub_groups']} sub-groups, collectives "
                f"{point['collectives_stock']} -> {point['collectives_ours']}, {point['sent_gib']:.1f} GiB sent"
            )
        for point in found[-1]["impossible"]:
            print(f"  {point['ranks']:>5} ranks: {point['reason']}")
    data = arguments.docs / "data" / "plan_scale.json"
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text(json.dumps(found, indent=1) + "\n")
    for path in [data, *draw_scale(found, arguments.docs / "images")]:
        print(path)


if __name__ == "__main__":
    main()
