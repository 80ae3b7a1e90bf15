"""Asking a template, or the clean copy next to a process, for a child of one's own."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence

MOST_BYTES, MOST_FDS = 1 << 20, 250
PR_SET_CHILD_SUBREAPER = 36


class Refused(Exception):
    """The template would start another process than the one that was asked for."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends that keep messages apart."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(link: socket.socket, message: dict, fds: Sequence[int] = ()) -> None:
    socket.send_fds(link, [json.dumps(message).encode()], list(fds))


def receive(link: socket.socket) -> tuple[dict, list[int]] | None:
    """The next message and the descriptors that came with it; None when the other end is gone."""
    try:
        data, fds, flags, _ = socket.recv_fds(link, MOST_BYTES, MOST_FDS)
    except ConnectionError:
        return None
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise OSError("a message to or from the template was cut short")
    return (json.loads(data), fds) if data else None


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Orphans among this process's descendants become its own children meanwhile."""
    _adopt(True)
    try:
        yield
    finally:
        _adopt(False)


def _adopt(on: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def ask(
    link: socket.socket,
    argv: Sequence[str],
    fds: Mapping[int, int],
    environment: Mapping[str, str],
    folder: str,
    session: bool = False,
    spawns: bool = False,
) -> int:
    """The process id of a new child of this process, which runs ``argv``.

    Args:
        link: to the template. argv: a command line of Python, with ``-m`` or ``-c``.
        fds: number in the child to descriptor here. session: the child leads a new session.
        spawns: what the child spawns by ``multiprocessing`` is forked, too.

    Raises:
        Refused: an ordinary start is needed.
    """
    request = {
        "argv": list(argv),
        "numbers": list(fds),
        "environment": dict(environment),
        "folder": folder,
        "session": session,
        "spawns": spawns,
        "asker": os.getpid(),
    }
    with adopting():
        send(link, request, list(fds.values()))
        answer = receive(link)
    if answer is None:
        raise RuntimeError("the template ended; HYPERDFLASH_TEST_TEMPLATE=0 does without it")
    if "pid" not in answer[0]:
        raise Refused(answer[0]["refused"])
    return answer[0]["pid"]
