"""SGLang's process-wide state, which its models need on a CPU too."""

import socket
from contextlib import contextmanager

from tests.conftest import EXAMPLE


@contextmanager
def one_rank():
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.runtime_context import SpawnRanks, create_context, use_context
    from sglang.srt.server_args import ServerArgs

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    args = ServerArgs(model_path=str(EXAMPLE / "target"), dtype="float32")
    args.resolve_once()
    with use_context(create_context(args, role="scheduler", ranks=SpawnRanks(world_rank=0))):
        method = f"tcp://127.0.0.1:{port}"
        init_distributed_environment(1, 0, method, 0, "gloo")
        initialize_model_parallel(backend="gloo")
        initialize_dp_attention(args)
        yield
