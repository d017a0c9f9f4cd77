"""How far a Trainer has come."""

import warnings

import lightning as L


def is_last_step(trainer: L.Trainer) -> bool:
    """Return whether the step being taken is the last that the Trainer's limits allow."""
    step = trainer.global_step + 1
    if trainer.max_steps != -1 and step >= trainer.max_steps:
        return True
    last_epoch = trainer.max_epochs is not None and 0 < trainer.max_epochs <= trainer.current_epoch + 1
    return last_epoch and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch


def skip_steps(trainer: L.Trainer, num_steps: int) -> None:
    """Move ``global_step`` and the schedules of learning rates that follow it, as if so many steps had been taken.

    For a worker that joins a run, or rejoins it after rounds it missed: replicas that are averaged must train at one
    learning rate. Schedules by epoch and by metric stay where they are, and so does the position in the data.
    """
    loop = trainer.fit_loop.epoch_loop
    done = loop.automatic_optimization.optim_progress.optimizer.step.total
    done.ready += num_steps
    done.completed += num_steps
    loop._batches_that_stepped += num_steps
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step\\(\\)` before")
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step" and not config.reduce_on_plateau:
                for _ in range(num_steps // config.frequency):
                    config.scheduler.step()  # type: ignore[call-arg]
