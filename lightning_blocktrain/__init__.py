"""Block-local language model training as PyTorch Lightning strategies.

``import lightning_blocktrain`` registers ``Trainer(strategy="blocktrain")`` and starts nothing else.
"""

from lightning_blocktrain.registration import register_strategies
from lightning_blocktrain.strategies import BlockTrainStrategy

register_strategies()

__all__ = ["BlockTrainStrategy"]
