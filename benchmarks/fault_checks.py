"""What must hold after single scenarios of the fault harness, beside what every run has to come to.

Owns who suffers and when: the scripts make it happen there, the checks look there. Pure; every check yields what is
wrong, whatever the story lacks. ``closes_by_the_deadline`` and ``resumes_soon`` judge times and are for
``Expected.time_check``, the others judge none.
"""

from collections.abc import Callable, Iterator

from benchmarks.fault_plan import Shape
from benchmarks.fault_stage import Story

Check = Callable[[Shape, Story], Iterator[str]]

VICTIM, BLOCK = 3, 0
"""The worker that suffers, the second replica of its block."""
ROUND = 2
"""The round in which it does."""
CONSTANT_S = 1.0
"""What a round may last beyond its deadline: two busy cores between all these processes."""
LISTEN_S, RESUME_S = 15.0, 5.0


def closes_by_the_deadline(shape: Shape, story: Story) -> Iterator[str]:
    """Every round closes by its deadline."""
    for report in story.reports:
        took_s = report["closed_at"] - report["opened_at"]
        if took_s > shape.deadline_s + CONSTANT_S:
            which = f"{report['entry']} round {report['round_idx']}"
            yield f"{which} lasted {took_s:.2f} s with a deadline of {shape.deadline_s:g} s"


def missing_by_name(shape: Shape, story: Story) -> Iterator[str]:
    """The round's report names the victim as missing."""
    missing = [r["missing"] for r in story.reports if r["entry"] == f"block{BLOCK}" and r["round_idx"] == ROUND]
    victims = tuple(story.died_at)
    if missing != [victims]:
        yield f"reports of round {ROUND} of block {BLOCK} miss {missing} and not {[victims]}"


def counts_once(shape: Shape, story: Story) -> Iterator[str]:
    """The victim's update on its last version counts once."""
    merged = [r["round_idx"] for r in story.reports if r["entry"] == f"block{BLOCK}" and VICTIM in r["accepted"]]
    if merged != list(range(ROUND + 1)):
        yield f"updates of the victim count in rounds {merged}"


def stands_still(shape: Shape, story: Story) -> Iterator[str]:
    """The block without workers keeps its parameters."""
    last = {digest for who, version, digest in story.rounds if who in (1, 4) and version == ROUND}
    if last != {story.masters.get("block1")}:
        yield "the block without workers did not keep its parameters"


def came_back(shape: Shape, story: Story) -> Iterator[str]:
    """The victim counts again after it was away."""
    rounds = [r["round_idx"] for r in story.reports if r["entry"] == f"block{BLOCK}" and VICTIM in r["accepted"]]
    if not any(round_idx > ROUND for round_idx in rounds):
        yield f"the victim counts in rounds {rounds} only"


def is_second_life(shape: Shape, story: Story) -> Iterator[str]:
    """The victim's second life begins where the run stands."""
    yield from came_back(shape, story)
    if story.began[VICTIM] != [0, ROUND]:
        yield f"the victim's lives began at versions {story.began[VICTIM]}"


def newcomer_counts(shape: Shape, story: Story) -> Iterator[str]:
    """Nobody waits for the newcomer in the round that it joins in, and it counts in a later one."""
    newcomer = shape.num_workers
    own = [r for r in story.reports if r["entry"] == f"block{newcomer % shape.num_blocks}"]
    if any(newcomer in r["expected"] for r in own if r["round_idx"] == ROUND):
        yield "the round that the newcomer joined in waited for it"
    if not any(newcomer in r["accepted"] for r in own if r["round_idx"] > ROUND):
        yield "the newcomer counts in no later round"


def resumes_soon(shape: Shape, story: Story) -> Iterator[str]:
    """The coordinator listens again, and rounds close again, in time."""
    assert story.killed_at is not None
    listening_at = story.listening_at[-1]
    if listening_at - story.killed_at > LISTEN_S:
        yield f"listening again after {listening_at - story.killed_at:.1f} s"
    resumed_s = min(closes_after_restart(story), default=listening_at) - listening_at
    if resumed_s > RESUME_S:
        yield f"the next round closes {resumed_s:.1f} s after that"


def resumes(shape: Shape, story: Story) -> Iterator[str]:
    """Rounds close again after the restart."""
    if not closes_after_restart(story):
        yield "no round closes after the restart"


def closes_after_restart(story: Story) -> list[float]:
    """Return when rounds were closed after the coordinator listened again."""
    return [report["closed_at"] for report in story.reports if report["closed_at"] > story.listening_at[-1]]
