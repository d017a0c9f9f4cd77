"""The serving benchmark: what it judges, and that its quick form measures every kind of arm."""

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.serving import ARMS, REAL, Arm, Row, at_the_same_time, main, parse, table_of
from benchmarks.serving_models import NAMES, QUICK, build
from benchmarks.serving_quality import Quality, judge, vocabulary_of
from benchmarks.serving_soak import main as soak
from tests.models.cases import causal


def test_quality_of_known_texts() -> None:
    uniform = causal("features", window_bytes=16)
    with torch.no_grad():
        uniform.readout.unembed.weight.zero_()
    words = vocabulary_of(b"The cat sat on a Mat.")
    assert words == {b"the", b"cat", b"sat", b"on", b"a", b"mat"}
    found = judge([b"x", b"yz"], [b" cat dog Mat ", b"aaaaaaaa"], uniform, words)
    assert found.reference_bits == pytest.approx(8.0, abs=1e-4)
    # Words that touch an end may be cut: "aaaaaaaa" does not count. Two of three are known.
    assert found.word_frac == pytest.approx(2 / 3)
    assert found.distinct_frac == pytest.approx((1.0 + 1 / 5) / 2)
    assert found.num_bytes == 21


def test_reference_bits_do_not_depend_on_where_windows_end() -> None:
    model = causal("features", window_bytes=64)
    short = causal("features", window_bytes=64)
    short.load_state_dict(model.state_dict())
    short.window_bytes = 16
    text = bytes(range(40))
    with torch.no_grad():
        whole = model.exit_logits(torch.tensor([list(b"p" + text[:-1])]))[0].log_softmax(-1)
    nats = -sum(float(whole[idx, byte]) for idx, byte in enumerate(text))
    assert judge([b"p"], [text], model, set()).reference_bits == pytest.approx(nats / 40 / math.log(2), rel=1e-5)
    assert judge([b"p"], [text], short, set()).reference_bits == pytest.approx(nats / 40 / math.log(2), rel=0.1)


def test_a_table_compares_with_plain_at_the_same_rtt() -> None:
    quality = Quality(1.5, 0.9, 0.8, 10)
    rows = [Row("plain", rtt, 64, 48, speed, speed, 1.0, 10.0, quality) for rtt, speed in ((0.0, 50.0), (50.0, 2.0))]
    rows.append(Row("sweep", 50.0, 128, 128, 400.0, 400.0, 1 / 128, 5.0, quality))
    ratios = list(table_of(rows, {128: quality}).columns[4].cells)
    assert ratios == ["1.0", "1.0", "200.0", "-"]


def test_arms_at_the_same_time_return_in_order() -> None:
    assert at_the_same_time([lambda n=n: n * n for n in range(5)]) == [0, 1, 4, 9, 16]  # type: ignore[misc]


def test_a_whole_output_leaves_room_for_the_prompt() -> None:
    assert Arm("sweep", 0).chunk_of(128, 256) == 128
    assert Arm("sweep", 0).chunk_of(512, 256) == 224
    assert Arm("sweep", 16).chunk_of(512, 256) == 16


def test_every_arm_has_its_models() -> None:
    assert {arm.model for arm in ARMS.values()} <= set(NAMES)
    assert {arm.draft for arm in ARMS.values()} - {None, "exit"} <= set(NAMES)
    for arm in ARMS.values():
        model = build(arm.model, QUICK)
        assert arm.chunk_bytes == 1 or model.p_span > 0
        assert model.num_blocks == 3


def test_default_distances_and_lengths() -> None:
    args = parse([])
    assert (args.rtts, args.lengths) == ([0, 10, 50, 150], [64, 128, 512])


@pytest.mark.slow
def test_quick_measures_speed_bytes_and_quality_in_one_row(tmp_path: Path) -> None:
    main(["--quick", "--models", str(tmp_path / "models"), "--json", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())
    rows = {(row["arm"], row["rtt_ms"]): row for row in found["rows"]}
    assert len(rows) == 10
    for row in rows.values():
        assert row["bytes_per_s"] > 0 and row["moved_per_byte"] > 0 and 0 < row["quality"]["reference_bits"] < 20
    assert rows["plain", 5.0]["traversals_per_byte"] == 1
    assert rows["sweep", 5.0]["traversals_per_byte"] == pytest.approx(1 / 24)
    # Four half round trips of 5 ms a byte at least: a relay that did not delay would be faster.
    assert rows["plain", 5.0]["bytes_per_s"] < 100
    assert rows["batched", 0.0]["quality"] == rows["plain", 0.0]["quality"]
    assert found["real"]["24"]["word_frac"] == 1.0 and REAL not in found
    assert 1 <= found["accepted_per_traversal"]["draft exit"] <= 9
    [tcp] = found["overhead"]
    assert tcp["pss_mib"] > tcp["block_and_interface_mib"] and tcp["planned_over_measured_sweep"] > 0


@pytest.mark.slow
def test_hosts_stand_several_clients(tmp_path: Path) -> None:
    found = soak(["--clients", "3", "--seconds", "4", "--json", str(tmp_path / "soak.json")])
    assert found.texts > 3 and not found.errors
    written = json.loads((tmp_path / "soak.json").read_text())
    assert written["texts"] == found.texts and len(written["pss_mib"]) >= 2
