"""Some blocks of a model that run walks: their keys and values by session, no socket, no clock, one caller at a time.

Owns what a host computes. A session's keys and values live here from its first walk until it is forgotten.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_blocktrain.errors import RequestRefusedError
from lightning_blocktrain.models.block_files import DTYPES, Manifest
from lightning_blocktrain.models.block_model import State, newest
from lightning_blocktrain.models.generation import Caches, Decision, decide, rewind, walk_inputs, walk_noise
from lightning_blocktrain.models.loading import Model
from lightning_blocktrain.models.transformer import VOCABULARY
from lightning_blocktrain.serving.errand import MAX_DRAWS, Errand


class SessionLostError(RequestRefusedError):
    """The host does not hold the keys and values that a walk goes on from."""


@dataclass
class _Session:
    caches: Caches
    length: int = 0
    """Positions that the caches hold, whatever kind of layers there are."""


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
        model_class: Of the model.
    """

    version: str
    blocks: tuple[int, ...]
    num_blocks: int
    dtype: str
    window_bytes: int
    p_span: float
    has_noise: bool
    model_class: str = field(default="", compare=False)


class BlockHost:
    """Runs walks through blocks that it holds.

    Args:
        model: Holds these blocks; see ``load_blocks``.
        manifest: Of the model.
        blocks: Indices of the blocks.
        dtype: Of the weights.
        max_sessions: Most sessions at once.
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
            manifest.model_class,
        )

    @property
    def max_state_bytes(self) -> int:
        """Bytes of the longest state between two blocks that is taken, in fp32."""
        per_position = 2 * self._model.width + VOCABULARY
        return 4 * MAX_DRAWS * self._model.window_bytes * per_position

    @property
    def num_sessions(self) -> int:
        """Sessions whose keys and values are held."""
        return len(self._sessions)

    @torch.inference_mode()
    def run(self, errand: Errand) -> Errand | Decision:
        """Run a walk through those of its next blocks that are here; return it as it goes on, or what it decides.

        Raises:
            RequestRefusedError: If it makes no sense here.
            SessionLostError: If it goes on from what is not here.
        """
        self._refuse(errand)
        session = self._session(errand)
        walk, block_idx, inputs = errand.walk, errand.next_block, walk_inputs(self._model, errand.walk)
        rewind(session.caches, walk.start)
        session.length = walk.start
        try:
            state = self._resumed(errand, inputs) if block_idx else self._start(errand, inputs)
            while block_idx < errand.num_blocks and block_idx in self.facts.blocks:
                state = self._model.step(block_idx, state, session.caches)
                block_idx += 1
        except (LookupError, RuntimeError) as exc:
            self.forget(*errand.key)
            raise RequestRefusedError(f"The state before block {errand.next_block} does not fit: {exc}") from exc
        session.length = walk.start + len(walk.inputs)
        if block_idx < errand.num_blocks:
            return errand.after(block_idx, self._model.carried(state))
        if walk.num_read == 0:
            return Decision((), ())
        return decide(self._model.read(block_idx - 1, newest(state, walk.num_read)), walk)

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
        if max(walk.inputs) >= 256 and not facts.p_span:
            raise RequestRefusedError("The model does not know unknown bytes.")
        if walk.sampling.num_draws > 1 and not facts.has_noise:
            raise RequestRefusedError("The model has no noise to draw.")

    def _session(self, errand: Errand) -> _Session:
        key = (*errand.key, errand.next_block)
        session = self._sessions.get(key)
        if errand.walk.start == 0:
            if session is None and len(self._sessions) >= self._max_sessions:
                raise RequestRefusedError(f"All {self._max_sessions} sessions are taken.")
            session = self._sessions[key] = _Session(self._own_caches(errand))
        elif session is None or session.length < errand.walk.start:
            raise SessionLostError(f"The keys and values of {errand.walk.start} positions are not here.")
        return session

    def _own_caches(self, errand: Errand) -> Caches:
        """Return caches for the layers that a walk runs through here, None for others."""
        slices, end = self._model.block_slices, errand.next_block
        while end < errand.num_blocks and end in self.facts.blocks:
            end += 1
        own = range(slices[errand.next_block].start, slices[end - 1].stop)
        return [cache if idx in own else None for idx, cache in enumerate(self._model.new_caches(errand.num_blocks))]

    def forget(self, client: str, session: int | None = None) -> None:
        """Drop a session, or all of a client's."""
        for key in [key for key in self._sessions if key[0] == client and session in (None, key[1])]:
            del self._sessions[key]
