"""Builds the pipeline that the settings ask for."""

from collections.abc import Sequence

from lightning_blocktrain.pipeline.base import Pipeline
from lightning_blocktrain.pipeline.groups import GroupsPipeline
from lightning_blocktrain.pipeline.processes import ProcessPipeline
from lightning_blocktrain.pipeline.settings import PipelineSettings
from lightning_blocktrain.pipeline.stage import Stage
from lightning_blocktrain.pipeline.threads import ThreadPipeline, TurnsPipeline
from lightning_blocktrain.pipeline.worker import Pace


def open_pipeline(
    settings: PipelineSettings, stages: Sequence[Stage], first_step: int, batch_bytes: int, hidden_bytes: int
) -> Pipeline:
    """Start the stages.

    Args:
        settings: The options.
        stages: The stages, or the groups of ``bp_groups``; for processes, of a module in shared memory.
        first_step: Optimizer steps taken before.
        batch_bytes: Shared memory that the largest batch takes.
        hidden_bytes: Shared memory that the largest hidden state takes.
    """
    timeout_s, num_threads = settings.stage_timeout_s, settings.num_threads(len(stages))
    pace = Pace(
        serial=not settings.overlaps,
        lag="newest" if settings.lag == "newest" else "pinned",
        snapshot_every=settings.snapshot_every,
    )
    if settings.method == "bp_groups":
        return GroupsPipeline(stages, first_step, timeout_s, num_threads)
    if settings.backend == "processes":
        return ProcessPipeline(
            stages, pace, first_step, timeout_s, settings.ring_slots, num_threads, batch_bytes, hidden_bytes
        )
    if settings.overlaps:
        return ThreadPipeline(stages, pace, first_step, timeout_s, settings.ring_slots, num_threads)
    return TurnsPipeline(stages, pace, first_step, timeout_s, settings.threads_per_stage and num_threads)
