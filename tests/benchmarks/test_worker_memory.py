import json
import mmap
import threading
from contextlib import nullcontext

import pytest

from benchmarks import worker_memory


def process(rank: int, base: int, peak: int, finished: bool = True) -> dict:
    measured = {"base": {"pss": base, "uss": base}, "peak": {"pss": peak, "uss": peak}, "num_samples": 9}
    return {"rank": rank, "finished": finished, **measured}


@pytest.mark.parametrize(("codec", "per_param"), [("fp32", 16), ("int8", 24)])
@pytest.mark.parametrize("over", [-1, 1])
def test_worker_memory_target_is_the_formula_of_the_worst_worker_that_is_not_rank_zero(codec, per_param, over):
    args = worker_memory.parse(["--quick", "--codec", codec])
    args.num_blocks = 3
    model, one = worker_memory.make_module("workers", args), worker_memory.make_module("block", args)
    elsewhere = sum(parameter.numel() for parameter in model.layers[:2].parameters())
    params = sum(parameter.numel() for parameter in model.parameters()) - elsewhere
    extra = 1000
    block_peak = 16 * sum(parameter.numel() for parameter in one.parameters()) + extra
    limit = 1.1 * (per_param * params + extra)
    found = {
        "block": [process(0, 50, 50 + block_peak)],
        "whole": [process(0, 70, 70 + 4 * int(limit))],
        "workers": [process(0, 0, 10 * int(limit)), process(2, 10, 11), process(1, 10, 10 + int(limit) + over)],
        "prefix": [process(0, 0, 1), process(1, 0, 1), process(2, 0, 1)],
    }
    report = worker_memory.report_of(found, args)
    assert report["params_of_block_and_interface"] == params
    assert report["a_bytes"] == extra
    assert report["limit_bytes"] == pytest.approx(limit)
    assert report["within"] is (over < 0)
    assert report["whole_over_worker"] == pytest.approx(4, rel=1e-2)
    assert report["rank_zero_bytes"] == 10 * int(limit)


@pytest.mark.parametrize(("prefix_codec", "per_value"), [("bf16", 2.0), ("fp32", 4.0)])
@pytest.mark.parametrize("over", [-1, 1])
def test_worker_memory_on_a_prefix_is_the_formula_of_the_last_block(prefix_codec, per_value, over):
    args = worker_memory.parse(["--quick", "--prefix-codec", prefix_codec])
    args.num_blocks = 3
    model, one = worker_memory.make_module("prefix", args), worker_memory.make_module("block", args)
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in model.layers]
    stem = model.embed.weight.numel()
    params = sum(parameter.numel() for parameter in model.parameters()) - layers[0] - layers[1] - stem
    prefix = layers[0] + layers[1] + stem
    extra = 1000
    formula = 16 * params + per_value * prefix
    limit = int(formula + 8 * layers[0] + 1.1 * extra)
    found = {
        "block": [process(0, 0, 16 * sum(parameter.numel() for parameter in one.parameters()) + extra)],
        "prefix": [process(0, 0, 10 * limit), process(1, 0, 10 * limit), process(2, 5, 5 + limit + over)],
    }
    report = worker_memory.report_on_prefix(found, args)
    assert (report["params_of_block_and_interface"], report["params_of_prefix"]) == (params, prefix)
    assert report["formula_bytes"] == formula
    assert report["left_over_bytes"] == limit + over - formula
    assert report["within"] is (over < 0)


def test_worker_memory_with_lookahead_is_of_the_worker_that_holds_most():
    args = worker_memory.parse(["--quick", "--lookahead", "1"])
    args.num_blocks = 3
    model, one = worker_memory.make_module("prefix", args), worker_memory.make_module("block", args)
    layer, stem = sum(parameter.numel() for parameter in model.layers[0].parameters()), model.embed.weight.numel()
    readout = sum(parameter.numel() for parameter in model.readout.parameters())
    found = {
        "block": [process(0, 0, 16 * sum(parameter.numel() for parameter in one.parameters()))],
        "prefix": [process(0, 0, 10**9), process(1, 0, 777), process(2, 0, 10**9)],
    }
    report = worker_memory.report_on_prefix(found, args)
    assert (report["rank"], report["worker_bytes"]) == (1, 777)
    assert report["formula_bytes"] == 16 * (layer + readout) + 2 * (layer + stem) + 6 * layer
    assert (report["params_of_prefix"], report["params_of_lookahead"]) == (layer + stem, layer)


@pytest.mark.parametrize("ended", [[process(0, 5, 9)], [process(0, 5, 9), process(1, 5, 6, finished=False)]])
def test_worker_memory_of_a_worker_that_did_not_take_all_steps_is_refused(ended):
    found = {"block": [process(0, 5, 9)], "whole": [process(0, 5, 9)], "workers": ended, "prefix": ended}
    with pytest.raises(RuntimeError, match=r"must take all steps; got arm=workers, ranks that have=\[0\] of \[0, 1\]"):
        worker_memory.report_of(found, worker_memory.parse(["--quick"]))


@pytest.mark.parametrize("fails_at", [None, 1])
def test_worker_memory_of_an_arm_says_whether_all_steps_were_taken(fails_at, tmp_path, monkeypatch):
    args = worker_memory.parse(["--quick", "--out", str(tmp_path)])
    make_module = worker_memory.make_module

    def breaking(*given):
        module = make_module(*given)
        step = module.training_step

        def training_step(batch, batch_idx):
            if batch_idx == fails_at:
                raise RuntimeError("it broke")
            return step(batch, batch_idx)

        module.training_step = training_step
        return module

    monkeypatch.setattr(worker_memory, "make_module", breaking)
    with nullcontext() if fails_at is None else pytest.raises(RuntimeError, match="it broke"):
        worker_memory.run_arm("block", args)
    assert json.loads((tmp_path / "block-0.json").read_text())["finished"] is (fails_at is None)


class CountedMemory(worker_memory.PeakMemory):
    sampled = threading.Semaphore(0)

    def sample(self):
        now = super().sample()
        self.sampled.release()
        return now


def test_worker_memory_peak_sees_what_is_allocated_while_it_samples():
    with CountedMemory(sample_every_s=0.001) as memory:
        block = mmap.mmap(-1, 2**26)  # from the system: an allocator may hold as much already
        block.write(bytes(len(block)))
        memory.sampled = threading.Semaphore(0)
        for _ in range(2):  # the first may have begun before
            assert memory.sampled.acquire(timeout=60.0)
        block.close()
    assert memory.peak["pss"] - memory.base["pss"] > 2**25


def test_worker_memory_of_one_block_is_refused(capsys):
    with pytest.raises(SystemExit):
        worker_memory.main(["--num-blocks", "1"])
    assert "num_blocks must be at least 2; got num_blocks=1" in capsys.readouterr().err


@pytest.mark.slow
def test_worker_memory_run_quick_measures_every_process(tmp_path):
    worker_memory.main(["--quick", "--json", str(tmp_path / "report.json")])
    report = json.loads((tmp_path / "report.json").read_text())
    ranks = {arm: [process["rank"] for process in found] for arm, found in report["processes"].items()}
    assert ranks == {"block": [0], "whole": [0], "workers": [0, 1], "prefix": [0, 1]}
    assert all(process["num_samples"] > 1 for found in report["processes"].values() for process in found)
    assert report["whole_over_worker"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_worker_memory_of_the_last_block_is_its_training_state_and_two_bytes_a_value_of_its_prefix():
    args = worker_memory.parse([])  # d=512, three blocks of four layers
    report = worker_memory.report_on_prefix(worker_memory.measure(args, ("block", "prefix")), args)
    assert report["within"], report
