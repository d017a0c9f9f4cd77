"""What an entry remembers of its rounds: who was accepted, how long updates were and how long they took.

Owns bounded lists and the two limits that follow from them, of the length of an update and of the time of a round.
Owns no verdict. Pure: the clock is an argument.
"""

import math
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from lightning_blocktrain.rounds.merge import DEADLINE_SLACK, Params, RoundRules, as_params

OUTLIER_WINDOW = 20
"""Accepted norms whose median judges the next ones."""
OUTLIER_MIN_HISTORY = 5
"""With fewer accepted norms nothing is refused as an outlier: a median of two or three says little."""
REMEMBERED_VERSIONS = 20
"""Closed rounds whose accepted workers are remembered to tell a retry from a late update."""
ARRIVAL_WINDOW = 60
"""Arrivals whose quantile sets an adaptive deadline."""
ARRIVAL_MIN_HISTORY = 8
"""With fewer arrivals a round lasts ``deadline_s``."""


def num_bases(rules: RoundRules) -> int:
    """Return how many masters of closed rounds are kept, for stale work on them to count."""
    return rules.max_staleness if rules.late == "stale_weighted" else 0


class History:
    """The memory of one entry.

    Args:
        rules: Of the run.
    """

    def __init__(self, rules: RoundRules) -> None:
        self._rules = rules
        self._norms: list[float] = []
        self._accepted_on: dict[int, frozenset[int]] = {}
        self._bases: dict[int, Params] = {}
        self._opened_at: dict[int, float] = {}
        self._arrivals: list[float] = []

    def accepted_on(self, base: int) -> frozenset[int]:
        """Return the workers of whom an update of this base was merged, whichever round merged it."""
        return self._accepted_on.get(base, frozenset())

    def master_of(self, version: int) -> Params | None:
        """Return the tensors of a closed version if stale work on it still counts, else None."""
        return self._bases.get(version)

    @property
    def outlier_limit(self) -> float:
        """Longest norm of a delta that is accepted at present.

        Only norms of closed rounds are looked at: a verdict does not depend on the order of arrival.
        """
        if self._rules.outlier_factor is None or len(self._norms) < OUTLIER_MIN_HISTORY:
            return math.inf
        middle = median(self._norms)
        # A warm-up from a learning rate of 0 gives zero deltas; their median must not refuse all that follow.
        return self._rules.outlier_factor * middle if middle > 0.0 else math.inf

    @property
    def limit_s(self) -> float:
        """Seconds that a round which opens now lasts at most."""
        quantile, deadline_s = self._rules.deadline_quantile, self._rules.deadline_s
        if quantile is None or len(self._arrivals) < ARRIVAL_MIN_HISTORY:
            return deadline_s
        ordered = sorted(self._arrivals)
        return min(deadline_s, DEADLINE_SLACK * ordered[math.ceil(quantile * len(ordered)) - 1])

    def note_opening(self, version: int, now: float) -> None:
        """Note when the round of a version began."""
        self._opened_at[version] = now
        self._opened_at.pop(version - REMEMBERED_VERSIONS, None)

    def note_arrival(self, base: int, now: float) -> None:
        """Note when an update on this base came, in time or late."""
        if base in self._opened_at:
            self._arrivals = [*self._arrivals, now - self._opened_at[base]][-ARRIVAL_WINDOW:]

    def note_close(self, version: int, master: Params, merged: Iterable[tuple[int, int]], norms: list[float]) -> None:
        """Note what a round did.

        Args:
            version: Of the round.
            master: The tensors that its updates were based on; kept as long as stale work on them counts.
            merged: Worker and base of each update that took part.
            norms: Of their deltas.
        """
        for worker_id, base in merged:
            self._accepted_on[base] = self.accepted_on(base) | {worker_id}
        self._accepted_on.pop(version - REMEMBERED_VERSIONS, None)
        self._norms = [*self._norms, *norms][-OUTLIER_WINDOW:]
        self._bases[version] = master
        self._bases = {base: kept for base, kept in self._bases.items() if base > version - num_bases(self._rules)}

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and the kept masters' own tensors, not to be written to."""
        return {
            "norms": list(self._norms),
            "merged_by": [[version, sorted(workers)] for version, workers in sorted(self._accepted_on.items())],
            "arrivals": list(self._arrivals),
            "opened_at": [[version, opened_at] for version, opened_at in sorted(self._opened_at.items())],
            "bases": [[version, dict(params)] for version, params in sorted(self._bases.items())],
        }

    def load_state_dict(self, state: Mapping[str, Any], like: Params) -> None:
        """Continue from a stored state.

        Args:
            state: What ``state_dict`` returned, at least ``norms``, ``merged_by`` and ``arrivals``; its tensors are
                copied. Without ``opened_at``, which only means something on the same clock, updates of the rounds
                before tell no time; without ``bases`` they are late or stale.
            like: The entry's tensors.
        """
        self._norms = list(state["norms"])
        self._accepted_on = {version: frozenset(workers) for version, workers in state["merged_by"]}
        self._arrivals = list(state["arrivals"])
        self._opened_at = dict(state.get("opened_at", ()))
        self._bases = {version: as_params(params, like=like) for version, params in state.get("bases", ())}
