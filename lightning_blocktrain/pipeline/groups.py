"""Exact backpropagation by groups of threads that share the weights: the control of the pipeline.

Owns the cut of a batch over the groups and the sum of their gradients. If this is as fast as a pipeline of stages,
the stages' concurrency was worth nothing beyond small thread groups.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_blocktrain.pipeline.account import StageClock
from lightning_blocktrain.pipeline.base import Pipeline
from lightning_blocktrain.pipeline.batches import split_batch
from lightning_blocktrain.pipeline.orders import (
    BatchOrder,
    BatchReport,
    DrainReport,
    FailureReport,
    Order,
    Report,
    StepOrder,
    StepReport,
)
from lightning_blocktrain.pipeline.stage import Stage, finite_norm
from lightning_blocktrain.pipeline.threads import Mailbox

T = TypeVar("T")


class GroupsPipeline(Pipeline):
    """Groups that each run the whole model on a part of the batch, and then step a share of the parameters.

    Args:
        groups: One alias of the whole model per group; group g's optimizer holds the parameters that it steps.
        first_step: Optimizer steps before the first order.
        timeout_s: Longest wait without any report.
        threads_per_group: Size of each group's OpenMP team.
    """

    def __init__(self, groups: Sequence[Stage], first_step: int, timeout_s: float, threads_per_group: int) -> None:
        super().__init__(1, first_step, True, timeout_s)
        self._groups = groups
        self._clock = StageClock()
        self._mail: Mailbox[Report] = Mailbox(None, threading.Event())
        self._pool = ThreadPoolExecutor(
            len(groups), "group", initializer=torch.set_num_threads, initargs=(threads_per_group,)
        )

    @override
    def _send(self, order: Order, timeout_s: float) -> bool:
        try:
            if isinstance(order, BatchOrder):
                self._mail.put(self._learn_batch(order))
            elif isinstance(order, StepOrder):
                self._mail.put(self._take_step(order))
            else:
                merged = {n: s for group in self._groups for n, s in group.optimizer_state().items()}
                self._mail.put(
                    DrainReport(0, order.drain_idx, self._clock.read(), merged if order.with_state else None)
                )
        except Exception as exc:
            self._mail.put(FailureReport(0, order.step_idx, exc))
        return True

    @override
    def _receive(self, timeout_s: float) -> Report | None:
        return self._mail.get(0)

    @override
    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _learn_batch(self, order: BatchOrder) -> BatchReport:
        parts = split_batch(order.data, len(self._groups))

        def learn(group: Stage, part: tuple[Any, float]) -> tuple[float, dict[str, float]]:
            data, share = part
            return group.learn(data, group.forward(data, None), order.divisor / share)

        with self._clock.section("busy"):
            results = self._all(lambda pair: learn(*pair), zip(self._groups, parts, strict=False))
        self._clock.count(batches=1)
        shares = [share for _, share in parts]
        loss = sum(share * value for share, (value, _) in zip(shares, results, strict=True))
        extras = {
            name: sum(share * others[name] for share, (_, others) in zip(shares, results, strict=True))
            for name in results[0][1]
        }
        return BatchReport(0, order.batch_idx, loss, extras, 0, self._clock.read())

    def _take_step(self, order: StepOrder) -> StepReport:
        with self._clock.section("optimizer"):
            norms = self._all(self._gather, self._groups)
            norm = torch.stack(norms).norm()
            self._all(lambda group: group.step(order, norm), self._groups)
        for group in self._groups:
            group.forget_gradients()
        self._clock.count(steps=1)
        return StepReport(order.step_idx)

    def _gather(self, group: Stage) -> Tensor:
        """Sum the groups' gradients of the parameters that ``group`` steps; return the norm of the sums."""
        for name, parameter in group.owned.items():
            found = [other.parameters[name].grad for other in self._groups]
            gradients = [gradient for gradient in found if gradient is not None]
            parameter.grad = torch.stack(gradients).sum(0) if len(gradients) > 1 else next(iter(gradients), None)
        return finite_norm(group.stepped)

    def _all(self, work: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
        """Do ``work`` on all items at the same time; raise the first failure after all have ended."""
        futures = [self._pool.submit(work, item) for item in items]
        wait(futures)
        return [future.result() for future in futures]
