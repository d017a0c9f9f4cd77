"""Some blocks of a model that run walks: their keys and values by session, no socket, no clock, one caller at a time.

Owns what a host computes. A session's keys and values live here from its first walk until it is forgotten.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_blocktrain.errors import RequestRefusedError
from lightning_blocktrain.models.block_files import DTYPES, Manifest
from lightning_blocktrain.models.block_model import State, newest
from lightning_blocktrain.models.generation import (
    Caches,
    Decision,
    StepCaches,
    read_decision,
    rewind,
    walk_inputs,
    walk_noise,
)
from lightning_blocktrain.models.generation_arguments import MAX_DRAWS
from lightning_blocktrain.models.loading import Model
from lightning_blocktrain.models.transformer import UNKNOWN, VOCABULARY, JointCache
from lightning_blocktrain.serving.errand import Errand

Outcome = Errand | Decision


class SessionLostError(RequestRefusedError):
    """The host does not hold the keys and values that a walk goes on from."""


class HostBusyError(RequestRefusedError):
    """The host holds as many sessions as it may."""


@dataclass
class _Session:
    caches: Caches
    length: int = 0
    """Positions that the caches hold, whatever kind of layers there are."""


@dataclass(frozen=True)
class _Begun:
    """A walk that makes sense here: its session, rewound, and the state before its next block."""

    errand: Errand
    session: _Session
    state: State


@dataclass(frozen=True)
class Facts:
    """What a host tells about itself.

    Args:
        version: Of the weights.
        blocks: Those it serves, ascending.
        num_blocks: B of the model.
        dtype: Of the weights and the computation: ``fp32`` or ``bf16``.
        window_bytes: Longest window.
        p_span: Above 0: the model knows unknown bytes.
        has_noise: Whether walks start from noise.
    """

    version: str
    blocks: tuple[int, ...]
    num_blocks: int
    dtype: str
    window_bytes: int
    p_span: float
    has_noise: bool


def alike(one: Errand, other: Errand) -> bool:
    """Tell whether two walks may run together: through the same blocks, in different sessions, one draw each."""
    same = (one.next_block, one.num_blocks) == (other.next_block, other.num_blocks)
    return same and one.key != other.key and one.walk.sampling.num_draws == other.walk.sampling.num_draws == 1


def joined(states: Sequence[State]) -> State:
    """Return several states (1, T_i, ...) as one, (1, sum of T_i, ...); what has no positions stays as it is."""
    return tuple(
        torch.cat(tensors, dim=1) if tensors[0].dim() > 1 else tensors[0] for tensors in zip(*states, strict=True)
    )


def parted(state: State, lengths: Sequence[int]) -> list[State]:
    """Return what ``joined`` joined."""
    sizes = list(lengths)
    parts = [t.split_with_sizes(sizes, dim=1) if t.dim() > 1 else (t,) * len(sizes) for t in state]
    return list(zip(*parts, strict=True))


class BlockHost:
    """Runs walks through blocks that it holds.

    Args:
        model: Holds these blocks; see ``load_blocks``.
        manifest: Of the model.
        blocks: Indices of the blocks.
        dtype: Of the weights.
        max_sessions: Most texts at once.
    """

    def __init__(
        self, model: Model, manifest: Manifest, blocks: Sequence[int], dtype: str = "fp32", max_sessions: int = 256
    ) -> None:
        self._model = model
        self._max_sessions = max_sessions
        self._dtype = DTYPES[dtype]
        self._sessions: dict[tuple[str, int, int], _Session] = {}
        """By client, session, and the block from which a walk runs here: it may come by twice."""
        self.facts = Facts(
            manifest.version,
            tuple(sorted(blocks)),
            model.num_blocks,
            dtype,
            model.window_bytes,
            float(model.p_span),
            model.has_noise,
        )

    @property
    def max_state_bytes(self) -> int:
        """Bytes of the longest state between two blocks that is taken, in fp32."""
        per_position = 2 * self._model.width + VOCABULARY
        return 4 * MAX_DRAWS * self._model.window_bytes * per_position

    @property
    def num_sessions(self) -> int:
        """Sessions whose keys and values are held."""
        return len({key[:2] for key in self._sessions})

    @torch.inference_mode()
    def run_together(self, errands: Sequence[Errand]) -> list[Outcome | RequestRefusedError]:
        """Run walks of different sessions at once through those of their next blocks that are here.

        Args:
            errands: Several only where all are ``alike``. The last bits of what is computed may then depend on who else
                is there, since kernels sum in another order over more positions.

        Returns:
            For each the errand as it goes on, what it decides, or why it makes no sense here: ``SessionLostError`` if
            it goes on from what is not here.
        """
        begun: list[_Begun] = []
        refused: dict[int, RequestRefusedError] = {}
        for idx, errand in enumerate(errands):
            try:
                begun.append(self._begin(errand))
            except RequestRefusedError as exc:
                refused[idx] = exc
        outcomes = iter(self._run_begun(begun) if begun else [])
        return [refused[idx] if idx in refused else next(outcomes) for idx in range(len(errands))]

    def _run_begun(self, begun: Sequence[_Begun]) -> list[Outcome | RequestRefusedError]:
        try:
            states, next_block = self._through_blocks(begun)
        except (LookupError, RuntimeError, ValueError) as exc:
            if len(begun) > 1:  # one of them does not fit
                return [outcome for one in begun for outcome in self._run_begun([one])]
            errand = begun[0].errand
            self.forget(*errand.key)
            return [RequestRefusedError(f"The state before block {errand.next_block} does not fit: {exc}")]
        for one in begun:
            one.session.length = one.errand.walk.start + len(one.errand.walk.inputs)
        return [self._outcome(one.errand, next_block, state) for one, state in zip(begun, states, strict=True)]

    def _begin(self, errand: Errand) -> _Begun:
        """Return a walk with its session, rewound to where it starts, and the state before its next block.

        Raises:
            RequestRefusedError: If it makes no sense here.
        """
        self._refuse(errand)
        session = self._session(errand)
        rewind(session.caches, errand.walk.start)
        session.length = errand.walk.start
        inputs = walk_inputs(self._model, errand.walk)
        try:
            state = self._resumed(errand, inputs) if errand.next_block else self._start(errand, inputs)
            return _Begun(errand, session, state)
        except LookupError as exc:
            self.forget(*errand.key)
            raise RequestRefusedError(
                f"The state before block {errand.next_block} does not fit: it lacks {exc}"
            ) from exc

    def _through_blocks(self, begun: Sequence[_Begun]) -> tuple[list[State], int]:
        """Return the states of walks after the blocks that are here, and the block that is next."""
        state, lengths = begun[0].state, [len(one.errand.walk.inputs) for one in begun]
        caches: StepCaches = begun[0].session.caches
        if len(begun) > 1:
            state = joined([one.state for one in begun])
            caches = [
                JointCache([cache for cache in kept if cache is not None], lengths) if kept[0] is not None else None
                for kept in zip(*(one.session.caches for one in begun), strict=True)
            ]
        first = begun[0].errand
        end = self._end(first)
        for block_idx in range(first.next_block, end):
            state = self._model.step(block_idx, state, caches)
        return ([state] if len(begun) == 1 else parted(state, lengths)), end

    def _end(self, errand: Errand) -> int:
        """Return the block after those that a walk runs through here."""
        end = errand.next_block
        while end < errand.num_blocks and end in self.facts.blocks:
            end += 1
        return end

    def _outcome(self, errand: Errand, next_block: int, state: State) -> Outcome:
        if next_block < errand.num_blocks:
            return errand.after(next_block, self._model.carried(state))
        return read_decision(self._model.read(next_block - 1, newest(state, errand.walk.num_read)), errand.walk)

    def _start(self, errand: Errand, inputs: Tensor) -> State:
        return self._model.start(inputs, walk_noise(self._model, errand.walk))

    def _resumed(self, errand: Errand, inputs: Tensor) -> State:
        return self._model.resumed(inputs, {name: tensor.to(self._dtype) for name, tensor in errand.carried.items()})

    def _refuse(self, errand: Errand) -> None:
        walk, facts = errand.walk, self.facts
        if not errand.next_block < errand.num_blocks <= facts.num_blocks or errand.next_block not in facts.blocks:
            raise RequestRefusedError(
                f"Block {errand.next_block} of {errand.num_blocks} is not served here, but {list(facts.blocks)}."
            )
        if walk.start + len(walk.inputs) > facts.window_bytes:
            raise RequestRefusedError(f"The walk ends beyond the window of {facts.window_bytes} bytes.")
        if UNKNOWN in walk.inputs and not facts.p_span:
            raise RequestRefusedError("The model does not know unknown bytes.")
        if walk.sampling.num_draws > 1 and not facts.has_noise:
            raise RequestRefusedError("The model has no noise to draw.")

    def _session(self, errand: Errand) -> _Session:
        key = (*errand.key, errand.next_block)
        session = self._sessions.get(key)
        if errand.walk.start == 0:
            if self.num_sessions >= self._max_sessions and not self._holds(errand):
                raise HostBusyError(
                    f"All {self._max_sessions} sessions of the host are taken: add a replica, or raise --max-sessions."
                )
            session = self._sessions[key] = _Session(self._own_caches(errand))
        elif session is None or session.length < errand.walk.start:
            raise SessionLostError(f"The keys and values of {errand.walk.start} positions are not here.")
        return session

    def _own_caches(self, errand: Errand) -> Caches:
        """Return caches for the layers that a walk runs through here, None for others."""
        slices = self._model.block_slices
        own = range(slices[errand.next_block].start, slices[self._end(errand) - 1].stop)
        return [cache if idx in own else None for idx, cache in enumerate(self._model.new_caches(errand.num_blocks))]

    def _holds(self, errand: Errand) -> bool:
        return any(key[:2] == errand.key for key in self._sessions)

    def forget(self, client: str, session: int | None = None) -> None:
        """Drop a session, or all of a client's."""
        for key in [key for key in self._sessions if key[0] == client and session in (None, key[1])]:
            del self._sessions[key]
