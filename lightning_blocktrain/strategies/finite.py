"""Non-finite values stop a worker's step before the update."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_blocktrain.errors import NonFiniteError, explain

FIX = "this worker made no update; lower the learning rate or clip"


def refuse_non_finite_loss(loss: object, where: str) -> None:
    """Refuse a loss with a NaN or an infinity; what is no tensor is somebody else's to refuse.

    Raises:
        NonFiniteError: Saying where.
    """
    if isinstance(loss, Tensor) and not torch.isfinite(loss).all():
        got = f"loss={float(loss.detach()):g} {where}"
        raise NonFiniteError(explain("the loss must be finite", got, FIX))


def with_finite_gradients(
    closure: Callable[[], Any], gradients: Callable[[], list[Tensor]], is_scaled: bool, where: str
) -> Callable[[], Any]:
    """Return ``closure`` followed by a check of its gradients.

    Args:
        closure: Runs a step's forward and backward pass; None from it means that there are no gradients.
        gradients: Returns them afterwards, and has checks of its own.
        is_scaled: A gradient scaler looks for non-finite ones itself, and expects them now and then.
        where: For the message of the ``NonFiniteError``.
    """

    def run() -> Any:
        result = closure()
        if result is None:  # the module skips this batch
            return None
        found = gradients()
        norm = torch.tensor(0.0) if is_scaled else torch.nn.utils.get_total_norm(found)
        if not torch.isfinite(norm):
            raise NonFiniteError(explain("the gradient must be finite", f"norm={float(norm):g} {where}", FIX))
        return result

    return run
