# SPDX-License-Identifier: Apache-2.0
"""Every option of every recipe, declared once: a recipe's sizes are values of this class, and so is a command line."""

# Annotations stay objects here: a parser can then read them wherever this module was loaded from.
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_zero3.config import SetupError, Switch, Zero3Options

Attention = Literal["sdpa", "eager", "cudnn"]
Precision = Literal["32-true", "bf16-mixed", "bf16-true"]
Size = Literal["tiny", "full"]

BENCHMARK_STEPS = 10
BENCHMARK_WARMUP_STEPS = 4
_AT_LEAST_ONE = (
    "layers",
    "max_tokens",
    "sequence_length",
    "micro_batch_size",
    "accumulate_grad_batches",
    "max_steps",
    "loss_tiles",
    "sub_group_size",
    "devices",
    "num_nodes",
    "checkpoint_every",
    "keep",
    "timeout_seconds",
    "ab_rounds",
)
# NumPy's largest seed; a year.
_AT_MOST = {"seed": 2**32 - 1, "timeout_seconds": 366 * 24 * 3600}
_NOT_NEGATIVE = ("learning_rate", "weight_decay", "warmup_steps", "seed")


@dataclass(frozen=True, kw_only=True)
class Settings(Zero3Options):
    """What a run does. Defaults of the command line are those of the recipe's ``--size``.

    Args:
        size: tiny: the architecture scaled down, runs anywhere. full: the true model, on as many GPUs as it takes.
        layers: Only the first so many layers of it; null for all.
        data: stdlib (the Python standard library's source), a text, .jsonl or .parquet file, a folder or glob of such
            files, or hf:NAME for a Hugging Face data set.
        tokenizer: Folder or hub name of a Hugging Face tokenizer; without one, tokens are bytes.
        text_field: Field or column that holds the text.
        max_tokens: How much of the data is read; null for all of it.
        sequence_length: Tokens of one sample.
        micro_batch_size: Samples of one micro-step on one rank (on one tensor-parallel group, where there are some).
        accumulate_grad_batches: Micro-steps of one optimizer step.
        max_steps: Optimizer steps.
        benchmark: 10 steps and no more: 4 to warm up and 6 measured ones, statistics over steps 2 to 10, each step
            listed.
        optimizer: deepspeed: AdamW named in the DeepSpeed config, whose sub-groups are those that the optimizer step
            was reported with (137 for GLM-4.5-Air). torch: torch.optim.AdamW made by the module, as usual in Lightning;
            one sub-group for each kind of partition, unless sub_group_size cuts them.
        learning_rate: AdamW's, after warm-up.
        weight_decay: AdamW's, of every weight.
        warmup_steps: Steps over which the learning rate rises linearly.
        sub_group_size: Elements of one rank's share after which a sub-group ends; null for DeepSpeed's own 10^9. The
            step's temporary memory is at least one sub-group's.
        precision: 32-true, bf16-mixed (bf16 weights, buffers in fp32) or bf16-true.
        bf16_masters: Whether master weights, gradients and moments are bf16 too; takes a bf16 precision.
        attention: sdpa (torch's, which chooses a kernel), cudnn (torch's with cuDNN's kernel and no other; takes a GPU)
            or eager (in Python).
        recompute_activations: Keep only each layer's input in forward, and compute the rest again in backward.
        loss_tiles: Pieces in which logits and loss are computed, so that the logits of all tokens never exist at once;
            1 is Transformers' own loss.
        devices: Processes on this node; null for the launcher's number, else every GPU, else 2.
        num_nodes: Nodes, each with as many processes.
        check_memory: Before the true model is trained on GPUs, plan its first steps (a minute, on rank 0), and refuse
            what doesn't fit.
        output: Folder for runs; each gets a folder version_N of its own.
        checkpoint_every: Save a checkpoint every so many optimizer steps, at the end, and after SIGTERM or SIGUSR1,
            which then ends the run with exit status 75; null for none. On several nodes, output must be a shared
            folder.
        keep: Checkpoints of one training that are kept, the last ones.
        resume: Go on from a checkpoint, with the losses of a run that was never interrupted. auto (or no value): the
            last complete one in output, or from the start where there's none. PATH: that one, or a run's last one.
        ab: Train with this switch, or with all of them, off (A) and on (B), with the same weights and data, one fit
            after the other in the same processes, and print what B saves; null for an ordinary run.
        ab_rounds: How often, for A B, B A, A B and so on. With 2 or more, runs of one arm tell how large noise is.
        profile: Steps that torch's profiler watches, counted from 1, such as 5 or 5-6: a trace for Perfetto and
            TensorBoard from each rank, and a table of what each phase costs, in the run's folder; null for none.
        profile_memory: Record memory in these steps, too: each phase's peak, and on GPUs a snapshot.
        timeout_seconds: How long a rank waits for the others in a collective, before it ends with an error.
        seed: For weights and the order of the data.
        weights: Start from a Hugging Face checkpoint: a folder of safetensors, of which each rank reads its part; null
            for random weights. Layers that --layers leaves out are skipped.
        save_hf: Write the trained weights as a Hugging Face folder, hugging_face in the run's folder, when the run has
            ended: fp32 masters, with the files of a tokenizer in a folder, and what else the checkpoint holds that the
            weights came from.
        expert_parallel_size: Ranks that share one set of experts; null for the largest number that divides both ranks
            and experts.

    Raises:
        SetupError: A number is out of range, or two options contradict each other.
    """

    size: Size = "tiny"
    layers: int | None = None
    data: str = "stdlib"
    tokenizer: str | None = None
    text_field: str = "text"
    max_tokens: int | None = None
    sequence_length: int = 8192
    micro_batch_size: int = 1
    accumulate_grad_batches: int = 1
    max_steps: int = 100
    benchmark: bool = False
    optimizer: Literal["deepspeed", "torch"] = "deepspeed"
    learning_rate: float = 1e-5
    weight_decay: float = 0.1
    warmup_steps: int = 10
    sub_group_size: int | None = None
    precision: Precision = "bf16-mixed"
    bf16_masters: bool = False
    attention: Attention = "sdpa"
    recompute_activations: bool = True
    loss_tiles: int = 1
    devices: int | None = None
    num_nodes: int = 1
    check_memory: bool = True
    output: Path = Path("runs")
    checkpoint_every: int | None = None
    keep: int = 2
    resume: str | None = None
    ab: Switch | Literal["all"] | None = None
    ab_rounds: int = 2
    profile: str | None = None
    profile_memory: bool = False
    timeout_seconds: int = 1800
    seed: int = 0
    weights: str | None = None
    save_hf: bool = False

    def __post_init__(self) -> None:
        """Check ranges, and options against each other."""
        super().__post_init__()
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SetupError(f"--{name} {value}: 1 or more.")
        for name in _NOT_NEGATIVE:
            if not 0 <= getattr(self, name) < math.inf:
                raise SetupError(f"--{name} {getattr(self, name)}: 0 or more.")
        for name, most in _AT_MOST.items():
            if getattr(self, name) > most:
                raise SetupError(f"--{name} {getattr(self, name)}: at most {most:,}.")
        if self.sequence_length < 2:
            raise SetupError(f"--sequence_length {self.sequence_length}: predicting a next token takes at least 2.")
        if self.loss_tiles > self.sequence_length:
            raise SetupError(
                f"--loss_tiles {self.loss_tiles}: a sample has {self.sequence_length} tokens (--sequence_length)."
            )
        if self.ab is not None and (self.checkpoint_every is not None or self.resume is not None):
            raise SetupError(f"--ab {self.ab} compares whole runs: leave --checkpoint_every and --resume out.")
        if self.ab is not None and self.steps < 3:
            raise SetupError(f"--ab {self.ab} with {self.steps} steps: the first isn't counted; 3 or more.")
        self._check_profile()
        if self.bf16_masters and not self.precision.startswith("bf16"):
            raise SetupError(
                f"--bf16_masters true with --precision {self.precision}: masters in bf16 need weights in bf16. Add "
                "--precision bf16-mixed, or leave bf16_masters out."
            )

    def _check_profile(self) -> None:
        if self.profile is None:
            if self.profile_memory:
                raise SetupError("--profile_memory records memory in profiled steps: add --profile 5-6.")
            return
        if self.ab is not None:
            raise SetupError(
                f"--profile {self.profile} with --ab {self.ab}: the profiler's own time would be compared."
            )
        first, last = self.profiled_steps or (0, 0)
        if not 1 <= first <= last <= self.steps:
            raise SetupError(
                f"--profile {self.profile}: a step or a range of steps, such as 5 or 5-6, of this run's {self.steps}."
            )

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """First and last step to profile; None for none, or where they can't be read."""
        first, dash, last = (self.profile or "").partition("-")
        if not (first.isdecimal() and (last if dash else first).isdecimal()):
            return None
        return int(first), int(last if dash else first)

    @property
    def steps(self) -> int:
        """Optimizer steps of this run."""
        return BENCHMARK_STEPS if self.benchmark else self.max_steps


# Of every recipe's scaled-down model: small enough for two CPU cores, large enough to learn what follows what in source
# code.
TINY = Settings(
    size="tiny",
    sequence_length=256,
    micro_batch_size=4,
    max_steps=200,
    max_tokens=8_000_000,
    optimizer="torch",
    learning_rate=2e-3,
    precision="32-true",
    recompute_activations=False,
)
