"""Error feedback: what a lossy codec lost of a worker's updates goes into the next one.

Owns the residual of one worker and one entry. Refuses to own how an update is encoded (that is ``codecs.py``) and what
became of it (that is the ledger's verdict, which the worker passes on).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from lightning_blocktrain.errors import CheckpointMismatchError, explain
from lightning_blocktrain.rounds.codecs import Codec, Encoded, difference
from lightning_blocktrain.rounds.merge import Params, floating_names


class ErrorFeedback:
    """What the codec has lost of one worker's updates of one entry, added to the next one.

    Per update: ``encode``; then ``confirm`` if it was accepted, or found to be a duplicate of an accepted one. Without
    ``confirm`` the residual stays that of the last accepted update: a late or stale one loses its own delta only, and
    encoding an update again for a retry gives the same message. Call ``reset`` where the worker's own state is in
    doubt: after any other refusal, and when the worker joins again. Not synchronised: one thread calls it.

    Args:
        codec: The run's codec.

    Source:
        Karimireddy et al. 2019, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", algorithm 2.
        Here the gradient is the delta of a round, and the loss is measured on the decoded parameters, so rounding to
        the base's dtype is fed back too.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._residual: Params = {}
        self._next: Params = {}

    @property
    def residual(self) -> Params:
        """What accepted updates still owe, fp32 by name; a name without debt is absent. Not to be written to."""
        return dict(self._residual)

    def encode(self, params: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> Encoded:
        """Encode an update with the residual added.

        Args:
            params: As in ``Codec.encode``.
            base: As in ``Codec.encode``.

        Raises:
            ValueError: As ``Codec.encode``, also when the residual is of tensors with other shapes.
        """
        encoded = self.codec.encode(params, base, self._residual)
        lost = {name: self._lost(encoded, name, params[name], base[name]) for name in floating_names(base)}
        self._next = {name: tensor for name, tensor in lost.items() if bool(tensor.any())}
        return encoded

    def _lost(self, encoded: Encoded, name: str, tensor: Tensor, start: Tensor) -> Tensor:
        # Decoded tensor by tensor: all together they take as much memory as the entry.
        parts = {key: part for key, part in encoded.tensors.items() if key.partition(":")[2] == name}
        decoded = self.codec.decode(Encoded(parts, encoded.meta), {name: start})[name]
        owed = difference(tensor.detach(), start.detach())
        if name in self._residual:
            owed = owed + self._residual[name].to(owed.device)
        lost = owed - difference(decoded, start.detach())
        # A NaN is refused with its update; kept here, it would spoil every later one.
        return lost.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def confirm(self) -> None:
        """Keep what the last ``encode`` lost; a second time, or after ``reset``, it changes nothing."""
        self._residual = self._next

    def reset(self) -> None:
        """Forget everything that is owed."""
        self._residual = self._next = {}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "ErrorFeedback":
        """Return one that continues from what ``state_dict`` gave."""
        feedback = cls(replace(Codec.from_meta(state["codec"]), spared=tuple(state["spared"])))
        feedback.load_state_dict(dict(state))
        return feedback

    def state_dict(self) -> dict[str, Any]:
        """Return the codec's meta and the residual's own tensors; an update not confirmed yet leaves no trace."""
        return {"codec": self.codec.meta, "spared": list(self.codec.spared), "residual": dict(self._residual)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a stored state.

        Args:
            state: What ``state_dict`` returned; its tensors are copied.

        Raises:
            CheckpointMismatchError: If it is another codec's.
        """
        if state["codec"] != self.codec.meta:
            got = f"stored codec={state['codec']}, here codec={self.codec.meta}"
            raise CheckpointMismatchError(explain("codec must be the stored one", got, "resume with that codec"))
        self._residual = self._next = {name: tensor.clone() for name, tensor in state["residual"].items()}
