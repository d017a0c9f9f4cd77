"""Floating point operations that a run spends on training, counted by formula: what "equal FLOPs" means.

A matrix product of (n, k) and (k, m) is ``2 n k m``. Attention counts every pair of positions, as dense kernels do.
Embedding look-ups, norms, softmax and optimizers are left out: below 2 % from width 64 on.
"""

from lightning_blocktrain.demo.recipe import Recipe
from lightning_blocktrain.models.transformer import VOCABULARY

TRAINED = 3
"""Forward passes that a trained part costs: its own, and one each for the gradients of inputs and of weights."""
FROZEN = 1
"""Forward passes that a frozen part costs."""
AHEAD = 2
"""Forward passes that a frozen part costs through which gradient passes: its own, and one for that of its inputs."""


def layer_flops(recipe: Recipe) -> int:
    """Return the FLOPs of one token's forward pass through one layer."""
    D, T = recipe.width, recipe.window_bytes
    return 24 * D * D + 4 * T * D


def readout_flops(recipe: Recipe) -> int:
    """Return the FLOPs of one token's forward pass through the readout."""
    return 2 * recipe.width * VOCABULARY


def training_flops(recipe: Recipe, kind: str, lookahead: int = 0, shares_readout: bool = False) -> int:
    """Return the FLOPs of a whole training, all blocks together.

    Args:
        recipe: Shape, tokens per block and number of blocks.
        kind: ``causal_full``, ``causal_block``, or an objective of block-local training.
        lookahead: Blocks after its own through which a block's loss is read, beside its own exit's.
        shares_readout: Whether the exit that is looked ahead to is trained with the block.
    """
    layer, readout, L, B = layer_flops(recipe), readout_flops(recipe), recipe.num_layers, recipe.num_blocks
    noise = 2 * recipe.width * recipe.width
    prefix_layers = L * (B - 1) // 2  # summed over blocks: block b runs the b * L_b layers before it
    later = [min(lookahead, B - 1 - block_idx) for block_idx in range(B)]  # blocks after each
    num_exits = sum(later) if kind == "residual" else sum(map(bool, later))
    ahead = AHEAD * sum(later) * recipe.layers_per_block * layer
    ahead += (TRAINED if shares_readout else AHEAD) * num_exits * readout
    per_token = {
        "causal_full": TRAINED * (L * layer + readout),
        "causal_block": TRAINED * (recipe.layers_per_block * layer + readout),
        "features": TRAINED * (L * layer + B * readout) + FROZEN * prefix_layers * layer + ahead,
        "residual": TRAINED * (L * layer + B * readout)
        + FROZEN * (prefix_layers * layer + B * (B - 1) // 2 * readout)
        + ahead,
        "denoise": TRAINED * (L * layer + B * (readout + noise)),
        "mse": TRAINED * (L * layer + B * (readout + noise)),
        "denoise_features": TRAINED * (L * layer + B * (readout + noise))
        + FROZEN * (prefix_layers * layer + B * (B - 1) // 2 * noise),
    }
    return recipe.tokens_per_block * per_token[kind]
