import math
from collections import Counter
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_blocktrain.rounds import Ledger, OuterSGD, Roster, RoundRules, Update, Verdict

WORKERS = st.integers(0, 3)
VALUES = st.sampled_from([0.0, 1.0, -3.5, 1e-30, 3e38, -3e38, math.nan, math.inf])
ACTIONS = st.one_of(
    st.tuples(st.just("join"), WORKERS, st.integers(0, 3)),
    st.tuples(st.just("leave"), WORKERS, st.integers(0, 3)),
    st.tuples(st.just("submit"), WORKERS, st.integers(0, 3), st.integers(-1, 3), VALUES, st.integers(-1, 3)),
    st.tuples(st.just("advance"), st.floats(0.0, 12.0)),
)
RULE_CHOICES = [
    RoundRules(deadline_s=10.0),
    RoundRules(deadline_s=10.0, weighting="tokens", clip_norm=1.0),
    RoundRules(deadline_s=10.0, outlier_factor=2.0, min_replicas=2),
    RoundRules(deadline_s=10.0, late="stale_weighted", max_staleness=1, deadline_quantile=0.5),
]


class Journal:
    """Plays actions on a ledger and keeps what must hold whatever they are."""

    def __init__(self, rules: RoundRules) -> None:
        self.roster = Roster("run", "s3cret")
        self.ledger = Ledger("block0", {"w": torch.zeros(2)}, rules, OuterSGD(momentum=0.5), self.roster)
        self.now = 0.0
        self.given: Counter[Verdict] = Counter()
        self.reported: Counter[Verdict] = Counter()
        self.accepted: list[tuple[int, int]] = []
        self.merged: list[tuple[int, int]] = []

    def join(self, worker_id: int, incarnation: int) -> None:
        self.roster.join(worker_id, incarnation)

    def leave(self, worker_id: int, incarnation: int) -> None:
        self.roster.leave(worker_id, incarnation)

    def submit(self, worker_id: int, incarnation: int, base_offset: int, value: float, num_tokens: int) -> None:
        base = self.ledger.version - base_offset
        update = Update(
            run_id="run",
            token="s3cret",
            worker_id=worker_id,
            incarnation=incarnation,
            base_version=base,
            num_steps=1,
            num_tokens=num_tokens,
            params={"w": torch.tensor([value, 1.0])},
        )
        receipt = self.ledger.submit(update, self.now)
        self.given[receipt.verdict] += 1
        if receipt.verdict is Verdict.ACCEPTED:
            self.accepted.append((worker_id, base))

    def advance(self, seconds: float) -> None:
        self.now += seconds
        version = self.ledger.version
        report = self.ledger.close_if_due(self.now)
        if report is not None:
            assert report.version == self.ledger.version == version + 1
            self.reported.update(report.counts)
            self.merged += [(worker_id, report.round_idx) for worker_id in report.accepted]
            self.merged += [(worker_id, report.round_idx - 1) for worker_id in report.stale]  # max_staleness is 1
            assert torch.isfinite(self.ledger.master["w"]).all()
        live = self.roster.live
        if not self.ledger.is_open and (self.ledger.version > 0 or len(live) >= 2):
            self.ledger.open(live, self.now)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(RULE_CHOICES), st.lists(ACTIONS, max_size=40))
def test_ledger_any_history_gives_one_verdict_each_and_merges_once(
    rules: RoundRules, actions: list[tuple[Any, ...]]
) -> None:
    journal = Journal(rules)
    journal.join(0, 0)
    journal.join(1, 0)
    journal.advance(0.0)
    for name, *arguments in actions:
        getattr(journal, name)(*arguments)
    journal.advance(100.0)
    assert journal.reported == journal.given
    assert sorted(journal.merged) == sorted(journal.accepted)
    assert len(set(journal.merged)) == len(journal.merged)
