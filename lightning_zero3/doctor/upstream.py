# SPDX-License-Identifier: Apache-2.0
"""What the installed DeepSpeed, Lightning and Transformers have and lack, what works with them, and how it is known."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Sequence
from typing import Any

from lightning_zero3.capabilities.fixes import UPSTREAM_FIXES
from lightning_zero3.capabilities.limits import UPSTREAM_LIMITS
from lightning_zero3.capabilities.probing import UpstreamFix, UpstreamLimit, not_mended

# DeepSpeed's preset → what is tested with it.
_MODELS = {
    "deepseek_v3": "GLM-4.5",
    "qwen3_5_moe": "Qwen3.5-MoE",
    "minimax_m3": "MiniMax-M3",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3-MoE",
}


def fixes(stage3: type[Any], known: Sequence[UpstreamFix] = UPSTREAM_FIXES) -> list[dict[str, Any]]:
    """For each fault of DeepSpeed's Stage-3 optimizer: whether the given class has it, and what ours does.

    Args:
        stage3: ``DeepSpeedZeroOptimizer_Stage3`` of the installed DeepSpeed.
        known: The faults.

    Returns:
        One dict each: ``name``, ``symbol``, ``reason``, ``upstream`` (``has the fix``, ``lacks it`` or ``unknown
        layout``), ``ours`` (whether our part acts), ``how`` it was found and what was ``missing`` for it.
    """
    return [_fix(stage3, fix) for fix in known]


def _fix(stage3: type[Any], fix: UpstreamFix) -> dict[str, Any]:
    looked_for = fix.looked_for(stage3)
    missing = [what for what, found in looked_for if not found]
    try:
        mended = not missing and fix.mended(stage3)
        probe = (inspect.getdoc(fix.mended) or "").partition("\n")[0].removeprefix("Whether ").rstrip(".")
    except (AttributeError, OSError, TypeError) as error:
        mended, missing = False, [*missing, str(error)]
        probe = "could not be read"
    code = f"read the code of {fix.symbol}"
    if missing:
        how = f"{code}: {len(missing)} of {len(looked_for)} things that our part hangs on aren't there"
    elif fix.mended is not_mended:
        how = f"{code}: all {len(looked_for)} things that our part hangs on are there; no release has a fix yet"
    else:
        how = f"{code}: asked whether {probe}: {'yes' if mended else 'no'}"
    return {
        "name": fix.name,
        "symbol": fix.symbol,
        "reason": fix.reason,
        "upstream": "unknown layout" if missing else "has the fix" if mended else "lacks it",
        "ours": not missing and not mended,
        "how": how,
        "missing": missing,
    }


def limits(known: Sequence[UpstreamLimit] = UPSTREAM_LIMITS) -> list[dict[str, Any]]:
    """For each thing that the installed packages can't do together: whether it was met here, and what follows.

    Args:
        known: The limits.
    """
    found = []
    for limit in known:
        try:
            present: bool | None = limit.present()
            how = f"tried out: {(inspect.getdoc(limit.present) or '').partition(chr(10))[0]}"
        except Exception as error:  # a broken package must not end the report
            present, how = None, f"the trial failed: {type(error).__name__}: {error}"
        found.append(
            {
                "name": limit.name,
                "symbol": limit.symbol,
                "reason": limit.reason,
                "affected": limit.affected,
                "present": present,
                "mended_here": limit.mended_here,
                "remedy": f"nothing to do, mended here: {limit.consequence}"
                if limit.mended_here
                else limit.consequence,
                "how": how,
            }
        )
    return found


def accelerator() -> dict[str, Any]:
    """The accelerator that DeepSpeed has chosen, and its devices."""
    import torch
    from deepspeed.accelerator import get_accelerator

    chosen = get_accelerator()
    cuda = torch.cuda.is_available()
    devices = []
    for index in range(torch.cuda.device_count() if cuda else 0):
        seen = torch.cuda.get_device_properties(index)
        devices.append({"index": index, "name": seen.name, "memory_gib": round(seen.total_memory / 2**30, 2)})
    return {
        "deepspeed": str(chosen.device_name()),
        "backend": str(chosen.communication_backend_name()),
        "set_by": "DS_ACCELERATOR" if "DS_ACCELERATOR" in os.environ else "detection",
        "devices": devices or [{"index": None, "name": f"{os.cpu_count()} CPU cores", "memory_gib": None}],
        "torch_for": next(
            (f"{name} {v}" for name, v in (("CUDA", torch.version.cuda), ("HIP", torch.version.hip)) if v), "CPUs"
        ),
        "cuda_available": cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
    }


def ops(roots: Sequence[Any]) -> list[dict[str, Any]]:
    """Each of DeepSpeed's ops: whether it is built already, and whether it could be.

    Args:
        roots: Folders in which ops are built.
    """
    import deepspeed
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    # Upstream symbols: ALL_OPS, __compatible_ops__ (probed when deepspeed is imported), installed_ops; 0.19.7, 0.19.8.
    # Expire when ds_report has an output for programs.
    compatible = getattr(deepspeed.ops, "__compatible_ops__", {})
    found = []
    for name, builder in sorted(ALL_OPS.items()):
        built = [str(root / builder.name / f"{builder.name}.so") for root in roots]
        built = [path for path in built if os.path.exists(path)]
        found.append(
            {
                "name": name,
                "built": "with DeepSpeed" if installed_ops.get(name) else (built[0] if built else None),
                "buildable": bool(compatible.get(name, False)),
                "placeholder": "NotImplemented" in type(builder).__name__,
            }
        )
    return found


def combinations(seen: dict[str, Any], installed: dict[str, str | None]) -> list[dict[str, Any]]:
    """What can be combined with ``zero3_fast`` on this machine with these versions.

    Args:
        seen: The sections ``accelerator``, ``ops``, ``fixes`` and ``limits``.
        installed: Versions of packages.

    Returns:
        One dict each: ``what``, ``works`` and ``why``.
    """
    return [{"what": what, "works": works, "why": why} for what, works, why in _combinations(seen, installed)]


def _combinations(seen: dict[str, Any], installed: dict[str, str | None]) -> Iterator[tuple[str, bool, str]]:
    from deepspeed.module_inject.auto_ep_presets.registry import available_preset_names
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    cuda = seen["accelerator"]["cuda_available"]
    ready = {op["name"] for op in seen["ops"] if (op["built"] or op["buildable"]) and not op["placeholder"]}
    presets = sorted(available_preset_names())
    yield "CUDA GPUs, NCCL", cuda, "torch sees a GPU" if cuda else "torch sees no GPU"
    yield "CPU, gloo", seen["accelerator"]["gloo"], "torch has gloo" if seen["accelerator"]["gloo"] else "no gloo"
    yield "fp32, bf16-mixed, bf16-true, autocast to bf16", True, "as docs/precision.md says"
    yield "fp16", cuda, "" if cuda else "DeepSpeed has no fp16 on a CPU"
    off = [fix["name"] for fix in seen["fixes"] if fix["upstream"] == "unknown layout"]
    yield (
        "every part of the fast step",
        not off,
        f"left to upstream: {', '.join(off)}" if off else "all hooks are there",
    )
    for preset in _MODELS:
        models = _MODELS[preset]
        has = preset in presets
        yield f"expert parallelism: {models}", has, "" if has else f"this DeepSpeed's presets: {', '.join(presets)}"
    # What 0.19.8 counts tensor-parallel peers' norms with; 0.19.7 has no such names and fails with both.
    both = hasattr(DeepSpeedZeroOptimizer_Stage3, "_grad_norm_counts_every_rank")
    yield "tensor and expert parallelism together", both, "" if both else "needs DeepSpeed 0.19.8"
    accelerate = installed.get("accelerate") is not None
    yield "from_pretrained in configure_model", accelerate, "" if accelerate else "pip install 'accelerate>=1.1,<2'"
    for what, op in (
        ("DeepSpeed FusedAdam", "fused_adam"),
        ("optimizer on the CPU (zero3_fast_offload)", "cpu_adam"),
        ("optimizer on NVMe", "async_io"),
    ):
        yield what, op in ready, "" if op in ready else f"op {op} is not built and can't be (ds_report says why)"
