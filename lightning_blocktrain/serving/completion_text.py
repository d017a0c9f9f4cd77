"""From decided bytes to the text and the JSON of a completion. Pure.

Owns where a text ends, which bytes are held back until it is known that no stop and no half of a character are among
them, and the shape of the answers. Owns no request (``completion_fields.py``) and no socket (``completions.py``).
"""

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_blocktrain.models.generation import Decision

SMALLEST = 2.0**-149
"""Of an fp32 above 0: a probability that is less has a log-probability that JSON can hold."""


@dataclass(frozen=True)
class Piece:
    """Part of a completion.

    Args:
        text: What it adds.
        tokens: Its bytes: a character of ASCII as it is, any other byte as ``bytes:`` and an escape.
        logprobs: Natural logarithm of the probability of each.
        offsets: Where in the completion, in characters, the character begins that each belongs to.
        finish_reason: Of the last piece, else None.
    """

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    offsets: tuple[int, ...]
    finish_reason: str | None = None


class Transcript:
    """The text of one completion as its bytes are decided, whatever the sizes of the chunks.

    Args:
        stops: The completion ends before the first of them that is complete.
        echoed: Text before that of the completion; the first piece holds it.
    """

    def __init__(self, stops: Sequence[bytes] = (), echoed: str = "") -> None:
        self._stops = tuple(stops)
        self._echoed = echoed
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = len(echoed)
        self._held = bytearray()
        self._probs: list[float] = []

    def add(self, decision: Decision) -> Piece:
        """Take a chunk and return what it settles; the piece of a completion that a stop has ended is its last."""
        for byte, prob in zip(decision.decided, decision.probs, strict=True):
            self._held.append(byte)
            self._probs.append(prob)
            ending = max((len(stop) for stop in self._stops if self._held.endswith(stop)), default=0)
            if ending:
                return self._released(len(self._held) - ending, "stop")
        return self._released(len(self._held) - self._length_of_a_beginning(), None)

    def end(self) -> Piece:
        """Return the last piece of a completion that no stop has ended."""
        return self._released(len(self._held), "length")

    def _length_of_a_beginning(self) -> int:
        """Return how many of the last bytes may be the beginning of a stop."""
        sizes = (
            size
            for stop in self._stops
            for size in range(min(len(stop) - 1, len(self._held)), 0, -1)
            if self._held.endswith(stop[:size])
        )
        return max(sizes, default=0)

    def _released(self, num_bytes: int, finish_reason: str | None) -> Piece:
        text, self._echoed = self._echoed, ""
        offsets = []
        for byte in self._held[:num_bytes]:
            found = self._decoder.decode(bytes([byte]))
            text += found
            self._num_chars += len(found)
            unfinished, _ = self._decoder.getstate()  # what may still become a character
            offsets.append(self._num_chars + len(unfinished.decode(errors="replace")) - 1)
        if finish_reason is not None:
            text += self._decoder.decode(b"", final=True)
        tokens = tuple(token_of(byte) for byte in self._held[:num_bytes])
        logprobs = tuple(math.log(max(SMALLEST, prob)) for prob in self._probs[:num_bytes])
        del self._held[:num_bytes], self._probs[:num_bytes]
        return Piece(text, tokens, logprobs, tuple(offsets), finish_reason)


def token_of(byte: int) -> str:
    """Return how a byte is written as a token."""
    return chr(byte) if byte < 128 else f"bytes:\\x{byte:02x}"


def joined(pieces: Sequence[Piece]) -> Piece:
    """Return all pieces of a completion as one."""
    return Piece(
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.tokens),
        tuple(logprob for piece in pieces for logprob in piece.logprobs),
        tuple(offset for piece in pieces for offset in piece.offsets),
        pieces[-1].finish_reason,
    )


@dataclass(frozen=True)
class Envelope:
    """What all answers to one request have in common.

    Args:
        name: Of the answer.
        created: Seconds since 1970.
        model: Name of the model.
        version: Of its weights.
        seed: Of the first choice.
        logprobs: Whether log-probabilities are wanted.
    """

    name: str
    created: int
    model: str
    version: str
    seed: int
    logprobs: bool

    def answer(self, choices: Sequence[tuple[int, Piece]], usage: dict[str, int] | None = None) -> dict[str, Any]:
        """Return the JSON of a whole answer, or of one event."""
        found: dict[str, Any] = {
            "id": self.name,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.version,
            "seed": self.seed,
            "choices": [self._choice(index, piece) for index, piece in choices],
        }
        return found if usage is None else {**found, "usage": usage}

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        logprobs = {
            "tokens": piece.tokens,
            "token_logprobs": piece.logprobs,
            "text_offset": piece.offsets,
            "top_logprobs": None,
        }
        return {
            "text": piece.text,
            "index": index,
            "logprobs": logprobs if self.logprobs else None,
            "finish_reason": piece.finish_reason,
        }


def usage_of(prompt_bytes: int, completion_bytes: int) -> dict[str, int]:
    """Return how much was read and written, in tokens, which are bytes."""
    total = prompt_bytes + completion_bytes
    return {"prompt_tokens": prompt_bytes, "completion_tokens": completion_bytes, "total_tokens": total}
