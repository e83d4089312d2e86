"""Faults on links: chosen by rule, and what becomes of the calls that meet them. Every rank ends with the right result
or with an error that names a rank and an operation, in time.
"""

from __future__ import annotations

import random
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from comm import ranks
from comm.ranks import check, run_ranks
from echelon.comm import Options
from echelon.comm.faults import Chooser, Rule, parse_faults
from echelon.comm.frame import Call, Header, Kind
from echelon.errors import ConfigError, PeerLost

DATA, READY = Header(Kind.DATA), Header(Kind.READY)


def chosen(rules: str, headers: list[Header], rank: int = 0, peer: int = 1) -> list[int]:
    chooser = Chooser(parse_faults(rules), rank, peer)
    return [place for place, header in enumerate(headers) if chooser.choose(header)]


# -- which frames: pure


@pytest.mark.parametrize(
    ("rule", "places"),
    [
        ("drop", list(range(12))),
        ("drop:after=3,count=1", [3]),
        ("drop:every=4", [3, 7, 11]),
        ("drop:after=1,every=3,count=2", [3, 6]),
        ("drop:kind=DATA,after=2,count=1", [4]),
        ("drop:seq=5", [5]),
        ("drop:peer=2", []),
        ("drop:rank=0,peer=1,count=1", [0]),
        ("drop:rank=1", []),
        ("drop:peer=2; drop:after=11", [11]),
    ],
)
def test_a_rule_chooses_its_frames(rule, places):
    headers = [Header(Kind.DATA if number % 2 == 0 else Kind.READY, seq=number) for number in range(12)]
    assert chosen(rule, headers) == places


def test_an_operation_is_chosen_by_its_name():
    from echelon.comm.call import encode_call

    reduce = DATA._replace(call=encode_call("all_reduce", "ring", torch.float32, "sum", None, 4))
    gather = DATA._replace(call=encode_call("gather", "direct", torch.float32, None, 0, 4))
    ask = Header(Kind.ASK, Call())
    assert chosen("drop:op=all_reduce", [gather, reduce, ask, reduce]) == [1, 3]
    assert chosen("drop:op=gather", [gather, reduce, ask]) == [0]


def test_chance_is_the_same_for_the_same_seed_and_another_for_another():
    frames = [DATA] * 1000
    first = chosen("drop:chance=0.1,seed=1", frames)
    assert chosen("drop:chance=0.1,seed=1", frames) == first
    assert chosen("drop:chance=0.1,seed=2", frames) != first
    assert 50 < len(first) < 200


def test_text_and_rules_say_the_same():
    assert parse_faults("delay:peer=1, kind=DATA, after=3, count=1, seconds=0.2; corrupt:peer=0,after=3") == (
        Rule(fault="delay", peer=1, kind="DATA", after=3, count=1, seconds=0.2),
        Rule(fault="corrupt", peer=0, after=3),
    )
    assert parse_faults("") == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("explode:peer=1", "'explode' is none of delay, drop"),
        ("drop:per=1", "says 'per'; a fault has rank, peer"),
        ("drop:peer=one", "peer=one, which is no number"),
        ("drop:peer=-1", "peer=-1 of a drop must be at least 0"),
        ("drop:every=0", "every=0"),
        ("drop:chance=2", "chance=2"),
        ("drop:kind=LETTER", "'LETTER' is none of DATA"),
        ("drop:op=reduce_all", "'reduce_all' is none of all_reduce"),
        ("drop:peer=1,peer=2", "'peer' a second time"),
        ("delay:peer=1", "only a delay has them, and must"),
        ("drop:seconds=1", "only a delay has them, and must"),
    ],
)
def test_what_is_no_rule_is_refused_with_the_way_out(text, said):
    with pytest.raises(ConfigError, match="faults") as caught:
        Options(faults=text)
    assert said in str(caught.value)


# -- what becomes of the calls: real processes


@pytest.fixture
def faulty(monkeypatch):
    """`faulty("drop:...")`: groups that are made from now on have it."""

    def faulty(rules: str) -> None:
        monkeypatch.setattr(ranks, "Options", lambda topology: Options(topology=topology, faults=rules))

    return faulty


def reduce_until_it_fails(calls: int, numel: int):
    """All-reduces, checked; how many were right, and the error of the first that was none."""

    def work(rank: int):
        size = dist.get_world_size()
        began = time.monotonic()
        for number in range(calls):
            data = torch.full((numel,), float(rank + number))
            try:
                began = time.monotonic()
                dist.all_reduce(data)
            except Exception as error:  # noqa: BLE001 (told to the test)
                fields = getattr(error, "fields", {})
                return {"right": number, "error": type(error).__name__, **fields, "s": time.monotonic() - began}
            expected = sum(range(size)) + size * number
            assert torch.equal(data, torch.full((numel,), float(expected)))
        return {"right": calls, "s": time.monotonic() - began}

    return work


TRANSPORTS = pytest.mark.parametrize("on_each", [3, 1], ids=["shm", "tcp"])


@TRANSPORTS
@pytest.mark.parametrize("numel", [100, 400_000])
def test_a_delayed_frame_comes_later_and_the_result_is_right(tmp_path, spread, faulty, on_each, numel):
    spread(on_each)
    faulty("delay:rank=0,peer=1,kind=DATA,op=all_reduce,after=2,count=1,seconds=0.4")

    def work(rank: int):
        began = time.monotonic()
        found = reduce_until_it_fails(8, numel)(rank)
        return [found["right"], time.monotonic() - began]

    for right, seconds in check(run_ranks(tmp_path, 2, work)):
        assert right == 8
        assert 0.35 < seconds < 2


@TRANSPORTS
def test_what_is_delayed_keeps_its_order(tmp_path, spread, faulty, on_each):
    spread(on_each)
    faulty("delay:rank=0,kind=OFFER,every=3,seconds=0.02")

    def work(rank: int):
        if rank == 0:
            for number in range(30):
                dist.send(torch.full((1 + number,), float(number)), 1)
            return None
        got = [torch.empty(1 + number) for number in range(30)]
        for one in got:
            dist.recv(one, 0)
        return [float(one.mean()) for one in got]

    assert check(run_ranks(tmp_path, 2, work))[1] == [float(number) for number in range(30)]


@TRANSPORTS
@pytest.mark.parametrize("numel", [100, 400_000])
def test_a_dropped_frame_is_silence_that_is_named_within_the_timeout(tmp_path, spread, faulty, on_each, numel):
    spread(on_each)
    faulty("drop:rank=0,peer=1,kind=DATA,seq=3")
    silent, deaf = check(run_ranks(tmp_path, 2, reduce_until_it_fails(8, numel), timeout_s=2))
    assert deaf["rank"] == 0
    for answer in (silent, deaf):  # who is not heard gets no answer either, and may suspect the other first
        assert answer["error"] == "PeerLost", answer
        assert answer["right"] in (2, 3)
        assert answer["rank"] in (0, 1)
        assert "all_reduce" in answer["during"]
        assert answer["s"] < 2 + 1.5


@TRANSPORTS
@pytest.mark.parametrize("numel", [100, 400_000])
def test_a_cut_link_is_found_at_once_by_both_its_ends(tmp_path, spread, faulty, on_each, numel):
    spread(on_each)
    faulty("cut:rank=0,peer=2,kind=DATA,seq=4")
    answers = check(run_ranks(tmp_path, 3, reduce_until_it_fails(8, numel), timeout_s=20, topology="direct"))
    for answer in answers:  # each end suspects the other, and the first to do so is believed by the third
        assert answer["error"] == "PeerLost", answer
        assert answer["right"] in (3, 4)
        assert answer["rank"] in (0, 2)
        assert "all_reduce" in answer["during"]
        assert answer["s"] < 3


@pytest.mark.parametrize("numel", [100, 400_000])
@pytest.mark.parametrize("kind", ["DATA", "READY"])
def test_a_damaged_frame_over_tcp_is_never_applied(tmp_path, spread, faulty, kind, numel):
    spread(1)
    faulty(f"corrupt:rank=0,kind={kind},after=2,count=1")
    for answer in check(run_ranks(tmp_path, 2, reduce_until_it_fails(8, numel), timeout_s=5)):
        if kind == "READY" and numel == 100:  # nothing is asked for
            assert answer["right"] == 8
            continue
        assert answer["error"] == "PeerLost", answer
        assert answer["right"] < 8
        assert "all_reduce" in answer["during"]
        assert answer["s"] < 5 + 1.5


def test_the_damage_is_what_the_receiver_names(tmp_path, spread, faulty):
    spread(1)
    faulty("corrupt:rank=0,kind=DATA,count=1")
    _, receiver = check(run_ranks(tmp_path, 2, reduce_until_it_fails(1, 100), timeout_s=5))
    assert receiver["rank"] == 0
    assert "damaged on its way" in receiver["during"]


@pytest.mark.parametrize("byte", range(0, 64, 3))
def test_no_byte_of_a_header_can_be_damaged_unnoticed(tmp_path, spread, faulty, byte):
    spread(1)
    faulty(f"corrupt:rank=0,kind=DATA,count=1,byte={byte}")
    _, receiver = check(run_ranks(tmp_path, 2, reduce_until_it_fails(1, 100), timeout_s=20))
    assert (receiver["error"], receiver["right"], receiver["rank"]) == ("PeerLost", 0, 0)
    assert any(why in receiver["during"] for why in ("damaged on its way", "no frame of this group"))


def test_damage_is_refused_where_no_checksum_would_find_it(tmp_path, faulty):
    faulty("corrupt:rank=0,peer=1")
    first, _ = run_ranks(tmp_path, 2, lambda rank: None, timeout_s=5)
    assert first["error"].startswith("ConfigError: faults: corrupt from rank 0 to rank 1: they share memory")


def test_a_rule_that_concerns_nobody_costs_nothing(tmp_path, faulty):
    faulty("drop:rank=7; cut:peer=9")

    def work(rank: int) -> list[str]:
        return [type(link).__name__ for link in dist.group.WORLD.driver.fabric.links.values()]

    assert check(run_ranks(tmp_path, 3, work)) == [["RingLink"] * 2] * 3


def test_after_a_fault_a_new_group_works(tmp_path, spread, faulty):
    spread(1)
    faulty("cut:rank=0,seq=2,kind=DATA")

    def work(rank: int):
        dist.all_reduce(torch.ones(10))
        with pytest.raises(PeerLost):
            dist.all_reduce(torch.ones(10))
        dist.destroy_process_group()
        store = dist.FileStore(str(tmp_path / "again"), 2)
        dist.init_process_group("echelon", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=10))
        data = torch.ones(10)
        dist.all_reduce(data)
        return data.sum().item()

    assert check(run_ranks(tmp_path, 2, work)) == [20.0, 20.0]


def random_rules(dice: random.Random, ranks: int, *, can_corrupt: bool) -> str:
    rules = []
    for _ in range(dice.randint(1, 3)):
        fault = dice.choice(["delay", "delay", "drop", "cut", *(["corrupt"] if can_corrupt else [])])
        rule = f"{fault}:rank={dice.randrange(ranks)},after={dice.randrange(30)},count={dice.randint(1, 3)}"
        rule += f",chance={dice.choice([0.2, 1.0])},seed={dice.randrange(100)}"
        rule += f",kind={dice.choice(['DATA', 'READY', 'OFFER'])}" if dice.random() < 0.5 else ""
        rule += f",seconds={dice.uniform(0.01, 0.1):.3f}" if fault == "delay" else ""
        rules.append(rule)
    return ";".join(rules)


@TRANSPORTS
@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_a_rank_ends_right_or_with_a_typed_error(tmp_path, spread, faulty, seed, on_each):
    """Never garbage, never a hang: every kind of call under random faults."""
    dice = random.Random(f"{seed}/{on_each}")
    size = dice.choice([2, 3])
    spread(on_each)
    faulty(random_rules(dice, size, can_corrupt=on_each == 1))
    timeout_s = 2.0

    def work(rank: int):
        began = time.monotonic()
        for number in range(25):
            numel = [3, 1000, 100_000][number % 3]
            try:
                began = time.monotonic()
                summed = torch.full((numel,), float(rank + 1))
                dist.all_reduce(summed)
                assert torch.equal(summed, torch.full((numel,), size * (size + 1) / 2))
                spread_out = torch.full((numel,), float(rank))
                dist.broadcast(spread_out, number % size)
                assert torch.equal(spread_out, torch.full((numel,), float(number % size)))
                out, back = torch.full((numel,), float(rank)), torch.empty(numel)
                sending = dist.isend(out, (rank + 1) % size)
                dist.recv(back, (rank - 1) % size)
                sending.wait()
                assert torch.equal(back, torch.full((numel,), float((rank - 1) % size)))
                dist.barrier()
            except PeerLost as error:
                return {"right": number, "rank": error.rank, "during": error.during, "s": time.monotonic() - began}
        return {"right": 25, "s": 0.0}

    for answer in check(run_ranks(tmp_path, size, work, timeout_s=timeout_s)):
        assert answer["s"] < 3 * timeout_s
        if answer["right"] < 25:
            assert 0 <= answer["rank"] < size
            assert any(op in answer["during"] for op in ("all_reduce", "broadcast", "send", "receive", "barrier"))
