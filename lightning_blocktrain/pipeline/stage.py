"""One stage of a pipeline: its layers, its copy of the readout, its local loss and its optimizer.

Owns the mathematics of a stage and no transport: who calls it, in which thread, is the backend's business.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal, cast

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_blocktrain.errors import NonFiniteError, explain
from lightning_blocktrain.partition import as_layout
from lightning_blocktrain.pipeline.alias import make_alias, snapshot_of, stage_optimizer
from lightning_blocktrain.pipeline.credit import Credit, OpenBatch, WeightStash
from lightning_blocktrain.pipeline.exits import exit_after, exits_of, read_out
from lightning_blocktrain.pipeline.orders import BatchOrder, StepOrder
from lightning_blocktrain.pipeline.readout import consensus
from lightning_blocktrain.pipeline.split import StageCut, cut_stages
from lightning_blocktrain.protocols import BlockLayout, SupportsStages

Method = Literal["bp", "live", "broadcast", "rgc", "bp_groups"]
Context = Callable[[], AbstractContextManager[Any]]
"""Makes the precision plugin's context of a forward pass; it is entered in the stage's own thread."""


class Stage:
    """A stage that learns from its own loss.

    Args:
        alias: Its alias of the module.
        cut: How the module is cut.
        stage_idx: Its place.
        owned: The parameters it trains, by name in the module.
        optimizer: Its optimizer over ``owned``.
        groups: For each of the optimizer's groups, its index among the user's groups.
        weights: Weights of the readout gradients that the final stage averages; None: it learns from its own loss
            alone, or this is not the final stage.
        publishes: Whether its readout gradients go to the final stage.
        reads_snapshot: Whether its readout is a copy to be renewed.
        context: Context of a forward pass.
        gives_credit: Whether the stage before learns from this one's loss too.
        awaits_credit: Whether this stage learns from the next one's loss too.
    """

    def __init__(
        self,
        alias: Any,
        cut: StageCut,
        stage_idx: int,
        owned: dict[str, Tensor],
        optimizer: Optimizer,
        groups: tuple[int, ...],
        weights: tuple[float, ...] | None,
        publishes: bool,
        reads_snapshot: bool,
        context: Context,
        gives_credit: bool = False,
        awaits_credit: bool = False,
    ) -> None:
        layout = as_layout(alias.configure_blocks())
        self.alias, self.stage_idx, self.num_stages = alias, stage_idx, cut.num_stages
        self.layers, self.readout = list(layout.layers[cut.slices[stage_idx]]), layout.readout
        depth = sum(cut.sizes[: stage_idx + 1])
        self.private = None if self.is_final else exit_after(exits_of(alias, len(layout.layers)), depth)
        self.owned, self.optimizer, self.groups = owned, optimizer, groups
        self.weights, self.publishes, self.reads_snapshot = weights, publishes, reads_snapshot
        self.context, self.gives_credit, self.awaits_credit = context, gives_credit, awaits_credit
        self._checked = False
        self._random_state: Tensor | None = None
        self._num_passes = 0
        self._num_arrivals: list[int] = []
        self.stepped = [p for group in optimizer.param_groups for p in group["params"]]
        named: dict[str, Tensor] = dict(alias.named_parameters())
        # A group of ``bp_groups`` learns the whole model and steps a share of it.
        self.parameters = owned if cut.num_stages > 1 else named
        mine = {id(p) for p in (*self.parameters.values(), *self.readout.parameters())}
        self._foreign = {name: p for name, p in named.items() if id(p) not in mine}

    @property
    def is_first(self) -> bool:
        """Whether it reads the batch."""
        return self.stage_idx == 0

    @property
    def is_final(self) -> bool:
        """Whether it owns the readout."""
        return self.stage_idx == self.num_stages - 1

    @property
    def snapshot(self) -> list[Tensor]:
        """The readout's tensors: the live ones in the final stage, this stage's copies in the others."""
        return [*self.readout.parameters(), *self.readout.buffers()]

    # One batch.

    def forward(self, data: Any, hidden: Tensor | None) -> Tensor:
        """Return the hidden state after its layers, (B, T, D), with its graph.

        Args:
            data: The batch.
            hidden: What the stage before passed on; it gets a gradient only if it asks for one.

        Raises:
            MisconfigurationException: If a layer changes ``hidden`` in place.
        """
        with self.context():
            if hidden is None:
                return run_layers(self.alias, self.layers, self.alias.stage_embed(data), data)
            version = hidden._version
            output = run_layers(self.alias, self.layers, hidden, data)
        if hidden._version != version:  # the stage before may still need it
            rule = f"the layers of stage {self.stage_idx} may not change their input in place"
            raise MisconfigurationException(explain(rule, "a hidden state that changed", "return a new tensor"))
        return output

    def learn(self, data: Any, hidden: Tensor, divisor: float) -> tuple[float, dict[str, float]]:
        """Add the gradients of the local loss; return the loss and the further scalars of ``stage_loss``.

        Raises:
            NonFiniteError: If the loss is NaN or infinite.
            MisconfigurationException: If the first loss does not reach exactly the stage's own parameters.
        """
        value, extras = self._backward(data, hidden, divisor)
        if not self._checked:
            self._check_reach()
        return value, extras

    def judge(
        self, order: BatchOrder, hidden: Tensor, stash: WeightStash | None
    ) -> tuple[float, dict[str, float], OpenBatch]:
        """Add the readout's gradients alone; ``finish`` follows once the next stage has judged too.

        Args:
            order: The batch.
            hidden: What ``forward`` returned.
            stash: The weights of its graph.

        Returns:
            The loss, the further scalars of ``stage_loss``, and what waits for credit.

        Raises:
            NonFiniteError: If the loss is NaN or infinite.
        """
        leaf = hidden.detach().requires_grad_()
        private: list[Tensor] = list(self.private.parameters()) if self.private is not None else []
        before = [parameter.grad for parameter in private]  # of batches whose step is still to come
        for parameter in private:
            parameter.grad = None
        value, extras = self._backward(order.data, leaf, order.divisor)
        assert leaf.grad is not None
        found = [(parameter, parameter.grad) for parameter in private if parameter.grad is not None]
        for parameter, gradient in zip(private, before, strict=True):
            parameter.grad = gradient
        return value, extras, OpenBatch(order.batch_idx, hidden, leaf.grad, found, stash)

    def finish(self, batch: OpenBatch, credit: Tensor) -> None:
        """Add the gradients of the layers and of the private exit; the batch's graph is freed.

        Args:
            batch: What ``judge`` returned.
            credit: Gradient of the next stage's loss for ``batch.hidden``, (B, T, D).

        Raises:
            MisconfigurationException: If the first one does not reach exactly the stage's own parameters.
        """
        if batch.hidden.requires_grad:  # else all layers are frozen
            torch.autograd.backward(batch.hidden, batch.gradient + credit)
        for parameter, gradient in batch.private:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        if not self._checked:
            self._check_reach()

    def _backward(self, data: Any, hidden: Tensor, divisor: float) -> tuple[float, dict[str, float]]:
        """Run the backward pass of the local loss; return the loss and the further scalars of ``stage_loss``."""
        with self.context():
            logits = read_out(hidden, self.readout, self.private)
            loss, extras = split_loss(self.alias.stage_loss(logits, data))
        value = float(loss.detach())
        if not abs(value) < float("inf"):
            fix = "nothing was updated with it; lower the learning rate or clip"
            raise NonFiniteError(explain("the loss must be finite", f"loss={value:g}", fix))
        self._num_passes += 1
        (loss / divisor).backward()  # type: ignore[no-untyped-call]
        return value, extras

    def _check_reach(self) -> None:
        reached = [name for name, parameter in self._foreign.items() if parameter.grad is not None]
        if reached:
            rule = f"the loss of stage {self.stage_idx} may train its own layers and the readout only"
            fix = "move the parameter into the readout or the layers, or use it in stage_embed alone"
            raise MisconfigurationException(explain(rule, "a gradient in " + ", ".join(reached), fix))
        layer_ids = {id(p) for layer in self.layers for p in layer.parameters()}
        missing = [n for n, p in self.owned.items() if id(p) in layer_ids and p.requires_grad and p.grad is None]
        if missing:
            rule = f"the loss of stage {self.stage_idx} must train every parameter of its layers"
            fix = "use it, or set requires_grad=False before the fit"
            raise MisconfigurationException(explain(rule, "no gradient in " + ", ".join(missing), fix))
        for parameter in self._foreign.values():  # no graph is kept for what others own
            parameter.requires_grad_(False)
        self._checked = True

    # One step.

    def take_readout_gradients(self) -> list[Tensor | None]:
        """Return this stage's readout gradients since the last step, None where it reached none, and forget them."""
        gradients = []
        for parameter in self.readout.parameters():
            gradient, parameter.grad = parameter.grad, None
            gradients.append(gradient)
        return gradients

    def agree(self, upstream: Sequence[Sequence[Tensor | None]]) -> None:
        """Put the consensus of all stages' readout gradients in the place of the final stage's own.

        Args:
            upstream: The gradients of stages 0 to S - 2.
        """
        assert self.weights is not None
        agreed = consensus([*upstream, self.take_readout_gradients()], self.weights)
        for idx, (parameter, gradient) in enumerate(zip(self.readout.parameters(), agreed, strict=True)):
            if gradient is not None and self._num_arrivals:
                gradient.mul_(self.num_stages * self._num_passes / self._num_arrivals[idx])
            if parameter.requires_grad:
                parameter.grad = gradient
        self._num_passes, self._num_arrivals = 0, [0] * len(self._num_arrivals)

    def count_arrivals(self) -> None:
        """Take the mean over the stages that use a readout parameter where autograd sums their gradients (``live``).

        Call it on the final stage.
        """
        parameters = list(self.readout.parameters())
        self._num_arrivals = [0] * len(parameters)
        for idx, parameter in enumerate(parameters):
            if parameter.requires_grad:
                hook = partial(self._count_arrival, idx)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _count_arrival(self, idx: int, parameter: Tensor) -> None:
        self._num_arrivals[idx] += 1

    def step(self, order: StepOrder, norm: Tensor | None = None) -> None:
        """Clip and take one optimizer step at the order's hyper-parameters.

        Args:
            order: The order.
            norm: Norm of the gradients that are clipped together; None: of this stage's own.

        Raises:
            NonFiniteError: If the gradient is NaN or infinite; nothing is updated.
        """
        norm = finite_norm(self.stepped) if norm is None else norm
        if order.clip is not None and order.clip.algorithm == "norm":
            torch.nn.utils.clip_grads_with_norm_(self.stepped, order.clip.value, norm)
        elif order.clip is not None:
            torch.nn.utils.clip_grad_value_(self.stepped, order.clip.value)
        for group, origin in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.update(order.groups[origin])
        self.optimizer.step()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Free the gradients of everything it may train."""
        for parameter in self.parameters.values():
            parameter.grad = None

    # State.

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer's state by parameter name; its tensors are not copied."""
        state = self.optimizer.state
        return {name: dict(state[p]) for name, p in self.owned.items() if p in state}

    def set_random_state(self, state: Tensor | None) -> None:
        """Draw from a random stream of its own; None: from the process's."""
        self._random_state = state

    def random_state(self) -> Tensor | None:
        """Return its own random stream, if it has one."""
        return self._random_state

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Let the code inside draw from the stage's own random stream."""
        if self._random_state is None:
            yield
            return
        outside = torch.get_rng_state()
        torch.set_rng_state(self._random_state)
        try:
            yield
        finally:
            self._random_state = torch.get_rng_state()
            torch.set_rng_state(outside)


def run_layers(alias: Any, layers: Sequence[nn.Module], hidden: Tensor, data: Any) -> Tensor:
    """Return ``hidden`` after ``layers``; of a layer that returns a tuple, its first element counts."""
    hook = getattr(alias, "stage_kwargs", None)
    keywords = hook(data, hidden) if hook is not None else {}
    for layer in layers:
        output = layer(hidden, **keywords)
        hidden = output[0] if isinstance(output, tuple) else output
    return hidden


def split_loss(output: Any) -> tuple[Tensor, dict[str, float]]:
    """Split what ``stage_loss`` returned into the loss and the scalars beside it."""
    if isinstance(output, Mapping):
        return output["loss"], {name: float(value) for name, value in output.items() if name != "loss"}
    return output, {}


def finite_norm(parameters: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of the gradients of ``parameters``.

    Raises:
        NonFiniteError: If it is NaN or infinite.
    """
    gradients = [p.grad.coalesce().values() if p.grad.is_sparse else p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if not torch.isfinite(norm):
        fix = "nothing was updated with it; lower the learning rate or clip"
        raise NonFiniteError(explain("the gradient must be finite", f"norm={float(norm):g}", fix))
    return norm


def build_stages(
    module: L.LightningModule,
    cut: StageCut,
    method: Method,
    optimizer: Optimizer,
    weights: tuple[float, ...],
    context: Context,
    credit: Credit = "local",
) -> list[Stage]:
    """Build the stages of ``module``; the state of ``optimizer`` moves into theirs.

    Args:
        module: The live module.
        cut: How it is cut.
        method: ``bp`` takes a cut of one stage. Under ``live`` all stages add to the gradient of one readout, under
            ``rgc`` and ``broadcast`` upstream stages read a snapshot of it.
        optimizer: The user's.
        weights: Consensus weights, for ``rgc``.
        context: Context of a forward pass.
        credit: What the stages before the final one learn from.
    """
    readout = as_layout(cast(SupportsStages, module).configure_blocks()).readout
    stages: list[Stage] = []
    for stage_idx in reversed(range(cut.num_stages)):
        if not stages:
            alias: Any = make_alias(module)
        elif method == "live":
            shared = zip(readout.parameters(), stages[-1].readout.parameters(), strict=True)
            alias = make_alias(module, dict(shared))
        else:
            alias = make_alias(module, snapshot_of(readout, learns=method == "rgc"))
        live, mine = dict(module.named_parameters()), dict(alias.named_parameters())
        owned: dict[str, Tensor] = {name: mine[name] for name in cut.names[stage_idx] if name in mine}
        clone, groups = stage_optimizer(optimizer, {live[name]: p for name, p in owned.items()})
        upstream, agreed = bool(stages), None
        if not upstream and cut.num_stages > 1:
            # Under ``live`` autograd has summed the gradients: its consensus has one member, to be scaled.
            agreed = {"rgc": weights, "live": (1 / cut.num_stages,)}.get(method)
        publishes, reads = upstream and method == "rgc", upstream and method in ("rgc", "broadcast")
        linked = credit == "next_stage"
        gives, awaits = linked and stage_idx > 0, linked and upstream
        stages.append(
            Stage(alias, cut, stage_idx, owned, clone, groups, agreed, publishes, reads, context, gives, awaits)
        )
    if method == "live" and any(stage.private is not None for stage in stages):
        stages[0].count_arrivals()
    return stages[::-1]


def build_groups(
    module: L.LightningModule, layout: BlockLayout, num_groups: int, optimizer: Optimizer, context: Context
) -> list[Stage]:
    """Build the groups of ``bp_groups``: each has the whole model and steps every ``num_groups``-th parameter.

    The state of ``optimizer`` moves into theirs.
    """
    whole = cut_stages(module, layout, [len(layout.layers)])
    live = dict(module.named_parameters())
    groups = []
    for group_idx in range(num_groups):
        alias = make_alias(module)
        mine = dict(alias.named_parameters())
        owned: dict[str, Tensor] = {name: mine[name] for name in list(live)[group_idx::num_groups]}
        clone, origins = stage_optimizer(optimizer, {live[name]: p for name, p in owned.items()})
        groups.append(Stage(alias, whole, 0, owned, clone, origins, None, False, False, context))
    return groups


def plain_state(stages: Sequence[Mapping[str, dict[str, Any]]], module: nn.Module) -> defaultdict[Tensor, Any]:
    """Return the stages' optimizer states as one state over the live module's parameters."""
    live = dict(module.named_parameters())
    return defaultdict(dict, {live[name]: state for states in stages for name, state in states.items()})
