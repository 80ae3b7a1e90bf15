"""A server that answers as SGLang's native API does, without a model, and what it is made of."""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Answers(ThreadingHTTPServer):
    """Answers a prompt of n tokens with ``[n, n, n]``; records prompts; fails on demand.

    ``context``, ``model``: what ``/server_info`` says. ``refuses``: the HTTP status that prompts of
    so many tokens get. ``answer``: other output ids, from a prompt's. ``connections``: accepted so
    far. ``failures``: HTTP statuses, or finish reasons, of the next requests. ``key``: see
    :class:`JsonHandler`. ``probes``: how often ``/server_info`` was read.
    """

    request_queue_size = 1024
    context, model, key, hold, probes, connections = 4096, "owner/target", None, None, 0, 0

    def __init__(self) -> None:
        self.prompts, self.failures = list[dict](), list[int | dict]()
        self.refuses = dict[int, int]()
        self.answer: Callable[[list[int]], list[int]] = lambda ids: [len(ids)] * 3
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def process_request(self, request, client_address) -> None:
        self.connections += 1
        super().process_request(request, client_address)


class JsonHandler(BaseHTTPRequestHandler):
    """JSON in and out; the ``key`` of its server, where it has one, opens it."""

    def asked(self) -> dict:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def reply(self, body: object, code: int = 200) -> None:
        """Send a body: bytes as they are."""
        key = self.server.key
        if key is not None and self.headers["Authorization"] != f"Bearer {key}":
            body, code = {"error": "Unauthorized"}, 401
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with suppress(OSError):  # a client that was killed
            self.wfile.write(data)

    def log_message(self, *_) -> None:
        pass


class Handler(JsonHandler):
    protocol_version = "HTTP/1.1"  # keeps connections, as SGLang's server does

    def do_GET(self):
        self.server.probes += 1
        self.reply({"max_req_input_len": self.server.context, "model_path": self.server.model})

    def do_POST(self):
        request = self.asked()
        finish = self.server.failures.pop() if self.server.failures else None
        if isinstance(finish, int):
            return self.reply("no", finish)
        self.server.prompts.append(request)
        n = len(request["input_ids"])
        if self.server.hold is not None:
            self.server.hold.wait()
        if n in self.server.refuses:
            return self.reply({"error": {"message": "no such prompt"}}, self.server.refuses[n])
        output = self.server.answer(request["input_ids"])
        if finish and finish["type"] == "abort":
            output = output[:-2]  # what there was when it was aborted
        meta = {"finish_reason": finish or {"type": "stop", "matched": output[-1]}}
        meta["completion_tokens"] = len(output)
        self.reply({"output_ids": output, "text": f"answer {n}", "meta_info": meta})
