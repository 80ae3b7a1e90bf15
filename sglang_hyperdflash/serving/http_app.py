"""SGLang's HTTP application with the plugins loaded, for servers of several tokenizer workers.

Uvicorn's workers import an application by its path (seam: ``SGLANG_HTTP_SERVER_APP_PATH``). SGLang
0.5.23 loads no plugins in them, so its own would not know the algorithm.
"""

from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.entrypoints.http_server import app  # noqa: E402

__all__ = ["app"]
