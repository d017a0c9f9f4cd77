"""The piecewise merge against the merge of whole replicas, among members that gather in threads."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_blocktrain.rounds import Params, RoundRules, Verdict
from lightning_blocktrain.rounds.merge import merge_replicas
from lightning_blocktrain.strategies import collective_merge
from lightning_blocktrain.strategies.collective_merge import Header, judge, merge_gathered, packed, pieces_of, unpacked


class Group:
    """Members that hand each other what they send."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.most_values = 0
        self._barrier = threading.Barrier(size, timeout=30)
        self._sent: list[Tensor | None] = [None] * size

    def gather(self, member: int) -> Callable[[Tensor], list[Tensor]]:
        def gather(tensor: Tensor) -> list[Tensor]:
            assert tensor.is_contiguous()
            self.most_values = max(self.most_values, tensor.numel())
            self._sent[member] = tensor
            self._barrier.wait()
            parts = [part.clone() for part in self._sent if part is not None]
            self._barrier.wait()
            return parts

        return gather

    def merge(
        self, replicas: list[Params], master: Params, accepted: dict[int, int], rules: RoundRules
    ) -> list[Params]:
        def act(member: int) -> Params:
            return merge_gathered(replicas[member], master, accepted, rules, self.gather(member), self.size)

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(act, range(self.size)))


def masters() -> Params:
    return {
        "matrix": torch.randn(5, 7),
        "still": torch.randn(4),
        "count": torch.tensor(3),
        "flags": torch.tensor([True, False, False]),
        "empty": torch.empty(0),
        "scalar": torch.randn(()),
    }


def replica_of(master: Params, member: int) -> Params:
    moved = {"matrix": master["matrix"] + torch.randn(5, 7), "count": master["count"] + member}
    if member % 2:
        moved["matrix"][2:] = master["matrix"][2:]  # moved in part: it has a say in all of it
    if member == 1:
        moved["scalar"] = master["scalar"] + 1.0
        moved["flags"] = torch.tensor([False, False, True])
    return {**{name: tensor.clone() for name, tensor in master.items()}, **moved}


@pytest.mark.parametrize("gathered_values", [1, 16, 2**22])
@pytest.mark.parametrize(
    ("rules", "accepted"),
    [
        (RoundRules(deadline_s=1.0), {0: 5, 1: 1, 2: 1, 3: 7}),
        (RoundRules(deadline_s=1.0), {1: 5}),
        (RoundRules(deadline_s=1.0), {0: 5, 3: 7}),
        (RoundRules(deadline_s=1.0, weighting="tokens"), {0: 6, 1: 3, 2: 9}),
        (RoundRules(deadline_s=1.0, merge="trimmed_mean", trim_frac=0.3), {0: 1, 1: 1, 2: 1, 3: 1}),
    ],
)
def test_merge_gathered_equals_the_merge_of_whole_replicas(
    rules: RoundRules, accepted: dict[int, int], gathered_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective_merge, "GATHERED_VALUES", gathered_values)
    torch.manual_seed(0)
    master = masters()
    replicas = [replica_of(master, member) for member in range(4)]
    for member in range(4):
        if member not in accepted:
            replicas[member]["matrix"] = torch.full((5, 7), float("nan"))
    expected = merge_replicas([replicas[m] for m in accepted], list(accepted.values()), master, rules)
    group = Group(4)
    for merged in group.merge(replicas, master, accepted, rules):
        assert merged.keys() == expected.keys()
        for name, tensor in expected.items():
            assert merged[name].dtype == tensor.dtype
            # Of weights other than one a vector unit fuses what it does not fuse in the last values of a piece.
            torch.testing.assert_close(merged[name], tensor, rtol=1e-6, atol=0, equal_nan=True)
            assert rules.weighting == "tokens" or torch.equal(merged[name], tensor)
        assert rules.merge == "trimmed_mean" or merged["still"] is master["still"]
    bytes_per_count = 8
    assert group.most_values <= max(len(master), max(1, gathered_values // 4) * bytes_per_count)


@settings(deadline=None, max_examples=30)
@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6), most=st.integers(1, 8))
def test_pieces_of_hold_every_value_once_in_order_and_no_more_than_asked(sizes: list[int], most: int) -> None:
    tensors = {str(i): torch.arange(size) + 100 * i for i, size in enumerate(sizes)}
    found: list[int] = []
    for piece in pieces_of(tensors, most):
        flat = packed(piece, tensors)
        assert flat.dtype is torch.uint8
        parts = unpacked(piece, flat, torch.int64)
        assert 0 < sum(part.numel() for part in parts) <= most
        found += [value for part in parts for value in part.tolist()]
    assert found == [value for tensor in tensors.values() for value in tensor.tolist()]


def test_pieces_of_do_not_mix_dtypes() -> None:
    tensors = {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.int64), "c": torch.zeros(2)}
    assert [[part.name for part in piece] for piece in pieces_of(tensors, 100)] == [["a"], ["b"], ["c"]]


def test_header_survives_its_numbers() -> None:
    for header in (Header(True, False, 7, 2**52 + 1, 0.5), Header(False, stops=True)):
        assert Header.unpack(header.pack(torch.device("cpu"))) == header


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, Verdict.ACCEPTED),
        ({"num_tokens": 0}, Verdict.MALFORMED),
        ({"norm": float("nan")}, Verdict.NONFINITE),
        ({"norm": float("inf")}, Verdict.NONFINITE),
        ({"norm": 3.5}, Verdict.OUTLIER),
    ],
)
def test_judge_gives_the_verdict_of_a_ledger(changes: dict[str, Any], verdict: Verdict) -> None:
    given_header = Header(**{"is_present": True, "num_steps": 1, "num_tokens": 4, "norm": 3.0, **changes})
    assert judge(given_header, limit=3.2) is verdict
