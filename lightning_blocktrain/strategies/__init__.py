"""The training strategies."""

from lightning_blocktrain.strategies.blocktrain import BlockTrainStrategy

__all__ = ["BlockTrainStrategy"]
