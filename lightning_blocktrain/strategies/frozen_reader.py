"""When a worker on a line fetches the blocks around its own.

Owns the schedule: every ``prefix_every`` rounds of the worker's own block, in the newest version that there is. Nobody
waits: where a block lags behind, its copy is read on, and asked for again a round later.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_blocktrain.errors import TransportError, explain
from lightning_blocktrain.rounds import block_entry
from lightning_blocktrain.rounds.codecs import Codec, Encoded
from lightning_blocktrain.strategies.frozen_blocks import FrozenBlocks
from lightning_blocktrain.transport import Fetched, RunTerms

Fetch = Callable[[str, int, Codec], Fetched | None]
"""Returns the newest version of an entry if it is newer than a version, in the form of a codec."""


class FrozenReader:
    """Keeps a worker's copies of the blocks around its own as new as the terms of its run want them.

    Args:
        frozen: The copies.
        blocks: Which blocks it reads; none where the layout has no frozen prefix.
    """

    def __init__(self, frozen: FrozenBlocks, blocks: Sequence[int]) -> None:
        self._frozen = frozen
        self._blocks = blocks
        self._served: dict[int, int] = {}

    def renew(self, version: int, terms: RunTerms, fetch: Fetch) -> int:
        """Fetch what is too old for the round that begins; return the bytes that came.

        Args:
            version: Of the worker's own block.
            terms: Of the run.
            fetch: Asks the coordinator.

        Raises:
            TransportError: If there is no copy of a block at all, or what came is not of this model.
        """
        wanted, num_bytes = terms.prefix_version(version), 0
        for block_idx in self._blocks:
            if self._served.get(block_idx, -1) < wanted:
                num_bytes += self._renew(block_idx, terms.prefix_codec, fetch)
            if self._frozen.versions[block_idx] >= wanted:
                self._served[block_idx] = wanted
        return num_bytes

    def _renew(self, block_idx: int, codec: Codec, fetch: Fetch) -> int:
        entry, have = block_entry(block_idx), self._frozen.versions.get(block_idx, -1)
        fetched = fetch(entry, have, codec)
        if fetched is None:
            if have < 0:
                rule = f"a coordinator must have every block: {entry} is read as a frozen block"
                raise TransportError(explain(rule, "no answer in time", "look at the coordinator's status"))
            return 0
        try:
            self._frozen.take(block_idx, fetched.version, codec, Encoded(fetched.params, dict(fetched.meta)))
        except ValueError as exc:
            raise TransportError(f"{entry} as a frozen block: {exc}") from exc
        return sum(tensor.numel() * tensor.element_size() for tensor in fetched.params.values())

    def state_dict(self, version: int) -> dict[str, Any]:
        """Return the copies that do not follow from the masters of a version of the worker's block; empty if none."""
        is_stale = any(kept < version for kept in self._frozen.versions.values())
        return {"prefix": {"round": version, "blocks": self._frozen.state_dict()}} if is_stale else {}

    def load_state_dict(self, state: Mapping[str, Any], version: int, terms: RunTerms) -> None:
        """Read on from what ``state_dict`` returned, if it is of this version of the worker's block.

        Where the versions begin anew (a run without a coordinator's state), the copies are fetched anew as well.
        """
        kept = state.get("prefix")
        if kept and kept["round"] == version:
            self._frozen.load_state_dict(kept["blocks"])
            wanted = terms.prefix_version(version)
            self._served = {b: wanted for b in self._blocks if self._frozen.versions.get(b, -1) >= wanted}
