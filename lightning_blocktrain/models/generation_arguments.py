"""What a caller may ask of a model that generates, refused before anything is computed."""

import sys
from typing import Protocol

from lightning_blocktrain.errors import explain

MAX_DRAWS = 64
"""Most walks whose probabilities are averaged."""
MAX_SEED = 2**63 - 1


def refuse_generation(prompt: bytes, num_bytes: int, temperature: float, seed: int) -> None:
    """Refuse what no model can generate from.

    Raises:
        ValueError: If ``prompt`` is not bytes, or a number is none, negative or too large.
    """
    if not isinstance(prompt, bytes):
        got = f"prompt={type(prompt).__name__}"
        raise ValueError(explain("prompt must be bytes", got, "encode text with .encode()"))
    if not _is_count(num_bytes, 0):
        raise ValueError(explain("num_bytes must be a whole number from 0 on", f"num_bytes={num_bytes!r}", "use 200"))
    if not is_temperature(temperature):
        got = f"temperature={temperature!r:.40}"
        raise ValueError(explain("temperature must be a finite number from 0 on", got, "use 1, or 0 for greedy"))
    if not _is_count(seed, 0, MAX_SEED):
        raise ValueError(explain("seed must be a whole number in 0 .. 2**63 - 1", f"seed={seed!r:.40}", "use 0"))


def is_temperature(value: object) -> bool:
    """Tell whether logits can be divided by a value, 0 for greedy."""
    # A whole number may be longer than any float; comparing it is exact.
    return isinstance(value, int | float) and type(value) is not bool and 0 <= value <= sys.float_info.max


def _is_count(value: object, least: int, most: int = 2**63) -> bool:
    return type(value) is int and least <= value <= most


class Generates(Protocol):
    """What says how a model can generate."""

    @property
    def window_bytes(self) -> int:
        """Longest window."""
        ...

    @property
    def p_span(self) -> float:
        """Above 0: it was trained on unknown bytes."""
        ...

    @property
    def has_noise(self) -> bool:
        """Whether its walks start from noise."""
        ...


def refuse_chunks(model: Generates, chunk_bytes: int, sweeps: int, num_draws: int) -> None:
    """Refuse a way to decide chunks that a model does not offer.

    Raises:
        ValueError: Naming what does not fit.
    """
    if not _is_count(chunk_bytes, 1, model.window_bytes):
        got = f"chunk_bytes={chunk_bytes!r}, window_bytes={model.window_bytes}"
        raise ValueError(explain("chunk_bytes must be in 1 .. window_bytes", got, "1 is autoregressive"))
    if not _is_count(sweeps, 1):
        raise ValueError(explain("sweeps must be a whole number from 1 on", f"sweeps={sweeps!r}", "use 1"))
    if not _is_count(num_draws, 1, MAX_DRAWS):
        raise ValueError(explain(f"num_draws must be in 1 .. {MAX_DRAWS}", f"num_draws={num_draws!r}", "use 1"))
    if num_draws > 1 and not model.has_noise:
        rule = "num_draws above 1 needs a model with noise"
        raise ValueError(explain(rule, f"a model without, num_draws={num_draws}", "leave num_draws out"))
    if chunk_bytes > 1 and not model.p_span:
        rule = "chunk_bytes above 1 needs a model that was trained on unknown bytes"
        raise ValueError(explain(rule, f"chunk_bytes={chunk_bytes}, p_span=0", "train with p_span=0.5"))


def checked_exit(num_blocks: int | None, of_blocks: int) -> int:
    """Return the number of blocks before an exit; None is that after all ``of_blocks`` of them.

    Raises:
        ValueError: If there is no such exit.
    """
    if num_blocks is not None and not 1 <= num_blocks <= of_blocks:
        rule = f"num_blocks before an exit (--exit) must be in 1 .. {of_blocks}"
        raise ValueError(explain(rule, f"num_blocks={num_blocks}", "leave it out for all blocks"))
    return of_blocks if num_blocks is None else num_blocks
