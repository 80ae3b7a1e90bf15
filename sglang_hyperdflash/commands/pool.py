"""Requests to SGLang servers of one model: each goes to the least busy, over a kept connection."""

from __future__ import annotations

import asyncio
import random
import resource
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import aiohttp
import requests
from tqdm import tqdm

from sglang_hyperdflash.commands.options import MOST_IN_FLIGHT
from sglang_hyperdflash.serving.scheduler.finish import NAN_MATCHED
from sglang_hyperdflash.tools.errors import ServerFailed
from sglang_hyperdflash.tools.server_process import key_headers, reason_of

ATTEMPTS = 3
# Seconds before the second attempt and before the first probe; each further pause is twice as long.
PAUSE, LONGEST_PAUSE = 2.0, 60.0
SPARE_FILES = 512  # open files besides the connections
# TCP keep-alive: the seconds of silence before the first probe and between probes, and the number
# of unanswered probes that ends the connection.
KEEP_ALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 20, socket.TCP_KEEPCNT: 3}


class Refused(Exception):
    """The server refuses a prompt; the text is the reason."""


class Busy(Exception):
    """The server takes no request now, or aborted this one; the text is the reason."""


class Failed(ValueError):
    """The server reports an internal error, such as HTTP 500; the text is the reason."""


# By HTTP status, which the finish reason of an aborted answer may hold as well.
ERRORS = {400: Refused, 413: Refused, 422: Refused, 429: Busy, 503: Busy}


def server_info(url: str) -> dict[str, Any]:
    """Return a running server's ``/server_info``; raise ``ServerFailed`` if nothing answers."""
    try:
        reply = requests.get(f"{url}/server_info", timeout=60, headers=key_headers())
        reply.raise_for_status()
        return reply.json()
    except (requests.RequestException, ValueError) as error:
        # What a failed connection says is a nest of other libraries' objects.
        silent = isinstance(error, requests.ConnectionError | requests.Timeout)
        raise ServerFailed(
            f"{url} {'does not answer' if silent else f'is no SGLang server: {error}'}. Start one "
            "with `python -m sglang.launch_server --model-path TARGET`; if it has a key, give it "
            "as --api-key."
        ) from error


class Pool:
    """Servers that share the requests; an asynchronous context manager.

    A busy server is asked again without limit. A server that fails gets no requests until it
    answers a probe. A request that fails ``attempts`` times the number of servers ends the run, or
    is refused if other requests have been answered since it was first sent.

    Attributes:
        models: the ``model_path`` of each server by its URL; after a failure the server must still
            serve it.
        in_flight: the number of requests at each server.
        pauses: the seconds before the next probe of each server.
        answered: the number of answered requests.
        probes: the tasks that probe the servers without requests.
        busy: the servers that were reported as busy.
    """

    def __init__(self, models: Mapping[str, str], attempts: int = ATTEMPTS) -> None:
        self.models, self.most_failures = models, attempts * len(models)
        self.in_flight, self.pauses = dict.fromkeys(models, 0), dict.fromkeys(models, PAUSE)
        self.answered = 0
        self.probes, self.busy = dict[str, asyncio.Task[None]](), set[str]()

    async def __aenter__(self) -> Pool:
        _raise_file_limit()
        # The commands limit what is in flight. SGLang closes a connection after 5 s without use.
        options = {"limit": 0, "keepalive_timeout": 2, "socket_factory": _keep_alive_socket}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(**options),
            headers=key_headers(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=60),
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        for probe in self.probes.values():
            probe.cancel()
        await self._session.close()

    async def ask(self, **payload: Any) -> dict[str, Any]:
        """Return the whole reply to one ``/generate`` request.

        Raises:
            Refused: the server does not take the request.
            ServerFailed: the request failed too often.
        """
        failures, pause, tried, answered_before = 0, PAUSE, set[str](), self.answered
        while True:
            available = self.in_flight.keys() - self.probes.keys() or self.in_flight.keys()
            if available <= tried:
                await asyncio.sleep(random.uniform(pause / 2, pause))
                pause, tried = min(2 * pause, LONGEST_PAUSE), set()
            url = min(sorted(available - tried), key=self.in_flight.__getitem__)
            tried.add(url)
            self.in_flight[url] += 1
            try:
                reply = await self._ask(url, payload)
                self.answered += 1
                self.pauses[url] = PAUSE
                return reply
            except Busy as reason:
                if url not in self.busy:
                    tqdm.write(f"{url} is busy ({reason}): what it does not take is asked again")
                self.busy.add(url)
            except (aiohttp.ClientError, TimeoutError, LookupError, ValueError) as error:
                failures, failure = failures + 1, f"{url} failed: {error!r}"
                if failures >= self.most_failures:
                    # One failure alone may be the server's fault, not the row's.
                    others_answered = self.answered > answered_before
                    if isinstance(error, Failed) and failures > 1 and others_answered:
                        raise Refused(f"every server fails: {error}") from error
                    advice = "What is finished is kept; run the same command again to resume."
                    raise ServerFailed(f"{failure}. {advice}") from error
                if url not in self.probes:
                    tqdm.write(f"{failure}; it is left out until it answers")
                    self.probes[url] = asyncio.create_task(self._probe(url))
            finally:
                self.in_flight[url] -= 1

    async def _ask(self, url: str, payload: dict[str, Any]) -> dict[str, Any]:
        async with self._session.post(f"{url}/generate", json=payload) as response:
            if not response.ok:
                reason = reason_of(await response.text()) or response.reason
                raise ERRORS.get(response.status, Failed)(reason)
            reply = await response.json(content_type=None)
        finish = reply["meta_info"]["finish_reason"]
        if finish.get("matched") == NAN_MATCHED:
            raise Refused("the target's logits are not finite")
        if finish["type"] == "abort":
            raise ERRORS.get(finish.get("status_code"), Busy)(f"aborted: {finish.get('message')}")
        return reply

    async def _probe(self, url: str) -> None:
        """Wait until a server serves its model again, and let it have requests."""
        model, timeout = None, aiohttp.ClientTimeout(sock_connect=60, sock_read=60)
        while model != self.models[url]:
            await asyncio.sleep(self.pauses[url])
            self.pauses[url] = min(2 * self.pauses[url], LONGEST_PAUSE)
            with suppress(aiohttp.ClientError, ValueError, AttributeError):
                async with self._session.get(f"{url}/server_info", timeout=timeout) as response:
                    model = (await response.json(content_type=None)).get("model_path")
        del self.probes[url]
        tqdm.write(f"{url} answers again")


def _keep_alive_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket with TCP keep-alive: a host that is gone would leave a request waiting."""
    client = socket.socket(*address[:3])
    client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEP_ALIVE.items():
        client.setsockopt(socket.IPPROTO_TCP, option, value)
    return client


def _raise_file_limit() -> None:
    """Raise the soft limit of open files, often 1,024, to one connection for each request."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MOST_IN_FLIGHT + SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
