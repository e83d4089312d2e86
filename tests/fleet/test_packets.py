from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from echelon.fleet.packets import receive_packet, send_packet

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def test_messages_and_files_arrive_together(pair: Pair) -> None:
    read, write = os.pipe()
    send_packet(pair[0], {"rank": 1}, [write])
    message, fds = receive_packet(pair[1], 2, wait=True)
    assert message == {"rank": 1}
    assert not os.get_inheritable(fds[0])
    os.write(fds[0], b"x")
    assert os.read(read, 1) == b"x"
    for fd in (read, write, *fds):
        os.close(fd)


def test_looking_for_news_never_waits(pair: Pair) -> None:
    with pytest.raises(BlockingIOError):
        receive_packet(pair[0], 1, wait=False)


def test_last_words_are_heard_although_the_speaker_left_with_requests_unread(pair: Pair) -> None:
    ours, theirs = pair
    send_packet(ours, {"rank": 0})
    send_packet(theirs, {"unable": "torch"})
    theirs.close()
    assert receive_packet(ours, 1, wait=False) == ({"unable": "torch"}, [])
    assert receive_packet(ours, 1, wait=False) == (None, [])
    send_packet(ours, {"rank": 1})
