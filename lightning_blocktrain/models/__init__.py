"""The LightningModules this package ships, and the layers they are made of."""

from lightning_blocktrain.models.byte_transformer import ByteTransformer
from lightning_blocktrain.models.diffusion_blocks import DiffusionBlocks

__all__ = ["ByteTransformer", "DiffusionBlocks"]
