"""The one place that requests come to, whatever carried them: checks the run, founds it, keeps what was accepted.

Owns the coordinator's service and its storage, and the moment a run begins. Owns no socket and no thread: whoever
carries the requests calls from one thread at a time, and passes the time.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import IO, Any

from torch import Tensor

from lightning_blocktrain.coordinator.service import CoordinatorService
from lightning_blocktrain.coordinator.status import snapshot
from lightning_blocktrain.coordinator.storage import Storage
from lightning_blocktrain.errors import (
    CheckpointMismatchError,
    NotFoundedError,
    RequestRefusedError,
    UnauthorisedError,
    WrongRunError,
    explain,
)
from lightning_blocktrain.rounds import INTERFACE, Receipt, Roster, Verdict
from lightning_blocktrain.rounds.roster import same_text
from lightning_blocktrain.rounds.verdicts import shown
from lightning_blocktrain.transport.base import Sender, Submission
from lightning_blocktrain.transport.messages import unpack_submission
from lightning_blocktrain.transport.terms import RunTerms, identity_differences
from lightning_blocktrain.transport.wire import MAX_HEADER_BYTES, MAX_TENSOR_HEADER_BYTES


class Desk:
    """The desk of one run.

    Args:
        run_id: Names the run.
        token: Its secret.
        storage: Keeps the state; the desk closes it. None keeps nothing.
        fixed_terms: Terms by name that hold whatever the founder of the run says.
        serves: The entries of the run that it is for, where several coordinators share it; None: all.

    Raises:
        ValueError: If the run id or the token is empty.
    """

    def __init__(
        self,
        run_id: str,
        token: str,
        storage: Storage | None = None,
        fixed_terms: Mapping[str, Any] | None = None,
        serves: Collection[str] | None = None,
    ) -> None:
        Roster(run_id, token)  # refuses empty ones
        self.run_id = run_id
        self._token = token
        self._storage = storage
        self._fixed_terms = dict(fixed_terms or {})
        self._serves = None if serves is None else tuple(serves)
        self._service: CoordinatorService | None = None

    @property
    def service(self) -> CoordinatorService:
        """The coordinator of the run.

        Raises:
            NotFoundedError: If there are no masters yet.
        """
        if self._service is None:
            raise NotFoundedError(f"The coordinator of run {self.run_id} has no masters yet.")
        return self._service

    @property
    def news(self) -> tuple[str, dict[str, int]]:
        """Phase and versions: whoever waits need not look again before this changes."""
        return ("empty", {}) if self._service is None else (self._service.phase, self._service.versions)

    def check_token(self, token: str) -> None:
        """Refuse a request without the run's token, in a time that does not depend on where they differ.

        Raises:
            UnauthorisedError: If it is another one.
        """
        if not same_text(token, self._token):
            raise UnauthorisedError("The coordinator does not take this token.")

    def check_run(self, run_id: str) -> None:
        """Refuse a request that is meant for another run.

        Raises:
            WrongRunError: Naming both.
        """
        if run_id != self.run_id:
            raise WrongRunError(f"This is the coordinator of run {self.run_id!r}; the request is for {shown(run_id)}.")

    def resume(self, now: float) -> bool:
        """Continue the stored run, if there is one.

        Args:
            now: Seconds on the caller's clock.

        Raises:
            CheckpointMismatchError: If another run is stored, another part of it, or one with other terms than those
                fixed here.
            StateError: If what is stored is damaged.
        """
        if self._storage is None or self._storage.is_empty:
            return False
        stored = self._storage.load(self.run_id)
        self._refuse_other_terms(stored.terms)
        self._refuse_other_entries(stored.terms, set(stored.entries))
        masters = {entry: state["master"] for entry, state in stored.entries.items()}
        service = self._make(stored.terms, masters)
        service.load_state(stored.run, stored.entries, now)
        for entry in stored.entries:
            for worker_id, frame in self._storage.kept_updates(entry):
                service.restore_update(entry, worker_id, unpack_submission(frame)[1], now)
        self._service = service
        service.advance(now)
        return True

    def _refuse_other_terms(self, stored: RunTerms) -> None:
        kept = {name: getattr(stored, name) for name in self._fixed_terms}
        differing = identity_differences(self._fixed_terms, kept)
        if differing:
            rule = "a stored run goes on with its own terms (here: asked for, there: stored)"
            raise CheckpointMismatchError(explain(rule, "; ".join(differing), "leave them out, or use another folder"))

    def _refuse_other_entries(self, terms: RunTerms, stored: set[str]) -> None:
        served = set(terms.entries(True) if self._serves is None else self._serves)
        if not served - {INTERFACE} <= stored <= served:  # a run may have no interface
            rule = "a stored run goes on with the entries that it has"
            got = f"stored={sorted(stored)}, served here={sorted(served)}"
            raise CheckpointMismatchError(explain(rule, got, "serve those, or use another folder"))

    def found(self, terms: RunTerms, masters: Mapping[str, Mapping[str, Tensor]] | None, now: float) -> bool | None:
        """Begin the run with these masters, unless it has begun.

        Returns:
            True if it has now, False if it had before, None if the masters are wanted and missing.

        Raises:
            RequestRefusedError: If the run has begun as another one; names what differs.
            ValueError: If the masters do not fit the terms.
        """
        if self._service is not None:
            differing = identity_differences(self._service.terms.full_identity, terms.full_identity)
            if differing:
                rule = "whoever joins a run must train its model in its way"
                raise RequestRefusedError(explain(rule, "; ".join(differing), "use the script of this run"))
            return False
        if masters is None:
            return None
        terms = replace(terms, **self._fixed_terms)
        service = self._make(terms, masters)
        if self._storage is not None:
            entries = {entry: ledger.state_dict() for entry, ledger in service.ledgers.items()}
            self._storage.create(self.run_id, terms, service.run_state(), entries)
        self._service = service
        service.advance(now)
        return True

    def _make(self, terms: RunTerms, masters: Mapping[str, Mapping[str, Tensor]]) -> CoordinatorService:
        return CoordinatorService(self.run_id, self._token, terms, masters, self._storage, self._serves)

    def max_update_bytes(self, entry: str) -> int:
        """Return how long a message with an update of this entry may be, whatever codec made it.

        Raises:
            RequestRefusedError: If there is no such entry.
        """
        master = self.service.ledger_of(entry).master
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in master.values())
        return 2 * num_bytes + MAX_HEADER_BYTES + MAX_TENSOR_HEADER_BYTES

    def submit(
        self, entry: str, sender: Sender, submission: Submission, now: float, message: IO[bytes] | None = None
    ) -> Receipt:
        """Judge an update; see ``CoordinatorService.submit``.

        Args:
            entry: Of the update.
            sender: Of the update.
            submission: The update.
            now: Seconds on the caller's clock.
            message: The message that it came in, kept with the state until its round has closed, so that an accepted
                update survives the process.
        """
        receipt = self.service.submit(entry, sender, submission, now)
        is_open = self.service.versions[entry] == receipt.version
        if receipt.verdict is Verdict.ACCEPTED and is_open and self._storage is not None and message is not None:
            base_version = submission.base_version
            self._storage.keep_update(entry, receipt.version, sender.worker_id, base_version, message)
        return receipt

    def advance(self, now: float) -> None:
        """Do what the time demands."""
        if self._service is not None:
            self._service.advance(now)

    def next_event(self) -> float | None:
        """Return when ``advance`` must be called at the latest, or None."""
        return None if self._service is None else self._service.next_event()

    def awaits_workers(self, ended_for_s: float, linger_s: float) -> bool:
        """Tell whether somebody may still fetch what is left of a run that has ended.

        Its workers may until they have left. From a part of a run others fetch too, who are no members of it, and
        whose own last round may close a deadline later.

        Args:
            ended_for_s: Seconds since the end.
            linger_s: Longest time that workers have.
        """
        service, is_part = self.service, self._serves is not None
        limit_s = linger_s + (service.terms.rules.deadline_s if is_part else 0.0)
        knows_all = service.membership.assigns
        return ended_for_s < limit_s and (bool(service.roster.live) or not knows_all)

    def stop(self, reason: str) -> None:
        """End the run."""
        self.service.stop(reason)

    def status(self, now: float) -> dict[str, Any]:
        """Return what there is to say of the run, as plain values."""
        serves = None if self._serves is None else list(self._serves)
        if self._service is None:
            return {"run_id": self.run_id, "phase": "empty", "reason": "", "serves": serves}
        return {**snapshot(self._service, now), "serves": serves}

    def close(self) -> None:
        """Give the storage back; any number of times."""
        if self._storage is not None:
            self._storage.close()
