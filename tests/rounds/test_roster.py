import pytest

from lightning_blocktrain.errors import CheckpointMismatchError
from lightning_blocktrain.rounds.roster import Roster

TOKEN = "s3cret-t0ken"


def test_roster_newer_incarnation_replaces_older() -> None:
    roster = Roster("run", TOKEN)
    assert roster.join(4, 1)
    assert roster.join(4, 2)
    assert not roster.join(4, 1)
    assert roster.incarnation_of(4) == 2


def test_roster_joining_twice_is_harmless() -> None:
    roster = Roster("run", TOKEN)
    assert roster.join(0, 0) and roster.join(0, 0)
    assert roster.live == (0,)


def test_roster_old_incarnation_cannot_make_the_new_one_leave() -> None:
    roster = Roster("run", TOKEN)
    roster.join(0, 1)
    roster.join(0, 2)
    assert not roster.leave(0, 1)
    assert roster.is_live(0)
    assert roster.leave(0, 2)
    assert not roster.leave(0, 2)
    assert roster.live == ()
    assert roster.incarnation_of(0) == 2


def test_roster_worker_that_never_joined_is_unknown() -> None:
    roster = Roster("run", TOKEN)
    assert roster.incarnation_of(3) is None
    assert not roster.leave(3, 0)


@pytest.mark.parametrize("run_id", ["other", "", None, 3, b"run"])
def test_roster_wrong_run_id_is_not_authorised(run_id: object) -> None:
    assert not Roster("run", TOKEN).authorises(run_id, TOKEN)


@pytest.mark.parametrize("token", ["", TOKEN + "x", TOKEN[:-1], None, TOKEN.encode(), "\ud800", "gr\u00fcn"])
def test_roster_wrong_token_is_not_authorised(token: object) -> None:
    assert not Roster("run", TOKEN).authorises("run", token)


def test_roster_right_pair_is_authorised() -> None:
    assert Roster("run", TOKEN).authorises("run", TOKEN)


def test_roster_token_appears_in_no_representation_or_state() -> None:
    roster = Roster("run", TOKEN)
    roster.join(0, 0)
    assert TOKEN not in repr(roster) + str(roster) + repr(roster.state_dict())


def test_roster_loaded_state_equals_the_stored_one() -> None:
    roster = Roster("run", TOKEN)
    roster.join(5, 3)
    roster.join(2, 1)
    roster.leave(2, 1)
    loaded = Roster("run", TOKEN)
    loaded.load_state_dict(roster.state_dict())
    assert loaded.state_dict() == roster.state_dict()
    assert loaded.live == (5,) and loaded.incarnation_of(2) == 1


def test_roster_state_of_another_run_is_refused() -> None:
    with pytest.raises(CheckpointMismatchError, match="stored run_id=run, this run_id=next"):
        Roster("next", TOKEN).load_state_dict(Roster("run", TOKEN).state_dict())


@pytest.mark.parametrize(("worker_id", "incarnation"), [(-1, 0), (0, -1), (True, 0), (0, 2**60)])
def test_roster_bad_number_is_refused(worker_id: int, incarnation: int) -> None:
    with pytest.raises(ValueError, match="must be non-negative ints"):
        Roster("run", TOKEN).join(worker_id, incarnation)


@pytest.mark.parametrize(("run_id", "token"), [("", TOKEN), ("run", "")])
def test_roster_empty_name_or_secret_is_refused_without_showing_it(run_id: str, token: str) -> None:
    with pytest.raises(ValueError, match="must be a non-empty string") as caught:
        Roster(run_id, token)
    assert TOKEN not in str(caught.value)
