"""How far a Trainer has come."""

import lightning as L


def is_last_step(trainer: L.Trainer) -> bool:
    """Return whether the step being taken is the last that the Trainer's limits allow."""
    step = trainer.global_step + 1
    if trainer.max_steps != -1 and step >= trainer.max_steps:
        return True
    last_epoch = trainer.max_epochs is not None and 0 < trainer.max_epochs <= trainer.current_epoch + 1
    return last_epoch and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
