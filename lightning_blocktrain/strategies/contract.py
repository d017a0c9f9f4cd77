"""What both strategies ask of a module and its optimizer, refused in one wording.

Owns what they have in common; what only one of them refuses is in ``block_guard`` and ``stage_guard``.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer

from lightning_blocktrain.errors import explain

CONFIGURE_BLOCKS = ("configure_blocks(self)", 'returns {"layers": self.layers, "readout": self.readout}')
"""Form and meaning of the hook that both strategies need."""


def missing_hooks(module: L.LightningModule, hooks: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return the names of the hooks that ``module`` lacks."""
    return [hook for hook in hooks if not callable(getattr(module, hook, None))]


def refuse_module(module: L.LightningModule, hooks: Mapping[str, tuple[str, str]], strategy: str) -> None:
    """Refuse a module that no strategy of ours can drive.

    Args:
        module: The module.
        hooks: Form and meaning of every hook that it needs, by name.
        strategy: Alias, for the message.

    Raises:
        MisconfigurationException: If it lacks a hook, optimises by hand, takes the loader's iterator or is compiled as
            a whole.
    """
    for hook in missing_hooks(module, hooks):
        form, meaning = hooks[hook]
        rule = f"strategy={strategy!r} needs a LightningModule with {form}, which {meaning}"
        raise MisconfigurationException(explain(rule, f"{type(module).__name__} without {hook}", "define it"))
    if not module.automatic_optimization:
        rule = f"strategy={strategy!r} needs automatic optimization: it takes the optimizer steps itself"
        raise MisconfigurationException(explain(rule, "automatic_optimization=False", "remove that line"))
    if "dataloader_iter" in signature(module.training_step).parameters:
        rule = f"strategy={strategy!r} deals out single batches: training_step must take batch"
        fix = "define training_step(self, batch, batch_idx)"
        raise MisconfigurationException(explain(rule, "training_step(self, dataloader_iter)", fix))
    if getattr(module, "_compiler_ctx", None) is not None:
        rule = f"strategy={strategy!r} cannot cut a LightningModule that was compiled as a whole"
        fix = "compile the layers instead: torch.compile each entry of the ModuleList"
        raise MisconfigurationException(explain(rule, "torch.compile(module)", fix))


def refuse_optimizers(optimizers: Sequence[Optimizer], strategy: str) -> None:
    """Refuse anything but one optimizer that holds parameters.

    Raises:
        MisconfigurationException: If ``configure_optimizers`` gave none, several, or an empty one.
    """
    num_filled = sum(any(group["params"] for group in optimizer.param_groups) for optimizer in optimizers)
    if len(optimizers) != 1 or num_filled != 1:
        raise _count_refused(str(num_filled), strategy)


@contextmanager
def refusing_several_optimizers(strategy: str) -> Iterator[None]:
    """Refuse several optimizers in our words: Lightning's advice, manual optimization, does not help here."""
    try:
        yield
    except RuntimeError as exc:
        if "multiple optimizers" not in str(exc):
            raise
        raise _count_refused("several", strategy) from exc


def _count_refused(given: str, strategy: str) -> MisconfigurationException:
    rule = f"strategy={strategy!r} needs exactly one automatic optimizer, with the parameters of all layers"
    fix = "put all parameters into one, in groups if they need different settings"
    return MisconfigurationException(explain(rule, f"configure_optimizers gave {given}", fix))
