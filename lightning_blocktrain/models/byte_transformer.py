"""A causal byte-level Transformer, trainable end to end, as a pipeline, or block by block on frozen features."""

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

from lightning_blocktrain.errors import explain
from lightning_blocktrain.models.base import Batch, ByteModule
from lightning_blocktrain.models.block_model import BlockModel, State
from lightning_blocktrain.models.generation import StepCaches
from lightning_blocktrain.models.transformer import VOCABULARY, ExitNorm, OwnExit, Readout, init_weights
from lightning_blocktrain.partition import default_num_blocks
from lightning_blocktrain.protocols import BlockLayout

CausalObjective = Literal["features", "residual"]
Exits = Literal["shared", "norm", "own"]


class ByteTransformer(BlockModel):
    """Pre-norm causal Transformer over bytes with rotary positions and an untied readout.

    Under Lightning's own strategies it learns by backpropagation through all layers. Under ``blocktrain`` block b
    learns next-byte prediction through a readout (see ``exits``) from what the blocks before it make of the text; they
    are frozen: they run forward only, in the version that was fetched last. With ``lookahead`` it also learns what the
    next blocks, frozen as well, make of it. Block 0 owns the embedding. So a worker trains one block, no gradient
    travels between workers, and yet every block builds on those before it. Under ``rgc`` the stages of a pipeline learn
    at once, each from its own next-byte loss.

    Args:
        num_layers: L.
        width: D.
        num_heads: H; D is a multiple of 2 H.
        window_bytes: T, the longest window.
        num_blocks: B, a divisor of L; None: the largest divisor of L up to 4.
        objective: What a block learns under ``blocktrain``. ``features``: next-byte cross entropy of
            ``readout(h_b)``. ``residual``: the same of ``logits_{b-1} + readout(h_b)``, the logits before it frozen.
        p_span: Probability that the inputs of a random suffix of a sequence are made unknown in training, so that
            ``generate`` can decide several bytes per walk; 0: never.
        exits: What reads out the hidden states where a block before the last one ends: the readout of the whole model
            (``shared``), its unembedding behind a norm of the block's own (``norm``), or a readout of the block's own
            (``own``), so that nothing is shared. The stages of ``rgc`` read out through the exit of the block in which
            they end.
        lookahead: k. The loss of block b is the cross entropy at its own exit plus that at the exit of block b + k, or
            of the last block, read through frozen copies of the blocks between: a block then also learns to be useful
            to those after it. 0: its own exit only. For ``blocktrain``.
        lr: Peak learning rate.
        weight_decay: Decay of matrices.
        warmup_steps: Linear warm-up.
    """

    # Its blocks are only a cut: the weights mean the same under another one.
    retunable = ByteModule.retunable | {"num_blocks", "lookahead"}

    def __init__(
        self,
        num_layers: int = 6,
        width: int = 128,
        num_heads: int = 4,
        window_bytes: int = 256,
        num_blocks: int | None = None,
        objective: CausalObjective = "features",
        p_span: float = 0.0,
        exits: Exits = "shared",
        lookahead: int = 1,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 50,
    ) -> None:
        num_blocks = default_num_blocks(num_layers) if num_blocks is None else num_blocks
        super().__init__(
            num_layers, num_blocks, width, num_heads, window_bytes, "attention", p_span, lr, weight_decay, warmup_steps
        )
        self.save_hyperparameters()
        if objective not in get_args(CausalObjective):
            choices = " or ".join(map(repr, get_args(CausalObjective)))
            fix = "objectives with noise are DiffusionBlocks'"
            raise ValueError(explain(f"objective must be {choices}", f"objective={objective!r}", fix))
        if type(lookahead) is not int or lookahead < 0:
            fix = "1 reads the loss through the next block too, 0 through none"
            rule = "lookahead must be a number of blocks, 0 or more"
            raise ValueError(explain(rule, f"lookahead={lookahead!r}", fix))
        self.objective = objective
        self.lookahead = lookahead
        self.embed = nn.Embedding(VOCABULARY + bool(p_span), width)
        self.readout = Readout(width)
        if exits not in get_args(Exits):
            rule = f"exits must be {' or '.join(map(repr, get_args(Exits)))}"
            raise ValueError(explain(rule, f"exits={exits!r}", "use 'shared'"))
        kind = {"norm": ExitNorm, "own": OwnExit}.get(exits)
        self.exits = None if kind is None else nn.ModuleList(kind(width) for _ in range(num_blocks - 1))
        init_weights(self, num_layers, width)

    def configure_blocks(self) -> BlockLayout:
        """Return the layout: block b reads the frozen features of the blocks before it."""
        heads: tuple[nn.Module | None, ...] = ()
        if self.exits is not None:
            heads = (*self.exits, self.readout if self.hparams["exits"] == "own" else None)
        return BlockLayout(
            self.layers,
            self.readout,
            self.num_blocks,
            prefix="frozen",
            stem=self.embed,
            heads=heads,
            lookahead=self.lookahead,
        )

    @override
    def architecture(self) -> dict[str, Any]:
        """Return the hyper-parameters in which a checkpoint must agree; with exits of their own, the blocks too."""
        own = {} if self.exits is None else {"num_blocks": self.num_blocks}
        return super().architecture() | own

    @override
    def start(self, inputs: Tensor, noise: Tensor | None = None) -> State:
        """Return the embedded bytes, (B, T, D)."""
        self.refuse_long_window(inputs)
        return (self.embed(inputs),)

    @override
    def step(self, block_idx: int, state: State, caches: StepCaches | None = None) -> State:
        """Return the hidden state after a block (B, T, D) and, where logits add up, those of its exit (B, T, V)."""
        hidden = self.run_block(block_idx, state[0], caches)
        if self.objective == "features":
            return (hidden,)
        own = self.exit_of(block_idx, hidden)
        return hidden, state[1] + own if block_idx else own

    def exit_of(self, block_idx: int, hidden: Tensor) -> Tensor:
        """Return what the readout makes of the hidden state after a block, (B, T, V)."""
        own = self.exit_at(block_idx)
        logits: Tensor = self.readout(hidden) if own is None else own(hidden, self.readout)
        return logits

    def exit_at(self, block_idx: int) -> nn.Module | None:
        """Return the private exit of a block; None where it goes through the readout as it is."""
        if self.exits is None or block_idx == len(self.exits):
            return None
        own: nn.Module = self.exits[block_idx]
        return own

    @override
    def read(self, block_idx: int, state: State) -> Tensor:
        """Return the logits of the next byte at the exit of block ``block_idx`` after its step, float32 (B, T, V)."""
        logits = self.exit_of(block_idx, state[0]) if self.objective == "features" else state[1]
        return logits.float()

    @override
    def exit_state(self, num_blocks: int) -> dict[str, Any]:
        """Return tensors by the names of the smaller model: the norm of its exit becomes that of its readout."""
        state, own = self.state_dict(), self.exit_at(num_blocks - 1)
        renamed = {} if own is None else own.state_dict()
        return state | {f"readout.{name}": tensor for name, tensor in renamed.items()}

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits of the next byte at each position after all blocks; (B, T) to (B, T, V)."""
        return self.exit_logits(inputs)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the next-byte cross entropy of the whole model, in nats."""
        inputs, targets = self.hide(batch)
        loss = F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=len(inputs))
        return loss

    def block_training_step(self, batch: Batch, batch_idx: int, block_idx: int) -> Tensor:
        """Return the loss of block ``block_idx`` in nats: next-byte cross entropy at its exit, and ``lookahead`` on.

        Logs the first as ``train/local_ce/block{b}`` and the second, if any, as ``train/ahead_ce/block{b}``.
        """
        inputs, targets = batch = self.hide(batch)
        state = self.before(self.block_features(batch, block_idx)) if block_idx else self.start(inputs)
        state = self.step(block_idx, state)
        loss = self.exit_loss(block_idx, state, targets)
        self.log(f"train/local_ce/block{block_idx}", loss.detach(), batch_size=len(inputs))
        last = min(block_idx + self.lookahead, self.num_blocks - 1)
        if last == block_idx:
            return loss
        for later in range(block_idx + 1, last + 1):
            state = self.step(later, state)
        ahead = self.exit_loss(last, state, targets)
        self.log(f"train/ahead_ce/block{block_idx}", ahead.detach(), batch_size=len(inputs))
        return loss + ahead

    def exit_loss(self, block_idx: int, state: State, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of ``targets`` (B, T) at a block's exit after its step, in nats."""
        return F.cross_entropy(self.read(block_idx, state).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def block_features(self, batch: Batch, block_idx: int) -> tuple[Tensor, ...]:
        """Return what the blocks before ``block_idx`` make of a batch: a function of them and the batch alone.

        The hidden states after the last of them, (B, T, D); where logits add up, those after every one of them.
        """
        (hidden,) = self.start(batch[0])
        after = []
        for earlier in range(block_idx):
            hidden = self.run_block(earlier, hidden)
            after.append(hidden)
        return tuple(after) if self.objective == "residual" else (hidden,)

    @torch.no_grad()
    def before(self, features: tuple[Tensor, ...]) -> State:
        """Return the state before a block, given the features that it reads."""
        if self.objective == "features":
            return features
        exits = [self.exit_of(block_idx, hidden) for block_idx, hidden in enumerate(features)]
        return features[-1], torch.stack(exits).sum(0)

    def stage_embed(self, batch: Batch) -> Tensor:
        """Return the hidden states before the first layer, (B, T, D), for a pipeline's first stage.

        Raises:
            MisconfigurationException: If the exits are sums of logits, which no stage computes.
        """
        if self.objective != "features":
            rule = "the stages of a pipeline and their exits need objective='features'"
            fix = "build the model with it, or train by blocks"
            raise MisconfigurationException(explain(rule, f"objective={self.objective!r}", fix))
        return self.start(batch[0])[0]

    def stage_exits(self) -> nn.ModuleList | None:
        """Return what stages read out through, one entry per layer but the last: the exit of the layer's block."""
        if not self.exits:
            return None
        size, last = len(self.layers) // self.num_blocks, len(self.exits) - 1
        return nn.ModuleList(self.exits[min(layer // size, last)] for layer in range(len(self.layers) - 1))

    def stage_loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the next-byte cross entropy of ``logits`` (B, T, V) at any stage, in nats."""
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
