# SPDX-License-Identifier: Apache-2.0
"""Compile what DeepSpeed would compile in the middle of a test, which then takes longer than a test may.

``python -m tests.build_ops``; quick where it has been done.
"""

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(sys.prefix, "torch_extensions"))

OPS = ("FusedAdamBuilder", "AsyncIOBuilder")


def main() -> None:
    """Build each op that can be built here."""
    from deepspeed.accelerator import get_accelerator

    for name in OPS:
        builder = get_accelerator().create_op_builder(name)
        if builder is not None and builder.is_compatible(verbose=False):
            print(f"{name}: {builder.load(verbose=False).__name__}", flush=True)
        else:
            print(f"{name}: can't be built here; tests that need it are skipped", flush=True)


if __name__ == "__main__":
    main()
