"""Running SGLang servers of one model: kept connections, each request to the least busy."""

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

from sglang_hyperdflash.serving.scheduler.finish import NAN_MATCHED
from sglang_hyperdflash.tools.errors import ServerFailed
from sglang_hyperdflash.tools.server_process import key_headers, reason_of

ATTEMPTS = 3
PAUSE, LONGEST_PAUSE = 2.0, 60.0  # s before the second attempt and the first probe, then doubled
MOST_IN_FLIGHT = 1024
SPARE_FILES = 512  # open files besides the connections
# Seconds of silence before the first probe, and between the probes; how many go unanswered.
PROBES = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 20, "TCP_KEEPCNT": 3}


class Refused(Exception):
    """The server refuses a prompt; the text gives the reason."""


class Busy(Exception):
    """The server takes no request now, or aborted this one; the text gives the reason."""


class Failed(ValueError):
    """The server answers with an error of its own, as HTTP 500; the text gives the reason."""


# By HTTP status, which the finish reason of an aborted answer may hold as well.
ERRORS = {400: Refused, 413: Refused, 422: Refused, 429: Busy, 503: Busy}


def server_info(url: str) -> dict[str, Any]:
    """A running server's ``/server_info``; raises ``ServerFailed`` where nothing answers."""
    try:
        answer = requests.get(f"{url}/server_info", timeout=60, headers=key_headers())
        answer.raise_for_status()
        return answer.json()
    except (requests.RequestException, ValueError) as error:
        raise ServerFailed(
            f"no SGLang server answers at {url}: {error!r}. Start one with `python -m "
            "sglang.launch_server --model-path TARGET`; if it has a key, give it as --api-key."
        ) from error


class Pool:
    """Servers that share the requests; an asynchronous context manager.

    A busy server is asked again for ever. One that fails is left out until it answers a probe; a
    request that fails ``attempts`` times the number of servers ends the run, or is refused where
    others have been answered since it was first asked.

    Attributes:
        models: the ``model_path`` of each server, which it must still serve after a failure.
        in_flight: requests at each server. pauses: seconds before the next probe of each.
        answered: how many requests were. out: the probes of those that are left out. busy: those
            that were reported as busy.
    """

    def __init__(self, models: Mapping[str, str], attempts: int = ATTEMPTS) -> None:
        self.models, self.most_failures = models, attempts * len(models)
        self.in_flight, self.pauses = dict.fromkeys(models, 0), dict.fromkeys(models, PAUSE)
        self.answered = 0
        self.out, self.busy = dict[str, asyncio.Task[None]](), set[str]()

    async def __aenter__(self) -> Pool:
        _allow_connections()
        # The commands limit what is in flight. SGLang closes a connection after 5 s without use.
        options = {"limit": 0, "keepalive_timeout": 2, "socket_factory": _watched_socket}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(**options),
            headers=key_headers(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=60),
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        for probe in self.out.values():
            probe.cancel()
        await self._session.close()

    async def ask(self, **payload: Any) -> dict[str, Any]:
        """The whole answer to one ``/generate`` request.

        Raises:
            Refused: the server does not take it. ServerFailed: it failed too often.
        """
        failures, pause, tried, answered = 0, PAUSE, set[str](), self.answered
        while True:
            left = self.in_flight.keys() - self.out.keys() or self.in_flight.keys()
            if left <= tried:
                await asyncio.sleep(random.uniform(pause / 2, pause))
                pause, tried = min(2 * pause, LONGEST_PAUSE), set()
            url = min(sorted(left - tried), key=self.in_flight.__getitem__)
            tried.add(url)
            self.in_flight[url] += 1
            try:
                answer = await self._ask(url, payload)
                self.answered += 1
                return answer
            except Busy as reason:
                if url not in self.busy:
                    tqdm.write(f"{url} is busy ({reason}): what it does not take is asked again")
                self.busy.add(url)
            except (aiohttp.ClientError, TimeoutError, LookupError, ValueError) as error:
                failures, failed = failures + 1, f"{url} failed: {error!r}"
                if failures >= self.most_failures:
                    # One failure alone may be the server's, not the row's.
                    others = self.answered > answered
                    if isinstance(error, Failed) and failures > 1 and others:
                        raise Refused(f"every server fails: {error}") from error
                    advice = "What is finished is kept; run the same command again to resume."
                    raise ServerFailed(f"{failed}. {advice}") from error
                if url not in self.out:
                    tqdm.write(f"{failed}; it is left out until it answers")
                    self.out[url] = asyncio.create_task(self._probe(url))
            finally:
                self.in_flight[url] -= 1

    async def _ask(self, url: str, payload: dict[str, Any]) -> dict[str, Any]:
        async with self._session.post(f"{url}/generate", json=payload) as reply:
            if not reply.ok:
                reason = reason_of(await reply.text()) or reply.reason
                raise ERRORS.get(reply.status, Failed)(reason)
            answer = await reply.json(content_type=None)
        finish = answer["meta_info"]["finish_reason"]
        if finish.get("matched") == NAN_MATCHED:
            raise Refused("the target's logits are not finite")
        if finish["type"] == "abort":
            raise ERRORS.get(finish.get("status_code"), Busy)(f"aborted: {finish.get('message')}")
        return answer

    async def _probe(self, url: str) -> None:
        """Take a server back when it serves its model again."""
        model, timeout = None, aiohttp.ClientTimeout(sock_connect=60, sock_read=60)
        while model != self.models[url]:
            await asyncio.sleep(self.pauses[url])
            self.pauses[url] = min(2 * self.pauses[url], LONGEST_PAUSE)
            with suppress(aiohttp.ClientError, ValueError, AttributeError):
                async with self._session.get(f"{url}/server_info", timeout=timeout) as reply:
                    model = (await reply.json(content_type=None)).get("model_path")
        del self.out[url]
        tqdm.write(f"{url} answers again")


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
