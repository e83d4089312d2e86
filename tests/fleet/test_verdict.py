from __future__ import annotations

import signal
from itertools import permutations

import pytest

from echelon.errors import (
    Bug,
    ConfigError,
    EchelonError,
    PeerLost,
    Stopped,
    StorageFailed,
    Timeout,
    TooFewWorkers,
    UserError,
)
from echelon.fleet.verdict import Finding, died, patience_s, reported, root_cause, starter_died

ON = "go on with --resume --out runs/x"
KILLED = int(signal.SIGKILL)  # the wait status of a process that a signal ended is the signal's number


def exited(code: int) -> int:
    return code << 8


def by_order(*errors: EchelonError) -> list[Finding]:
    return [reported(rank, float(rank), error) for rank, error in enumerate(errors)]


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_the_cause_is_found_in_whatever_order_its_symptoms_arrive(order: tuple[int, ...]) -> None:
    errors = [PeerLost(2, "all-reduce"), Timeout("all-reduce", 30), UserError(2, "broken"), Bug(3, "connection reset")]
    findings = [reported(rank, float(at), errors[rank]) for at, rank in enumerate(order)]
    assert root_cause(findings) is errors[2]


@pytest.mark.parametrize("cause", [ConfigError("data", "empty"), UserError(1, "x"), StorageFailed("runs", "full")])
def test_a_typed_error_outweighs_the_death_that_follows_it(cause: EchelonError) -> None:
    assert root_cause([reported(1, 1.0, cause), died(0, 1.5, KILLED, False, ON)]) is cause


def test_a_kill_outweighs_the_error_that_user_code_raises_because_of_it() -> None:
    findings = [died(2, 1.0, KILLED, False, ON), reported(0, 1.2, UserError(0, "RuntimeError: connection closed"))]
    assert "rank 2" in str(root_cause(findings))


def test_a_kill_learnt_of_at_the_same_moment_counts_as_first() -> None:
    findings = [reported(0, 1.0, UserError(0, "RuntimeError: connection closed")), died(2, 1.05, KILLED, False, ON)]
    assert "rank 2" in str(root_cause(findings))


def test_an_abort_never_hides_the_error_that_made_a_library_abort() -> None:
    error = UserError(0, "x")
    assert root_cause([died(2, 1.0, int(signal.SIGABRT), False, ON), reported(0, 1.2, error)]) is error


def test_a_death_outweighs_unexpected_exceptions_and_lost_peers() -> None:
    findings = [reported(0, 0.0, Bug(0, "reset")), reported(1, 0.1, PeerLost(2, "x")), died(2, 0.5, KILLED, False, ON)]
    assert isinstance(root_cause(findings), TooFewWorkers)


def test_an_exit_without_a_word_outweighs_what_its_peers_say() -> None:
    error = root_cause([reported(0, 0.0, Bug(0, "reset")), died(1, 0.5, exited(0), False, ON)])
    assert isinstance(error, UserError)
    assert error.rank == 1
    assert "exit code 0" in str(error)


def test_stopping_as_asked_outweighs_the_peers_that_it_leaves_alone() -> None:
    assert isinstance(root_cause(by_order(PeerLost(1, "x"), Stopped(3, "runs/x"))), Stopped)


def test_a_lost_peer_with_a_name_says_more_than_one_without_and_more_than_a_timeout() -> None:
    named = PeerLost(2, "x")
    assert root_cause(by_order(Timeout("x", 1), PeerLost(-1, "x"), named)) is named


def test_what_all_ranks_say_alike_is_reported_for_the_lowest() -> None:
    findings = [reported(rank, 1.0 - rank / 10, UserError(rank, "same", f"trace {rank}")) for rank in range(3)]
    error = root_cause(findings)
    assert isinstance(error, UserError)
    assert error.rank == 0


def test_of_different_errors_the_first_is_reported() -> None:
    first = UserError(2, "the cause")
    assert root_cause([reported(0, 2.0, UserError(0, "what followed")), reported(2, 1.0, first)]) is first


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGUSR1])
def test_a_death_names_rank_signal_and_what_to_do(number: signal.Signals) -> None:
    text = str(died(3, 0.0, int(number), False, ON).error)
    assert "rank 3" in text
    assert number.name in text
    assert text.endswith(ON)


def test_a_kill_says_out_of_memory_only_when_the_kernel_says_so() -> None:
    assert "or killed by hand" in str(died(0, 0.0, KILLED, False, ON).error)
    assert "killed by hand" not in str(died(0, 0.0, KILLED, True, ON).error)


def test_a_death_whose_status_is_unknown_or_whose_signal_has_no_name_is_still_told() -> None:
    assert "rank 1" in str(died(1, 0.0, None, False, ON).error)
    assert "signal 42" in str(died(1, 0.0, 42, False, ON).error)


def test_the_loss_of_the_template_explains_the_deaths_of_its_workers() -> None:
    findings = [died(0, 1.02, None, False, ON), starter_died(1.01, "was ended by SIGKILL", ON)]
    assert "the process that starts the workers" in str(root_cause(findings))


def test_a_cause_is_waited_for_longer_when_only_symptoms_are_known() -> None:
    symptom = reported(0, 0.0, PeerLost(1, "x"))
    assert patience_s([symptom]) > patience_s([symptom, reported(1, 0.0, UserError(1, "x"))]) > 0
    assert patience_s([symptom]) > patience_s([died(1, 0.0, KILLED, False, ON)]) > 0
