"""The options of a pipeline, checked on their own; what depends on the module is checked when it is known."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lightning.pytorch.utilities import rank_zero_warn

from lightning_blocktrain.errors import explain
from lightning_blocktrain.pipeline.credit import Credit
from lightning_blocktrain.pipeline.readout import ConsensusWeights, consensus_weights
from lightning_blocktrain.pipeline.stage import Method

Mode = Literal["serial", "async"]
Backend = Literal["threads", "processes"]
Lag = Literal["newest", "pipeline", "pinned"]
StageSplit = Literal["even", "auto"] | Sequence[int]
Schedule = Literal["local", "local_then_bp"]

SERIAL_ONLY = ("bp", "live", "bp_groups")
"""Methods whose batches do not overlap."""


def num_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class PipelineSettings:
    """Options as the strategy documents them.

    Raises:
        ValueError: If one is out of range, or two exclude one another.
    """

    method: Method
    num_stages: int | None
    mode: Mode
    backend: Backend
    threads_per_stage: int | None
    snapshot_every: int
    ring_slots: int
    micro_batches: int
    lag: Lag
    stage_split: StageSplit
    consensus_weights: ConsensusWeights
    clip: float | None
    stage_timeout_s: float
    credit: Credit = "local"
    schedule: Schedule = "local"
    switch_frac: float | None = None

    def __post_init__(self) -> None:
        """Refuse what is wrong on its own."""
        kinds = {"method": Method, "mode": Mode, "backend": Backend, "lag": Lag, "credit": Credit, "schedule": Schedule}
        for name, kind in kinds.items():
            _refuse_unknown(name, getattr(self, name), get_args(kind))
        for name in ("snapshot_every", "ring_slots", "micro_batches"):
            _refuse_no_count(name, getattr(self, name))
        for name in ("num_stages", "threads_per_stage"):
            if getattr(self, name) is not None:
                _refuse_no_count(name, getattr(self, name))
        _refuse_not_positive("stage_timeout_s", self.stage_timeout_s)
        if self.clip is not None:
            _refuse_not_positive("clip", self.clip)
        if self.switch_frac is not None and not 0 < self.switch_frac < 1:
            got = f"switch_frac={self.switch_frac!r}"
            raise ValueError(explain("switch_frac must be between 0 and 1", got, "use for example 0.5"))
        self._refuse_split()
        self._refuse_combinations()

    @property
    def overlaps(self) -> bool:
        """Whether stages work on several batches at the same time."""
        return self.mode == "async"

    def switch_step(self, max_steps: int) -> int | None:
        """Return the optimizer steps that stages take before all layers learn as one; None: they never do.

        Args:
            max_steps: Steps of the whole run.
        """
        if self.schedule == "local":
            return None
        return round((0.5 if self.switch_frac is None else self.switch_frac) * max_steps)

    def num_threads(self, num_stages: int) -> int:
        """Return the size of a stage's OpenMP team.

        Stages that run at the same time share the cores: more than ``max(1, cores // S)`` each are cut down to it,
        with a warning.
        """
        cores = num_cores()
        together = num_stages if self.overlaps or self.method == "bp_groups" else 1
        cap = max(1, cores // together)
        if self.threads_per_stage is not None and self.threads_per_stage > cap:
            got = f"threads_per_stage={self.threads_per_stage}, {together} at the same time on {cores} cores"
            rank_zero_warn(f"{got}: using {cap}.")
        return min(self.threads_per_stage or cap, cap)

    def _refuse_split(self) -> None:
        split = self.stage_split
        if isinstance(split, str):
            _refuse_unknown("stage_split", split, ("even", "auto"))
        elif not split or not all(type(size) is int and size >= 1 for size in split):
            rule = "stage_split must be 'even', 'auto' or the number of layers of each stage"
            raise ValueError(explain(rule, f"stage_split={split!r}", "use for example [6, 7, 6, 5]"))
        elif self.num_stages not in (None, len(split)):
            rule = "stage_split must have one number per stage"
            got = f"stage_split={split!r}, num_stages={self.num_stages}"
            raise ValueError(explain(rule, got, "leave num_stages out"))
        known = self.num_stages if isinstance(split, str) else len(split)
        if known is not None or isinstance(self.consensus_weights, str):
            consensus_weights(self.consensus_weights, known or 1)

    def _refuse_combinations(self) -> None:
        method = self.method
        excluded = [
            (method in SERIAL_ONLY and self.overlaps, "mode='async'", f"method={method!r} does not overlap batches"),
            (
                method in ("live", "bp_groups") and self.backend == "processes",
                "backend='processes'",
                f"method={method!r} shares one gradient in one process",
            ),
            (
                method == "bp_groups" and self.micro_batches > 1,
                f"micro_batches={self.micro_batches}",
                "its groups cut each batch already",
            ),
            (
                method != "rgc" and self.consensus_weights != "uniform",
                f"consensus_weights={self.consensus_weights!r}",
                f"method={method!r} has no consensus to weigh",
            ),
            (
                self.lag != "newest" and (method not in ("rgc", "broadcast") or self.snapshot_every > 1),
                f"lag={self.lag!r}",
                "it needs method 'rgc' or 'broadcast' and snapshot_every=1",
            ),
            (
                self.stage_split == "auto" and not self.overlaps,
                "stage_split='auto'",
                "only stages that run at the same time (mode='async') have a balance",
            ),
            (
                method in ("bp", "bp_groups") and self.stage_split != "even",
                f"stage_split={self.stage_split!r}",
                f"method={method!r} has no stages",
            ),
            (
                method in ("bp", "bp_groups") and self.credit != "local",
                f"credit={self.credit!r}",
                "its layers learn from the final loss already",
            ),
            (
                method in ("bp", "bp_groups") and self.schedule != "local",
                f"schedule={self.schedule!r}",
                "its layers learn as one from the start",
            ),
            (
                self.schedule == "local" and self.switch_frac is not None,
                f"switch_frac={self.switch_frac!r}",
                "schedule='local' has no switch",
            ),
        ]
        for wrong, got, why in excluded:
            if wrong:
                raise ValueError(explain(f"options must go together: {why}", f"method={method!r}, {got}", "drop one"))


def _refuse_unknown(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        choices = ", ".join(map(repr, known))
        raise ValueError(explain(f"{name} must be known", f"{name}={value!r}", f"choose one of {choices}"))


def _refuse_no_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(explain(f"{name} must be at least 1, a whole number", f"{name}={value!r}", "use 1 or more"))


def _refuse_not_positive(name: str, value: object) -> None:
    if not (isinstance(value, int | float) and 0 < value < float("inf")):
        raise ValueError(explain(f"{name} must be finite and above 0", f"{name}={value!r}", "use for example 1.0"))
