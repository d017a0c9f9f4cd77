import json
from pathlib import Path

import pytest

from benchmarks import exchange


def test_arms_are_the_codecs_and_every_policy_under_every_network() -> None:
    assert len(exchange.arms()) == len(exchange.CODECS) + len(exchange.POLICIES) * len(exchange.NETWORKS)


def test_exchange_runs_each_arm_once_and_prints_both_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, names = tmp_path / "runs.jsonl", ["codec fp32", "codec int8", "wan drop", "wan stale_weighted"]
    arguments = ["--quick", "--json", str(path), "--arms", *names]
    exchange.main(arguments)
    rows = {row["arm"]: row for row in map(json.loads, path.read_text().splitlines())}
    assert list(rows) == names
    fp32, int8, drop, stale = rows.values()
    assert fp32["participation"] == 1.0
    assert int8["sent_bytes"] < 0.4 * fp32["sent_bytes"]  # short tensors have a scale of their own each
    assert drop["participation"] < 1.0
    assert (drop["stale"], stale["stale"] > 0) == (0, True)
    assert stale["worker_tokens"] == drop["worker_tokens"]
    printed = capsys.readouterr().out
    assert "codecs, lockstep" in printed and "stale_weighted" in printed
    exchange.main(arguments)
    assert len(path.read_text().splitlines()) == len(names)


def test_paired_gap_compares_equal_seeds_only() -> None:
    rows = [{"seed": seed, "nats_per_byte": float(seed)} for seed in (1, 2)]
    reference = [{"seed": 2, "nats_per_byte": 1.5}, {"seed": 3, "nats_per_byte": 9.0}]
    assert exchange.paired_gap(rows, reference) == 0.5
