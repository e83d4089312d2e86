from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.fleet.wire import LINE_LIMIT_BYTES, Garbled, Lines, to_line

MESSAGES = st.lists(
    st.fixed_dictionaries({"kind": st.text(), "x": st.one_of(st.text(), st.integers(), st.lists(st.floats()))}),
    max_size=5,
)


@given(MESSAGES, st.lists(st.integers(1, 30)))
def test_messages_arrive_whole_and_in_order_however_the_stream_is_cut(messages: list[Any], cuts: list[int]) -> None:
    stream = b"".join(map(to_line, messages))
    lines, found = Lines(), []
    for cut in [*cuts, len(stream) + 1]:
        found += lines.feed(stream[:cut])
        stream = stream[cut:]
    assert json.dumps(found) == json.dumps(messages)


@given(st.binary(max_size=300))
def test_any_bytes_are_messages_or_garbled_and_nothing_else(data: bytes) -> None:
    try:
        found = Lines().feed(data + b"\n")
    except Garbled:
        return
    assert all(isinstance(message["kind"], str) for message in found)


@pytest.mark.parametrize("line", [b"[]\n", b"{}\n", b'{"kind": 3}\n', b"nonsense\n", b"\n", b"[" * 100_000 + b"\n"])
def test_what_is_no_object_with_a_kind_is_garbled(line: bytes) -> None:
    with pytest.raises(Garbled):
        Lines().feed(line)


def test_a_line_without_end_is_refused_before_it_fills_the_memory() -> None:
    lines, piece = Lines(), b"x" * (1 << 20)
    for _ in range(LINE_LIMIT_BYTES // len(piece) - 1):
        assert lines.feed(piece) == []
    with pytest.raises(Garbled, match="longer"):
        lines.feed(piece)


def test_a_message_longer_than_a_line_may_be_is_refused_by_its_sender() -> None:
    with pytest.raises(ValueError, match="longer"):
        to_line({"kind": "x", "text": "x" * LINE_LIMIT_BYTES})
