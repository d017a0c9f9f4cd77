import json
import lzma
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import pipeline_target
from benchmarks.pipeline_corpora import Corpus, enwik8, split_stories, split_text, tinystories
from benchmarks.pipeline_target import FIRST_SEED, PILOT_SEEDS, QUICK, Runs, Verdict, gap
from benchmarks.pipeline_training import METHODS, Shape, strategy_of, train
from benchmarks.study.statistics import pairs_needed, power, tost, upper_bound
from lightning_blocktrain import BoundedHorizonStrategy, ByteTransformer


def test_upper_bound_is_that_of_the_published_figures() -> None:
    """Five gaps of mean .841 and standard deviation 1.315 have the bound 2.095."""
    shape = [-2.0, -1.0, 0.0, 1.0, 2.0]
    gaps = [0.841 + 1.315 * value / math.sqrt(2.5) for value in shape]
    assert upper_bound(gaps) == pytest.approx(2.095, abs=5e-4)
    assert math.isnan(upper_bound([1.0]))


@pytest.mark.parametrize(("num_pairs", "expected"), [(5, 0.41), (8, 0.62), (11, 0.76), (12, 0.79)])
def test_power_at_a_true_gap_of_zero_has_its_known_values(num_pairs: int, expected: float) -> None:
    assert power(num_pairs, 1.315, 1.0) == pytest.approx(expected, abs=0.006)


def test_power_is_the_share_of_simulated_samples_that_pass() -> None:
    generator = torch.Generator().manual_seed(0)
    samples = 0.3 + 0.8 * torch.randn(1000, 6, generator=generator, dtype=torch.float64)
    passed = sum(upper_bound(sample.tolist()) <= 1.0 for sample in samples) / 1000
    assert passed == pytest.approx(power(6, 0.8, 1.0, mean=0.3), abs=0.05)  # three standard errors


def test_pairs_needed_are_the_fewest_of_that_power() -> None:
    assert pairs_needed(1.315, 1.0, mean=0.841) == 425
    for sd in (0.2, 0.7, 1.315):
        n = pairs_needed(sd, 1.0)
        assert power(n, sd, 1.0) >= 0.8
        assert n == 2 or power(n - 1, sd, 1.0) < 0.8
    assert pairs_needed(0.0, 1.0) == 2
    assert pairs_needed(50.0, 1.0, most=20) == 21


@pytest.mark.parametrize(
    ("values", "equivalent", "different"),
    [
        ([0.001, -0.001, 0.0005, -0.0005], True, False),
        ([0.0021, 0.002, 0.0019, 0.002], True, True),
        ([0.02, -0.02, 0.01, -0.01], False, False),
        ([0.02, 0.021, 0.019, 0.02], False, True),
        ([-0.02, -0.021, -0.019, -0.02], False, True),
    ],
)
def test_tost_keeps_equivalence_and_difference_apart(values: list[float], equivalent: bool, different: bool) -> None:
    found = tost(values, 0.005)
    assert (found.equivalent, found.different) == (equivalent, different)
    # The test passes where the two-sided 90 % interval lies within the bounds.
    assert equivalent == (upper_bound(values) < 0.005 and -upper_bound([-v for v in values]) > -0.005)


def test_tost_of_equal_differences_needs_no_variance() -> None:
    assert tost([0.001] * 3, 0.005).equivalent
    assert not tost([0.01] * 3, 0.005).equivalent


def test_text_is_cut_at_90_and_95_per_cent() -> None:
    text = bytes(range(200))
    train_part, valid, test = split_text(text)
    assert (len(train_part), len(valid), len(test)) == (180, 10, 10)
    assert train_part + valid + test == text


def test_stories_stay_whole_stand_once_and_a_cut_one_is_left_out() -> None:
    stories = [f"Story {idx}\nends.".encode() for idx in range(40)]
    first = b"".join(story + b"\n<|endoftext|>\n" for story in stories[:25]) + b"a story that is cu"
    second = b"<|endoftext|>\n".join([*stories[20:], b""])
    parts = split_stories([first, second])
    found = [[s.strip() for s in part.split(b"<|endoftext|>")[:-1]] for part in parts]
    assert found == [stories[:36], stories[36:38], stories[38:]]
    assert all(part.endswith(b"\n<|endoftext|>\n") for part in parts)


def test_packed_files_become_corpora(tmp_path: Path) -> None:
    text, stories = bytes(100), b"".join(b"%d<|endoftext|>" % idx for idx in range(20))
    (tmp_path / "slice.xz").write_bytes(lzma.compress(text))
    (tmp_path / "stories.txt.xz").write_bytes(lzma.compress(stories))
    corpora = enwik8(str(tmp_path / "slice.xz"), tmp_path), tinystories([str(tmp_path / "stories.txt.xz")], tmp_path)
    assert [corpus.name for corpus in corpora] == ["enwik8", "tinystories"]
    assert [Path(path).stat().st_size for path in corpora[0].options.values()] == [90, 5, 5]
    assert Path(corpora[1].options["test"]).read_bytes() == b"19\n<|endoftext|>\n"


SMALL = Shape(2, 16, 2, 16, 2, 2 * 16 * 6, 3e-3, 2, 1, 0.5, score_batches=2)


FAST = ("bp", "rgc_next_private")


@pytest.mark.parametrize(
    "method", [pytest.param(method, marks=() if method in FAST else pytest.mark.slow) for method in METHODS]
)
def test_run_of_every_method_ends_with_scores_and_a_curve(corpus_folder: Path, method: str) -> None:
    corpus = Corpus("small", {split: str(corpus_folder / f"{split}.txt") for split in ("train", "val", "test")})
    row = train(corpus, method, 3, SMALL, with_test=True)
    assert [tokens for tokens, _ in row["curve"]] == [96, 192]
    assert row["curve"][-1][1] == row["valid"]
    assert 4 < row["valid"] < 9 and 4 < row["test"] < 9
    again = train(corpus, method, 3, SMALL, with_test=False)
    assert (again["valid"], again["test"]) == (row["valid"], None)


@pytest.fixture
def corpus_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "cache"))
    for split, length in {"train": 2000, "val": 300, "test": 300}.items():
        text = "".join(f"{idx} and {idx + 1}, " for idx in range(length))[:length]
        (tmp_path / f"{split}.txt").write_text(text)
    return tmp_path


def test_private_norms_share_the_first_weights_of_the_plain_model() -> None:
    options = {"num_layers": 3, "width": 16, "num_heads": 2, "window_bytes": 8}
    states = []
    for exits in ("shared", "norm"):
        torch.manual_seed(0)
        states.append(ByteTransformer(exits=exits, **options).state_dict())
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert len(states[1]) == len(states[0]) + 2 * 2


def test_strategies_emulate_the_lag_of_the_pipeline() -> None:
    assert strategy_of(METHODS["bp"], SMALL) == "auto"
    for method in METHODS:
        if method != "bp":
            strategy = strategy_of(METHODS[method], SMALL)
            assert isinstance(strategy, BoundedHorizonStrategy)
            lag = "newest" if "undelayed" in method else "pipeline"
            assert (strategy.settings.mode, strategy.settings.lag) == ("serial", lag)
            assert ("then_bp" in method) == (strategy.settings.schedule == "local_then_bp")
            assert ("next" in method) == (strategy.settings.credit == "next_stage")
            assert ("final" in method) == (strategy.settings.consensus_weights == "final")


class FakeTraining:
    """Bits that depend on method, seed and learning rate; remembers what it ran."""

    def __init__(self, sd: float = 0.001) -> None:
        self.ran: list[tuple[str, str, int, int, float, bool]] = []
        self.sd = sd

    def __call__(self, corpus: Corpus, method: str, seed: int, shape: Shape, with_test: bool) -> dict[str, Any]:
        self.ran.append((corpus.name, method, seed, shape.tokens, shape.lr, with_test))
        noise = self.sd * (seed % 3 - 1) if method != "bp" else 0.0
        bits = 2.0 + {"bp": 0.0, "rgc": 0.1}.get(method, 0.004) + noise + abs(shape.lr - 3e-3)
        half = [shape.tokens // 2, bits + 1]
        row = {"corpus": corpus.name, "method": method, "seed": seed, "curve": [half, [shape.tokens, bits]]}
        return {**vars(shape), **row, "valid": bits, "test": bits + 0.5 if with_test else None, "cpu_s": 1.0}


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> FakeTraining:
    fake = FakeTraining()
    monkeypatch.setattr(pipeline_target, "train", fake)
    return fake


def text_file(tmp_path: Path) -> str:
    (tmp_path / "text").write_bytes(bytes(1000))
    return str(tmp_path / "text")


def test_protocol_chooses_on_valid_and_confirms_on_test_with_new_seeds(
    training: FakeTraining, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--enwik8", text_file(tmp_path), "--methods", "rgc", "rgc_next", "--json", str(tmp_path / "rows.jsonl")]
    (verdict,) = pipeline_target.main(options)
    assert {run[4] for run in training.ran if run[3] == 131_072} == {1.5e-3, 3e-3, 6e-3}
    long = [run for run in training.ran if run[3] == 1_048_576]
    assert {run[4] for run in long} == {3e-3}
    assert {(run[1], run[2]) for run in long if not run[5]} == {
        *(("bp", seed) for seed in PILOT_SEEDS),
        *(("rgc_next", seed) for seed in PILOT_SEEDS),
        ("rgc", PILOT_SEEDS[0]),
    }
    assert [(run[1], run[2]) for run in long if run[5]] == [
        (m, FIRST_SEED + idx) for idx in range(2) for m in ("rgc_next", "bp")
    ]
    assert (verdict.method, verdict.needed, verdict.underpowered, verdict.passed) == ("rgc_next", 2, False, True)
    printed = capsys.readouterr().out
    assert "enwik8, rgc_next: non-inferior: mean gap" in printed
    assert "2 pairs on test" in printed


def test_protocol_that_is_continued_trains_only_what_is_missing(training: FakeTraining, tmp_path: Path) -> None:
    options = ["--enwik8", text_file(tmp_path), "--methods", "rgc_next", "--json", str(tmp_path / "rows.jsonl")]
    pipeline_target.main([*options, "--until", "lr"])
    assert len(training.ran) == 3
    first = pipeline_target.main(options)
    num = len(training.ran)
    assert num == 3 + 6 + 4
    assert pipeline_target.main(options) == first
    assert len(training.ran) == num
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == num
    assert str(tmp_path) not in json.dumps(rows)
    pipeline_target.main([*options, "--lr", "1e-3", "--until", "method"])
    assert len(training.ran) == num  # one method: nothing to choose


def test_wide_pilot_is_called_underpowered_in_the_first_line_and_runs_the_most_pairs(
    training: FakeTraining, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training.sd = 0.1
    options = ["--enwik8", text_file(tmp_path), "--lr", "3e-3", "--methods", "rgc_next"]
    (verdict,) = pipeline_target.main([*options, "--json", str(tmp_path / "rows.jsonl")])
    assert verdict.underpowered and len(verdict.gaps) == 12 and verdict.needed > 12
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(
        f"enwik8, rgc_next: UNDERPOWERED ({verdict.needed} pairs needed), non-inferiority NOT shown"
    )


def test_gap_is_in_per_cent_of_bp() -> None:
    assert gap(2.1, 2.0) == pytest.approx(5)


def test_verdict_that_is_just_within_the_margin_passes() -> None:
    bits = (0.001, 0.001)
    assert Verdict("c", "m", 0.1, 2, (1.0, 1.0), bits, ()).passed
    assert not Verdict("c", "m", 0.1, 2, (1.0, 1.01), bits, ()).passed


def test_files_rows_of_another_shape_are_not_those_asked_for(training: FakeTraining, tmp_path: Path) -> None:
    runs, corpus = Runs(tmp_path / "rows.jsonl"), Corpus("c", {})
    runs.get(corpus, "bp", 0, QUICK)
    Runs(tmp_path / "rows.jsonl").get(corpus, "bp", 0, SMALL)
    assert len(training.ran) == 2


@pytest.mark.parametrize(
    "wrong", [[], ["--enwik8", "x", "--tokens", "1000"], ["--quick", "--methods", "bp"], ["--quick", "--until", "x"]]
)
def test_wrong_options_are_refused_before_anything_runs(training: FakeTraining, wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        pipeline_target.main(wrong)
    assert training.ran == []
