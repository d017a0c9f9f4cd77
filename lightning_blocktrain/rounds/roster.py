"""Who takes part in a run: its id, its secret, and the newest incarnation of every worker.

Owns membership, shared by all ledgers of a run. Refuses to own which block a worker holds and whether it is in time.
"""

import hmac
from typing import Any

from lightning_blocktrain.errors import CheckpointMismatchError, explain
from lightning_blocktrain.rounds.verdicts import is_count, shown


class Roster:
    """The workers of one run.

    Not synchronised: one thread calls it, the one that calls the ledgers.

    Args:
        run_id: Names the run; not secret.
        token: The run's secret. It appears in no message, representation or state.

    Raises:
        ValueError: If either is not a non-empty string.
    """

    def __init__(self, run_id: str, token: str) -> None:
        for name, value in (("run_id", run_id), ("token", token)):
            if not isinstance(value, str) or not value:
                got = f"{name} of type {type(value).__name__}, empty={not value}"
                raise ValueError(explain(f"{name} must be a non-empty string", got, "choose one per run"))
        self.run_id = run_id
        self._token = token
        self._incarnations: dict[int, int] = {}
        self._live: set[int] = set()

    def authorises(self, run_id: object, token: object) -> bool:
        """Tell whether both are this run's, in a time that does not depend on where they differ."""
        if not isinstance(run_id, str) or not isinstance(token, str):
            return False
        same_run = same_text(run_id, self.run_id)
        same_token = same_text(token, self._token)
        return same_run and same_token

    def join(self, worker_id: int, incarnation: int) -> bool:
        """Register a worker; the newest incarnation wins, and joining twice is harmless.

        Args:
            worker_id: Non-negative int.
            incarnation: Non-negative int that grows with every life of the worker.

        Returns:
            Whether this incarnation is now the one heard; False when a newer one joined before.

        Raises:
            ValueError: If either is not a non-negative int below ``MAX_COUNT``.
        """
        if not (is_count(worker_id) and is_count(incarnation)):
            got = f"worker_id={shown(worker_id)}, incarnation={shown(incarnation)}"
            raise ValueError(explain("worker_id and incarnation must be non-negative ints", got, "count from 0"))
        if incarnation < self._incarnations.get(worker_id, 0):
            return False
        self._incarnations[worker_id] = incarnation
        self._live.add(worker_id)
        return True

    def leave(self, worker_id: int, incarnation: int) -> bool:
        """Mark a worker as gone, so that no open round waits for it.

        Returns:
            Whether it was live as this incarnation; False leaves the roster as it was.
        """
        if self._incarnations.get(worker_id) != incarnation or worker_id not in self._live:
            return False
        self._live.discard(worker_id)
        return True

    def incarnation_of(self, worker_id: int) -> int | None:
        """Return the newest incarnation that joined, or None if the worker never did."""
        return self._incarnations.get(worker_id)

    def is_live(self, worker_id: int) -> bool:
        """Tell whether the worker joined and has not left since."""
        return worker_id in self._live

    @property
    def live(self) -> tuple[int, ...]:
        """Ids of the live workers, ascending."""
        return tuple(sorted(self._live))

    def state_dict(self) -> dict[str, Any]:
        """Return the membership as plain values, without the token."""
        incarnations = [[worker_id, self._incarnations[worker_id]] for worker_id in sorted(self._incarnations)]
        return {"run_id": self.run_id, "incarnations": incarnations, "live": list(self.live)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the membership by a stored one.

        Raises:
            CheckpointMismatchError: If the state belongs to another run; the roster is left as it was.
        """
        if state["run_id"] != self.run_id:
            got = f"stored run_id={state['run_id']}, this run_id={self.run_id}"
            raise CheckpointMismatchError(explain("run_id must be the stored one", got, "resume with its run id"))
        self._incarnations = dict(state["incarnations"])
        self._live = set(state["live"])


def same_text(left: str, right: str) -> bool:
    """Compare in a time that does not depend on where they differ."""
    # Lone surrogates cannot be encoded strictly; a request must not be able to raise here.
    return hmac.compare_digest(left.encode("utf-8", "surrogatepass"), right.encode("utf-8", "surrogatepass"))
