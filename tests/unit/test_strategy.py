# SPDX-License-Identifier: Apache-2.0
"""The strategy as users make it: options, registry, LightningCLI; and errors before any process group exists."""

import copy
import dataclasses
import inspect
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DeepSpeedStrategy, StrategyRegistry
from torch.utils.data import DataLoader

from lightning_zero3 import STOCK, ConfigConflictError, Zero3FastStrategy, Zero3Options
from tests.fits import QUIET, Language, Pairs, Regression, Sentences
from tests.models import build, build_glm, tiny, tiny_glm

BARE: dict[str, Any] = {"zero_optimization": {"stage": 3}}


def trainer_for(strategy: Any, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        **{
            **QUIET,
            "strategy": strategy,
            "devices": 1,
            "max_steps": 1,
            **options,
        }
    )


@pytest.fixture
def world_of_two(monkeypatch):
    """As the first of two ranks under torchrun; nothing may get so far as to wait for the other."""
    variables = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "unit")


def refused(kind: type[Exception], strategy: Any, module: pl.LightningModule, data: Any, **options: Any) -> str:
    """The message with which fit is refused, after checking that no process group was made."""
    trainer = trainer_for(strategy, **options)
    with pytest.raises(kind) as caught:
        trainer.fit(module, DataLoader(data, batch_size=2))
    assert not torch.distributed.is_initialized()
    return str(caught.value)


def language(**overrides: Any) -> tuple[Language, Sentences]:
    config = tiny_glm(**overrides)
    return Language(build_glm(config, seed=1)), Sentences(config.vocab_size)


# ---------------------------------------------------------------- options


def test_the_constructors_own_options_are_those_of_the_dataclass():
    parameters = inspect.signature(Zero3FastStrategy.__init__).parameters
    own = [name for name, parameter in parameters.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    fields = dataclasses.fields(Zero3Options)
    assert own == [field.name for field in fields]
    for field in fields:
        assert parameters[field.name].default == field.default
        assert parameters[field.name].annotation == field.type
        assert f"{field.name}:" in Zero3FastStrategy.__doc__
        assert f"{field.name}:" in Zero3Options.__doc__


def test_the_default_config_is_stocks_with_our_two_additions():
    stock = DeepSpeedStrategy(stage=3).config
    assert Zero3FastStrategy().config == {**stock, "zero_allow_untested_optimizer": True}


def test_the_users_dict_is_left_alone_and_not_held():
    config = copy.deepcopy(BARE)
    strategy = Zero3FastStrategy(config, expert_parallel_size=1, reduce_bucket_size=1000)
    strategy.enable_step_timers()
    assert config == BARE
    assert strategy.config["zero_optimization"] == {"stage": 3, "reduce_bucket_size": 1000}
    assert strategy.config["expert_parallel"] == {"enabled": True, "autoep_size": 1}


def test_a_path_and_the_environment_variable_are_read(tmp_path, monkeypatch):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 3, "reduce_bucket_size": 77}}')
    assert Zero3FastStrategy(path).config["zero_optimization"]["reduce_bucket_size"] == 77
    monkeypatch.setenv("PL_DEEPSPEED_CONFIG_PATH", str(path))
    assert Zero3FastStrategy().config["zero_optimization"]["reduce_bucket_size"] == 77
    with pytest.raises(ConfigConflictError, match=r"reduce_bucket_size=78.*77"):
        Zero3FastStrategy(reduce_bucket_size=78)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stage": 2}, "stage=3: leave stage out"),
        ({"zero_optimization": False}, "zero_optimization=True"),
        ({"config": {"zero_optimization": {"stage": 2}}}, "zero_optimization.stage to 2"),
        ({"config": {**BARE, "expert_parallel": {"autoep_size": 4}}, "expert_parallel_size": 2}, "autoep_size to 4"),
        ({"config": {"zero_optimization": {"overlap_comm": True}}, "overlap_comm": False}, "overlap_comm=False"),
    ],
)
def test_a_conflict_is_named(arguments, message):
    with pytest.raises(ConfigConflictError, match=message):
        Zero3FastStrategy(**arguments)


def test_an_offload_beside_a_config_gets_lightnings_details():
    offload = {"offload_optimizer": True, "offload_optimizer_device": "nvme"}
    strategy = Zero3FastStrategy({"zero_optimization": {"stage": 3}}, **offload, optimizer_buffer_count=7)
    written_by_lightning = DeepSpeedStrategy(stage=3, **offload, optimizer_buffer_count=7).config["zero_optimization"]
    section = strategy.config["zero_optimization"]["offload_optimizer"]
    assert section == written_by_lightning["offload_optimizer"]
    assert section["nvme_path"] == "/local_nvme"


def test_a_stage_in_a_string_is_stage_3_for_lightning_too():
    assert Zero3FastStrategy({"zero_optimization": {"stage": "3"}}).zero_stage_3


def test_what_says_the_same_is_no_conflict():
    strategy = Zero3FastStrategy(
        {"zero_optimization": {"stage": 3, "overlap_comm": False}}, stage=3, zero_optimization=True, overlap_comm=False
    )
    assert strategy.config["zero_optimization"]["overlap_comm"] is False


def test_a_misspelt_option_is_refused():
    with pytest.raises(TypeError, match=r"'alias_master_weight'\. Did you mean alias_master_weights\?"):
        Zero3FastStrategy(alias_master_weight=True)
    with pytest.raises(TypeError, match=r"'reduce_bucketsize'\. Did you mean reduce_bucket_size\?"):
        Zero3FastStrategy(reduce_bucketsize=1)
    with pytest.raises(TypeError, match="alias_master_weights='yes'"):
        Zero3FastStrategy(alias_master_weights="yes")


# ---------------------------------------------------------------- registry and command line


def test_all_names_make_the_strategy():
    assert type(trainer_for("zero3_fast").strategy) is Zero3FastStrategy
    offload = trainer_for("zero3_fast_offload").strategy
    assert type(offload) is Zero3FastStrategy
    assert offload.config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert "offload_param" not in offload.config["zero_optimization"]
    assert StrategyRegistry["zero3_fast"]["description"]
    stock = trainer_for("zero3_stock").strategy
    assert type(stock) is Zero3FastStrategy
    assert stock.options == Zero3Options(**STOCK)
    on = {name for name, value in vars(stock.options).items() if value is True}
    assert on == {"stock_semantics"}


def command_line(tmp_path: Path, strategy: Any) -> Zero3FastStrategy:
    config = {"trainer": {"strategy": strategy, "accelerator": "cpu", "devices": 1, "logger": False}}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    cli = LightningCLI(Regression, run=False, args=["--config", str(path)], save_config_callback=None)
    return cli.trainer.strategy


def test_lightning_cli_by_name(tmp_path):
    assert type(command_line(tmp_path, "zero3_fast")) is Zero3FastStrategy


def test_lightning_cli_by_class_with_options(tmp_path):
    arguments = {
        "expert_parallel_size": 4,
        "alias_master_weights": False,
        "reduce_bucket_size": 1234,
        "config": {"zero_optimization": {"stage": 3, "overlap_comm": False}},
    }
    strategy = command_line(tmp_path, {"class_path": "lightning_zero3.Zero3FastStrategy", "init_args": arguments})
    assert strategy.options == Zero3Options(expert_parallel_size=4, alias_master_weights=False)
    assert strategy.config["zero_optimization"] == {"stage": 3, "overlap_comm": False, "reduce_bucket_size": 1234}


def test_lightning_cli_refuses_a_misspelt_option(tmp_path, capsys):
    arguments = {"expert_paralel_size": 4}
    with pytest.raises(SystemExit):
        command_line(tmp_path, {"class_path": "lightning_zero3.Zero3FastStrategy", "init_args": arguments})
    assert "expert_paralel_size" in capsys.readouterr().err


# ---------------------------------------------------------------- refused before any process group


@pytest.mark.usefixtures("world_of_two")
def test_a_size_that_does_not_divide_the_ranks():
    module, data = language()
    message = refused(ValueError, Zero3FastStrategy(expert_parallel_size=4), module, data, devices=2)
    assert "expert_parallel_size=4 doesn't divide the 2 ranks" in message


@pytest.mark.usefixtures("world_of_two")
def test_a_size_that_does_not_divide_the_experts():
    module, data = language(n_routed_experts=3, n_group=1, topk_group=1)
    message = refused(ValueError, Zero3FastStrategy(expert_parallel_size=2), module, data, devices=2)
    assert "doesn't divide the 3 experts of some_odd_name.model.layers.1.mlp" in message


@pytest.mark.usefixtures("world_of_two")
def test_a_size_that_does_not_divide_the_experts_of_a_model_that_is_not_built_yet():
    class Later(Language):
        def configure_model(self) -> None:
            raise AssertionError("too late")

    module = Later(None)
    module.config = tiny_glm(n_routed_experts=3, n_group=1, topk_group=1)
    message = refused(ValueError, Zero3FastStrategy(expert_parallel_size=2), module, Pairs(), devices=2)
    assert "doesn't divide the 3 experts of Later.config (model_type='glm4_moe')" in message


def test_a_dense_model():
    module, data = language(first_k_dense_replace=tiny_glm().num_hidden_layers)
    message = refused(ValueError, Zero3FastStrategy(expert_parallel_size=1), module, data)
    assert "no MoE layer in some_odd_name (Glm4MoeForCausalLM)" in message


def test_a_model_without_correction_biases():
    module = Language(build(tiny("mixtral")))
    message = refused(ValueError, Zero3FastStrategy(router_bias_update_speed=0.001), module, Sentences(64))
    assert "no router in Language (MixtralForCausalLM, model_type='mixtral') has a correction bias" in message


def test_no_hugging_face_model():
    message = refused(ValueError, Zero3FastStrategy(expert_parallel_size=1), Regression(), Pairs())
    assert "Regression holds no Hugging Face model" in message


@pytest.mark.usefixtures("world_of_two")
def test_tensor_parallel_sizes_that_fit_nothing():
    module, data = language()
    message = refused(ValueError, Zero3FastStrategy(tensor_parallel_size=4), module, data, devices=2)
    assert "tensor_parallel_size=4 doesn't divide the 2 ranks" in message
    message = refused(ValueError, Zero3FastStrategy(tensor_parallel_size=2), module, data, devices=2)
    assert "doesn't divide num_key_value_heads of some_odd_name (Glm4MoeForCausalLM): 1." in message
    message = refused(ValueError, Zero3FastStrategy(tensor_parallel_size=2), Regression(), Pairs(), devices=2)
    assert "tensor_parallel_size is set, but Regression holds no Hugging Face model" in message


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 1}])
def test_there_must_be_something_to_verify(options):
    message = refused(ValueError, Zero3FastStrategy(verify_parallel=True, **options), *language())
    assert "expert_parallel_size replaces or tensor_parallel_size (2 or more) splits" in message
    assert "leave verify_parallel out" in message


@pytest.mark.usefixtures("world_of_two")
def test_a_tensor_parallel_size_is_checked_before_a_model_is_built():
    class Later(Language):
        def configure_model(self) -> None:
            raise AssertionError("too late")

    message = refused(ValueError, Zero3FastStrategy(tensor_parallel_size=4), Later(None), Pairs(), devices=2)
    assert "tensor_parallel_size=4 doesn't divide the 2 ranks" in message


@pytest.mark.usefixtures("world_of_two")
@pytest.mark.parametrize("options", [{"tensor_parallel_size": 4}, {"expert_parallel_size": 4}])
def test_sizes_are_checked_before_an_evaluation_too(options):
    module, data = language(num_key_value_heads=2)
    module.test_step = module.training_step
    with pytest.raises(ValueError, match=r"=4 doesn't divide the 2 ranks"):
        trainer_for(Zero3FastStrategy(**options), devices=2).test(module, DataLoader(data, batch_size=2))
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({**BARE, "gradient_accumulation_steps": 4}, {}, "accumulate_grad_batches=4"),
        ({**BARE, "gradient_clipping": 1.0}, {"gradient_clip_val": 0.5}, "gradient_clip_val=0.5"),
        ({**BARE, "bf16": {"enabled": True}}, {}, 'precision="32-true"'),
        ({**BARE, "torch_autocast": {"enabled": True}}, {"precision": "bf16-mixed"}, "torch_autocast"),
        ({**BARE, "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}, {}, "train_batch_size to 8"),
        ({**BARE, "train_batch_size": 8}, {}, "train_micro_batch_size_per_gpu 2 ×"),
    ],
)
def test_a_conflict_with_the_trainer(config, options, message):
    before = copy.deepcopy(config)
    assert message in refused(ConfigConflictError, Zero3FastStrategy(config), Regression(), Pairs(), **options)
    assert config == before


def test_an_accelerator_that_is_neither_a_gpu_nor_a_cpu():
    class Other(pl.accelerators.CPUAccelerator.__mro__[1]):
        def setup_device(self, device: Any) -> None: ...
        def get_device_stats(self, device: Any) -> dict: ...
        def teardown(self) -> None: ...
        @staticmethod
        def parse_devices(devices: Any) -> Any:
            return devices

        @staticmethod
        def get_parallel_devices(devices: Any) -> list:
            return [torch.device("cpu")] * devices

        @staticmethod
        def auto_device_count() -> int:
            return 1

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def name() -> str:
            return "other"

    trainer = trainer_for("zero3_fast", accelerator=Other())
    with pytest.raises(RuntimeError, match="not with Other"):
        trainer.strategy.setup_environment()
    assert not torch.distributed.is_initialized()


def test_a_config_property_that_raises_is_not_asked():
    class Raising(Language):
        @property
        def config(self) -> Any:
            raise RuntimeError("not yet")

    config = tiny_glm(n_routed_experts=3, n_group=1, topk_group=1)
    module = Raising(build_glm(config, seed=1))
    trainer = trainer_for(Zero3FastStrategy(expert_parallel_size=2))
    with pytest.raises(ValueError, match="doesn't divide the 1 ranks"):
        trainer.fit(module, DataLoader(Sentences(config.vocab_size), batch_size=2))


def test_an_accelerator_that_deepspeed_was_not_imported_for(monkeypatch):
    strategy = Zero3FastStrategy()
    trainer = trainer_for(strategy)
    monkeypatch.setattr(type(strategy), "root_device", torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match="DS_ACCELERATOR=cuda"):
        trainer.strategy.setup_environment()
    assert not torch.distributed.is_initialized()
    assert os.environ.get("DS_ACCELERATOR") == "cpu"


def test_one_way_to_another_layout() -> None:
    config = {"checkpoint": {"load_universal": True}}
    with pytest.raises(ConfigConflictError, match="Leave one of them out"):
        Zero3FastStrategy(config, resume_layout="universal")
