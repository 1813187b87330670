# SPDX-License-Identifier: Apache-2.0
"""What users write in ``configure_model`` has the values that it would have had without partitions."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

from lightning_zero3 import Zero3FastStrategy
from tests.fits import Language, Sentences, fit
from tests.models import FAMILIES, tiny, tiny_glm


def from_config(config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    # Transformers' automatic class knows this text model as a part of a larger one only.
    if config.model_type == "minimax_m3_vl_text":
        return MiniMaxM3VLForCausalLM._from_config(config, **options)
    return AutoModelForCausalLM.from_config(config, **options)


def from_pretrained(folder: str, **options: Any) -> PreTrainedModel:
    if "minimax" in folder:
        return MiniMaxM3VLForCausalLM.from_pretrained(folder, **options)
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def build(how: str, what: Any, **options: Any) -> PreTrainedModel:
    """The same line of a user's, in partitions or not."""
    torch.manual_seed(5)
    if how == "from_pretrained":
        return from_pretrained(what, **options)
    what = copy.deepcopy(what)  # from_config writes its dtype into it
    if how == "from_config":
        return from_config(what, **options)
    return type(_ON_META[what.model_type])(what)


_ON_META: dict[str, PreTrainedModel] = {}


def whole(how: str, what: Any, weights: torch.dtype, **options: Any) -> dict[str, torch.Tensor]:
    """A model without partitions, and its weights cast once to the run's dtype, as the engine would."""
    model = build(how, what, **options)
    weighed = {name: value.detach().to(weights) for name, value in model.named_parameters()}
    return {**weighed, **{name: value.detach().clone() for name, value in model.named_buffers()}}


class Builds(Language):
    """Builds models in ``configure_model``, each as its reference was built, and trains the last one."""

    def __init__(self, references: list[tuple[str, Any, dict[str, Any], dict[str, torch.Tensor]]]) -> None:
        super().__init__(None)
        self.references = references
        self.different: list[str] = []

    def configure_model(self) -> None:
        import deepspeed

        if self.some_odd_name is not None:
            return
        for how, what, options, reference in self.references:
            model = build(how, what, **options)
            parameters = list(model.parameters())
            if any(parameter.numel() for parameter in parameters):
                self.different.append(f"{how}: a weight isn't partitioned")
            with deepspeed.zero.GatheredParameters(parameters):
                found = {name: value.detach() for name, value in [*model.named_parameters(), *model.named_buffers()]}
                if found.keys() != reference.keys():
                    self.different.append(f"{how}: {found.keys() ^ reference.keys()}")
                self.different += [
                    f"{how} {options}: {name} {found[name].dtype} {expected.dtype}"
                    for name, expected in reference.items()
                    if found[name].dtype != expected.dtype or not torch.equal(found[name], expected)
                ]
            self.some_odd_name = model.train()


def built(family: str, folder: str, precision: str, weights: torch.dtype) -> tuple[list[str], list[float]]:
    config = tiny(family)
    with torch.device("meta"):
        _ON_META[config.model_type] = from_config(config)
    builds: list[tuple[str, Any, dict[str, Any]]] = [
        ("constructor", config, {}),
        ("from_config", config, {}),
        ("from_config", config, {"dtype": torch.bfloat16}),
        ("from_pretrained", folder, {"dtype": torch.bfloat16}),
        ("from_pretrained", folder, {}),
    ]
    references = [(how, what, options, whole(how, what, weights, **options)) for how, what, options in builds]
    module = Builds(references)
    fit(module, Sentences(config.vocab_size), Zero3FastStrategy(), steps=2, precision=precision)
    return module.different, module.losses


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folders: dict[str, str] = {}

    def get(family: str) -> str:
        """A folder of safetensors in which nothing is at the value that initialisation gives."""
        if family not in folders:
            folder = tmp_path_factory.mktemp("pretrained") / family
            torch.manual_seed(3)
            model = from_config(tiny(family))
            with torch.no_grad():
                for tensor in [*model.parameters(), *(b for n, b in model.named_buffers() if "bias" in n)]:
                    tensor.uniform_(-0.5, 0.5)
            model.save_pretrained(folder)
            folders[family] = str(folder)
        return folders[family]

    return get


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "family", ["glm", *(pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES if each != "glm")]
)
def test_models_in_partitions_have_the_values_of_whole_ones(ranks, checkpoint, family, world_size):
    for precision, weights in (("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)):
        for different, losses in ranks(world_size).run(built, family, checkpoint(family), precision, weights):
            assert different == []
            assert all(0 < loss < 20 for loss in losses)


def test_checkpoints_hold_each_expert_apart(checkpoint):
    """So that loading has to join them."""
    for family in ("glm", "mixtral", "qwen3"):
        with safe_open(Path(checkpoint(family)) / "model.safetensors", "pt") as file:
            assert any(".experts.0." in name for name in file.keys()), family  # noqa: SIM118


class Own(torch.nn.Module):
    """A module of a user's own, with a buffer that bf16 would round."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(32, 3)
        self.register_buffer("scale", torch.tensor([1000.123]) * torch.rand(1))


class Mixed(Language):
    """A tied Hugging Face model, and beside it a module that is drawn after it."""

    def __init__(self, how: str, what: Any, config: PretrainedConfig) -> None:
        super().__init__(None)
        self.how, self.what, self.config = how, what, config
        self.different: list[str] = []

    def configure_model(self) -> None:
        import deepspeed

        if self.some_odd_name is not None:
            return
        self.some_odd_name, self.own = build(self.how, self.what).train(), Own()
        with deepspeed.zero.GatheredParameters(list(self.parameters())):
            self.state = {name: value.detach().clone() for name, value in self.own.state_dict().items()}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + self.own.linear.weight.sum() * 0


def tied_and_mixed(how: str, folder: str) -> tuple[bool, bool, list[bool]]:
    config = tiny_glm(tie_word_embeddings=True)
    with torch.device("meta"):
        _ON_META[config.model_type] = from_config(config)
    what = folder if how == "from_pretrained" else config
    build(how, what)
    expected = {name: value.to(torch.bfloat16) for name, value in Own().state_dict().items()}
    torch.manual_seed(5)
    build(how, what)
    expected["scale"] = Own().scale
    module = Mixed(how, what, config)
    fit(module, Sentences(config.vocab_size), Zero3FastStrategy(), steps=2, precision="bf16-mixed")
    model: Any = module.some_odd_name
    counted = sum(1 for _ in model.parameters())
    return (
        model.lm_head.weight is model.model.embed_tokens.weight,
        counted == len({id(parameter) for parameter in _ON_META["glm4_moe"].parameters()}),
        [torch.equal(expected[name].to(value.dtype), value) for name, value in module.state.items()],
    )


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("how", ["constructor", "from_config", "from_pretrained"])
def test_ties_are_kept_and_what_is_drawn_afterwards_is_too(ranks, tmp_path, how, world_size):
    if how == "from_pretrained":
        from_config(tiny_glm(tie_word_embeddings=True)).save_pretrained(tmp_path)
    seen = ranks(world_size).run(tied_and_mixed, how, str(tmp_path))
    for tied, no_parameter_twice, _ in seen:
        assert tied
        assert no_parameter_twice
    # Weights come from rank 0; a buffer is each rank's own, as in a whole model.
    assert seen[0][2] == [True, True, True]


class Pretrained(Language):
    def __init__(self, folder: str, *, in_partitions: bool) -> None:
        super().__init__(None if in_partitions else from_pretrained(folder).train())
        self.folder = folder

    def configure_model(self) -> None:
        if self.some_odd_name is None:
            self.some_odd_name = from_pretrained(self.folder).train()


def pretrained_and_shared(folder: str) -> list[list[float]]:
    modules = [Pretrained(folder, in_partitions=False), Pretrained(folder, in_partitions=True)]
    for module, size in zip(modules, (None, 2), strict=True):
        fit(module, Sentences(64), Zero3FastStrategy(expert_parallel_size=size))
    return [module.losses for module in modules]


def test_a_checkpoint_loaded_into_partitions_trains_with_its_experts_shared(ranks, checkpoint):
    for whole_losses, losses in ranks(2).run(pretrained_and_shared, checkpoint("glm")):
        assert losses == pytest.approx(whole_losses, abs=2e-5)


def without_accelerate(folder: str) -> str:
    from transformers import utils

    from lightning_zero3.substitution import substituted

    module = Builds([("from_pretrained", folder, {}, {})])
    with (
        substituted(utils, "is_accelerate_available", lambda: False),
        pytest.raises(ImportError, match="accelerate") as refusal,
    ):
        fit(module, Sentences(64), Zero3FastStrategy(), steps=1)
    return str(refusal.value)


def test_a_checkpoint_without_accelerate_is_refused_with_what_to_install(ranks, checkpoint):
    (message,) = ranks(1).run(without_accelerate, checkpoint("mixtral"))
    assert 'pip install "lightning_zero3[pretrained]"' in message
    assert "MixtralForCausalLM.from_pretrained" in message


class OnMeta(Language):
    """Its model has no values, whether it is there from the start or comes in ``configure_model``."""

    def __init__(self, *, late: bool) -> None:
        with torch.device("meta"):
            meta = from_config(tiny_glm())
        super().__init__(None if late else meta)
        self.late = [meta]

    def configure_model(self) -> None:
        self.some_odd_name = self.late[0]


def on_meta(late: bool) -> str:
    with pytest.raises(ValueError, match="on the meta device") as refusal:
        fit(OnMeta(late=late), Sentences(64), Zero3FastStrategy(), steps=1)
    return str(refusal.value)


@pytest.mark.parametrize("late", [False, True])
def test_models_without_values_are_refused(ranks, late):
    (message,) = ranks(1).run(on_meta, late)
    assert "some_odd_name.model.embed_tokens.weight" in message
    assert "configure_model" in message


def stock_has_garbage() -> float:
    module = Builds([])
    module.configure_model = lambda: setattr(  # type: ignore[method-assign]
        module, "some_odd_name", module.some_odd_name or AutoModelForCausalLM.from_config(tiny_glm())
    )
    try:
        fit(module, Sentences(64), Zero3FastStrategy(stock_semantics=True), steps=1)
    except (RuntimeError, IndexError):
        return float("nan")
    import deepspeed

    weight = module.some_odd_name.model.layers[0].mlp.up_proj.weight
    with deepspeed.zero.GatheredParameters([weight]):
        return weight.std().item()


def test_stock_semantics_builds_as_stock_does(ranks):
    (spread,) = ranks(1).run(stock_has_garbage)
    assert spread != pytest.approx(tiny_glm().initializer_range, rel=0.2)
