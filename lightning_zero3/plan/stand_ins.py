# SPDX-License-Identifier: Apache-2.0
"""What stands in for kernels and for decisions that need data, while a rehearsal runs on the meta device.

Each allocates, saves for backward and frees what the real one does; none computes anything. Tokens are taken to be
spread evenly over the experts.

Upstream symbols, substituted for the length of a rehearsal (DeepSpeed 0.19.8): ``compute_split_plan`` and
``compute_split_plan_from_expert_indices`` of ``auto_ep_layer``; ``generate_permute_indices``,
``permute_rows_supported`` and ``gather_rows`` of ``ep_kernels``; ``apply_expert_activation`` of ``ep_experts``;
``average_gradient_over_tp``, ``partition_assignments`` and ``restore_combined`` of ``ep_tp_dispatch``;
``get_accelerator`` of ``zero.linear`` (there is no autocast for the meta device); ``assert_ints_same_as_other_ranks``;
``torch.nn.functional.scaled_dot_product_attention`` and ``torch._grouped_mm``; ``data_ptr`` of meta tensors, all 0;
``torch_chunk_gated_delta_rule`` of the models with linear attention and ``forward`` and ``build_block_mask`` of
``MiniMaxM3VLIndexer`` (Transformers 5.24). A missing name raises. Expires, one by one, when they have meta forms.
"""

# ruff: noqa: ARG001 (signatures are upstream's)
from __future__ import annotations

import importlib
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from lightning_zero3.config import SetupError
from lightning_zero3.substitution import substituted

# Tokens of one tile of flash-linear-attention's chunked gated delta rule.
_CHUNK = 64


@contextmanager
def stand_ins(*, gpu: bool, block_sparse_kernel: bool = False) -> Iterator[None]:
    """Inside, a planned engine's forward, backward and step run on meta tensors.

    Args:
        gpu: Kernels of GPUs (flash attention, Triton permutations and activations, flash-linear-attention); otherwise
            what runs on a CPU.
        block_sparse_kernel: MiniMax-M3's sparse attention by a kernel that needs no scores and no mask of all pairs of
            tokens; otherwise as Transformers computes it.

    Raises:
        SetupError: This DeepSpeed has other kernels than those that are known (0.19.7).
    """
    import deepspeed
    from deepspeed.module_inject import auto_ep_layer
    from deepspeed.moe import ep_kernels
    from deepspeed.runtime.zero import linear, partitioned_param_coordinator, stage3

    if not hasattr(ep_kernels, "permute_rows_supported"):
        raise SetupError(
            f"Steps can't be rehearsed with DeepSpeed {deepspeed.__version__}, whose expert layers are others; "
            "--rehearse=false tells the structure alone, and 0.19.8 can do both."
        )
    with ExitStack() as scope:

        def put(owner: Any, name: str, replacement: Any) -> None:
            scope.enter_context(substituted(owner, name, replacement))

        put(linear, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cpu"))
        for owner in (partitioned_param_coordinator, stage3):
            put(owner, "assert_ints_same_as_other_ranks", lambda *_, **__: None)
        put(torch.nn.functional, "scaled_dot_product_attention", _attention)
        put(auto_ep_layer, "compute_split_plan", _split_plan)
        put(auto_ep_layer, "compute_split_plan_from_expert_indices", _split_plan_of_part)
        put(ep_kernels, "generate_permute_indices", _permute_indices)
        put(torch, "_grouped_mm", _grouped_product(torch._grouped_mm))
        _folded_tensor_parallelism(put)
        if gpu:
            _gpu_kernels(put)
        if block_sparse_kernel:
            _block_sparse_attention(put)
        addresses = _Addresses()
        put(torch.Tensor, "data_ptr", lambda tensor: addresses.of_tensor(tensor))
        put(torch.UntypedStorage, "data_ptr", lambda storage: addresses.of_storage(storage))
        yield


def _gpu_kernels(put: Any) -> None:
    from deepspeed.moe import ep_experts, ep_kernels

    put(ep_kernels, "permute_rows_supported", lambda _: True)
    put(ep_kernels, "gather_rows", lambda rows, index: rows.new_empty((index.numel(), *rows.shape[1:])))
    put(ep_experts, "apply_expert_activation", _expert_activation(ep_experts.apply_expert_activation))
    for family in ("qwen3_5_moe", "qwen3_5", "qwen3_next"):
        try:
            module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        except ImportError:
            continue
        if hasattr(module, "torch_chunk_gated_delta_rule"):
            put(module, "torch_chunk_gated_delta_rule", _gated_delta_rule)


def _block_sparse_attention(put: Any) -> None:
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer

    def chosen_blocks(self: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        batch, tokens, _hidden = hidden_states.shape
        heads = self.q_norm(self.q_proj(hidden_states).view(batch, tokens, -1, self.head_dim)).shape[2]
        self.k_norm(self.k_proj(hidden_states).view(batch, tokens, 1, self.head_dim))
        blocks = min(self.topk_blocks, -(-tokens // self.block_size))
        return torch.empty((batch, heads, tokens, blocks), dtype=torch.long, device=hidden_states.device)

    put(MiniMaxM3VLIndexer, "forward", chosen_blocks)
    put(MiniMaxM3VLIndexer, "build_block_mask", lambda *_, **__: None)


class _Saving(torch.autograd.Function):
    """An output of its own storage; saves its inputs and what else is given, and makes a gradient for each input."""

    @staticmethod
    def forward(ctx: Any, shape: Any, dtype: Any, kept: Any, *inputs: Any) -> Any:
        given = [i for i in inputs if i is not None]
        output = given[0].new_empty(shape, dtype=dtype)
        ctx.differentiable = [i is not None and i.requires_grad for i in inputs]
        ctx.present = [i is not None for i in inputs]
        more = [output.new_empty(size, dtype=of) for size, of in kept]
        ctx.save_for_backward(*given, output, *more)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # noqa: ARG004
        saved = iter(ctx.saved_tensors)
        inputs = [next(saved) if there else None for there in ctx.present]
        made = [
            torch.empty_like(tensor) if tensor is not None and wanted else None
            for tensor, wanted in zip(inputs, ctx.differentiable, strict=True)
        ]
        return (None, None, None, *made)


def _grouped_product(real: Any) -> Any:
    """Torch's own has a meta form for bf16 only; CPUs compute it in fp32 too."""

    def product(rows: torch.Tensor, matrices: torch.Tensor, *, offs: torch.Tensor, **named: Any) -> Any:
        if rows.dtype is torch.bfloat16:
            return real(rows, matrices, offs=offs, **named)
        return _GroupedProduct.apply(rows, matrices)  # type: ignore[no-untyped-call]

    return product


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, matrices)
        return rows.new_empty((rows.shape[0], matrices.shape[-1]))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # noqa: ARG004
        rows, matrices = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_strided(
            matrices.shape, matrices.stride(), dtype=matrices.dtype, device=matrices.device
        )


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> Any:
    """Flash or memory-efficient attention: linear in the tokens, but for a mask that somebody has made already."""
    kept = [(query.shape[:-1], torch.float32)]  # the log-sum-exp of each row
    shape = (*query.shape[:-1], value.shape[-1])
    return _Saving.apply(shape, query.dtype, kept, query, key, value, attn_mask)  # type: ignore[no-untyped-call]


def _gated_delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **named: Any
) -> tuple[Any, Any]:
    """flash-linear-attention's chunked kernel: inputs, the output and one tile-sized matrix for each tile and head."""
    batch, tokens, heads = value.shape[:3]
    kept = [((batch, tokens, heads), torch.float32), ((batch, tokens, heads, _CHUNK), value.dtype)]
    output = _Saving.apply(value.shape, value.dtype, kept, query, key, value, g, beta)  # type: ignore[no-untyped-call]
    state = value.new_empty((batch, heads, key.shape[-1], value.shape[-1])) if named.get("output_final_state") else None
    return output, state


def _expert_activation(real: Any) -> Any:
    """The fused kernel of SwiGLU keeps its two inputs; forms without a kernel stay torch's operations."""

    def activation(gate: Any, up: Any, name: str = "swiglu", alpha: float = 1.702, limit: float = 7.0, **_: Any) -> Any:
        if name != "swiglu":
            return real(gate, up, name, alpha, limit, fused=False)
        return _Fused.apply(gate, up)  # type: ignore[no-untyped-call]

    return activation


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Any, up: Any) -> Any:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # noqa: ARG004
        gate, up = ctx.saved_tensors
        return torch.empty_like(gate), torch.empty_like(up)


def _split_plan(
    selected_experts: torch.Tensor, num_experts: int, ep_size: int, num_local_experts: int, *_: Any, **__: Any
) -> Any:
    return _even_plan(selected_experts.numel(), ep_size, num_local_experts)


def _split_plan_of_part(
    expert_indices: torch.Tensor, num_experts: int, ep_size: int, num_local_experts: int, *_: Any, **__: Any
) -> Any:
    return _even_plan(expert_indices.numel(), ep_size, num_local_experts)


def _even_plan(rows: int, ranks: int, local: int) -> Any:
    from deepspeed.module_inject.auto_ep_layer import SplitPlan

    splits = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
    # As many are received as are sent.
    counts = torch.empty(ranks, local, dtype=torch.int32, device="meta")
    return SplitPlan(list(splits), list(splits), counts)


def _permute_indices(counts: Any, experts: int, ranks: int, longest: int, alignment: int, **__: Any) -> tuple[Any, ...]:
    sizes = (longest, experts, experts)
    return tuple(torch.empty(size, dtype=torch.int32, device="meta") for size in sizes)


def _folded_tensor_parallelism(put: Any) -> None:
    from deepspeed.moe import ep_tp_dispatch

    seen = {"tokens": 1}
    real = ep_tp_dispatch.average_gradient_over_tp

    def average(hidden: torch.Tensor, *arguments: Any) -> Any:
        # The first that a layer calls: the numbers of tokens that it notes in tensors are lost on the meta device.
        seen["tokens"] = hidden.shape[0] * hidden.shape[1]
        return real(hidden, *arguments)

    def partition(payload: Any, *, tp_group: Any, tp_rank: int, tp_size: int) -> Any:
        rows = payload.token_indices.numel() // tp_size
        local = payload.token_indices.new_empty(rows)
        part = ep_tp_dispatch._take(payload, local)
        context = ep_tp_dispatch.RestoreContext(
            original_payload=payload,
            local_indices=local,
            tp_rank=tp_rank,
            tp_size=tp_size,
            num_tokens=seen["tokens"],
            counters={},
        )
        return part, context

    def restore(combined: torch.Tensor, context: Any, *, tp_group: Any, **_: Any) -> Any:
        payload, tokens = context.original_payload, seen["tokens"]
        slots = payload.token_indices.numel() // tokens
        weights = payload.combine_weights.index_select(0, context.local_indices).to(combined.dtype)
        counts = (combined.shape[0],) * context.tp_size
        gather = ep_tp_dispatch._AllGatherVariableRows.apply
        every = gather(combined, tp_group, counts, combined.shape[0])
        weighted = every * gather(weights, tp_group, counts, combined.shape[0]).reshape(-1, 1)
        output = combined.new_zeros((tokens, combined.shape[-1]))
        index = payload.token_indices.new_empty(min(tokens, every.shape[0]))
        for _slot in range(slots):
            output.index_add_(0, index, weighted.index_select(0, index))
        return output

    put(ep_tp_dispatch, "average_gradient_over_tp", average)
    put(ep_tp_dispatch, "partition_assignments", partition)
    put(ep_tp_dispatch, "restore_combined", restore)


class _Addresses:
    """Distinct addresses for storages that have none, so that what lies together can be told by comparing them."""

    def __init__(self) -> None:
        self._tensor, self._storage = torch.Tensor.data_ptr, torch.UntypedStorage.data_ptr
        self._bases: dict[int, tuple[Any, int]] = {}

    def of_storage(self, storage: Any) -> int:
        if storage.device.type != "meta":
            return int(self._storage(storage))
        known = self._bases.get(storage._cdata)
        if known is None or known[0]() is None:
            # Far beyond the size of any storage.
            known = (weakref.ref(storage), (len(self._bases) + 1) << 44)
            self._bases[storage._cdata] = known
        return known[1]

    def of_tensor(self, tensor: torch.Tensor) -> int:
        if not tensor.is_meta:
            return int(self._tensor(tensor))
        return self.of_storage(tensor.untyped_storage()) + int(tensor.storage_offset()) * tensor.element_size()
