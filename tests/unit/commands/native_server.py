"""A server that answers as SGLang's native API does, without a model."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Answers(ThreadingHTTPServer):
    """Answers a prompt of n tokens with ``[n, n, n]``; records prompts; fails on demand.

    ``context``, ``model``: what ``/server_info`` says. ``refuses``, ``breaks``: prompts of so many
    tokens get 400, or 500. ``answer``: other output ids, from a prompt's. ``connections``: accepted
    so far.
    ``failures``: HTTP statuses, or finish reasons, of the next requests.
    ``key``: what a request must have. ``probes``: how often ``/server_info`` was read.

    Args:
        delay: seconds of each answer.
    """

    request_queue_size = 1024

    def __init__(self, delay: float = 0.0) -> None:
        self.prompts, self.failures = list[dict](), list[int | dict]()
        self.key, self.probes, self.connections, self.delay = None, 0, 0, delay
        self.context, self.refuses, self.breaks, self.model = 4096, -1, -1, "owner/target"
        self.hold: threading.Event | None = None
        self.answer: Callable[[list[int]], list[int]] = lambda ids: [len(ids)] * 3
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def process_request(self, request, client_address) -> None:
        self.connections += 1
        super().process_request(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps connections, as SGLang's server does

    def log_message(self, *_):
        pass

    def reply(self, code: int, body) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with suppress(OSError):  # a client that was killed
            self.wfile.write(data)

    def locked(self) -> bool:
        key = self.server.key
        locked = key is not None and self.headers["Authorization"] != f"Bearer {key}"
        if locked:
            self.reply(401, {"error": "Unauthorized"})
        return locked

    def do_GET(self):
        self.server.probes += 1
        if self.locked():
            return
        info = {"max_req_input_len": self.server.context, "model_path": self.server.model}
        self.reply(200, info)

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.locked():
            return
        finish = self.server.failures.pop() if self.server.failures else None
        if isinstance(finish, int):
            return self.reply(finish, "no")
        self.server.prompts.append(request)
        n = len(request["input_ids"])
        if self.server.hold is not None:
            self.server.hold.wait()
        for tokens, code in (self.server.refuses, 400), (self.server.breaks, 500):
            if n == tokens:
                return self.reply(code, {"error": {"message": "no such prompt"}})
        time.sleep(self.server.delay)
        output = self.server.answer(request["input_ids"])
        if finish and finish["type"] == "abort":
            output = output[:-2]  # what there was when it was aborted
        meta = {"finish_reason": finish or {"type": "stop", "matched": output[-1]}}
        self.reply(200, {"output_ids": output, "text": f"answer {n}", "meta_info": meta})
