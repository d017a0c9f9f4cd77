"""The one recipe that all runs of the demo share, and the table of its budgets."""

import math
from dataclasses import dataclass, replace

from lightning_blocktrain.errors import explain


@dataclass(frozen=True)
class Recipe:
    """Sizes and settings of a comparison at equal tokens.

    ``steps * batch_size * window_bytes`` tokens go through every control, and through every block of a block-trained
    model, summed over its replicas.

    Args:
        steps: Lightning steps of a control; with r replicas a block-trained model takes ``steps / r``.
        num_layers: L.
        num_blocks: B, a divisor of L.
        width: D.
        num_heads: H.
        window_bytes: T.
        batch_size: Windows per batch of each worker.
        replicas: Workers per block.
        sync_every: Inner steps per round.
        average_decay: Of every model's running average of weights, taken once per round; see ``BlockTrainStrategy``.
        network: Name of the simulated network between the workers.
        lr: Peak learning rate, for every model.
        warmup_steps: Linear warm-up; a cosine follows.
        weight_decay: Of matrices.
        clip: Gradient norm.
        validate_every: Lightning steps between two points of the curves.
        val_batches: Batches of each of these points, from the start of val.
        test_windows: Windows of the final evaluation, spread evenly over test; the same for every model.
        accelerator: As Lightning takes it.
        num_threads: Threads of torch on the CPU; None: as they are.

    Raises:
        ValueError: If the replicas do not divide the steps.
    """

    steps: int = 150
    num_layers: int = 6
    num_blocks: int = 3
    width: int = 128
    num_heads: int = 4
    window_bytes: int = 128
    batch_size: int = 16
    replicas: int = 1
    sync_every: int = 10
    average_decay: float = 0.9
    network: str = "lockstep"
    lr: float = 1e-3
    warmup_steps: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0
    validate_every: int = 30
    val_batches: int = 8
    test_windows: int = 64
    accelerator: str = "cpu"
    num_threads: int | None = None

    def __post_init__(self) -> None:
        if self.steps < 1 or self.replicas < 1 or self.steps % self.replicas:
            got = f"steps={self.steps}, replicas={self.replicas}"
            raise ValueError(explain("replicas must divide steps, both at least 1", got, "raise steps"))

    @property
    def layers_per_block(self) -> int:
        """``L_b``."""
        return self.num_layers // self.num_blocks

    @property
    def tokens_per_block(self) -> int:
        """N, the tokens of every control and of every block."""
        return self.steps * self.batch_size * self.window_bytes


BUDGETS = {
    "tiny": Recipe(
        steps=20,
        width=32,
        num_heads=2,
        window_bytes=32,
        batch_size=8,
        sync_every=5,
        warmup_steps=5,
        validate_every=10,
        val_batches=2,
        test_windows=16,
        # At this size threads wait for each other longer than they compute.
        num_threads=1,
    ),
    "small": Recipe(),
    "medium": Recipe(steps=1500, warmup_steps=50, validate_every=150, val_batches=16, test_windows=128),
}
"""The budgets by name; a number scales the steps of ``small``."""

NUM_CURVE_POINTS = 5


def recipe_of(budget: str) -> Recipe:
    """Return the recipe of a named budget, or ``small`` with its steps multiplied by a number.

    Args:
        budget: A key of ``BUDGETS``, or a positive number as text.

    Raises:
        ValueError: If it is neither.
    """
    if budget in BUDGETS:
        return BUDGETS[budget]
    try:
        factor = float(budget)
    except ValueError:
        factor = math.nan
    if not 0 < factor < 10**4:
        rule = f"budget must be {', '.join(BUDGETS)} or a number between 0 and 10000"
        raise ValueError(explain(rule, f"budget={budget!r}", "0.5 trains half as long as small"))
    small = BUDGETS["small"]
    # Whole rounds between validations, and whole intervals in the run: every point then sees merged masters.
    rounds = max(1, round(small.steps * factor / small.sync_every / NUM_CURVE_POINTS))
    interval = rounds * small.sync_every
    steps = interval * max(1, round(small.steps * factor / interval))
    return replace(small, steps=steps, validate_every=interval, warmup_steps=min(small.warmup_steps, steps // 5))
