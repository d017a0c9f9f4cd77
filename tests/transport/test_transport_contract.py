"""What every transport promises; memory, HTTP and a shared line to one coordinator run the same lines."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_blocktrain.coordinator import SimulatedCoordinator, WorkerRound, preset_network
from lightning_blocktrain.coordinator import masters as coordinator_masters
from lightning_blocktrain.errors import (
    NotFoundedError,
    NotJoinedError,
    RequestRefusedError,
    RunEndedError,
    RunFailedError,
    SupersededError,
    TransportError,
    UnauthorisedError,
    WrongRunError,
)
from lightning_blocktrain.rounds import OuterSGD, RoundRules, Verdict
from lightning_blocktrain.rounds.codecs import Codec, Encoded
from lightning_blocktrain.rounds.values import decode_values, encode_values
from lightning_blocktrain.transport.base import Fetched, Transport, WorkerFacts
from tests.transport.lines import (
    RUN,
    Line,
    begin,
    line_of,
    make_masters,
    make_terms,
    moved,
    same,
    submission,
)


@pytest.fixture(params=["memory", "http", "shared"])
def line(request: pytest.FixtureRequest) -> Iterator[Line]:
    with line_of(request.param) as opened:
        yield opened


def fetched(transport: Transport, entry: str, newer_than: int = -1, timeout_s: float = 0.0) -> Fetched:
    found = transport.fetch(entry, newer_than, timeout_s)
    assert found is not None
    return found


def send(transport: Transport, seed: int, base: int = 0, entry: str = "block0", **changes: Any) -> Verdict:
    params = changes.pop("params", None) or moved(fetched(transport, entry).params, seed)
    return transport.submit(entry, submission(base, params, **changes)).verdict


# Founding, joining, leaving


def test_join_before_the_masters_are_there_is_refused(line: Line) -> None:
    with pytest.raises(NotFoundedError, match="run-1 has no masters yet"):
        line.join(0)


def test_found_the_first_one_counts_and_another_model_is_refused(line: Line) -> None:
    transport = line.open()
    assert transport.status()["phase"] == "empty"
    assert transport.found(make_terms(), make_masters())
    assert not transport.found(make_terms(), {name: moved(kept, 1) for name, kept in make_masters().items()})
    assert same(fetched(transport, "block1").params, make_masters()["block1"])
    with pytest.raises(RequestRefusedError, match="num_blocks: here=2, there=3"):
        transport.found(make_terms(3), make_masters(3))


def test_found_masters_that_do_not_fit_the_terms_are_refused_and_the_next_ones_taken(line: Line) -> None:
    transport = line.open()
    with pytest.raises((RequestRefusedError, ValueError), match="masters must hold block0 to block2"):
        transport.found(make_terms(3), make_masters(2))
    assert transport.found(make_terms(), make_masters())


def test_join_answers_with_block_shard_versions_and_terms(line: Line) -> None:
    terms = make_terms(num_workers=4, max_rounds=9, identity={"model": "m"}, worker_settings={"inner_state": "keep"})
    line.open().found(terms, make_masters())
    _, welcome = line.join(3, identity={"model": "m", "other": 1}, host="here")
    assert (welcome.worker_id, welcome.incarnation, welcome.block_idx, welcome.num_workers) == (3, 0, 1, 4)
    assert welcome.run_id == RUN
    assert dict(welcome.versions) == {"block0": 0, "block1": 0, "interface": 0}
    assert welcome.terms == terms


def test_join_without_an_id_gives_the_least_covered_block(line: Line) -> None:
    line.open().found(make_terms(3), make_masters(3))
    line.join(0)
    line.join(2)
    given = [line.join()[1] for _ in range(4)]
    assert [(welcome.worker_id, welcome.block_idx) for welcome in given] == [(1, 1), (3, 0), (4, 1), (5, 2)]


def test_join_again_with_the_same_nonce_is_the_same_life(line: Line) -> None:
    line.open().found(make_terms(), make_masters())
    facts = WorkerFacts(nonce="life-1")
    first, again = line.open().join(facts), line.open().join(facts)
    assert (again.worker_id, again.incarnation) == (first.worker_id, first.incarnation) == (0, 0)
    assert list(line.open().status()["workers"]) == ["0"]


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (WorkerFacts(-1), "worker_id must be below"),
        (WorkerFacts(10**6), "worker_id must be below"),
        (WorkerFacts(block_idx=2), "block_idx must be below 2"),
        (WorkerFacts(nonce=""), "nonce must be text of 1 to"),
        (WorkerFacts(host="h" * 999), "host must be text of 0 to"),
        (WorkerFacts(identity={"sync_every": 6}), "sync_every: here=5, there=6"),
    ],
)
def test_join_facts_that_do_not_fit_are_refused(line: Line, facts: WorkerFacts, message: str) -> None:
    transport = line.open()
    transport.found(make_terms(), make_masters())
    with pytest.raises(RequestRefusedError, match=message):
        transport.join(facts)
    assert transport.status()["workers"] == {}


def test_scenario_34_worker_of_another_model_is_refused_with_the_fields_named(line: Line) -> None:
    line.open().found(make_terms(identity={"layout": "aa", "sigma": [1, 10]}), make_masters())
    with pytest.raises(
        RequestRefusedError, match=r"layout: here='aa', there='bb'; sigma: here=\[1, 10\], there=\[1, 9\]"
    ):
        line.join(0, identity={"layout": "bb", "sigma": [1, 9]})


def test_scenario_04_worker_that_returns_is_a_new_incarnation_and_the_old_one_is_refused(line: Line) -> None:
    ((old, _), _) = begin(line, [0, 0])
    new, welcome = line.join(0)
    assert (welcome.worker_id, welcome.incarnation) == (0, 1)
    receipt = old.submit("block0", submission(0, moved(fetched(old, "block0").params, 1)))
    assert receipt.verdict is Verdict.SUPERSEDED
    assert "Incarnation 0 of worker 0 was replaced by 1" in receipt.reason
    assert send(new, 1) is Verdict.ACCEPTED
    with pytest.raises(SupersededError, match="has joined as incarnation 1, you are 0"):
        line.open().join(WorkerFacts(0), incarnation=0)


def test_leave_lets_the_round_close_without_the_worker(line: Line) -> None:
    (stays, _), (leaves, _) = begin(line, [0, 0])
    assert send(stays, 1) is Verdict.ACCEPTED
    assert stays.fetch("block0", 0, 0.0) is None
    leaves.leave()
    leaves.leave()
    assert fetched(stays, "block0", 0).version == 1
    assert send(leaves, 2, base=1) is Verdict.SUPERSEDED
    assert stays.status()["workers"]["1"]["is_live"] is False


def test_dismiss_lets_the_round_close_without_the_worker_which_may_join_again(line: Line) -> None:
    (stays, _), (dies, _) = begin(line, [0, 0])
    send(stays, 1)
    assert stays.fetch("block0", 0, 0.0) is None
    with line.open() as watcher:
        assert watcher.dismiss(1)
        assert not watcher.dismiss(1)
    assert fetched(stays, "block0", 0).version == 1
    assert stays.status()["workers"]["1"]["is_live"] is False
    assert send(dies, 2, base=1) is Verdict.SUPERSEDED
    again, welcome = line.join(1)
    assert (welcome.worker_id, welcome.incarnation) == (1, 1)
    send(stays, 3, base=1)
    send(again, 4, base=1)
    send(stays, 5, base=2)
    assert stays.fetch("block0", 2, 0.0) is None  # it is waited for as before


@pytest.mark.parametrize("worker_id", [2, -1, None, "1", True, 10**30, 0.0])
def test_dismiss_of_nobody_changes_nothing(line: Line, worker_id: Any) -> None:
    (worker, _), _ = begin(line, [0, 1])
    assert not worker.dismiss(worker_id)
    assert [kept["is_live"] for kept in worker.status()["workers"].values()] == [True, True]


def test_join_of_an_open_run_tells_everyone_as_many_parts_as_it_needs_workers(line: Line) -> None:
    line.open().found(make_terms(rules=RoundRules(deadline_s=RULES_DEADLINE, min_replicas=2)), make_masters())
    parts = [line.join()[1] for _ in range(4)]
    assert [(welcome.worker_id, welcome.num_workers) for welcome in parts] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    _, far = line.join(4000)
    assert far.num_workers == 5


def test_submit_before_join_is_refused(line: Line) -> None:
    line.open().found(make_terms(), make_masters())
    with pytest.raises(NotJoinedError, match="must join before it submits"):
        line.open().submit("block0", submission(0, make_masters()["block0"]))


def test_scenario_05_worker_that_joins_in_mid_round_is_not_waited_for_and_counts_in_the_next(line: Line) -> None:
    ((first, _),) = begin(line, [0])
    for version in range(3):
        send(first, version, base=version)
    late, welcome = line.join()
    assert welcome.versions["block0"] == 3
    assert (welcome.worker_id, welcome.num_workers, welcome.block_idx) == (1, 2, 0)
    assert same(fetched(late, "block0").params, fetched(first, "block0").params)
    send(first, 3, base=3)
    assert fetched(first, "block0", 3).version == 4
    send(first, 4, base=4)
    assert first.fetch("block0", 4, 0.0) is None  # now it is waited for
    send(late, 5, base=4)
    assert fetched(first, "block0", 4).version == 5
    assert first.status()["entries"]["block0"]["last_round"]["accepted"] == [0, 1]


def test_scenario_30_workers_of_other_seeds_begin_with_the_masters(line: Line) -> None:
    workers = begin(line, [0, 0])
    mine = {name: moved(kept, 3) for name, kept in make_masters(1).items()}
    assert not line.open().found(make_terms(1), mine)
    for transport, _ in workers:
        assert same(fetched(transport, "block0").params, make_masters(1)["block0"])


# Fetching


def test_fetch_gives_tensors_of_ones_own_bit_for_bit(line: Line) -> None:
    odd: dict[str, Tensor] = {
        "scalar": torch.tensor(1e6),
        "empty": torch.zeros(0, 3),
        "counter": torch.tensor(2**40),
        "flags": torch.tensor([True, False]),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "denormal": torch.tensor([1e-45, -0.0, 3.4e38]),
    }
    transport = line.open()
    transport.found(make_terms(1), {"block0": odd})
    first = fetched(transport, "block0")
    assert same(first.params, odd)
    first.params["transposed"].add_(1.0)
    assert same(fetched(transport, "block0").params, odd)


def test_fetch_without_anything_newer_returns_none_and_unknown_entries_are_refused(line: Line) -> None:
    transport = line.open()
    transport.found(make_terms(interface_every=2), make_masters(interface=False))
    assert transport.fetch("block0", 0, 0.0) is None
    assert transport.fetch("block0", 0, 0.05) is None
    for entry in ("block2", "interface", "../block0", ""):
        with pytest.raises(RequestRefusedError):
            transport.fetch(entry)


@pytest.mark.parametrize("codec", [Codec("fp32"), Codec("bf16"), Codec("int8"), Codec("int8", block=16)])
def test_fetch_in_a_codec_gives_the_values_in_its_form(line: Line, codec: Codec) -> None:
    run_codec = Codec("bf16", spared=("layer.b",))
    masters = {"block0": {**make_masters(1)["block0"], "layer.b": torch.tensor([1 / 3])}}
    transport = line.open()
    transport.found(make_terms(1, prefix_codec=run_codec), masters)
    found = transport.fetch("block0", -1, 0.0, codec)
    assert found is not None and (found.version, dict(found.meta)) == (0, codec.meta)
    spared = replace(codec, spared=("layer.b",))
    expected = encode_values(spared, masters["block0"])
    assert same(found.params, expected.tensors)
    decoded = decode_values(spared, Encoded(found.params, dict(found.meta)), masters["block0"])
    assert torch.equal(decoded["layer.b"], masters["block0"]["layer.b"])
    assert torch.equal(decoded["layer.n"], masters["block0"]["layer.n"])
    found.params["values:layer.b"].add_(1.0)
    again = transport.fetch("block0", -1, 0.0, codec)
    assert again is not None and same(again.params, expected.tensors)
    assert same(fetched(transport, "block0").params, masters["block0"])


def test_fetch_in_a_codec_waits_like_any_other_and_gives_the_newest(line: Line) -> None:
    ((worker, _),) = begin(line, [0])
    assert worker.fetch("block0", 0, 0.0, Codec("bf16")) is None
    send(worker, 1)
    found = worker.fetch("block0", 0, 0.0, Codec("bf16"))
    assert found is not None and found.version == 1
    assert same(found.params, encode_values(Codec("bf16"), fetched(worker, "block0").params).tensors)
    assert found.closes_in_s is not None


def test_fetch_in_a_codec_that_carries_no_values_is_refused_by_name(line: Line) -> None:
    transport = line.open()
    transport.found(make_terms(), make_masters())
    with pytest.raises(RequestRefusedError, match="codec must be a codec for whole values; got codec='topk'"):
        transport.fetch("block0", -1, 0.0, Codec("topk"))
    assert transport.fetch("block0", -1, 0.0, Codec("bf16")) is not None


def test_fetch_in_a_codec_is_encoded_once_for_all_who_ask(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counting(codec: Codec, params: Any) -> Encoded:
        calls.append(codec.name)
        return encode_values(codec, params)

    monkeypatch.setattr(coordinator_masters, "encode_values", counting)
    (worker, _), (other, _) = begin(line, [0, 0])
    for transport in (worker, other, worker):
        transport.fetch("block0", -1, 0.0, Codec("int8"))
    assert calls == ["int8"]
    for transport in (worker, other):
        send(transport, 1)
    for transport in (worker, other):
        transport.fetch("block0", 0, 0.0, Codec("int8"))
    assert calls == ["int8", "int8"]


def test_fetch_waits_for_the_close_of_the_round(line: Line) -> None:
    (waits, _), (sends, _) = begin(line, [0, 0])
    send(waits, 1)
    found: list[Fetched | None] = []
    waiting = threading.Thread(target=lambda: found.append(waits.fetch("block0", 0, 60.0)))
    waiting.start()
    send(sends, 2)
    waiting.join(30.0)
    assert [fetch.version for fetch in found if fetch is not None] == [1]


# Verdicts


def test_scenario_13_update_after_the_deadline_is_late_and_told_the_new_version(line: Line) -> None:
    (quick, _), (slow, _) = begin(line, [0, 0])
    send(quick, 1)
    line.clock.now += RULES_DEADLINE + 1
    receipt = slow.submit("block0", submission(0, moved(make_masters(1)["block0"], 2)))
    assert (receipt.verdict, receipt.version) == (Verdict.LATE, 1)
    assert quick.status()["entries"]["block0"]["verdicts"] == {"accepted": 1, "late": 1}


def test_scenario_14_update_on_an_old_version_is_refused(line: Line) -> None:
    ((worker, _),) = begin(line, [0])
    for version in range(3):
        send(worker, version, base=version)
    before = fetched(worker, "block0").params
    assert send(worker, 9, base=0) is Verdict.DUPLICATE
    other, _ = line.join()
    assert send(other, 9, base=0) is Verdict.STALE
    assert same(fetched(worker, "block0").params, before)


def test_scenario_15_update_sent_twice_is_merged_once(line: Line) -> None:
    (first, _), (second, _) = begin(line, [0, 0])
    replicas = [moved(make_masters(1)["block0"], seed) for seed in (1, 2)]
    assert send(first, 0, params=replicas[0]) is Verdict.ACCEPTED
    assert send(first, 0, params=replicas[0]) is Verdict.DUPLICATE
    send(second, 0, params=replicas[1])
    assert send(first, 0, params=replicas[0]) is Verdict.DUPLICATE
    mean = (replicas[0]["layer.w"] + replicas[1]["layer.w"]) / 2
    assert torch.equal(fetched(first, "block0").params["layer.w"], mean)


def test_scenario_17_round_closes_as_soon_as_everyone_has_answered(line: Line) -> None:
    (first, _), (second, _) = begin(line, [0, 0])
    send(first, 1)
    assert first.fetch("block0", 0, 0.0) is None
    send(second, 2)
    assert fetched(first, "block0", 0).version == 1  # the clock has not moved
    assert first.status()["entries"]["block0"]["last_round"]["took_s"] == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scenario_18_update_that_is_not_finite_is_refused_and_the_others_averaged(line: Line, bad: float) -> None:
    (sick, _), (sound, _) = begin(line, [0, 0])
    params = moved(make_masters(1)["block0"], 1)
    params["layer.w"][2, 1] = bad
    assert send(sick, 0, params=params) is Verdict.NONFINITE
    other = moved(make_masters(1)["block0"], 2)
    send(sound, 0, params=other)
    assert same(fetched(sick, "block0", 0).params, other)


def test_scenario_19_update_1000_times_too_long_is_refused(line: Line) -> None:
    rules = RoundRules(deadline_s=1000.0, outlier_factor=10.0)
    ((worker, _),) = begin(line, [0], rules=rules)
    for version in range(6):
        assert send(worker, version, base=version) is Verdict.ACCEPTED
    params = {name: tensor * 1 for name, tensor in fetched(worker, "block0").params.items()}
    params["layer.w"] += 1e4
    assert send(worker, 0, base=6, params=params) is Verdict.OUTLIER


@pytest.mark.parametrize("count", [0, -1, float("nan"), None, 2**60, 10**400, "7", True, 1.5])
def test_scenario_20_impossible_token_count_is_refused(line: Line, count: Any) -> None:
    (worker, _), _ = begin(line, [0, 0])
    assert send(worker, 1, num_tokens=count) is Verdict.MALFORMED
    assert send(worker, 1, num_steps=0) is Verdict.ACCEPTED


@pytest.mark.parametrize(
    "change",
    [
        {"layer.w": torch.zeros(1, 3)},
        {"layer.w": torch.zeros(1)},
        {"more": torch.zeros(2)},
        {"layer.n": torch.zeros(())},
    ],
)
def test_scenario_21_tensors_that_do_not_fit_are_refused(line: Line, change: dict[str, Tensor]) -> None:
    (worker, _), _ = begin(line, [0, 0])
    params = moved(make_masters(1)["block0"], 1)
    assert send(worker, 0, params={**params, **change}) is Verdict.MALFORMED
    assert send(worker, 0, params={"layer.w": params["layer.w"]}) is Verdict.MALFORMED
    assert send(worker, 0, params=params) is Verdict.ACCEPTED


def test_scenario_22_bf16_arrives_bit_for_bit_and_is_merged_in_fp32(line: Line) -> None:
    (first, _), (second, _) = begin(line, [0, 0])
    replicas = [moved(make_masters(1)["block0"], seed) for seed in (1, 2)]
    for transport, params in zip((first, second), replicas, strict=True):
        send(transport, 0, params={**params, "layer.w": params["layer.w"].bfloat16()})
    wide = [params["layer.w"].bfloat16().float() for params in replicas]
    assert torch.equal(fetched(first, "block0").params["layer.w"], (wide[0] + wide[1]) / 2)


def test_scenario_26_views_and_transposed_tensors_are_sent_as_what_they_show(line: Line) -> None:
    ((worker, _),) = begin(line, [0])
    base = torch.randn(3, 10)
    view = base.t()[::2]  # (5, 3), neither contiguous nor at the beginning of its storage
    send(worker, 0, params={"layer.w": view, "layer.n": torch.tensor([5, 6])[1]})
    assert torch.equal(fetched(worker, "block0", 0).params["layer.w"], view)


def test_submit_for_a_block_of_others_is_refused(line: Line) -> None:
    (worker, _), _ = begin(line, [0, 1])
    receipt = worker.submit("block1", submission(0, make_masters()["block1"]))
    assert receipt.verdict is Verdict.MALFORMED
    assert receipt.reason == "Worker 0 trains block 0, not block1."


@pytest.mark.parametrize("meta", [{"codec": "zip"}, {"codec": "int8", "block": "64"}, Codec("bf16").meta])
def test_submit_with_another_codec_than_the_runs_is_refused(line: Line, meta: dict[str, str]) -> None:
    (worker, _), _ = begin(line, [0, 0], codec=Codec("int8"))
    receipt = worker.submit("block0", submission(0, make_masters(1)["block0"], meta=meta))
    assert receipt.verdict is Verdict.MALFORMED
    assert "The codec says: the message must be of codec" in receipt.reason


@pytest.mark.parametrize("codec", [Codec("bf16"), Codec("int8", block=16), Codec("topk", top_frac=0.5)])
def test_submit_with_the_runs_codec_is_decoded_on_its_base(line: Line, codec: Codec) -> None:
    ((worker, welcome),) = begin(line, [0], codec=codec)
    assert welcome.terms.codec == codec
    master = make_masters(1)["block0"]
    encoded = codec.encode(moved(master, 3), master)
    assert send(worker, 0, params=encoded.tensors, meta=encoded.meta) is Verdict.ACCEPTED
    assert same(fetched(worker, "block0", 0).params, codec.decode(encoded, master))


def test_late_update_counts_with_its_weight_where_the_rules_say_so(line: Line) -> None:
    rules = RoundRules(deadline_s=RULES_DEADLINE, late="stale_weighted")
    (first, _), (second, _) = begin(line, [0, 0], rules=rules)
    master = make_masters(1)["block0"]
    on_time, late = moved(master, 1), moved(master, 2)
    send(first, 0, params=on_time)
    line.clock.now += RULES_DEADLINE
    closes_in_s = fetched(first, "block0", 0).closes_in_s
    assert closes_in_s == pytest.approx(RULES_DEADLINE, abs=60.0)  # less what a download has taken
    receipt = second.submit("block0", submission(0, late))
    assert receipt.verdict is Verdict.ACCEPTED
    assert receipt.reason == "Counts in the round of version 1, weighing 0.707."
    fresh = moved(on_time, 3)
    send(first, 1, params=fresh, base=1)
    line.clock.now += RULES_DEADLINE
    moved_on, weight = on_time["layer.w"] + late["layer.w"] - master["layer.w"], 2**-0.5
    expected = (fresh["layer.w"] + weight * moved_on) / (1 + weight)
    assert torch.allclose(fetched(first, "block0", 1).params["layer.w"], expected, atol=0.01)  # it is rounded to 1/1024


# The whole run


@pytest.mark.parametrize("interface_every", [1, 2, 3])
def test_lockstep_of_three_blocks_with_two_replicas_equals_the_simulation(line: Line, interface_every: int) -> None:
    num_rounds, blocks, outer = 5, [w % 3 for w in range(6)], OuterSGD(0.7, 0.9, nesterov=True)
    options = {"outer": outer, "interface_every": interface_every, "max_rounds": num_rounds, "interface": True}
    workers = begin(line, blocks, **options)
    masters = make_masters(3)
    network = preset_network("lockstep", 6, RULES_DEADLINE, 5, 100)
    rules = RoundRules(deadline_s=RULES_DEADLINE)
    simulated = SimulatedCoordinator(masters, blocks, rules, lambda: outer, network, 0, interface_every)
    held = [{entry: fetched(t, entry) for entry in (f"block{w.block_idx}", "interface")} for t, w in workers]
    local = [dict(kept["interface"].params) for kept in held]
    for round_idx in range(num_rounds):
        due, updates = workers[0][1].terms.interface_due(round_idx), []
        for (transport, welcome), kept, worker_id in zip(workers, held, range(6), strict=True):
            entry = f"block{welcome.block_idx}"
            block = moved(kept[entry].params, 100 * round_idx + worker_id)
            local[worker_id] = moved(local[worker_id], 100 * round_idx + worker_id + 50)
            send(transport, 0, base=kept[entry].version, entry=entry, params=block)
            if due:
                send(transport, 0, base=kept["interface"].version, entry="interface", params=local[worker_id])
            updates.append(WorkerRound(worker_id, 5, 40, block, local[worker_id] if due else None))
        simulated.finish_round(updates, final=round_idx == num_rounds - 1)
        for (transport, welcome), kept, worker_id in zip(workers, held, range(6), strict=True):
            for entry in (f"block{welcome.block_idx}", *(["interface"] if due else [])):
                kept[entry] = fetched(transport, entry, kept[entry].version)
            local[worker_id] = dict(kept["interface"].params) if due else local[worker_id]
    transport = workers[0][0]
    for entry, master in simulated.masters.items():
        assert fetched(transport, entry).version == simulated.versions[entry]
        assert same(fetched(transport, entry).params, master)
    assert transport.status()["phase"] == "finished"
    with pytest.raises(RunEndedError, match="all 5 rounds are closed"):
        transport.fetch("block0", num_rounds, 5.0)
    with pytest.raises(RunEndedError):
        line.join()


def test_scenario_08_single_worker_gets_back_what_it_sent(line: Line) -> None:
    ((worker, _),) = begin(line, [0], interface=True)
    for version in range(3):
        sent = {entry: moved(fetched(worker, entry).params, version) for entry in ("block0", "interface")}
        for entry, params in sent.items():
            send(worker, 0, base=version, entry=entry, params=params)
        assert all(same(fetched(worker, entry, version).params, params) for entry, params in sent.items())


def test_stop_ends_the_run_for_everybody(line: Line) -> None:
    (first, _), (second, _) = begin(line, [0, 0])
    first.stop("enough")
    for ask in (lambda: second.fetch("block0", 0), lambda: send(second, 1), lambda: line.join()):
        with pytest.raises(RunEndedError, match="The run is over: enough"):
            ask()
    assert fetched(second, "block0").version == 0, "what there is stays to be had, for who uses the model afterwards"
    second.leave()
    assert (second.status()["phase"], second.status()["reason"]) == ("stopped", "enough")


def test_scenario_10_missing_workers_are_named_after_join_timeout(line: Line) -> None:
    line.open().found(make_terms(num_workers=4, join_timeout_s=30.0), make_masters())
    worker, _ = line.join(2)
    line.clock.now += 29.0
    assert worker.status()["phase"] == "waiting"
    line.clock.now += 1.0
    with pytest.raises(RunFailedError, match=r"join_timeout_s=30, missing workers \[0, 1, 3\]"):
        worker.fetch("block0", 0, 0.0)
    assert worker.status()["phase"] == "failed"


# Admission


def test_scenario_38_wrong_token_is_refused_and_changes_nothing(line: Line) -> None:
    (worker, _), _ = begin(line, [0, 0])
    stranger = line.open(token="guess")
    before = worker.status()
    for ask in (
        lambda: stranger.join(WorkerFacts(0)),
        lambda: stranger.fetch("block0"),
        lambda: stranger.status(),
        lambda: stranger.stop("mine"),
        lambda: stranger.dismiss(1),
    ):
        with pytest.raises(UnauthorisedError) as caught:
            ask()
        assert "guess" not in str(caught.value) and "s3cret" not in str(caught.value)
    after = worker.status()
    assert {name: after[name] for name in ("phase", "entries", "workers")} == {
        name: before[name] for name in ("phase", "entries", "workers")
    }


def test_scenario_36_coordinator_of_another_run_refuses_by_run_id(line: Line) -> None:
    line.open().found(make_terms(), make_masters())
    with pytest.raises(WrongRunError, match="coordinator of run 'run-1'; the request is for 'run-2'"):
        line.open(run_id="run-2").join(WorkerFacts(0))


def test_close_twice_is_harmless_and_ends_the_line(line: Line) -> None:
    transport = line.open()
    transport.status()
    transport.close()
    transport.close()
    with pytest.raises(TransportError, match="The transport is closed"):
        transport.status()


def test_close_before_first_use_is_harmless(line: Line) -> None:
    transport = line.open()
    transport.close()
    with pytest.raises(TransportError, match="The transport is closed"):
        transport.status()


RULES_DEADLINE = 1000.0
