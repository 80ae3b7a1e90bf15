"""A server that answers as SGLang does, for tests of ``python -m eval`` without a model."""

import json
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Self

from eval.__main__ import main
from tests.unit.commands.native_server import JsonHandler


@dataclass
class FakeServer:
    """An OpenAI-compatible server that drafts; ``before`` is called before each answer."""

    answer: Callable[[str], list[int]] | int  # of a prompt, or how often its length is said
    histogram: list[int]
    logits: dict[int, float] = field(default_factory=dict)  # of a position that is asked for
    dtype: str = "bfloat16"
    device: str = "cpu"
    die_after: int | None = None  # so many answers
    refuse: tuple[str, int, bytes] | None = None  # a prompt's last text, the code, the body
    says_ids: bool = True
    widths: Sequence[int] = ()  # rounds of every answer, by width
    finish: str = "stop"
    key: str | None = None  # what every request must have

    def __post_init__(self) -> None:
        if isinstance(self.answer, int):
            self.answer = lambda text, tokens=self.answer: [len(text)] * tokens
        self.before = lambda: None
        self.requests, self.generated, self.loaded = list[dict](), list[dict](), list[dict]()
        outer = self

        class Handler(JsonHandler):
            def do_GET(self) -> None:
                self.reply({"dtype": outer.dtype, "device": outer.device})

            def do_POST(self) -> None:
                asked = self.asked()
                if self.path == "/generate":
                    outer.generated.append(asked)
                    return self.reply(outer.logprobs(asked))
                if self.path == "/update_weights_from_disk":
                    outer.loaded.append(asked)
                    return self.reply({})
                assert self.path == "/v1/chat/completions"
                outer.requests.append(asked)
                if outer.die_after is not None and len(outer.requests) > outer.die_after:
                    return self.connection.close()
                outer.before()
                if outer.refuse and asked["messages"][-1]["content"] == outer.refuse[0]:
                    return self.reply(outer.refuse[2], outer.refuse[1])
                self.reply(outer.chat(asked))

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads, self.server.key = True, self.key
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def chat(self, asked: dict) -> dict:
        details = {
            "spec_num_correct_drafts": sum(i * n for i, n in enumerate(self.histogram)),
            "spec_verify_ct": sum(self.histogram),
            "spec_correct_drafts_histogram": self.histogram,
            "spec_cap_lens_histogram": list(self.widths),
        }
        choice = {"message": {"content": "answer"}, "finish_reason": self.finish}
        if asked.get("return_prompt_token_ids"):
            choice["prompt_token_ids"] = [len(m["content"]) for m in asked["messages"]]
        ids = self.answer(asked["messages"][-1]["content"])[: asked["max_tokens"]]
        extension = {}
        if asked.get("return_spec_tokens_details"):
            extension["spec_tokens_details"] = details
        if asked.get("return_output_ids_in_sglext") and self.says_ids:
            extension["output_ids"] = [ids]
        return {"choices": [choice], "sglext": extension}

    def logprobs(self, asked: dict) -> dict:
        values = [[self.logits[t] - 30.0, t, None] for t in asked["token_ids_logprob"]]
        return {"meta_info": {"output_token_ids_logprobs": [values]}}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def run_options(data: Path, out: Path, target: FakeServer, ours: FakeServer) -> list[str]:
    """A run of two methods on two running servers: three prompts of two turns, two rounds."""
    command = ["run", "--target", "any", "--data-dir", str(data), "--out", str(out)]
    command += ["--methods", "baseline,hyperdflash6", "--benchmarks", "gsm8k", "--rounds", "2"]
    command += ["--server", f"baseline={target.url}", "--server", f"hyperdflash6={ours.url}"]
    return [*command, "--num-prompts", "3", "--max-new-tokens", "5"]


def run_command(data: Path, out: Path, target: FakeServer, ours: FakeServer, *more: str) -> int:
    """``python -m eval run`` of :func:`run_options`; its exit code."""
    return main([*run_options(data, out, target, ours), *more])


def in_a_process(command: list[str], log: Path) -> None:
    """``python -m eval`` with its output in a file; for a process that a test stops."""
    with log.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        sys.exit(main(command))


def rows_of(out: Path) -> dict[str, dict]:
    """Rows of ``results.json`` by method (the last setting's)."""
    return {r["method"]: r for r in json.loads((out / "results.json").read_text())["rows"]}
