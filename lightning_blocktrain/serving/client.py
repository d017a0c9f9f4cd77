"""Generate with blocks that are served elsewhere: what ``model.generate`` does, with every traversal over the network.

Owns sessions and what happens when a host is lost: the walks whose keys and values are still needed run again, on hosts
that live, and the text goes on. Random numbers belong to positions, so it goes on with the same bytes.
"""

import itertools
import logging
import os
import random
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Self

from lightning_blocktrain.errors import TransportError, explain
from lightning_blocktrain.models.block_files import DTYPES
from lightning_blocktrain.models.generation import (
    Decision,
    Decoder,
    Draft,
    Sampling,
    Walk,
    checked_continuation,
    continuation,
)
from lightning_blocktrain.models.generation_arguments import checked_exit, refuse_chunks, refuse_generation
from lightning_blocktrain.models.loading import Model
from lightning_blocktrain.serving.address import Address, parse_route
from lightning_blocktrain.serving.block_host import Facts
from lightning_blocktrain.serving.errand import Errand
from lightning_blocktrain.serving.fleet import Fleet, HostLostError, NeighbourLostError, Patience
from lightning_blocktrain.transport.address import TOKEN
from lightning_blocktrain.transport.loop import LoopThread

log = logging.getLogger(__name__)

MAX_MOVES = 8
"""Times that a walk is tried on other hosts before it fails."""


class SweepClient:
    """Generates from a model whose blocks are served on several hosts. Its methods may be called from any thread.

    Args:
        route: ``host:port`` or ``tls://host:port``, with commas between them; several of one block are replicas.
        token: Of the hosts; None: from ``BLOCKTRAIN_TOKEN``.
        wire: How states travel: ``fp32``, or ``bf16`` for half the bytes.
        chained: Whether a walk goes from host to host; False: every host answers here, and what it computed is sent on.
        patience: How long to wait.

    Raises:
        ServingError: If no host is reached, or they serve different versions.
        ValueError: If an argument is wrong.
    """

    def __init__(
        self,
        route: str | Sequence[Address],
        token: str | None = None,
        wire: str = "fp32",
        chained: bool = True,
        patience: Patience | None = None,
    ) -> None:
        if wire not in DTYPES:
            rule = f"wire must be {' or '.join(map(repr, DTYPES))}"
            raise ValueError(explain(rule, f"wire={wire!r}", "use 'fp32'"))
        addresses = parse_route(route) if isinstance(route, str) else tuple(route)
        given = os.environ.get(TOKEN, "") if token is None else token
        self._wire = wire
        self._chained = chained
        self._loop = LoopThread("blocktrain-sweeps")
        self._fleet = Fleet(addresses, given, patience or Patience())
        self._sessions = itertools.count(random.getrandbits(16))
        try:
            self.facts: Facts = self._loop.run(self._fleet.connect)
        except BaseException:
            self.close()
            raise

    @property
    def num_blocks(self) -> int:
        """B of the model."""
        return self.facts.num_blocks

    @property
    def traffic_bytes(self) -> tuple[int, int]:
        """Bytes that this client has sent and received."""
        return self._fleet.sent_bytes, self._fleet.received_bytes

    def generate(
        self,
        prompt: bytes,
        num_bytes: int,
        *,
        num_blocks: int | None = None,
        chunk_bytes: int = 1,
        sweeps: int = 1,
        num_draws: int = 1,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> bytes:
        """Continue ``prompt``; arguments, result and errors are those of ``BlockModel.generate``.

        Raises:
            ServingError: If a block is served by nobody any more, or no answer comes in time.
        """
        choices = {"num_blocks": num_blocks, "chunk_bytes": chunk_bytes, "sweeps": sweeps, "num_draws": num_draws}
        chunks = self.stream(prompt, num_bytes, **choices, temperature=temperature, seed=seed)  # type: ignore[arg-type]
        return b"".join(bytes(chunk.decided) for chunk in chunks)

    def stream(
        self,
        prompt: bytes,
        num_bytes: int,
        *,
        num_blocks: int | None = None,
        chunk_bytes: int = 1,
        sweeps: int = 1,
        num_draws: int = 1,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> Generator[Decision]:
        """Yield what continues ``prompt``, chunk by chunk, each byte with its probability; see ``generate``."""
        refuse_generation(prompt, num_bytes, temperature, seed)
        refuse_chunks(self.facts, chunk_bytes, sweeps, num_draws)
        sampling = Sampling(temperature, seed, num_draws)
        return self._stream(prompt, num_bytes, checked_exit(num_blocks, self.num_blocks), chunk_bytes, sweeps, sampling)

    def _stream(
        self, prompt: bytes, num_bytes: int, num_blocks: int, chunk_bytes: int, sweeps: int, sampling: Sampling
    ) -> Generator[Decision]:
        with self.walker(num_blocks) as walker:
            decoder = Decoder(walker, self.facts.window_bytes, sampling)
            yield from continuation(decoder, prompt, num_bytes, chunk_bytes, sweeps)

    def stream_checked(
        self,
        prompt: bytes,
        num_bytes: int,
        draft: "Model | SweepClient",
        *,
        num_guesses: int = 8,
        draft_chunk_bytes: int = 1,
        draft_sweeps: int = 1,
        num_blocks: int | None = None,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> Generator[Decision]:
        """Yield what ``stream`` yields byte by byte with the same seed, several at a time where a draft guessed right.

        Every traversal of the hosts checks ``num_guesses`` guesses and adds one byte of its own.

        Args:
            prompt: What to continue.
            num_bytes: How many bytes to add.
            draft: Guesses: a small model here, the exit after some blocks (``model.at_exit``), or served blocks.
            num_guesses: Guesses per traversal, 1 or more.
            draft_chunk_bytes: Bytes that the draft decides per sweep.
            draft_sweeps: Its sweeps per chunk.
            num_blocks: Blocks before the exit that decides; None: all.
            temperature: 0 is greedy.
            seed: The same seed gives the same bytes, whatever the draft.

        Raises:
            ValueError: If a number is out of range.
            ServingError: If a block is served by nobody any more, or no answer comes in time.
        """
        refuse_generation(prompt, num_bytes, temperature, seed)
        guesser = draft.facts if isinstance(draft, SweepClient) else draft
        refuse_chunks(guesser, draft_chunk_bytes, draft_sweeps, 1)
        if num_guesses < 1:
            raise ValueError(explain("num_guesses must be at least 1", f"num_guesses={num_guesses}", "use 8"))
        last, sampling = checked_exit(num_blocks, self.num_blocks), Sampling(temperature, seed)

        def chunks() -> Generator[Decision]:
            with self.walker(last) as walker, ExitStack() as stack:
                walks = draft.walker()
                if isinstance(walks, RemoteWalker):
                    stack.enter_context(walks)
                decoder = Decoder(walker, self.facts.window_bytes, sampling)
                guesses = Draft(Decoder(walks, guesser.window_bytes, sampling), draft_chunk_bytes, draft_sweeps)
                yield from checked_continuation(decoder, guesses, prompt, num_bytes, num_guesses)

        return chunks()

    def walker(self, num_blocks: int | None = None) -> "RemoteWalker":
        """Return what walks through the blocks before an exit, for one text."""
        last = checked_exit(num_blocks, self.num_blocks)
        return RemoteWalker(self._fleet, self._loop, self._sessions, last, self._wire, self._chained)

    def close(self) -> None:
        """End all connections."""
        self._loop.close(self._fleet.close)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all connections."""
        self.close()


class RemoteWalker:
    """Walks for one text, in one session at a time; a context that ends with the session.

    Args:
        fleet: The hosts.
        loop: Where the fleet lives.
        sessions: Numbers of sessions that have not been.
        num_blocks: Blocks before the exit that decides.
        wire: How states travel.
        chained: Whether a walk goes from host to host.
    """

    def __init__(
        self,
        fleet: Fleet,
        loop: LoopThread,
        sessions: Iterator[int],
        num_blocks: int,
        wire: str,
        chained: bool,
    ) -> None:
        self._fleet = fleet
        self._loop = loop
        self._sessions = sessions
        self._num_blocks = num_blocks
        self._wire = wire
        self._chained = chained
        self._session = -1
        self._path: list[Address] = []
        self._kept: list[Walk] = []
        """The walks whose keys and values the next one may go on from, in order."""
        self._number = 0
        self.num_moves = 0
        """Times that the text was moved to other hosts."""

    def __call__(self, walk: Walk) -> Decision:
        """Return what the hosts decide.

        Raises:
            ServingError: If they cannot, and no others can.
        """
        # What a walk goes back behind needs no repetition; one that it cuts does.
        self._kept = [kept for kept in self._kept if kept.start < walk.start]
        for _ in range(MAX_MOVES):
            replayed: list[Walk] = []
            if not self._path:
                self._settle()
                replayed = [_silent(kept) for kept in self._kept]
            try:
                decision = self._run([*replayed, walk])
            except HostLostError as exc:
                lost = exc
                self.num_moves += 1
                if isinstance(exc, NeighbourLostError) and self._fleet.reaches(exc.address):
                    log.warning("%s States of this text go through the client from here on, more slowly.", exc)
                    self._chained = False
                self._leave()
            else:
                self._kept.append(walk)
                return decision
        raise lost

    def _settle(self) -> None:
        """Choose hosts for a new session."""
        self._session = next(self._sessions)
        self._path = self._loop.run(lambda: self._fleet.path(self._num_blocks, self._session))

    def _leave(self) -> None:
        """Have the hosts of this session forget it."""
        session, path = self._session, self._path
        self._path = []
        with suppress(TransportError):  # the client is closed: they have forgotten it
            self._loop.run(lambda: self._fleet.forget(session, path))

    def _run(self, walks: Sequence[Walk]) -> Decision:
        errands = []
        for walk in walks:
            self._number += 1
            errands.append(
                Errand(self._fleet.name, self._session, self._number, walk, self._num_blocks, 0, (), wire=self._wire)
            )
        *replayed, errand = errands
        traverse = self._fleet.walk if self._chained else self._fleet.walk_step_by_step
        return self._loop.run(lambda: traverse(errand, self._path, replayed))

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tell the hosts that the session is over."""
        self._leave()


def _silent(walk: Walk) -> Walk:
    """Return a walk that leaves the same keys and values and decides nothing."""
    return Walk(walk.start, walk.inputs, walk.position, 0, walk.sampling)
