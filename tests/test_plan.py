"""The plan language: what parses, how it is written back, what is refused and with which words."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import ConfigError
from echelon.plan import Agreement, Codec, Plan, Served

counts = st.integers(1, 10**6)


def served() -> st.SearchStrategy[Served]:
    return st.builds(
        Served,
        servers=counts,
        replicas=counts,
        tiers=st.sampled_from([1, 2]),
        groups=st.none() | counts,
        reads=st.sampled_from(["strong", "eventual"]),
    )


def agreements() -> st.SearchStrategy[Agreement]:
    return st.one_of(
        st.builds(Agreement, rule=st.sampled_from(["sync", "async"])),
        st.builds(Agreement, rule=st.just("bounded"), steps=st.integers(0, 10**6)),
        st.builds(Agreement, rule=st.just("local"), steps=counts, sites=st.none() | counts),
    )


def codecs() -> st.SearchStrategy[Codec]:
    fractions = st.floats(0, 1, exclude_min=True)
    return st.one_of(
        st.builds(Codec, name=st.sampled_from(["fp16", "bf16", "int8", "int4", "sign", "adapt"])),
        st.builds(Codec, name=st.sampled_from(["topk", "randk"]), amount=fractions),
        st.builds(Codec, name=st.just("lowrank"), amount=counts),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan that can exist: fields are drawn freely and what contradicts them is drawn again as nothing."""
    fields = {
        "dp": draw(st.none() | counts),
        "tp": draw(st.just(1) | counts),
        "pp": draw(st.just(1) | counts),
        "zero": draw(st.integers(0, 3)),
        "schedule": draw(st.sampled_from(["1f1b", "gpipe", "interleaved", "zerobubble"])),
        "topology": draw(st.none() | st.sampled_from(["ring", "tree", "star", "hier"])),
        "server": draw(st.none() | served()),
        "agreement": draw(agreements()),
        "codec": draw(st.none() | codecs()),
        "zstd": draw(st.booleans()),
    }
    nothing = {f.name: f.default for f in dataclasses.fields(Plan)} | {"agreement": Agreement()}
    for name in ("schedule", "topology", "zero", "agreement", "server"):
        try:
            return Plan(**fields)
        except ConfigError:
            fields[name] = nothing[name]
    return Plan(**fields)


@given(plans())
def test_every_plan_parses_back_from_its_text(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan
    assert hash(Plan.parse(str(plan))) == hash(plan)


@given(plans(), st.randoms())
def test_the_order_of_terms_and_axes_does_not_matter(plan: Plan, random: object) -> None:
    mesh, *modifiers = str(plan).split("+")
    axes = mesh.split(".")
    random.shuffle(axes)
    terms = [".".join(axes), *modifiers]
    random.shuffle(terms)
    assert str(Plan.parse("+".join(terms))) == str(plan)


@given(plans())
def test_no_character_of_a_plan_needs_quoting_in_a_shell(plan: Plan) -> None:
    assert not set(str(plan)) - set("abcdefghijklmnopqrstuvwxyz0123456789.,:=+-")


@given(plans())
def test_terms_are_the_words_of_the_text(plan: Plan) -> None:
    terms = list(plan.terms().values())
    axes = [text for name, text in plan.terms().items() if name in {"dp", "tp", "pp"}]
    assert str(plan) == "+".join([".".join(axes), *terms[len(axes) :]])


@given(plans(), st.integers(1, 64))
def test_a_resolved_plan_uses_every_worker_or_says_why_not(plan: Plan, workers: int) -> None:
    try:
        resolved = plan.resolve(workers)
    except ConfigError as error:
        assert error.why
        return
    assert resolved.dp * resolved.tp * resolved.pp == workers
    assert dataclasses.replace(resolved, dp=plan.dp) == plan
    assert resolved.resolve(workers) == resolved
    assert Plan.parse(str(resolved)) == resolved


ALPHABET = "dpt012349.+:,=- xzero1f1bgpipesynclocalbounded\u0664\n\x00"


@given(st.one_of(st.text(max_size=40), st.text(ALPHABET, max_size=40)))
def test_any_text_is_a_plan_or_a_config_error(text: str) -> None:
    try:
        plan = Plan.parse(text)
    except ConfigError as error:
        assert error.term
        assert error.why
    else:
        assert Plan.parse(str(plan)) == plan


@given(plans(), st.data())
def test_a_slip_of_one_character_never_ends_in_anything_but_a_plan_or_a_config_error(
    plan: Plan, data: st.DataObject
) -> None:
    text = str(plan)
    place = data.draw(st.integers(0, len(text)))
    slip = text[:place] + data.draw(st.sampled_from(ALPHABET)) + text[place + data.draw(st.integers(0, 1)) :]
    try:
        Plan.parse(slip)
    except ConfigError as error:
        assert error.why


GOOD = {
    "dp": Plan(),
    "ddp": Plan(),
    " dp \n": Plan(),
    "ddp4": Plan(dp=4),
    "dp1": Plan(dp=1),
    "tp2": Plan(dp=1, tp=2),
    "dp.tp2": Plan(tp=2),
    "pp2.dp3.tp4": Plan(dp=3, tp=4, pp=2),
    "tp1": Plan(dp=1),
    "zero1": Plan(zero=1),
    "dp+zero2": Plan(zero=2),
    "zero3+dp4": Plan(dp=4, zero=3),
    "pp2+1f1b": Plan(dp=1, pp=2),
    "pp2+gpipe": Plan(dp=1, pp=2, schedule="gpipe"),
    "interleaved+dp.pp4": Plan(pp=4, schedule="interleaved"),
    "pp2+zerobubble": Plan(dp=1, pp=2, schedule="zerobubble"),
    "ring": Plan(topology="ring"),
    "dp+hier+int8": Plan(topology="hier", codec=Codec(name="int8")),
    "ps": Plan(server=Served()),
    "ps:servers=1,reads=eventual,tiers=1": Plan(server=Served()),
    "ps:tiers=2": Plan(server=Served(tiers=2)),
    "ps:reads=strong,groups=2+async": Plan(server=Served(reads="strong", groups=2), agreement=Agreement(rule="async")),
    "sync": Plan(),
    "ps+bounded:0": Plan(server=Served(), agreement=Agreement(rule="bounded", steps=0)),
    "local:8": Plan(agreement=Agreement(rule="local", steps=8)),
    "ps+local:8": Plan(server=Served(), agreement=Agreement(rule="local", steps=8)),
    "zero2+local:8,sites=2": Plan(zero=2, agreement=Agreement(rule="local", steps=8, sites=2)),
    "topk:0.01": Plan(codec=Codec(name="topk", amount=0.01)),
    "topk:1e-2": Plan(codec=Codec(name="topk", amount=0.01)),
    "randk:.5": Plan(codec=Codec(name="randk", amount=0.5)),
    "lowrank:2+zero2": Plan(zero=2, codec=Codec(name="lowrank", amount=2)),
    "ps+lowrank:2": Plan(server=Served(), codec=Codec(name="lowrank", amount=2)),
    "zstd": Plan(zstd=True),
    "zstd+int8": Plan(codec=Codec(name="int8"), zstd=True),
    "adapt": Plan(codec=Codec(name="adapt")),
}


@pytest.mark.parametrize("text", GOOD)
def test_a_good_plan_means(text: str) -> None:
    assert Plan.parse(text) == GOOD[text]


CANONICAL = {
    "int8+zero1+pp2.tp2.dp4": "dp4.tp2.pp2+zero1+int8",
    "zero2": "dp+zero2",
    "ddp": "dp",
    "sync+dp2": "dp2",
    "dp1.pp2+1f1b": "pp2",
    "tp1.dp1": "dp1",
    "zstd+topk:0.0100+ps:reads=strong,servers=2+async": "dp+ps:servers=2,reads=strong+async+topk:0.01+zstd",
    "ps:servers=2,replicas=2,tiers=2,groups=2,reads=strong": "dp+ps:servers=2,replicas=2,tiers=2,groups=2,reads=strong",
    "bf16+local:50,sites=2+zero3+ring+pp2.dp8+gpipe": "dp8.pp2+zero3+gpipe+ring+local:50,sites=2+bf16",
    "randk:1.0": "dp+randk:1",
    "topk:0.00001": "dp+topk:1e-05",
}


@pytest.mark.parametrize("text", CANONICAL)
def test_a_plan_is_written_in_one_way(text: str) -> None:
    assert str(Plan.parse(text)) == CANONICAL[text]


# The plan, the term at fault, and what the reason must say to be of use.
BAD = [
    ("", "plan", "write dp"),
    ("+", "+", "missing"),
    ("dp+", "+", "missing"),
    ("dp++int8", "+", "missing"),
    ("x" * 1000, "x" * 20 + "...", "at most"),
    ("dp 4", "dp 4", "e.g. dp2.tp2"),
    ("in t8", "in t8", "without blanks"),
    ("hello", "hello", "there are dp, tp2, pp2, zero1"),
    # one letter off, another spelling, another system's word
    ("zero4", "zero4", "zero1"),
    ("ZeRO1", "ZeRO1", "did you mean zero1?"),
    ("dp+zero-2", "zero-2", "did you mean zero2?"),
    ("zero:3", "zero:3", "did you mean zero3?"),
    ("interleave+pp2", "interleave", "did you mean interleaved?"),
    ("DP4", "DP4", "did you mean dp4?"),
    ("dp=4", "dp=4", "did you mean dp4?"),
    ("dp:4", "dp:4", "did you mean dp4?"),
    ("ps+bounded4", "bounded4", "did you mean bounded:4?"),
    ("ps+bounded=4", "bounded=4", "did you mean bounded:4?"),
    ("topk0.01", "topk0.01", "did you mean topk:0.01?"),
    ("lowrnk:2", "lowrnk:2", "lowrank:2"),
    ("int16", "int16", "int8"),
    ("fp8", "fp8", "fp16"),
    ("fsdp", "fsdp", "zero3"),
    ("powersgd", "powersgd", "lowrank:2"),
    ("diloco", "diloco", "local:50"),
    ("allreduce", "allreduce", "ring"),
    # the mesh
    ("dp0", "dp0", "from 1"),
    ("dp04", "dp04", "whole number"),
    ("dp1.5", "5", "no mesh axis"),
    ("dp-1", "dp-1", "dp1"),
    ("dp\u0664", "dp\u0664", "whole number"),
    ("dp" + "9" * 300, "dp" + "9" * 300, "whole number"),
    ("dp1000001", "dp1000001", "1000000"),
    ("tp", "tp", "tp2"),
    ("pp.dp", "pp", "pp2"),
    ("tp0", "tp0", "from 1"),
    ("dp2.dp3", "dp3", "already"),
    ("dp2..tp2", "dp2..tp2", "missing"),
    ("dp2+tp2", "tp2", "joined by dots"),
    ("dp2.zero1", "zero1", "dp2+zero1"),
    ("zero1.dp2", "zero1.dp2", "joined by dots"),
    ("dp2,tp2", "dp2,tp2", "dp2.tp2"),
    ("dp2.xp2", "xp2", "dp, tp and pp"),
    # two of a row
    ("dp+dp", "dp", "said twice"),
    ("int8+int8", "int8", "said twice"),
    ("int8+int4", "int4", "the codec is int8 already"),
    ("zero1+zero2", "zero2", "the ZeRO stage is zero1 already"),
    ("pp2+gpipe+1f1b", "1f1b", "the pipeline schedule is gpipe already"),
    ("ring+tree", "tree", "the topology is ring already"),
    ("ps+ps:servers=2", "ps:servers=2", "the parameter server is ps already"),
    ("ps+sync+async", "async", "the agreement is sync already"),
    ("zstd+zstd", "zstd", "said twice"),
    # numbers and options
    ("int8:2", "int8:2", "write int8"),
    ("ring:", "ring:", "write ring"),
    ("ps+async:3", "async:3", "write async"),
    ("zstd:9", "zstd:9", "write zstd"),
    ("bounded", "bounded", "bounded:K"),
    ("ps+bounded:", "bounded:", "bounded:K"),
    ("ps+bounded:-1", "bounded:-1", "whole number"),
    ("ps+bounded:1.5", "bounded:1.5", "whole number"),
    ("ps+bounded:4,sites=2", "bounded:4,sites=2", "no option of bounded"),
    ("local", "local", "local:H"),
    ("local:0", "local:0", "from 1"),
    ("local:x", "local:x", "local:H"),
    ("local:8,", "local:8,", "sites=2"),
    ("local:8,site=2", "local:8,site=2", "sites=2"),
    ("local:8,sites", "local:8,sites", "sites=2"),
    ("local:8,sites=0", "local:8,sites=0", "from 1"),
    ("local:8,sites=2,sites=2", "local:8,sites=2,sites=2", "whole number"),
    ("topk", "topk", "topk:F"),
    ("topk:0", "topk:0", "above 0"),
    ("topk:2", "topk:2", "at most 1"),
    ("topk:-0.1", "topk:-0.1", "topk:F"),
    ("topk:nan", "topk:nan", "topk:F"),
    ("topk:1%", "topk:1%", "topk:F"),
    ("topk:1e-999", "topk:1e-999", "above 0"),
    ("randk:inf", "randk:inf", "randk:F"),
    ("lowrank", "lowrank", "lowrank:R"),
    ("lowrank:0", "lowrank:0", "from 1"),
    ("lowrank:0.5", "lowrank:0.5", "whole number"),
    ("ps:", "ps:", "ps:servers=2"),
    ("ps:2", "ps:2", "ps:servers=2"),
    ("ps:servers", "ps:servers", "servers=2"),
    ("ps:servers=0", "ps:servers=0", "from 1"),
    ("ps:replicas=x", "ps:replicas=x", "replicas=2"),
    ("ps:groups=0", "ps:groups=0", "from 1"),
    ("ps:tiers=3", "ps:tiers=3", "tiers=2"),
    ("ps:reads=weak", "ps:reads=weak", "strong"),
    ("ps:server=2", "ps:server=2", "did you mean servers=2?"),
    ("ps:servers=2,servers=3", "ps:servers=3", "twice"),
    ("ps:servers=2,", "ps:", "servers, replicas, tiers, groups and reads"),
    # terms that contradict each other
    ("gpipe", "gpipe", "pp2+gpipe"),
    ("1f1b", "1f1b", "pp2+1f1b"),
    ("dp4.pp1+zerobubble", "zerobubble", "pp2+zerobubble"),
    ("ring+ps", "ring", "leave one of the two out"),
    ("ps+zero1", "zero1", "ps:servers=2"),
    ("async", "async", "ps+async"),
    ("bounded:4", "bounded:4", "ps+bounded:4"),
    ("ps+local:8,sites=2", "local:8,sites=2", "ps:groups=2+local:8"),
    ("zero1+local:8", "zero1", "local:8,sites=2"),
    ("dp2+local:8,sites=3", "local:8,sites=3", "sites=2"),
    ("dp2+ps:groups=3+async", "ps:groups=3", "groups=2"),
]


@pytest.mark.parametrize(("text", "term", "hint"), BAD)
def test_a_bad_plan_is_refused_by_term_with_what_would_be_right(text: str, term: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Plan.parse(text)
    assert caught.value.term == term
    assert hint in caught.value.why
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("word", ["zero2", "dp4", "ps", "lowrank:2", "local:50", "bounded:4", "topk:0.01"])
def test_a_hint_is_itself_a_plan(word: str) -> None:
    """What `did you mean` proposes for a word in capitals is that word, and it can be used."""
    with pytest.raises(ConfigError, match=f"did you mean {word}") as caught:
        Plan.parse(word.upper())
    assert caught.value.term == word.upper()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Plan(dp=0),
        lambda: Plan(dp="4"),
        lambda: Plan(dp=True),
        lambda: Plan(tp=1.5),
        lambda: Plan(pp=None),
        lambda: Plan(zero=4),
        lambda: Plan(zero=True),
        lambda: Plan(schedule="2f2b", pp=2),
        lambda: Plan(schedule="gpipe"),
        lambda: Plan(topology="mesh"),
        lambda: Plan(server=Served(), zero=1),
        lambda: Plan(server="ps"),
        lambda: Plan(codec="int8"),
        lambda: Plan(agreement=None),
        lambda: Plan(zstd=1),
        lambda: Agreement(rule="eager"),
        lambda: Agreement(rule="sync", steps=3),
        lambda: Agreement(rule="bounded"),
        lambda: Agreement(rule="async", sites=2),
        lambda: Codec(name="int3"),
        lambda: Codec(name="int8", amount=2),
        lambda: Codec(name="topk"),
        lambda: Codec(name="topk", amount=float("nan")),
        lambda: Codec(name="randk", amount=True),
        lambda: Codec(name="lowrank", amount=2.0),
        lambda: Served(servers=0),
        lambda: Served(tiers=True),
        lambda: Served(reads="weak"),
    ],
)
def test_a_plan_made_without_text_is_held_to_the_same_rules(make: object) -> None:
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize(
    ("text", "workers", "resolved"),
    [
        ("dp", 1, "dp1"),
        ("dp", 4, "dp4"),
        ("dp4", 4, "dp4"),
        ("dp.tp2+zero1", 8, "dp4.tp2+zero1"),
        ("dp.tp2.pp2", 4, "tp2.pp2"),
        ("tp2", 2, "tp2"),
        ("ps:servers=3+async", 2, "dp2+ps:servers=3+async"),
        ("zero2", 1, "dp1+zero2"),
    ],
)
def test_dp_takes_the_workers_that_are_left(text: str, workers: int, resolved: str) -> None:
    assert str(Plan.parse(text).resolve(workers)) == resolved


@pytest.mark.parametrize(
    ("text", "workers", "term", "hint"),
    [
        ("dp4", 2, "dp4", "--workers 4"),
        ("dp4", 8, "dp4", "write dp, where"),
        ("dp2.tp2", 8, "dp2.tp2", "write dp.tp2, where"),
        ("tp2", 4, "tp2", "write dp.tp2, where"),
        ("dp.tp2.pp2", 3, "dp.tp2.pp2", "needs 4 workers"),
        ("dp.tp2", 1, "dp.tp2", "there is 1"),
        ("dp.tp2+zero1", 5, "dp.tp2", "--workers 4 or 6"),
        ("local:8,sites=4", 2, "local:8,sites=4", "sites=2"),
        ("ps:groups=4+async", 2, "ps:groups=4", "groups=2"),
        ("dp", 0, "workers", "from 1"),
    ],
)
def test_workers_that_do_not_fit_the_mesh_are_refused(text: str, workers: int, term: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Plan.parse(text).resolve(workers)
    assert caught.value.term == term
    assert hint in caught.value.why


def test_terms_are_named_by_feature() -> None:
    plan = Plan.parse("dp4.pp2+zero1+gpipe+hier+local:8,sites=2+topk:0.01+zstd")
    assert plan.terms() == {
        "dp": "dp4",
        "pp": "pp2",
        "zero1": "zero1",
        "gpipe": "gpipe",
        "hier": "hier",
        "local": "local:8,sites=2",
        "topk": "topk:0.01",
        "zstd": "zstd",
    }
    assert Plan.parse("ps:servers=2+bounded:4").terms() == {
        "dp": "dp",
        "ps": "ps:servers=2",
        "bounded": "bounded:4",
    }


def test_a_plan_can_be_given_as_text_or_as_itself() -> None:
    plan = Plan.parse("dp2+zero1")
    assert Plan.of(plan) is plan
    assert Plan.of("zero1+dp2") == plan
    with pytest.raises(ConfigError, match="not int"):
        Plan.of(4)


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan().dp = 3
