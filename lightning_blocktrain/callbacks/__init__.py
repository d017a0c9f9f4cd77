"""Callbacks, and the one namespace of metric keys.

A key is ``<group>/<name>[/<part>]``: W&B and TensorBoard make a section of each group, CSV a column of each key.
Units are the last word of a name; a key without one is a count, a ratio or in nats, as said here. ``{b}`` is a
block index, ``{s}`` a stage index, ``{K}`` a number of draws.

| key | meaning | unit |
|---|---|---|
| ``train/loss`` | loss of the training step; a block's under ``blocktrain``, with ``lookahead`` of two exits | nats |
| ``train/local_ce/block{b}`` | cross entropy of block b's local task; comparable with nothing else | nats per token |
| ``train/ahead_ce/block{b}`` | cross entropy at the exit that block b looks ahead to | nats per token |
| ``val/loss`` | loss of the validation step | nats per token |
| ``val/bits_per_byte`` | held-out code length (``BitsPerToken`` over bytes) | bits per byte |
| ``val/local_ce/block{b}`` | block b at noise from its own band; the target is in its input | nats per token |
| ``val/sweep_ce_k1`` | cross entropy after one sweep over the blocks, mean over the draws | nats per token |
| ``val/sweep_ce_k16`` | the same, mean probability of 16 draws (``k{K}`` for K) | nats per token |
| ``val/sweep_bits_per_byte`` | code length of the mean probability of all draws | bits per byte |
| ``val/prior_ce_k1`` | block 0 alone at the highest noise, mean over the draws | nats per token |
| ``val/prior_ce`` | the same, mean probability of all draws | nats per token |
| ``val/composition_gain`` | ``prior_ce - sweep_ce``, equal draws and starting noise | nats per token |
| ``val/span_ce`` | one sweep that does not know the second half, scored on it | nats per token |
| ``val/ablation/z_noise_ce`` | all draws; ``z`` after block 0 replaced by fresh noise | nats per token |
| ``val/ablation/z_zero_ce`` | all draws; ``z`` after block 0 replaced by zeros | nats per token |
| ``val/ablation/no_z_ce`` | one walk without ``z`` | nats per token |
| ``val/ablation/context_scrambled_ce`` | all draws; inputs permuted within their window | nats per token |
| ``val/leak_accuracy`` | accuracy of reading the target off the noised input at ``sigma_min`` | ratio |
| ``val/loss/exit{s}`` | loss of the model cut off after stage s | nats per token |
| ``val/bits_per_token/exit{s}`` | the same in bits; bits per byte where tokens are bytes | bits per token |
| ``test/...`` | as ``val/...``, on the test split | |
| ``throughput/accepted_tokens_per_s`` | tokens of merged block updates per second of training | tokens/s |
| ``throughput/worker_tokens_per_s`` | tokens processed per second of training, all workers | tokens/s |
| ``throughput/steps_per_s`` | Lightning optimizer steps (one of every worker) per second of training | steps/s |
| ``memory/peak_pss_mib`` | largest simultaneous PSS of the process tree since the start | MiB |
| ``memory/pss_mib`` | newest PSS of the process tree | MiB |
| ``memory/anon_mib``, ``memory/file_mib``, ``memory/shmem_mib`` | its parts | MiB |
| ``memory/peak_uss_mib``, ``memory/uss_mib`` | USS, where there is no PSS | MiB |
| ``memory/peak_rss_mib``, ``memory/rss_mib`` | RSS, where there is neither; counts shared pages repeatedly | MiB |
| ``rounds/round`` | rounds finished so far | count |
| ``rounds/participation`` | expected block workers that were accepted / all of them, this round | ratio |
| ``rounds/accepted`` | block updates accepted in this round | count |
| ``rounds/merged`` | blocks that a merge moved in this round | count |
| ``rounds/stale`` | workers of whom late work was merged in this round | count |
| ``rounds/late`` | block updates too late for their round, since the previous close | count |
| ``rounds/missing`` | expected block workers that gave no answer to the round | count |
| ``rounds/refused/<verdict>`` | block updates refused with this verdict (below) | count |
| ``rounds/delta_norm/block{b}`` | mean L2 norm of the accepted deltas, 0 without any | norm |
| ``rounds/merged_delta_norm/block{b}`` | L2 norm of the merged delta, 0 without any | norm |
| ``rounds/delta_norm/interface``, ``rounds/merged_delta_norm/interface`` | the same | norm |
| ``rounds/interface/participation`` | accepted interface updates / expected ones, when its round closed | ratio |
| ``rounds/interface/not_accepted`` | interface updates that were late or refused | count |
| ``blocktrain/worker_steps`` | inner optimizer steps so far, all workers | count |
| ``blocktrain/worker_tokens`` | tokens processed so far, all workers | count |
| ``blocktrain/sent_bytes`` | bytes of the updates sent so far by this process's workers, as encoded | bytes |
| ``blocktrain/prefix_bytes`` | bytes of frozen blocks fetched so far by this process's workers, as encoded | bytes |
| ``blocktrain/prefix_tokens`` | target tokens so far, once per call of a frozen layer | count |
| ``blocktrain/prefix_s`` | time in forward passes of frozen layers so far, decoding of the prefix included | s |
| ``blocktrain/prefix_cache_hits`` | batches so far whose features were found on disk | count |
| ``blocktrain/accepted_tokens`` | tokens of the block updates that were merged so far | count |
| ``pipeline/busy_frac/stage{s}`` | forward and backward passes / wall time of the stage, validation left out | ratio |
| ``pipeline/wait_in_frac/stage{s}`` | waiting for a batch, a snapshot or gradients / wall time | ratio |
| ``pipeline/wait_out_frac/stage{s}`` | waiting for room in front of the next stage / wall time | ratio |
| ``pipeline/copy_frac/stage{s}`` | copying into and out of shared memory / wall time | ratio |
| ``pipeline/optimizer_frac/stage{s}`` | consensus, clipping, optimizer step / wall time | ratio |
| ``pipeline/work_s/stage{s}`` | work of a step: CPU time for one thread, else busy + copy + optimizer | s |
| ``pipeline/lag/stage{s}`` | optimizer steps between a batch and the readout it saw, mean over the batches | count |
| ``pipeline/lag_max/stage{s}`` | the same, largest | count |
| ``pipeline/closure_error`` | share of wall time outside all five parts: largest size over the stages | ratio |
| ``pipeline/parallelism`` | work of all stages / work of the busiest; S for perfect balance | ratio |

The refusals are ``stale``, ``superseded``, ``duplicate``, ``nonfinite``, ``outlier``, ``malformed`` and
``unauthorised``; each has its column from the first round on.
"""

from lightning_blocktrain.callbacks.exits import ExitEvaluation, ExitScore, evaluate_exits
from lightning_blocktrain.callbacks.memory import MemoryMonitor, TreeMemory, tree_memory
from lightning_blocktrain.callbacks.pipeline import PipelineMonitor, ReportsStages
from lightning_blocktrain.callbacks.rounds import ReportsRounds, RoundMonitor
from lightning_blocktrain.callbacks.sweep_eval import SweepEvaluation, SweepReport, evaluate_sweep
from lightning_blocktrain.callbacks.throughput import AcceptedThroughput

__all__ = [
    "AcceptedThroughput",
    "ExitEvaluation",
    "ExitScore",
    "MemoryMonitor",
    "PipelineMonitor",
    "ReportsRounds",
    "ReportsStages",
    "RoundMonitor",
    "SweepEvaluation",
    "SweepReport",
    "TreeMemory",
    "evaluate_exits",
    "evaluate_sweep",
    "tree_memory",
]
