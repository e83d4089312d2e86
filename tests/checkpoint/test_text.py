"""Plain values come back as they were: type, order and every bit."""

from __future__ import annotations

import contextlib
import json
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.checkpoint.text import ATOMS, CONTAINERS, pack, unpack
from echelon.errors import ConfigError

atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(codec=None), max_size=5),
    st.binary(max_size=5),
    st.complex_numbers(),
)
keys = st.one_of(st.text(max_size=3), st.integers(), st.booleans(), st.none(), st.binary(max_size=2), st.just("~"))
values = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=12,
)


def through_text(value):
    return unpack(json.loads(json.dumps(pack(value), allow_nan=False)))


def bits(value):
    """A picture in which two values are equal only if they are of one type and have the same bits."""
    if isinstance(value, float):
        return "float", struct.pack("d", value)
    if isinstance(value, complex):
        return "complex", struct.pack("dd", value.real, value.imag)
    if isinstance(value, dict):
        return type(value), [(bits(key), bits(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [bits(item) for item in value]
    return type(value), value


@given(values)
def test_any_nest_of_plain_values_comes_back_the_same(value):
    assert bits(through_text(value)) == bits(value)


@pytest.mark.parametrize(
    "value",
    [
        10**5000,
        -(10**5000),
        2**63,
        -(2**63) - 1,
        2**64,
        5e-324,
        -0.0,
        math.inf,
        -math.inf,
        struct.unpack(">d", bytes.fromhex("7ff8dead0000beef"))[0],
        "\ud800\udc00",
        "\ud800",
        "\U00010000",
        {"~": "tuple", "v": [1]},
        {1: "a", "1": "b", True + 1: "c"},
        {10**5000: 1},
        {(1, (2, "x")): {None: ()}},
        [[[[]]]],
        b"\x00\xff",
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_json_would_bend_come_back_the_same(value):
    assert bits(through_text(value)) == bits(value)


def test_counters_sets_and_ordered_dicts_keep_their_kind():
    value = {
        "milestones": Counter({5: 1, 2: -3}),
        "set": {1, "a", (2, 3)},
        "frozen": {frozenset({1, 2}): 1},
        "ordered": OrderedDict(b=1, a=2),
    }
    back = through_text(value)
    assert back == value
    assert type(back["milestones"]) is Counter
    assert type(back["ordered"]) is OrderedDict
    assert list(back["ordered"]) == ["b", "a"]
    assert type(next(iter(back["frozen"]))) is frozenset


def test_a_defaultdict_comes_back_without_its_factory():
    back = through_text(defaultdict(list, {3: [1]}))
    assert type(back) is dict
    assert back == {3: [1]}


def test_the_same_set_is_the_same_text_in_any_order_of_insertion():
    one, other = set(range(0, 24, 8)), set(range(16, -1, -8))
    assert list(one) != list(other), "the premise: equal sets that are walked through in another order"
    assert json.dumps(pack(one)) == json.dumps(pack(other))


@pytest.mark.parametrize(
    "value",
    [
        np.float64(0.1),
        np.float32("nan"),
        np.float16(-0.0),
        np.int8(-5),
        np.uint64(2**64 - 1),
        np.bool_(True),
        np.complex64(1 + 2j),
        np.str_("ä"),
        np.str_(""),
        np.bytes_(b"ab"),
        np.datetime64("2020-01-01T00:00:00", "ns"),
        np.timedelta64(3, "s"),
        np.longdouble(1) / 3,
    ],
)
def test_numpy_scalars_keep_their_type_and_bits(value):
    back = through_text(value)
    assert type(back) is type(value)
    assert back.dtype == value.dtype
    assert back.tobytes() == value.tobytes()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.uint32).reshape(2, 3),
        np.zeros((0, 3), np.float32),
        np.array(1.5),
        np.arange(4, dtype=">i4"),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(["a", "bcd"]),
        np.arange(10)[::3],
    ],
)
def test_arrays_keep_dtype_shape_and_elements(array):
    back = through_text(array)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert np.array_equal(back, array)
    back.flat[:1] = back.flat[:1]  # writable, as the array was


def test_random_states_of_python_and_numpy_come_back_and_go_on_alike():
    python, numpy = random.Random(3), np.random.RandomState(4)
    states = through_text({"python": python.getstate(), "numpy": numpy.get_state()})
    expected = python.random(), numpy.rand()
    python.setstate(states["python"])
    numpy.set_state(states["numpy"])
    assert (python.random(), numpy.rand()) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn])
def test_torch_dtypes_come_back(dtype):
    assert through_text([dtype]) == [dtype]


def make_schedulers():
    schedulers = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
    return [
        schedulers.MultiStepLR(optimizer, [1, 1, 5]),
        schedulers.OneCycleLR(optimizer, 0.1, total_steps=10),
        schedulers.CyclicLR(optimizer, 0.1, 0.2),
        schedulers.ReduceLROnPlateau(optimizer),
        schedulers.CosineAnnealingWarmRestarts(optimizer, 3),
        schedulers.LambdaLR(optimizer, lambda epoch: 1.0),
        schedulers.SequentialLR(
            optimizer, [schedulers.ConstantLR(optimizer), schedulers.ExponentialLR(optimizer, 0.9)], [5]
        ),
    ]


@pytest.mark.parametrize("scheduler", make_schedulers(), ids=lambda scheduler: type(scheduler).__name__)
def test_the_state_of_every_torch_scheduler_comes_back(scheduler):
    state = scheduler.state_dict()
    assert bits(through_text(state)) == bits(state)


class Thing:
    pass


class Name(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, Thing()]}, "values['a'][1]"),
        ({"a": {3: Thing()}}, "values['a'][3]"),
        ({Thing(): 1}, "values key 0"),
        ((1, lambda: 2), "values[1]"),
        ([Name("x")], "values[0]"),
        ({"a": np.array([Thing()])}, "values['a']"),
        ({"a": [torch.zeros(1)]}, "values['a'][0]"),
        ({"a": range(3)}, "values['a']"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_its_path(value, path):
    with pytest.raises(ConfigError) as refused:
        pack(value)
    assert refused.value.term == path


def test_a_structure_that_contains_itself_is_refused():
    endless: dict = {}
    endless["a"] = [endless]
    with pytest.raises(ConfigError, match="contains itself"):
        pack(endless)


def test_the_deepest_structure_that_is_accepted_can_be_read():
    value: object = 1
    for _ in range(100):
        value = {1: value}
    assert through_text(value) == value
    with pytest.raises(ConfigError):
        pack({1: value})


def test_tensors_go_to_the_sink_by_their_path_and_come_back():
    sink: dict[str, torch.Tensor] = {}
    value = {"ema": (torch.arange(3), 2), 5: {"5": torch.ones(1, requires_grad=True)}}
    packed = json.loads(json.dumps(pack(value, sink)))
    assert set(sink) == {"values['ema'][0]", "values[5]['5']"}
    back = unpack(packed, sink)
    assert torch.equal(back["ema"][0], torch.arange(3))
    assert torch.equal(back[5]["5"], torch.ones(1))


jsonable = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.fixed_dictionaries(
            {
                "~": st.sampled_from([*ATOMS, *CONTAINERS, "counter", "tensor", "none"]),
                "v": inner,
            }
        ),
        st.tuples(st.sampled_from(["<f4", "|O", "<U0", "|V4", "<U3", "x"]), st.just([]), inner).map(
            lambda v: {"~": "array", "v": list(v)}
        ),
    ),
    max_leaves=8,
)


@settings(max_examples=400)
@given(jsonable)
def test_unpacking_anything_gives_values_or_a_value_error(packed):
    with contextlib.suppress(ValueError):
        unpack(packed)
