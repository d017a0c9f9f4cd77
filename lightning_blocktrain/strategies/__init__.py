"""The training strategies."""

from lightning_blocktrain.strategies.blocktrain import BlockTrainStrategy
from lightning_blocktrain.strategies.bounded_horizon import BoundedHorizonStrategy

__all__ = ["BlockTrainStrategy", "BoundedHorizonStrategy"]
