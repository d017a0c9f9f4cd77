"""Walks that run together, session by session, without a socket."""

from dataclasses import replace

import pytest
import torch

from lightning_blocktrain.errors import RequestRefusedError
from lightning_blocktrain.models.generation import Decision, LocalWalker, Sampling, Walk
from lightning_blocktrain.serving.block_host import SessionLostError, alike, joined, parted
from lightning_blocktrain.serving.errand import Errand
from tests.models.cases import CAUSAL, NOISY, causal, lively, noisy
from tests.serving.local import host_of


def errand(session: int, walk: Walk, next_block: int = 0, num_blocks: int = 3) -> Errand:
    return Errand("me", session, 1, walk, num_blocks, next_block, ())


def walk(start: int, inputs: bytes, seed: int, num_read: int = 1) -> Walk:
    return Walk(start, tuple(inputs), start, num_read, Sampling(seed=seed))


@pytest.mark.parametrize("case", [*CAUSAL, *NOISY, "mlp"], ids=str)
def test_walks_that_run_together_decide_what_each_decides_alone(case: tuple[str, str]) -> None:
    model = noisy("denoise", layer="mlp") if case == "mlp" else lively(*case)
    host = host_of(model, [0, 1, 2])
    texts = [b"abcd", b"x", b"hello"]
    alone = [LocalWalker(model, 3) for _ in texts]
    for start_again in (False, True):  # prompts of different lengths, then one byte more for each
        walks = [
            walk(len(text) if start_again else 0, b"!" if start_again else text, seed)
            for seed, text in enumerate(texts)
        ]
        found = host.run_together([errand(session, own) for session, own in enumerate(walks)])
        expected = [walker(own) for walker, own in zip(alone, walks, strict=True)]
        for together, by_itself in zip(found, expected, strict=True):
            assert isinstance(together, Decision) and together.decided == by_itself.decided
            assert together.probs == pytest.approx(by_itself.probs, rel=1e-4)
    assert host.num_sessions == 3


def test_states_of_walks_that_run_together_go_on_apart() -> None:
    model = noisy("denoise_features")
    first, second = host_of(model, [0]), host_of(model, [1, 2])
    walks = [walk(0, b"abcd", 1, 2), walk(0, b"xyz", 2, 3)]
    middle = first.run_together([errand(session, own) for session, own in enumerate(walks)])
    assert all(isinstance(one, Errand) and one.next_block == 1 for one in middle)
    assert [one.carried["z"].shape[1] for one in middle if isinstance(one, Errand)] == [4, 3]
    found = second.run_together([one for one in middle if isinstance(one, Errand)])
    expected = [LocalWalker(model, 3)(own) for own in walks]
    assert [one.decided for one in found if isinstance(one, Decision)] == [one.decided for one in expected]


def test_one_that_makes_no_sense_does_not_spoil_the_others() -> None:
    model = causal("features")
    host = host_of(model, [0, 1, 2])
    fine = walk(0, b"abc", 1)
    found = host.run_together([errand(1, walk(3, b"a", 1)), errand(2, fine), errand(3, walk(0, b"a" * 9, 1))])
    assert isinstance(found[0], SessionLostError) and isinstance(found[2], RequestRefusedError)
    assert found[1] == LocalWalker(model, 3)(fine)
    # A state of another width is found only while computing.
    odd = replace(errand(4, fine, next_block=1), carried={"0": torch.zeros(1, 3, 5)})
    even = replace(errand(5, fine, next_block=1), carried={"0": torch.zeros(1, 3, model.width)})
    refused, decided = host.run_together([odd, even])
    assert isinstance(refused, RequestRefusedError) and "does not fit" in str(refused)
    assert isinstance(decided, Decision)


def test_a_state_without_z_does_not_spoil_the_others() -> None:
    model = noisy("denoise_features")
    first, second = host_of(model, [0]), host_of(model, [1, 2])
    fine = walk(0, b"abc", 1)
    whole, lacking = first.run_together([errand(session, fine) for session in (1, 2)])
    assert isinstance(whole, Errand) and isinstance(lacking, Errand) and len(lacking.carried) == 2
    lacking = replace(lacking, carried={"hidden": lacking.carried["hidden"]})
    decided, without_z = second.run_together([whole, lacking])
    assert decided == LocalWalker(model, 3)(fine)
    assert isinstance(without_z, Decision)  # a walk of its own kind, and runs by itself


def test_a_host_of_blocks_that_a_walk_passes_twice_counts_one_session() -> None:
    host = host_of(causal("features"), [0, 2], max_sessions=1)
    [gone] = host.run_together([errand(1, walk(0, b"abc", 1))])
    assert isinstance(gone, Errand) and gone.next_block == 1
    [back] = host_of(causal("features"), [1]).run_together([gone])
    assert isinstance(back, Errand)
    [decided] = host.run_together([back])
    assert isinstance(decided, Decision) and host.num_sessions == 1


def test_what_may_run_together() -> None:
    one = errand(1, walk(0, b"abc", 1))
    assert alike(one, errand(2, walk(5, b"a", 7)))
    assert not alike(one, errand(1, walk(5, b"a", 7)))  # the same session: in order
    assert not alike(one, errand(2, walk(0, b"abc", 1), next_block=1))
    assert not alike(one, errand(2, walk(0, b"abc", 1), num_blocks=2))
    draws = replace(walk(0, b"abc", 1), sampling=Sampling(num_draws=2))
    assert not alike(one, errand(2, draws))


def test_joined_states_part_as_they_were() -> None:
    states = [(torch.randn(1, n, 4), torch.empty(0), torch.randn(1, n, 2)) for n in (3, 1, 5)]
    for found, state in zip(parted(joined(states), [3, 1, 5]), states, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, state, strict=True))


def test_a_forgotten_session_is_lost_and_others_stay() -> None:
    host = host_of(causal("features"), [0, 1, 2])
    host.run_together([errand(session, walk(0, b"abc", 1)) for session in (1, 2)])
    host.forget("me", 1)
    assert host.num_sessions == 1
    lost, goes_on = host.run_together([errand(session, walk(3, b"d", 1)) for session in (1, 2)])
    assert isinstance(lost, SessionLostError) and "keys and values of 3 positions are not here" in str(lost)
    assert isinstance(goes_on, Decision)
    host.forget("somebody else")
    assert host.num_sessions == 1
    host.forget("me")
    assert host.num_sessions == 0
