"""Private exits: what a module puts in the place of the shared readout where an upstream stage ends.

Owns the contract of the hook ``stage_exits`` and its use. A module that has it returns one small module per layer but
the last: ``exits[k](hidden, readout)`` gives the logits of a stage that ends after layer k, from parameters of its own
and whatever it takes of the shared readout, such as the unembedding behind a norm of its own. The final stage and the
whole model go through the readout alone. Exits where no stage ends stay as they are.
"""

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_blocktrain.errors import explain


def exits_of(module: nn.Module, num_layers: int) -> nn.ModuleList | None:
    """Return the private exits of ``module``; None if all stages share the readout.

    Raises:
        MisconfigurationException: If there is not one per layer but the last, or the module does not own them.
    """
    hook = getattr(module, "stage_exits", None)
    exits = hook() if hook is not None else None
    if exits is None:
        return None
    if not isinstance(exits, nn.ModuleList) or len(exits) != num_layers - 1:
        got = f"{len(exits)} of them" if isinstance(exits, nn.ModuleList) else type(exits).__name__
        rule = "stage_exits must return None or a torch.nn.ModuleList with one entry per layer but the last"
        raise MisconfigurationException(explain(rule, f"{got} for num_layers={num_layers}", "make one for each"))
    owned = {id(part) for part in module.modules()}
    if not all(id(part) in owned for part in exits):
        rule = "stage_exits must return submodules of the LightningModule: else nobody trains and saves them"
        raise MisconfigurationException(explain(rule, "others", "register them in __init__"))
    return exits


def exit_after(exits: nn.ModuleList | None, depth: int) -> nn.Module | None:
    """Return the private exit after ``depth`` layers; None: the readout alone."""
    return exits[depth - 1] if exits is not None and depth <= len(exits) else None


def read_out(hidden: Any, readout: nn.Module, private: nn.Module | None) -> Any:
    """Return the logits of a hidden state, through a private exit if there is one."""
    return readout(hidden) if private is None else private(hidden, readout)
