"""Corpora as raw bytes, cut into windows for training and evaluation."""

from lightning_blocktrain.data.cache import CorpusInfo
from lightning_blocktrain.data.corpora import NAMED_CORPORA
from lightning_blocktrain.data.datamodule import ByteDataModule

__all__ = ["NAMED_CORPORA", "ByteDataModule", "CorpusInfo"]
