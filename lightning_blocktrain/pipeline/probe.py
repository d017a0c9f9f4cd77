"""A trial run of the stage hooks on one batch, before any stage learns: what does not fit is refused here."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_blocktrain.errors import explain
from lightning_blocktrain.partition import as_layout
from lightning_blocktrain.pipeline.alias import make_alias
from lightning_blocktrain.pipeline.exits import exit_after, exits_of, read_out
from lightning_blocktrain.pipeline.ring import payload_bytes
from lightning_blocktrain.pipeline.stage import Context


def probe(module: L.LightningModule, batch: Any, context: Context) -> int:
    """Run the forward pass of every stage hook on ``batch`` and return the bytes of the largest hidden state.

    The module, its buffers and the random streams stay as they are.

    Raises:
        MisconfigurationException: If a hook or a layer returns something else than its contract says.
    """
    alias: Any = make_alias(module, {buffer: buffer.detach().clone() for buffer in module.buffers()})
    layout = as_layout(alias.configure_blocks())
    exits = exits_of(alias, len(layout.layers))
    with torch.random.fork_rng(devices=[]), context():
        with torch.no_grad():
            hidden = _one_tensor("stage_embed", alias.stage_embed(batch))
        keywords = _keywords(alias, batch, hidden)
        with torch.no_grad():
            largest = payload_bytes(hidden)
            for idx, layer in enumerate(layout.layers):
                hidden = _run(idx, layer, hidden, keywords)
                largest = max(largest, payload_bytes(hidden))
                private = exit_after(exits, idx + 1)
                if private is not None or idx + 1 == len(layout.layers):
                    with _told(f"readout and stage_loss after layer {idx}"):
                        output = alias.stage_loss(read_out(hidden, layout.readout, private), batch)
                    _check_loss(output)
    return largest


@contextmanager
def _told(where: str) -> Iterator[None]:
    """Say in an error of the user's own code where the trial run of the first batch met it."""
    try:
        yield
    except Exception as exc:
        exc.add_note(f"In the trial run of the first batch: {where}.")
        raise


def _one_tensor(what: str, output: Any) -> Tensor:
    if not isinstance(output, Tensor) or not output.is_floating_point():
        rule = f"{what} must return one floating-point tensor"
        got = f"{type(output).__name__}" if not isinstance(output, Tensor) else f"a tensor of {output.dtype}"
        raise MisconfigurationException(explain(rule, got, "return the hidden state alone; the batch carries the rest"))
    return output


def _keywords(alias: Any, batch: Any, hidden: Tensor) -> Mapping[str, Any]:
    hook = getattr(alias, "stage_kwargs", None)
    keywords = hook(batch, hidden) if hook is not None else {}
    if not isinstance(keywords, Mapping):
        rule = "stage_kwargs must return a mapping of keywords for every layer"
        raise MisconfigurationException(explain(rule, type(keywords).__name__, "return for example {'mask': mask}"))
    trained = [name for name, value in keywords.items() if isinstance(value, Tensor) and value.requires_grad]
    if trained:
        rule = "stage_kwargs may not use trainable parameters: no stage would own them"
        raise MisconfigurationException(
            explain(rule, "a gradient in " + ", ".join(trained), "move them into the layers")
        )
    return keywords


def _run(idx: int, layer: nn.Module, hidden: Tensor, keywords: Mapping[str, Any]) -> Tensor:
    what = f"layer {idx} ({type(layer).__name__})"
    try:
        signature(layer.forward).bind(hidden, **keywords)
    except TypeError as exc:
        rule = f"{what} must take one tensor and the keywords of stage_kwargs"
        raise MisconfigurationException(explain(rule, str(exc), "give what else it needs in stage_kwargs")) from exc
    with _told(f"{what}, on a hidden state of shape {tuple(hidden.shape)}"):
        output = layer(hidden, **keywords)
    return _one_tensor(what, output[0] if isinstance(output, tuple) and output else output)


def _check_loss(output: Any) -> None:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        rule = "stage_loss must return a scalar loss, or a mapping with one under 'loss'"
        got = f"{type(output).__name__}" if not isinstance(loss, Tensor) else f"a loss of shape {tuple(loss.shape)}"
        raise MisconfigurationException(explain(rule, got, "return for example F.cross_entropy(...)"))
