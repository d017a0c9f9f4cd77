"""Block-local language model training as PyTorch Lightning strategies.

``import lightning_blocktrain`` registers ``Trainer(strategy="blocktrain")``, ``Trainer(strategy="rgc")`` and its
companions, and starts nothing else.
"""

from lightning_blocktrain.callbacks import AcceptedThroughput, MemoryMonitor, PipelineMonitor, RoundMonitor
from lightning_blocktrain.callbacks.exits import ExitEvaluation, ExitScore, evaluate_exits
from lightning_blocktrain.callbacks.sweep_eval import SweepEvaluation, SweepReport, evaluate_sweep
from lightning_blocktrain.coordinator import NetworkModel, WorkerLink
from lightning_blocktrain.data import ByteDataModule
from lightning_blocktrain.metrics import BitsPerToken
from lightning_blocktrain.models import ByteTransformer, DiffusionBlocks
from lightning_blocktrain.protocols import BlockLayout
from lightning_blocktrain.registration import register_strategies
from lightning_blocktrain.rounds import OuterSGD
from lightning_blocktrain.rounds.codecs import Codec
from lightning_blocktrain.serving.client import SweepClient
from lightning_blocktrain.strategies import BlockTrainStrategy, BoundedHorizonStrategy

register_strategies()

__all__ = [
    "AcceptedThroughput",
    "BitsPerToken",
    "BlockLayout",
    "BlockTrainStrategy",
    "BoundedHorizonStrategy",
    "ByteDataModule",
    "ByteTransformer",
    "Codec",
    "DiffusionBlocks",
    "ExitEvaluation",
    "ExitScore",
    "MemoryMonitor",
    "NetworkModel",
    "OuterSGD",
    "PipelineMonitor",
    "RoundMonitor",
    "SweepClient",
    "SweepEvaluation",
    "SweepReport",
    "WorkerLink",
    "evaluate_exits",
    "evaluate_sweep",
]
