"""The pipeline of one fit: its start at the first batch, its restarts, and the state that survives them.

Owns when stages are built and taken down. Between two pipelines, and after the last, the optimizer state is the user's
optimizer's own again.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import Optimizer

from lightning_blocktrain.errors import explain
from lightning_blocktrain.pipeline.account import TimeAccount
from lightning_blocktrain.pipeline.backends import open_pipeline
from lightning_blocktrain.pipeline.base import FinishedBatch, Pipeline
from lightning_blocktrain.pipeline.batches import split_batch
from lightning_blocktrain.pipeline.orders import Clip, DrainReport
from lightning_blocktrain.pipeline.probe import probe
from lightning_blocktrain.pipeline.processes import share, unshare
from lightning_blocktrain.pipeline.readout import consensus_weights
from lightning_blocktrain.pipeline.ring import payload_bytes
from lightning_blocktrain.pipeline.settings import PipelineSettings, num_cores
from lightning_blocktrain.pipeline.split import StageCut, balanced_sizes, cut_stages
from lightning_blocktrain.pipeline.stage import Context, Stage, build_groups, build_stages, plain_state
from lightning_blocktrain.protocols import BlockLayout

SETTLE_STEPS, BALANCE_STEPS = 5, 20
"""Steps left out of, and measured for, the balance of ``stage_split="auto"``."""


class PipelineRun:
    """Feeds the pipeline of one fit.

    Args:
        module: The live module.
        layout: Its layout.
        optimizer: The user's optimizer.
        settings: The strategy's options.
        sizes: Layers per stage to begin with.
        num_groups: Groups of ``bp_groups``; 0 for the other methods.
        context: Context of a forward pass.
        switch_step: Optimizer steps after which all layers learn as one stage; None: never.
    """

    def __init__(
        self,
        module: L.LightningModule,
        layout: BlockLayout,
        optimizer: Optimizer,
        settings: PipelineSettings,
        sizes: Sequence[int],
        num_groups: int,
        context: Context,
        switch_step: int | None = None,
    ) -> None:
        self._module, self._layout, self._optimizer, self._settings = module, layout, optimizer, settings
        self._num_groups, self._context = num_groups, context
        self.cut: StageCut = cut_stages(module, layout, sizes)
        self._weights = consensus_weights(settings.consensus_weights, len(sizes))
        self._switch_step, self._as_one = switch_step, False
        self._flags = [(name, p, p.requires_grad) for name, p in module.named_parameters()]
        self._pipeline: Pipeline | None = None
        self._room = (0, 0)
        self._probed: list[tuple[int, ...]] = []
        self._kept: list[FinishedBatch] = []
        self._since_step: list[tuple[Any, float]] = []
        self._to_balance = settings.stage_split == "auto"
        self._settled: tuple[int, tuple[TimeAccount, ...]] | None = None
        self.random_states: list[Tensor] = []
        if len(sizes) > num_cores() and settings.overlaps:
            rank_zero_warn(f"{len(sizes)} stages share {num_cores()} cores: they take turns on them.")

    @property
    def accounts(self) -> tuple[TimeAccount, ...]:
        """The newest time account of each stage; empty before the first batch."""
        return self._pipeline.accounts if self._pipeline is not None else ()

    @property
    def num_in_flight(self) -> int:
        """Orders to learn that are not finished."""
        return self._pipeline.num_in_flight if self._pipeline is not None else 0

    def learn(self, batch: Any, divisor: float, first_step: int) -> list[float]:
        """Order one batch, in parts; start the stages at the first.

        Args:
            batch: The batch.
            divisor: What its loss is divided by.
            first_step: Optimizer steps taken before it, for stages that start now.

        Returns:
            The share of the batch in each part.
        """
        self._switch_if_due(first_step)
        parts = split_batch(batch, self._settings.micro_batches)
        for part, share_of_batch in parts:
            if self._pipeline is None or not self._pipeline.fits(part) or self._outgrows(part):
                self._start(part, first_step)
            assert self._pipeline is not None
            self._pipeline.learn(part, divisor / share_of_batch)
            if self._settings.backend == "processes":
                self._since_step.append((part, divisor / share_of_batch))
        return [share_of_batch for _, share_of_batch in parts]

    def step(self, groups: tuple[dict[str, Any], ...], clip: Clip | None) -> None:
        """Order one optimizer step."""
        assert self._pipeline is not None
        self._refuse_changed_flags()
        self._pipeline.step(groups, clip)
        self._since_step = []
        if self._to_balance and not self._as_one:
            self._balance()

    def finished(self, wait: bool) -> list[FinishedBatch]:
        """Return what has been finished since the last call; ``wait`` for at least one."""
        if self._pipeline is None:
            return []
        kept, self._kept = self._kept, []
        return kept + self._pipeline.finished(wait and not kept)

    def drain(self) -> None:
        """Wait until all stages stand at the same number of steps."""
        if self._pipeline is not None:
            self._pipeline.drain()

    def gather(self) -> None:
        """Drain, and give the user's optimizer the state of all stages (and ``random_states`` theirs)."""
        if self._pipeline is not None:
            self._take_back(self._pipeline.drain(with_state=True))

    def release(self) -> None:
        """Take the state away from the user's optimizer again, while the stages have it."""
        if self._pipeline is not None:
            self._optimizer.state.clear()

    def close(self) -> None:
        """Take the stages down; the module keeps its weights. Safe in any state, and twice."""
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None
            if self._settings.backend == "processes":
                unshare(self._module)

    def _take_back(self, reports: Sequence[DrainReport]) -> None:
        states = [report.optimizer_state or {} for report in reports]
        self._optimizer.state = plain_state(states, self._module)
        self.random_states = [r.random_state for r in reports if r.random_state is not None]

    def _start(self, batch: Any, first_step: int) -> None:
        """Start the stages, or start them again where they have no room for ``batch``."""
        hidden_bytes = probe(self._module, batch, self._context)
        self._probed.append(shapes(batch))
        room = max(self._room[0], payload_bytes(batch)), max(self._room[1], hidden_bytes)
        if self._pipeline is None or room != self._room:
            self._room = room
            self._restart(first_step)

    def _outgrows(self, batch: Any) -> bool:
        """Return whether rings of a fixed room may be too small: ``batch`` is larger somewhere than all probed ones."""
        if self._settings.backend != "processes":
            return False
        sizes = shapes(batch)
        return not any(
            len(known) == len(sizes) and all(size <= most for size, most in zip(sizes, known, strict=True))
            for known in self._probed
        )

    def _switch_if_due(self, first_step: int) -> None:
        """Let all layers learn as one from the first batch of the step that the schedule says."""
        num_steps = self._pipeline.num_steps if self._pipeline is not None else first_step
        due = self._switch_step is not None and num_steps >= self._switch_step
        if self._pipeline is None:
            self._as_one = due
        elif due and not self._as_one:
            rank_zero_info(f"schedule='local_then_bp': all layers learn as one from step {num_steps} on.")
            self._as_one = True
            self._restart(num_steps)

    def _restart(self, first_step: int) -> None:
        if self._pipeline is not None:
            first_step = self._pipeline.num_steps
            self.gather()
            self._kept += self._pipeline.finished(wait=False)
            self.close()
        kept = defaultdict(dict, self._optimizer.state)
        try:
            self._open(first_step)
        except BaseException:  # interrupted, or refused: nothing of the user's is lost
            self._optimizer.state = kept
            self.close()
            if self._settings.backend == "processes":
                unshare(self._module)
            raise
        self._learn_again()

    def _open(self, first_step: int) -> None:
        if self._settings.backend == "processes":
            share(self._module)
        stages = self._build()
        if self._settings.overlaps and self._settings.backend == "threads":
            self.random_states = []  # threads draw from the process's own stream
        else:
            self._seed(stages)
        self._pipeline = open_pipeline(self._settings, stages, first_step, *self._room)

    def _learn_again(self) -> None:
        """Give new stages the gradients that the old ones had gathered since their last step."""
        assert self._pipeline is not None
        for part, divisor in self._since_step:
            self._pipeline.learn(part, divisor)
        if self._since_step:
            self._pipeline.drain()
            self._pipeline.finished(wait=False)  # reported before

    def _build(self) -> list[Stage]:
        if self._num_groups:
            return build_groups(self._module, self._layout, self._num_groups, self._optimizer, self._context)
        if self._as_one:
            whole = cut_stages(self._module, self._layout, [len(self._layout.layers)])
            return build_stages(self._module, whole, "bp", self._optimizer, (1.0,), self._context)
        settings = self._settings
        return build_stages(
            self._module, self.cut, settings.method, self._optimizer, self._weights, self._context, settings.credit
        )

    def _seed(self, stages: Sequence[Stage]) -> None:
        """Give each stage a random stream: the one it had, else stage 0 the process's and the others one each."""
        if self._as_one:  # the first stage's stream goes on
            self.random_states = self.random_states[:1]
        if len(self.random_states) != len(stages):
            seed = torch.initial_seed()
            generators = [torch.Generator().manual_seed((seed + idx) % 2**63) for idx in range(1, len(stages))]
            self.random_states = [torch.get_rng_state(), *(generator.get_state() for generator in generators)]
        for stage, state in zip(stages, self.random_states, strict=True):
            stage.set_random_state(state)

    def _balance(self) -> None:
        """After a warm-up, move layers so that the stages' measured work balances."""
        assert self._pipeline is not None
        accounts = self._pipeline.accounts
        done = min(account.num_steps for account in accounts)
        if self._settled is None:
            if done >= SETTLE_STEPS:
                self._settled = (done, accounts)
            return
        if done < self._settled[0] + BALANCE_STEPS:
            return
        self._to_balance = False
        num_threads = self._settings.num_threads(self.cut.num_stages)
        pairs = zip(accounts, self._settled[1], strict=True)
        work_s = [(account - settled).work_s(num_threads) for account, settled in pairs]
        sizes = balanced_sizes(self.cut.sizes, work_s)
        busy_ms = ", ".join(f"{1e3 * seconds:.1f}" for seconds in work_s)
        rank_zero_info(
            f"stage_split='auto': {busy_ms} ms of work a step with {list(self.cut.sizes)} layers per stage; "
            f"now {list(sizes)}. stage_split={list(sizes)} starts a run with this cut."
        )
        if sizes != self.cut.sizes:
            self.cut = cut_stages(self._module, self._layout, sizes)
            self._restart(self._pipeline.num_steps)

    def _refuse_changed_flags(self) -> None:
        changed = [name for name, parameter, flag in self._flags if parameter.requires_grad != flag]
        if changed:
            rule = "stages train the same parameters from the start of a fit to its end"
            fix = "freeze in setup() or configure_model(), and start another fit to unfreeze"
            raise MisconfigurationException(explain(rule, "requires_grad changed of " + ", ".join(changed), fix))


def shapes(batch: Any) -> tuple[int, ...]:
    """Return the dimensions of all tensors of a batch, one after the other."""
    sizes: list[int] = []
    apply_to_collection(batch, Tensor, lambda tensor: sizes.extend(tensor.shape))
    return tuple(sizes)
