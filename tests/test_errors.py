"""Errors cross process boundaries with their type and fields, and turn the user's failures into one clear line."""

from __future__ import annotations

import copy
import json
import sys

import pytest

from echelon import errors
from echelon.errors import (
    LINE_LIMIT,
    TRACE_LIMIT,
    ConfigError,
    EchelonError,
    OutOfMemory,
    Stopped,
    Unwinding,
    UserError,
    decode,
    encode,
    users_code,
)

EXAMPLES = [
    (errors.ConfigError("batch", "is too small"), 2),
    (errors.OutOfMemory("memory", "rank 1 ran out"), 2),
    (errors.OutOfMemoryPlan(2**31, 2**30), 2),
    (errors.UserError(1, "ValueError: no", "Traceback ..."), 3),
    (errors.Diverged(7, "the loss is nan", 2), 3),
    (errors.VerificationFailed("weights differ"), 4),
    (errors.Stopped(9, "runs/x"), 75),
    (errors.Stopped(9, "runs/x", 3), 75),
    (errors.TooFewWorkers("1 of 4 left"), 76),
    (errors.PeerLost(3, "an all-reduce"), 76),
    (errors.Timeout("joining", 3.5), 76),
    (errors.OutOfStep(0, "a sum", 1, "a broadcast"), 3),
    (errors.StorageFailed("/x", "full"), 77),
    (errors.CheckpointCorrupt("/x", "a hash differs"), 78),
    (errors.Bug(0, "KeyError", "Traceback ..."), 1),
]


def test_every_error_has_an_example_here():
    def below(kind):
        return {kind}.union(*(below(child) for child in kind.__subclasses__()))

    ours = {kind for kind in below(EchelonError) if kind.__module__ == "echelon.errors"}
    assert ours == {type(error) for error, _ in EXAMPLES} | {EchelonError}


@pytest.mark.parametrize(("error", "code"), EXAMPLES)
def test_the_exit_code_is_the_contract_s(error, code):
    assert error.exit_code == code


@pytest.mark.parametrize(("error", "code"), EXAMPLES)
def test_an_error_survives_json_with_type_fields_and_sentence(error, code):
    twin = decode(json.loads(json.dumps(encode(error))))
    assert type(twin) is type(error)
    assert twin.fields == error.fields
    assert str(twin) == str(error) != ""


@pytest.mark.parametrize(("error", "code"), EXAMPLES)
def test_an_error_can_be_copied(error, code):
    assert copy.copy(error).fields == error.fields


def test_a_stop_that_nobody_catches_ends_a_script_with_its_code():
    assert isinstance(Stopped(3, "runs/x"), SystemExit)
    assert Stopped(3, "runs/x").code == 75


def test_a_stop_says_how_to_go_on():
    assert "--resume --out runs/x" in str(Stopped(3, "runs/x"))
    assert "nothing was trained" in str(Stopped(0, "runs/x"))
    assert "--resume --out 'my runs/x'" in str(Stopped(3, "my runs/x"))


def test_a_stop_of_what_is_not_kept_promises_no_way_on():
    for error in (Stopped(3, ""), Stopped(0, "", 3)):
        assert "step 3; nothing was" in str(error)
        assert "start it again" in str(error)
        assert "--resume" not in str(error)
    assert str(Stopped(3, "")) == "stopped on request after step 3; nothing was kept, so start it again"


@pytest.mark.parametrize(
    ("error", "text"),
    [(UserError(-1, "no"), "in one process: no"), (errors.Diverged(2, "no", -1), "step 2: no")],
)
def test_where_no_worker_is_at_fault_no_rank_is_named(error, text):
    assert str(error) == text


def raised_by(user, rank=2):
    with pytest.raises(EchelonError) as caught, users_code("computing the loss", rank):
        user()
    return caught.value


def test_what_the_user_raises_keeps_its_traceback_and_says_when():
    def user():
        raise ValueError("first line\nsecond line")

    error = raised_by(user)
    assert type(error) is UserError
    assert error.rank == 2
    assert error.why == "ValueError: first line (while computing the loss)"
    assert "in user" in error.trace
    assert "second line" in error.trace


@pytest.mark.parametrize("text", ["x" * 3_000_000, "first\n" + "a line\n" * 500_000 + "last"])
def test_a_message_of_megabytes_is_cut_to_how_it_begins_and_ends(text):
    def user():
        raise ValueError(f"what is wrong {text} in the end")

    error = raised_by(user)
    assert type(error) is UserError
    assert error.why.startswith("ValueError: what is wrong")
    assert len(error.why) < LINE_LIMIT + 100
    assert len(error.trace) < TRACE_LIMIT + 200
    assert error.trace.startswith("Traceback (most recent call last):\n")
    assert "in user" in error.trace
    assert error.trace.rstrip().endswith("in the end")
    assert len(raised_by(lambda: sys.exit(text)).why) < LINE_LIMIT + 100


def test_an_exception_without_a_message_is_named_by_its_type():
    def user():
        raise KeyError

    assert raised_by(user).why.startswith("KeyError (while")


def test_notes_on_an_exception_are_in_the_trace():
    def user():
        error = ValueError("no")
        error.add_note("while reading sample 7 of the dataset")
        raise error

    assert "sample 7" in raised_by(user).trace


def test_sys_exit_in_the_user_s_code_is_the_user_s_failure():
    def user():
        raise SystemExit(0)

    error = raised_by(user)
    assert type(error) is UserError
    assert "sys.exit(0)" in error.why


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")])
def test_memory_that_ran_out_says_what_to_do(error):
    def user():
        raise error

    found = raised_by(user)
    assert type(found) is OutOfMemory
    assert isinstance(found, ConfigError)
    assert "microbatch" in found.why


@pytest.mark.parametrize("error", [ConfigError("a", "b"), Unwinding(), Stopped(1, "x")])
def test_what_has_its_own_meaning_passes_through(error):
    with pytest.raises(type(error)) as caught, users_code("making the model"):
        raise error
    assert caught.value is error
