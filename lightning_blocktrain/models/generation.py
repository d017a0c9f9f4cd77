"""Deciding bytes one chunk after the other, with the keys and values of decided bytes at hand.

Owns the window and the random numbers of its positions. What a traversal of the blocks computes is the walker's
business: ``LocalWalker`` runs a model in this process, and one that is served runs elsewhere.

Every position of a text has noise of its own, and every byte Gumbel noise of its own: functions of the seed and the
position alone. So whoever repeats a traversal, on whatever machine, repeats its random numbers.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_blocktrain.models.sampling import gumbel_at, position_generator, sample_bytes
from lightning_blocktrain.models.transformer import UNKNOWN, JointCache, KeyValueCache

Caches = Sequence[KeyValueCache | None]
"""One per layer; None for a layer that looks at no other position."""

StepCaches = Sequence[KeyValueCache | JointCache | None]
"""The same, or those of several texts at once."""


@dataclass(frozen=True)
class Sampling:
    """How the bytes of a text are drawn.

    Args:
        temperature: 0 is greedy.
        seed: Of all noise: the same seed gives the same bytes.
        num_draws: K, walks from noise of their own, whose probabilities are averaged.
    """

    temperature: float = 1.0
    seed: int = 0
    num_draws: int = 1


@dataclass(frozen=True)
class Walk:
    """One traversal of the blocks, for the newest positions of a window.

    Args:
        start: Positions of the window whose keys and values are kept; those of later ones are forgotten.
        inputs: The bytes from there on, ``UNKNOWN`` where not decided.
        position: Where the first of ``inputs`` stands in the text.
        num_read: How many of them, the last ones, decide the byte after them; 0: keys and values only.
        sampling: How they are drawn.
    """

    start: int
    inputs: tuple[int, ...]
    position: int
    num_read: int
    sampling: Sampling


class Decision(NamedTuple):
    """The bytes that a walk decided, and the probability that the model gave each of them (at temperature 1)."""

    decided: tuple[int, ...]
    probs: tuple[float, ...]


Walker = Callable[[Walk], Decision]


class WalksBlocks(Protocol):
    """A model whose next-byte logits can be asked for at an exit, position after position."""

    window_bytes: int

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    def new_caches(self, num_blocks: int) -> Caches:
        """Return empty caches for one window, of the layers before an exit."""
        ...

    def draw_noise(self, shape: Sequence[int], generator: torch.Generator) -> Tensor | None:
        """Return the noise of (B, T) positions; None for a model that needs none."""
        ...

    def exit_logits(
        self,
        inputs: Tensor,
        num_blocks: int | None = None,
        noise: Tensor | None = None,
        caches: Caches | None = None,
        num_read: int | None = None,
    ) -> Tensor:
        """Return logits (B, T, V) for the last ``num_read`` of the positions after those that the caches hold."""
        ...


class LocalWalker:
    """Runs a model of this process.

    Args:
        model: Decides.
        num_blocks: Blocks before the exit that decides.
    """

    def __init__(self, model: WalksBlocks, num_blocks: int) -> None:
        self._model = model
        self._num_blocks = num_blocks
        self._caches = model.new_caches(num_blocks)

    @torch.no_grad()
    def __call__(self, walk: Walk) -> Decision:
        """Return what the model decides."""
        rewind(self._caches, walk.start)
        inputs, noise = walk_inputs(self._model, walk), walk_noise(self._model, walk)
        logits = self._model.exit_logits(inputs, self._num_blocks, noise, self._caches, walk.num_read)
        return read_decision(logits, walk)


def rewind(caches: Caches, length: int) -> None:
    """Forget all positions but the first ``length``."""
    for cache in caches:
        if cache is not None:
            cache.rewind(length)


def walk_inputs(model: WalksBlocks, walk: Walk) -> Tensor:
    """Return the inputs of a walk, int64 (K, T)."""
    return torch.tensor([walk.inputs], device=model.device).expand(walk.sampling.num_draws, -1)


def walk_noise(model: WalksBlocks, walk: Walk) -> Tensor | None:
    """Return the noise of a walk's positions, (K, T, D); None for a model that needs none."""
    sampling, positions = walk.sampling, range(walk.position, walk.position + len(walk.inputs))
    generators = (position_generator(sampling.seed, position, "noise") for position in positions)
    drawn = [model.draw_noise((sampling.num_draws, 1), generator) for generator in generators]
    given = [noise for noise in drawn if noise is not None]
    return torch.cat(given, dim=1) if given else None


def read_decision(logits: Tensor, walk: Walk) -> Decision:
    """Return the bytes that the last positions of a walk decide.

    Args:
        logits: Of its ``num_read`` last positions, (K, num_read, V).
        walk: The walk.
    """
    if walk.num_read == 0:
        return Decision((), ())
    # The mean of the draws' probabilities is the model's distribution.
    log_probs = logits.float().cpu().log_softmax(-1).logsumexp(0) - torch.tensor(float(walk.sampling.num_draws)).log()
    first = walk.position + len(walk.inputs) - walk.num_read + 1
    decided = sample_bytes(log_probs, walk.sampling.temperature, gumbel_at(walk.sampling.seed, first, walk.num_read))
    probs = log_probs.gather(-1, decided[:, None])[:, 0].exp()
    return Decision(tuple(decided.tolist()), tuple(probs.tolist()))


class Decoder:
    """Continues one text.

    Args:
        walk: Traverses the blocks.
        window_bytes: Longest window of the model; one that is full is restarted from its newer half.
        sampling: How bytes are drawn.
    """

    def __init__(self, walk: Walker, window_bytes: int, sampling: Sampling) -> None:
        self._walk = walk
        self._window = window_bytes
        self._sampling = sampling
        self._first: int | None = None
        """Where the window begins in the text."""
        self._num_cached = 0

    def decide(self, text: Sequence[int], num_new: int, sweeps: int) -> Decision:
        """Return the next ``num_new`` bytes after ``text``.

        Args:
            text: That of the last call and what it returned.
            num_new: How many to decide.
            sweeps: Each one after the first reads the bytes of the one before.
        """
        fresh = self._fresh(text, num_new)
        found = self._traverse([*fresh, *[UNKNOWN] * (num_new - 1)], num_new)
        self._num_cached += len(fresh)
        for _ in range(min(sweeps, num_new) - 1):  # after num_new sweeps every byte follows from decided ones
            later = self._traverse(found.decided[:-1], num_new - 1)
            found = Decision(found.decided[:1] + later.decided, found.probs[:1] + later.probs)
        return found

    def check(self, text: Sequence[int], guessed: Sequence[int]) -> Decision:
        """Return the bytes that follow ``text`` and each of the bytes that somebody guessed, in one traversal.

        Only those are returned that follow from decided bytes: up to the first that differs from its guess. They are
        what ``decide`` returns one by one: the window begins where it would, and guesses beyond its end are left out.
        """
        fresh = self._fresh(text, 1)
        guessed = guessed[: self._window - self._num_cached - len(fresh)]
        found = self._traverse([*fresh, *guessed], len(guessed) + 1)
        num_right = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(guessed, found.decided, strict=False))))
        self._num_cached += len(fresh) + num_right
        return Decision(found.decided[: num_right + 1], found.probs[: num_right + 1])

    def go_back(self, length: int) -> None:
        """Forget what was made of all bytes of the text but the first ``length``: another text goes on from them."""
        if self._first is not None:
            if length <= self._first:
                self._first = None
            else:
                self._num_cached = min(self._num_cached, length - self._first)

    def _fresh(self, text: Sequence[int], num_new: int) -> list[int]:
        """Return the bytes of the window that no walk has kept; begin the window anew where it is too full."""
        window = self._window
        if self._first is None or len(text) - self._first + num_new - 1 > window:
            keep = window if self._first is None else (window + 1) // 2
            self._first, self._num_cached = len(text) - min(len(text), keep, window - num_new + 1), 0
        return list(text[self._first + self._num_cached :])

    def _traverse(self, inputs: Sequence[int], num_read: int) -> Decision:
        assert self._first is not None
        position = self._first + self._num_cached
        return self._walk(Walk(self._num_cached, tuple(inputs), position, num_read, self._sampling))


def continuation(decoder: Decoder, prompt: bytes, num_bytes: int, chunk_bytes: int, sweeps: int) -> Generator[Decision]:
    """Yield what continues a prompt, chunk by chunk; see ``BlockModel.generate``."""
    text = list(prompt or b"\n")
    end = len(text) + num_bytes
    while len(text) < end:
        decision = decoder.decide(text, min(chunk_bytes, end - len(text)), sweeps)
        text += decision.decided
        yield decision


class Draft:
    """Guesses what follows a text, with a model that may err: the draft of speculative decoding.

    It draws with the random numbers of whoever checks it, so that its guesses are right as often as the two models
    agree. Whatever it guesses, the checked text is the other model's own.

    Args:
        decoder: Of the model that guesses, with the sampling of the one that checks.
        chunk_bytes: Bytes that it decides per sweep.
        sweeps: Sweeps per chunk.
    """

    def __init__(self, decoder: Decoder, chunk_bytes: int = 1, sweeps: int = 1) -> None:
        self._decoder = decoder
        self._chunk_bytes = chunk_bytes
        self._sweeps = sweeps
        self._seen: list[int] = []

    def guess(self, text: Sequence[int], num_guesses: int) -> list[int]:
        """Return the bytes that probably follow ``text``."""
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(self._seen, text, strict=False))
        self._decoder.go_back(min(len(list(alike)), len(text) - 1))  # the newest byte is read again
        self._seen = list(text)
        guessed: list[int] = []
        while len(guessed) < num_guesses:
            self._seen = [*text, *guessed]
            num_new = min(self._chunk_bytes, num_guesses - len(guessed))
            guessed += self._decoder.decide(self._seen, num_new, self._sweeps).decided
        return guessed


def checked_continuation(
    decoder: Decoder, draft: Draft, prompt: bytes, num_bytes: int, num_guesses: int
) -> Generator[Decision]:
    """Decode speculatively: yield what ``continuation`` yields byte by byte, several where a draft has guessed them.

    Args:
        decoder: Of the model whose text it is.
        draft: Guesses.
        prompt: What is continued.
        num_bytes: How many bytes to add.
        num_guesses: Guesses per traversal of the decoder's blocks.
    """
    text = list(prompt or b"\n")
    end = len(text) + num_bytes
    while len(text) < end:
        guesses = draft.guess(text, min(num_guesses, end - len(text) - 1))
        decision = decoder.check(text, guesses)
        text += decision.decided
        yield decision
