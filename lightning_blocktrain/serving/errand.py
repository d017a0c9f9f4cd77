"""What travels from host to host in one traversal: the walk, how far it has come, and the state between two blocks.

Pure: from an errand to a header and tensors, and back with every value checked, since it comes from a stranger.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_blocktrain.errors import WireError
from lightning_blocktrain.models.block_files import DTYPES
from lightning_blocktrain.models.generation import Decision, Sampling, Walk
from lightning_blocktrain.models.generation_arguments import MAX_DRAWS, MAX_SEED, is_temperature
from lightning_blocktrain.models.transformer import UNKNOWN
from lightning_blocktrain.serving.address import Address
from lightning_blocktrain.serving.link import fields_of
from lightning_blocktrain.transport.wire import Frame

STATE = "state."
MAX_HOSTS = 1024
MAX_CLIENT_CHARS = 64

Carried = dict[str, Tensor]
"""The tensors of a state between two blocks, by name; none before the first."""


@dataclass(frozen=True)
class Errand:
    """A walk on its way.

    Args:
        client: Names who wants to know.
        session: Names, with the client, the keys and values that the walk goes on from.
        number: Of the walk in its session.
        walk: What is computed.
        num_blocks: Blocks before the exit that decides.
        next_block: The block whose turn it is.
        route: The hosts after the one that it comes to, chained; none: what was computed goes back to the client.
        wire: A key of ``DTYPES``: how states travel.
        carried: The state before ``next_block``.
    """

    client: str
    session: int
    number: int
    walk: Walk
    num_blocks: int
    next_block: int
    route: tuple[Address, ...]
    wire: str = "fp32"
    carried: Carried = field(default_factory=dict, repr=False)

    @property
    def key(self) -> tuple[str, int]:
        """What keys and values are kept by."""
        return self.client, self.session

    def after(self, next_block: int, carried: Mapping[str, Tensor]) -> "Errand":
        """Return the errand as it goes on, to the first host of the route."""
        return replace(self, next_block=next_block, carried=dict(carried), route=self.route[1:])


def errand_message(errand: Errand) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the header and the tensors of an errand."""
    walk = errand.walk
    header = {
        "kind": "walk",
        "client": errand.client,
        "session": errand.session,
        "number": errand.number,
        "num_blocks": errand.num_blocks,
        "next_block": errand.next_block,
        "route": [str(address) for address in errand.route],
        "wire": errand.wire,
        "start": walk.start,
        "position": walk.position,
        "num_read": walk.num_read,
        "temperature": float(walk.sampling.temperature),
        "seed": walk.sampling.seed,
        "num_draws": walk.sampling.num_draws,
    }
    dtype = DTYPES[errand.wire]
    state = {f"{STATE}{name}": tensor.to(dtype) for name, tensor in errand.carried.items()}
    return header, {"inputs": torch.tensor(walk.inputs, dtype=torch.int16), **state}


def errand_of(frame: Frame) -> Errand:
    """Return the errand of a message.

    Raises:
        WireError: If it is none.
    """
    client, route, wire, temperature = fields_of(
        frame, "walk", client=str, route=list, wire=str, temperature=(int, float)
    )
    names = ("session", "number", "num_blocks", "next_block", "start", "position", "num_read", "seed", "num_draws")
    counts = dict(zip(names, fields_of(frame, "walk", **dict.fromkeys(names, int)), strict=True))
    low = [name for name in names if not 0 <= counts[name] <= MAX_SEED]
    if low or not counts["num_blocks"] or not 1 <= counts["num_draws"] <= MAX_DRAWS:
        raise WireError(f"The fields {low or ['num_blocks', 'num_draws']} of a walk are out of range.")
    if not 0 < len(client) <= MAX_CLIENT_CHARS or wire not in DTYPES or len(route) > MAX_HOSTS:
        raise WireError(f"The walk has no client, {len(route)} hosts, or the wire type {wire!r:.20}.")
    if not is_temperature(temperature):
        raise WireError(f"The temperature of a walk is {temperature!r:.40}.")
    try:
        hosts = tuple(Address.parse(text) for text in route if isinstance(text, str))
    except ValueError as exc:
        raise WireError(str(exc)) from exc
    sampling = Sampling(float(temperature), counts["seed"], counts["num_draws"])
    inputs = _inputs(frame)
    walk = Walk(counts["start"], inputs, counts["position"], counts["num_read"], sampling)
    # A copy lies where kernels sum as they do over any tensor of the process.
    carried = {
        name.removeprefix(STATE): tensor.float().clone()
        for name, tensor in frame.tensors.items()
        if name.startswith(STATE)
    }
    for name, tensor in carried.items():
        if tensor.dim() != 3 or tensor.shape[:2] != (counts["num_draws"], len(inputs)):
            raise WireError(f"The state {name} has the shape {tuple(tensor.shape)}.")
    if counts["num_read"] > len(inputs) or len(hosts) < len(route):
        raise WireError("A walk reads at most as many positions as it has, and a route names hosts.")
    return Errand(
        client,
        counts["session"],
        counts["number"],
        walk,
        counts["num_blocks"],
        counts["next_block"],
        hosts,
        wire,
        carried,
    )


def _inputs(frame: Frame) -> tuple[int, ...]:
    inputs = frame.tensors.get("inputs")
    if inputs is None or inputs.dtype != torch.int16 or inputs.dim() != 1 or not len(inputs):
        raise WireError("A walk needs inputs, int16 (T,).")
    if int(inputs.min()) < 0 or int(inputs.max()) > UNKNOWN:
        raise WireError(f"The inputs of a walk are 0 to {UNKNOWN}.")
    return tuple(inputs.tolist())


def decision_message(errand: Errand, decision: Decision) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the header and the tensors that tell a client what was decided."""
    header = {"kind": "decided", "session": errand.session, "number": errand.number}
    tensors = {
        "decided": torch.tensor(decision.decided, dtype=torch.uint8),
        "probs": torch.tensor(decision.probs, dtype=torch.float32),
    }
    return header, tensors


def decision_of(frame: Frame) -> Decision:
    """Return what a message says was decided.

    Raises:
        WireError: If it says nothing.
    """
    fields_of(frame, "decided", session=int, number=int)
    decided, probs = frame.tensors.get("decided"), frame.tensors.get("probs")
    if decided is None or probs is None or decided.dtype != torch.uint8 or decided.shape != probs.shape:
        raise WireError("A decision holds bytes and as many probabilities.")
    return Decision(tuple(decided.tolist()), tuple(probs.tolist()))
