"""What the fork server imports before it forks stages; its heap is frozen, so that no collection unshares its pages."""

import gc

import lightning_blocktrain.pipeline.processes  # noqa: F401

gc.collect()
gc.freeze()
