"""What a LightningModule offers to be trained block by block: the layout and the hooks, as types.

Strategies reach a module only through these names; a module needs no import of ours to provide them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor, nn

Prefix = Literal["none", "frozen"]
"""May a block's loss run the blocks before it? ``none``: no. ``frozen``: yes, without gradient."""


@dataclass(frozen=True)
class BlockLayout:
    """Where a module keeps its layers and its readout, and how its blocks relate.

    Args:
        layers: The layers that are cut into contiguous blocks; everything else is interface.
        readout: Final norm and unembedding (belongs to the interface here, to the final stage of a pipeline).
        num_blocks: Number of blocks the module was built for; None leaves the choice to the strategy.
        prefix: Whether a block's loss may run the blocks before it, see ``Prefix``.
        stem: What runs before the first layer, such as the embedding, where only block 0 trains it; it then belongs to
            block 0. For ``blocktrain`` with a frozen prefix; None: it is interface, which all blocks train.
        heads: Per block, what its loss alone trains beside its layers, such as a readout of its own; None where a block
            has no such module. The readout may be the last block's.
        lookahead: How many of the blocks after its own a block's loss may run as well. They are frozen copies like the
            prefix, which this needs; gradient passes through them to the block, and reaches no tensor of theirs.
    """

    layers: nn.ModuleList
    readout: nn.Module
    num_blocks: int | None = None
    prefix: Prefix = "none"
    stem: nn.Module | None = None
    heads: Sequence[nn.Module | None] = ()
    lookahead: int = 0


@runtime_checkable
class SupportsBlocks(Protocol):
    """A module that says how it is cut into blocks."""

    def configure_blocks(self) -> BlockLayout | Mapping[str, Any]:
        """Return a ``BlockLayout`` or a mapping with its fields (``layers`` and ``readout`` are required)."""
        ...


@runtime_checkable
class SupportsBlockTraining(SupportsBlocks, Protocol):
    """A module that ``strategy="blocktrain"`` can train."""

    def block_training_step(self, batch: Any, batch_idx: int, block_idx: int) -> Tensor:
        """Return a scalar loss whose gradient reaches block ``block_idx`` and the interface only."""
        ...


@runtime_checkable
class SupportsFeatures(Protocol):
    """A module with a frozen prefix that says what a block reads of a batch, so that it can be kept on disk.

    ``block_training_step`` has to ask for it as ``self.block_features(batch, block_idx)``, for every block after the
    first.
    """

    def block_features(self, batch: Any, block_idx: int) -> Tensor | tuple[Tensor, ...]:
        """Return what block ``block_idx`` reads: a function of the batch and the blocks before it, without gradient."""
        ...


@runtime_checkable
class SupportsStages(SupportsBlocks, Protocol):
    """A module that ``strategy="rgc"`` can train.

    It may also have ``stage_kwargs(batch, hidden) -> dict``: keywords for every layer (a mask, rotary tables), made
    without trainable parameters; and ``stage_exits() -> ModuleList``: private exits, one per layer but the last, where
    ``exits[k](hidden, readout)`` gives the logits of a stage that ends after layer k, which trains it. The hooks run on
    copies of the module that share its tensors, in other threads or processes, made at the first batch of a fit: what
    they need must come from the batch. Attributes set later, ``self.global_step`` and ``self.current_epoch`` do not
    reach them, and they may not call ``self.log``.
    """

    def stage_embed(self, batch: Any) -> Tensor:
        """Return the hidden state before the first layer, one tensor."""
        ...

    def stage_loss(self, logits: Any, batch: Any) -> Tensor | Mapping[str, Any]:
        """Return the mean loss of what the readout gave, or a mapping with ``loss`` and more scalars to log."""
        ...


@runtime_checkable
class CountsTokens(Protocol):
    """A module that knows how many target tokens its batch holds."""

    def count_tokens(self, batch: Any) -> int:
        """Return the number of target tokens in ``batch``."""
        ...
