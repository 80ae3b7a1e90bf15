"""Running SGLang servers of one model: kept connections, each request to the least busy."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Iterable
from typing import Any

import aiohttp
import requests
from tqdm import tqdm

from sglang_hyperdflash.tools.errors import ServerFailed
from sglang_hyperdflash.tools.server_process import reason_of

ATTEMPTS, PAUSE = 3, 2.0  # seconds before the second attempt, doubled for each further one
MOST_IN_FLIGHT = 1024
SPARE_FILES = 512  # open files besides the connections
# Seconds of silence before the first probe, and between the probes; how many go unanswered.
PROBES = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 20, "TCP_KEEPCNT": 3}


class Refused(Exception):
    """The server refuses a prompt; the text gives the reason."""


def server_info(url: str) -> dict[str, Any]:
    """A running server's ``/server_info``; raises ``ServerFailed`` where nothing answers."""
    try:
        answer = requests.get(f"{url}/server_info", timeout=60)
        answer.raise_for_status()
        return answer.json()
    except (requests.RequestException, ValueError) as error:
        raise ServerFailed(
            f"no SGLang server answers at {url}: {error!r}. Start one with "
            "`python -m sglang.launch_server --model-path TARGET`."
        ) from error


async def ask(url: str, **payload: Any) -> dict[str, Any]:
    """The answer of one server to one request, asked once: see :meth:`Pool.ask`."""
    async with Pool([url], attempts=1) as pool:
        return await pool.ask(**payload)


class Pool:
    """Servers that share the requests; an asynchronous context manager.

    A server that fails ``attempts`` times is reported and left out; its requests go to the others.

    Attributes:
        in_flight: requests at each server that is not left out.
    """

    def __init__(self, urls: Iterable[str], attempts: int = ATTEMPTS) -> None:
        self.in_flight, self.attempts = dict.fromkeys(urls, 0), attempts

    async def __aenter__(self) -> Pool:
        _allow_connections()
        self._session = aiohttp.ClientSession(
            # The commands limit what is in flight.
            connector=aiohttp.TCPConnector(limit=0, socket_factory=_watched_socket),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=60),
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._session.close()

    async def ask(self, **payload: Any) -> dict[str, Any]:
        """The answer to one ``/generate`` request; a busy server is asked again.

        Raises:
            Refused: the server does not take it. ServerFailed: no server is left.
        """
        while True:
            url = min(self.in_flight, key=self.in_flight.__getitem__)
            self.in_flight[url] += 1
            try:
                return await self._ask(url, payload)
            except ServerFailed as error:
                self._leave_out(url, error)
            finally:
                if url in self.in_flight:
                    self.in_flight[url] -= 1

    async def _ask(self, url: str, payload: dict[str, Any]) -> dict[str, Any]:
        failure: Exception | None = None
        for attempt in range(self.attempts):
            if attempt:
                await asyncio.sleep(PAUSE * 2 ** (attempt - 1))
                if url not in self.in_flight:  # another request found that it is gone
                    break
            try:
                async with self._session.post(f"{url}/generate", json=payload) as reply:
                    if reply.status == 400:
                        raise Refused(reason_of(await reply.text()))
                    reply.raise_for_status()
                    return await reply.json(content_type=None)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                failure = error
        raise ServerFailed(
            f"{url} failed {self.attempts} time{'s' * (self.attempts > 1)}: {failure!r}. What is "
            "finished is kept; run the same command again to resume."
        ) from failure

    def _leave_out(self, url: str, error: ServerFailed) -> None:
        if url not in self.in_flight:
            return
        if len(self.in_flight) == 1:
            raise error
        del self.in_flight[url]
        others = ", ".join(self.in_flight)
        reason = f"failed {self.attempts} time{'s' * (self.attempts > 1)}: {error.__cause__!r}"
        tqdm.write(f"{url} {reason}; asking {others} instead")


def _watched_socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket whose peer is probed while it computes: a host that is gone would never answer."""
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in PROBES.items():
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


def _allow_connections() -> None:
    """Raise the soft limit of open files, which is often 1,024, for a connection a request."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_IN_FLIGHT + SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
