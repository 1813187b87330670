# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: with AutoTP, the check that ranks have the same first batch fails on a batch that is a dict."""

from reproduce import run

import torch


def check():
    from deepspeed.runtime.utils import compare_tensors_in_structures

    batch, same = ({"input_ids": torch.arange(4)} for _ in range(2))
    try:
        # What the forward hook of the first batch calls, with the arguments of engine(batch).
        equal = compare_tensors_in_structures([batch], [same])
    except Exception as error:
        return True, f"the same dict on both ranks: {type(error).__name__}: {error}"
    return not equal, f"the same dict on both ranks: equal is {equal}"


if __name__ == "__main__":
    run(check)
