"""Messages between launcher and template: one JSON object a packet, open files along with it."""

from __future__ import annotations

import array
import json
import socket
from collections.abc import Sequence
from typing import Any

PACKET_LIMIT_BYTES = 64 << 10


def send_packet(control: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send `message`; the receiver gets descriptors of its own for the files that `fds` are open on.

    A receiver that is gone is no error here: reading from it tells.
    """
    passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        control.sendmsg([json.dumps(message).encode()], passed, socket.MSG_NOSIGNAL)
    except (BrokenPipeError, ConnectionResetError):
        return


def receive_packet(control: socket.socket, most_fds: int, *, wait: bool) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message, None when the other end is closed. Raises BlockingIOError when there is none and not to `wait`.

    `socket.recv_fds` would be this, but drops its flags: it would wait, and leave the descriptors open across an exec.
    """
    flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
    room = socket.CMSG_LEN(most_fds * array.array("i").itemsize)
    try:
        data, ancillary, _, _ = control.recvmsg(PACKET_LIMIT_BYTES, room, flags)
    except ConnectionResetError:
        # Told once, and before what is still to be read, when the other end closed with requests of ours unread.
        data, ancillary, _, _ = control.recvmsg(PACKET_LIMIT_BYTES, room, flags)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return (json.loads(data) if data else None), list(fds)
