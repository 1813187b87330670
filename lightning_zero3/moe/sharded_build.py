# SPDX-License-Identifier: Apache-2.0
"""What ``configure_model`` runs in: modules partitioned as they are built, with the values that they would have whole.

Stock Lightning opens ``deepspeed.zero.Init`` there. Under it ``Glm4MoeForCausalLM(config)`` and ``from_config`` give
garbage, since Transformers initialises partitions of size 0; ``from_pretrained`` builds on the meta device and loads
nothing; and tensors made in constructors, ``inv_freq`` among them, are rounded to the training dtype. Here all three
have a whole model's values, so that users write what they would write anyway.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lightning_zero3.config import SetupError
from lightning_zero3.substitution import substituted

# The dtype that a parameter's constructor gave it, where the run's is another.
_BUILT_AS = "_zero3_built_as"
# Transformers' own mark on what has its values: its initialisation leaves such tensors alone.
INITIALIZED = "_is_hf_initialized"
# Elements that are drawn at a time; a multiple of the 16 that torch draws at a time, so that pieces are as the whole.
_PIECE = 1 << 17
# These draw or write element by element, so that pieces of a tensor are parts of the whole.
_BY_ELEMENT = ("normal_", "uniform_", "zeros_", "ones_", "constant_")


class PretrainedModelError(SetupError, ImportError):
    """``from_pretrained`` in ``configure_model`` needs a package that isn't installed."""


@contextmanager
def sharded_build(config: Mapping[str, Any], remote_device: str | None = None) -> Iterator[None]:
    """Partition every module that is built inside, with a whole model's values, buffers and ties.

    With a seed, ``PreTrainedModel`` constructors and ``from_config`` give the values of the same call without
    partitions, drawn in the dtype of that call and then cast to the run's. ``from_pretrained`` gives the checkpoint's.
    No rank holds more than its partitions and one module with its direct children, and PEFT's adapters, which the
    engine partitions.

    Upstream symbols: ``deepspeed.zero.Init`` (its argument ``tensor_overrides``, and ``_zero_init_param``, which is
    overridden; 0.19.7, 0.19.8); ``PreTrainedModel.init_weights``, ``_from_config`` and ``from_pretrained``,
    ``modeling_utils._is_ds_init_called``, ``initialization.TORCH_INIT_FUNCTIONS`` and ``HfDeepSpeedConfig``
    (Transformers 5.24). Reason: this module's text. A missing name raises. Expires when the plain constructor works
    under ``zero.Init``.

    Args:
        config: The completed DeepSpeed config.
        remote_device: Where partitions are stored, as for ``deepspeed.zero.Init``.
    """
    from deepspeed.runtime.zero import partition_parameters as zero
    from transformers import PreTrainedModel, initialization, modeling_utils
    from transformers.integrations.deepspeed import HfDeepSpeedConfig
    from transformers.utils import is_accelerate_available

    class PartitionedBuild(zero.Init):  # type: ignore[misc]
        """``zero.Init`` that leaves all tensors but parameters as they are made, and PEFT's adapters whole."""

        def _post_init_method(self, module: nn.Module) -> None:
            if not _built_by_peft():
                super()._post_init_method(module)

        def _zero_init_param(self, parameter: nn.Parameter) -> None:
            if parameter.is_floating_point() and parameter.dtype != self.dtype:
                setattr(parameter, _BUILT_AS, parameter.dtype)
                parameter.data = _cast(parameter.data, self.dtype)
            super()._zero_init_param(parameter)

    from_config = PreTrainedModel._from_config.__func__
    from_pretrained = PreTrainedModel.from_pretrained.__func__

    def from_config_here(cls: type, *arguments: Any, **options: Any) -> Any:
        # Transformers would open a zero.Init of its own, and draw weights in another order.
        with substituted(modeling_utils, "_is_ds_init_called", True):
            return from_config(cls, *arguments, **options)

    def from_pretrained_here(cls: type, *arguments: Any, **options: Any) -> Any:
        if not is_accelerate_available():
            raise PretrainedModelError(
                f"{cls.__name__}.from_pretrained in configure_model needs the package accelerate: by it, Transformers "
                'loads into partitions. Install it: pip install "lightning_zero3[pretrained]".'
            )
        loaded = from_pretrained(cls, *arguments, **options)
        _round_to_built((loaded[0] if isinstance(loaded, tuple) else loaded).parameters())
        return loaded

    with ExitStack() as scope:
        if is_accelerate_available():
            # Alive for the length of the block, it makes from_pretrained load into partitions. It must not know of
            # tensor parallelism: weights are loaded whole, and the engine shards them afterwards.
            without_tp = {name: value for name, value in config.items() if name != "tensor_parallel"}
            alive = HfDeepSpeedConfig(without_tp)
            scope.callback(lambda _: None, alive)
        scope.enter_context(substituted(PreTrainedModel, "init_weights", _init_weights_of_partitions(PreTrainedModel)))
        scope.enter_context(substituted(PreTrainedModel, "_from_config", classmethod(from_config_here)))
        scope.enter_context(substituted(PreTrainedModel, "from_pretrained", classmethod(from_pretrained_here)))
        functions = initialization.TORCH_INIT_FUNCTIONS
        scope.callback(functions.update, dict(functions))
        functions.update({name: _drawn_as_built(name, function) for name, function in functions.items()})
        overrides = [zero.DeepSpeedTensorOverride.device]
        scope.enter_context(
            PartitionedBuild(config_dict_or_path=config, remote_device=remote_device, tensor_overrides=overrides)
        )
        yield


def initialize_partitions(model: Any) -> None:
    """Draw a partitioned model's weights on rank 0, in the order in which a whole model draws them.

    Tensors that have their values already (:data:`INITIALIZED`) are neither drawn nor sent.

    As ``transformers.integrations.deepspeed.initialize_weights_zero3`` (5.24), which can't be used: it gathers modules
    again that are initialised already, as those of a nested model are, and leaves buffers on rank 0.

    Args:
        model: A ``PreTrainedModel``.
    """
    from deepspeed.runtime.zero import partition_parameters as zero
    from transformers.initialization import guard_torch_init_functions
    from transformers.modeling_utils import PreTrainedModel

    def visit(module: nn.Module, initialize: Callable[..., None]) -> None:
        for child in module.children():
            visit(child, child._initialize_weights if isinstance(child, PreTrainedModel) else initialize)
        if getattr(module, "_is_hf_initialized", False):
            return
        # A module may initialise its direct children's weights too.
        near = [module, *(child for child in module.children() if not isinstance(child, PreTrainedModel))]
        parameters = [
            parameter
            for each in near
            for parameter in each.parameters(recurse=False)
            if not getattr(parameter, INITIALIZED, False)
        ]
        with zero.GatheredParameters(parameters, modifier_rank=0):
            if not parameters or torch.distributed.get_rank() == 0:
                initialize(module, is_custom_code)
        if parameters:
            share_buffers(buffer for each in near for buffer in each.buffers(recurse=False))
        module._is_hf_initialized = True  # type: ignore[assignment]

    is_custom_code = model.is_custom_code() if hasattr(model, "is_custom_code") else model.is_remote_code()
    with outside_zero_init(), torch.no_grad(), guard_torch_init_functions():
        visit(model, model._initialize_weights)


def _built_by_peft() -> bool:
    """Whether PEFT is the one of PEFT and Transformers that is building a module.

    It writes first values, and other dtypes, into the modules that it has built, which in partitions of size 0 does
    nothing or loses them: LoRA would not start at zero. Adapters stay whole until the engine partitions them.
    """
    if sys.modules.get("peft") is None:  # no walk up the stack for each module of a model without adapters
        return False
    frame: Any = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in ("peft", "transformers"):
            return package == "peft"
        frame = frame.f_back
    return False


@contextmanager
def outside_zero_init() -> Iterator[None]:
    """What is computed inside doesn't go through the constructors that ``zero.Init`` has patched, where it is active.

    Upstream symbols: ``deepspeed.zero.Init``'s ``top_level_context``, ``shutdown_init_context`` and
    ``restore_init_context`` (0.19.7, 0.19.8), which are there for that.
    """
    from deepspeed.runtime.zero import partition_parameters as zero

    if zero.top_level_context is None:
        yield
        return
    zero.shutdown_init_context()
    try:
        yield
    finally:
        zero.restore_init_context()


def share_buffers(buffers: Iterable[torch.Tensor]) -> None:
    """Copy rank 0's buffers to all: a module that has weights is initialised on rank 0 alone.

    Args:
        buffers: The same on all ranks, in the same order.
    """
    from deepspeed.accelerator import get_accelerator

    if torch.distributed.get_world_size() > 1:
        for buffer in buffers:
            # NCCL takes what is on the device only; a buffer may have been made on the host.
            sent = buffer.to(get_accelerator().current_device_name())
            torch.distributed.broadcast(sent, src=0)
            if sent is not buffer:
                buffer.copy_(sent)


def _init_weights_of_partitions(pretrained_model: Any) -> Callable[[Any], None]:
    whole = pretrained_model.init_weights

    def init_weights(model: Any) -> None:
        # What is built on the meta device for its shapes alone has no partitions.
        if not all(hasattr(parameter, "ds_id") for parameter in model.parameters()):
            whole(model)
            return
        initialize_partitions(model)
        model.tie_weights(recompute_mapping=False)

    return init_weights


def _drawn_as_built(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Draw in the dtype that a whole model would draw in, then cast; a few megabytes at a time."""

    def draw(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        built_as = getattr(tensor, _BUILT_AS, tensor.dtype)
        if built_as == tensor.dtype:
            return function(tensor, *arguments, **options)
        with torch.no_grad():
            for piece in _pieces(tensor) if name in _BY_ELEMENT else [tensor.data]:
                drawn = torch.empty_like(piece, dtype=built_as)
                function(drawn, *arguments, **options)
                piece.copy_(drawn)
        return tensor

    return draw


def _cast(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast, where there is room for it in the storage that the tensor has already."""
    if data.element_size() < dtype.itemsize or not data.is_contiguous():
        return data.to(dtype)
    flat = data.view(-1)
    narrow = flat.view(dtype)[: flat.numel()]
    # From front to back, nothing is overwritten before it is read.
    for start in range(0, flat.numel(), _PIECE):
        narrow[start : start + _PIECE] = flat[start : start + _PIECE].to(dtype)
    return narrow.view(data.shape)


def _pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Parts of a tensor that are drawn one after the other; on a CPU their values are those of the whole."""
    if not tensor.is_contiguous():
        return [tensor.data]
    flat = tensor.data.view(-1)
    # Fewer than 16 values are drawn in another way, so the last piece takes such a rest along.
    sizes = [_PIECE] * max(flat.numel() // _PIECE - 1, 0)
    return list(flat.split([*sizes, flat.numel() - sum(sizes)]))


def _round_to_built(parameters: Iterable[nn.Parameter]) -> None:
    """Give weights the digits that they were asked to have: ``dtype=torch.bfloat16`` in an fp32 run."""
    for parameter in parameters:
        partition: torch.Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
        built_as = getattr(parameter, _BUILT_AS, partition.dtype)
        if partition.is_floating_point() and torch.finfo(built_as).bits < torch.finfo(partition.dtype).bits:
            partition.data.copy_(partition.data.to(built_as))
