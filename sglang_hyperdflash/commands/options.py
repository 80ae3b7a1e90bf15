"""The options of every command; to print help fast, this imports neither torch nor SGLang."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

from sglang_hyperdflash.draft.config import CANDIDATES, FORMS, REDUCERS
from sglang_hyperdflash.tools.command_line import COUNT, SHARE, number
from sglang_hyperdflash.tools.server_process import add_key_option
from sglang_hyperdflash.training.recipe import Policy, Recipe
from sglang_hyperdflash.training.rows import SOURCES, STRICT

# In the order of use; each has a function here and a module in this folder.
COMMANDS = {
    "check": "check whether this installation can serve",
    "init": "make a new drafter for a target",
    "regenerate": "answer a data set's prompts with the target, for training",
    "capture": "write the target's states of a data set, through SGLang",
    "train": "train a drafter",
    "learn": "train a drafter on what servers record",
    "generate": "answer a JSONL file offline",
    "plan": "compare the K/V memory of speculative methods, or count the cost of a training",
}
MOST_IN_FLIGHT = 1024  # requests of one command


class Listed(argparse._SubParsersAction):
    """Sub-commands; each is listed with its line of :data:`COMMANDS`."""

    def add_parser(self, name: str, **options) -> argparse.ArgumentParser:
        return super().add_parser(name, **options | {"help": COMMANDS[name]})


def check(commands) -> None:
    """Add ``check`` and its options."""
    text = "Check whether this installation can serve, without loading a model."
    add = commands.add_parser("check", description=text).add_argument
    text = "compile every kernel, compare it with its reference on this GPU, and time it"
    add("--gpu", action="store_true", help=text)
    add("--all", action="store_true", help="--gpu: FlashInfer's attention, too")
    add("--json", type=Path, metavar="FILE", help="--gpu: write the report there")


def size(text: str) -> int:
    """Parse a size; ``none``, as ``init`` prints it, is 0."""
    return 0 if text == "none" else int(text)


SIZE_OR_NONE = number(size, "at least 0", lambda n: n >= 0)
# Options of ``init`` that replace one size of the default shape, and their help texts.
SIZES = {
    "layers": "transformer layers (default: from the target)",
    "heads": "attention heads (default: from the target)",
    "kv_heads": "K/V heads (default: from the target)",
    "head_dim": "width of a head (default: from the target)",
    "intermediate_size": "width of the MLP (default: three times the hidden size)",
    "block_size": "rows of a block: the anchor plus the drafts (default: 7)",
    "window": "context tokens that a block may see; none for all (default: from the target)",
    "dependency_rank": "rank of the dependency head; 0 for the paper's drafter, which has none "
    "(default: from the target)",
    "dependency_top_k": "candidates of a draft that the dependency head scores when serving "
    f"(default: {CANDIDATES})",
}


def init(commands) -> None:
    """Add ``init`` and its options."""
    add = commands.add_parser(
        "init",
        description="Make an untrained draft checkpoint whose gate starts as the target's own "
        "collapse, where it has one. Reads only the target's config.json and gate. The default "
        "shape follows the target's hidden size, layers and context length, and is printed.",
    ).add_argument
    add("--target", required=True, help="target folder or hub id")
    add("--revision", help="branch, tag or commit of a hub id (default: the main branch)")
    add("--out", type=Path, help="new folder for the draft checkpoint (needed without --dry-run)")
    text = "print the drafter's shape and write nothing; only the target's config.json is read"
    add("--dry-run", action="store_true", help=text)
    for name, text in SIZES.items():
        kind = SIZE_OR_NONE if name in ("window", "dependency_rank") else COUNT
        add(f"--{name.replace('_', '-')}", type=kind, help=text)
    add("--rope-theta", type=float, default=10000.0, help="RoPE base")
    text = "causal attention inside a block, "
    text += "so that the first drafts are the same at every verify width"
    add("--causal", action="store_true", help=text)
    text = "reduction of the residual paths to one state: the gate of the method, or a linear "
    text += "projection (default: hc_gate, with --layer-ids fc)"
    add("--reducer", choices=REDUCERS, help=text)
    text = "start of the gate; approximate: the closest gate of a target without an hc_head of its "
    text += "own (DeepSeek-V4.1)"
    add("--gate", choices=("inherited", "approximate"), default="inherited", help=text)
    text = "read the outputs of these target layers, from 0, instead of the pre-collapse residual, "
    text += "DFlash-style (default: none)"
    add("--layer-ids", type=int, nargs="+", help=text)
    text = "form of the dependency head; product: the selector of DFlash 2"
    add("--dependency-form", choices=FORMS, default=FORMS[0], help=text)
    add("--mask-token-id", type=int, help="mask token (default: the target tokenizer's)")
    add("--seed", type=int, default=0, help="random seed for the new weights")


def add_sampling(parser: argparse.ArgumentParser, **defaults: float) -> None:
    """Add the options of ``generate`` and ``regenerate`` about answers, with these defaults."""
    add = parser.add_argument
    text = "leave out answers that are cut by length, and later turns"
    add("--finished-only", action="store_true", help=text)
    text = "most tokens of an answer; less if the context leaves less"
    add("--max-new-tokens", type=COUNT, help=text)
    temperature = number(float, "a number of at least 0", lambda t: 0 <= t < math.inf)
    add("--temperature", type=temperature, help="0 is greedy")
    add("--top-p", type=SHARE, help="nucleus sampling; 1 is off")
    top_k = number(int, "-1 or at least 1", lambda k: k == -1 or k >= 1)
    add("--top-k", type=top_k, help="tokens to sample from; -1 is all")
    parser.set_defaults(**defaults)


def regenerate(commands) -> None:
    """Add ``regenerate`` and its options."""
    parser = commands.add_parser(
        "regenerate",
        description="Answer every user turn of chat JSONL with a running SGLang server and keep "
        "the exact tokens: training data for `hyperdflash train`. Run again to resume.",
    )
    add = parser.add_argument
    text = "address of a running SGLang server, http://HOST:PORT; repeat it to spread the requests"
    add("--server", required=True, action="append", help=text)
    add("--target", required=True, help="folder or hub id of the target's tokenizer")
    add("--input", nargs="+", required=True, help=f"chat data: {SOURCES}")
    add("--output", type=Path, required=True, help="JSONL of the answers; run again to resume")
    add_sampling(parser, max_new_tokens=2048, temperature=0.7, top_p=0.8, top_k=20)
    concurrency = number(int, f"from 1 to {MOST_IN_FLIGHT}", lambda n: 1 <= n <= MOST_IN_FLIGHT)
    text = f"conversations in flight at all servers together, at most {MOST_IN_FLIGHT}"
    add("--concurrency", type=concurrency, default=32, help=text)
    add("--limit", type=COUNT, help="how many rows to read (default: all)")
    add_key_option(parser)
    add("--strict", action="store_true", help=STRICT)
    text = "arguments of the chat template as JSON, for example '{\"thinking\": true}'"
    add("--template-args", default="{}", help=text)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``commands.generate.engine_arguments`` reads."""
    add = parser.add_argument
    add("--dtype", default="auto", help="dtype of the weights, as SGLang's --dtype")
    add("--tp", type=COUNT, default=1, help="GPUs that share the model")
    add("--engine-args", default="{}", help="more of SGLang's server arguments, as a JSON object")
    add("--verbose", action="store_true", help="show what SGLang and its libraries print")


def share(text: str) -> tuple[int, int]:
    """Parse a ``--share``: ``I/N``, from ``1/N`` to ``N/N``."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"expected I/N with I from 1 to N, found {text}")
    return int(part), int(parts)


def writer_name(text: str) -> str:
    """Check a ``--writer``, which becomes part of file names."""
    if not re.fullmatch(r"\w[\w.-]*", text):
        raise argparse.ArgumentTypeError(f"expected letters, digits, _, - and ., found {text!r}")
    return text


def capture(commands) -> None:
    """Add ``capture`` and its options."""
    parser = commands.add_parser(
        "capture",
        description="Prefill every conversation with an SGLang server and keep the pre-collapse "
        'residual, in a store for `hyperdflash train` (features = "captured"). Run again to '
        "resume. Several engines fill one store, each run with its own --share.",
    )
    add = parser.add_argument
    add("--target", dest="model", required=True, help="target folder or hub id")
    add("--data", nargs="+", required=True, help=f"chat data: {SOURCES}")
    add("--strict", action="store_true", help=STRICT)
    add("--out", type=Path, required=True, help="folder of the store")
    text = "capture the I-th of N parts of the data, while others capture the rest"
    add("--share", type=share, default="1/1", metavar="I/N", help=text)
    text = "name of this run in the store (default: its share); another data set needs another"
    add("--writer", type=writer_name, help=text)
    text = "tokens; answers that end later are left out, and a conversation of such answers alone "
    text += "is listed; less if the target's context is shorter"
    add("--max-length", type=COUNT, default=4096, help=text)
    text = "tokens stored before the first answer, at least a drafter's window (default: all)"
    add("--window", type=COUNT, help=text)
    text = "of the stored states: the target's own, or float8_e4m3fn with a scale for each token "
    text += "and path, half of bf16's size"
    add("--states-dtype", choices=("auto", "fp8"), default="auto", help=text)
    text = "GiB that the store holds at most, all shares together: `train` reads it meanwhile, and "
    text += "each side waits for the other (default: all of the states)"
    add("--budget", type=number(float, "above 0", lambda n: n > 0), metavar="GIB", help=text)
    text = "make the store and say what it will hold, so that `train` can start, without an engine"
    add("--begin", action="store_true", help=text)
    add("--shard-mib", type=COUNT, default=1024, help="largest size of a shard, MiB")
    add("--concurrency", type=COUNT, default=16, help="conversations in flight")
    add_engine_options(parser)
    parser.set_defaults(draft=None)


def add_process_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``commands.train.processes`` reads."""
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    text = "CPU threads of each process (default: torch's own number)"
    parser.add_argument("--threads", type=COUNT, help=text)


def train(commands) -> None:
    """Add ``train`` and its options."""
    parser = commands.add_parser(
        "train",
        description="Train a drafter in the stages of a TOML file; run again to resume. For many "
        "processes: torchrun --nproc-per-node N -m sglang_hyperdflash train ...",
    )
    add = parser.add_argument
    add("--config", type=Path, required=True, help="training file (TOML)")
    add("--work", type=Path, required=True, help="folder of this run's states and logs")
    text = "folder that keeps the target's states for later runs on the same samples"
    add("--states", type=Path, metavar="FOLDER", help=f"{text} (default: WORK/states)")
    text = "set a field of the training file, such as stage.0.lr=1e-4; repeat it for more"
    add("--set", action="append", default=[], metavar="NAME=VALUE", help=text)
    text = "print simulated tau of a drafter on the held-out answers, and train nothing"
    add("--evaluate", type=Path, metavar="DRAFTER", help=text)
    text = "steps of each stage to trace with torch's profiler, into WORK/stage-N/profile"
    add("--profile", type=COUNT, default=0, metavar="STEPS", help=text)
    add("--strict", action="store_true", help=STRICT)
    add_process_options(parser)


def server_url(text: str) -> str:
    """Check an address on the command line; return it without its last slash."""
    if text.startswith(("http://", "https://")):
        return text.rstrip("/")
    raise argparse.ArgumentTypeError(
        f"expected a URL such as http://127.0.0.1:30000, found {text!r}"
    )


def learn(commands) -> None:
    """Add ``learn`` and its options."""
    parser = commands.add_parser(
        "learn",
        description="Train a drafter continuously on what servers with HYPERDFLASH_RECORD "
        "record. A version is published, and sent to every --server, when it drafts better than "
        "the served one on requests that are never trained on; one whose drafts these servers "
        "accept less often is taken back. Stop it with Ctrl-C or SIGTERM; run it again to resume. "
        "For many processes: torchrun --nproc-per-node N -m sglang_hyperdflash learn ...",
    )
    add = parser.add_argument
    add("--target", required=True, help="folder or hub id of the target")
    text = "drafter that the servers started with; they read it at the same path"
    add("--draft", type=Path, required=True, help=text)
    add("--store", type=Path, required=True, help="folder that servers record to")
    text = "folder for the published versions; servers read it at the same path"
    add("--publish", type=Path, required=True, help=text)
    add("--work", type=Path, required=True, help="folder of this run's states and logs")
    text = "URL of a server that gets the versions, started with --enable-metrics; repeatable"
    add("--server", action="append", type=server_url, default=[], help=text)
    add_key_option(parser)
    positive = number(float, "above 0", lambda x: x > 0)
    recipe, policy = Recipe(), Policy()
    add("--lr", type=positive, default=1e-3, help="learning rate of AdamW after the warm-up")
    add("--batch", type=COUNT, default=recipe.batch, help="samples of a step, over all processes")
    add("--micro-batch", type=COUNT, help="samples in memory at once, per process (default: batch)")
    add("--anchors", type=COUNT, default=recipe.anchors, help="blocks per sample, drawn at random")
    add("--every", type=COUNT, default=recipe.every, help="steps between checkpoints and judgings")
    text = "newest samples that half of every batch is drawn from; the other half is of older ones"
    add("--newest", type=COUNT, default=policy.newest, help=text)
    text = "held-out requests that judge: so many of the newest, and so many of older ones"
    add("--judges", type=COUNT, default=policy.judges, help=text)
    text = "times that a sample is drawn on average; then the learner waits for new ones"
    add("--passes", type=COUNT, default=policy.passes, help=text)
    text = "tokens read of a sample, its last ones"
    add("--max-length", type=COUNT, default=2048, help=text)
    add_process_options(parser)


def generate(commands) -> None:
    """Add ``generate`` and its options."""
    text = "Answer a JSONL file offline through an SGLang server of its own."
    parser = commands.add_parser("generate", description=text)
    add = parser.add_argument
    add("--model", required=True, help="target folder or hub id")
    add("--draft", help="drafter (default: none, no speculation)")
    text = "JSONL or a JSON array, with prompt, messages or turns"
    add("--input", type=Path, required=True, help=text)
    add("--strict", action="store_true", help=STRICT)
    add("--output", type=Path, required=True, help="JSONL of the answers; run again to resume")
    add_sampling(parser, max_new_tokens=512, temperature=0.0, top_p=1.0, top_k=-1)
    min_p = number(float, "from 0 to 1", lambda p: 0 <= p <= 1)
    text = "smallest probability, relative to the likeliest token's"
    add("--min-p", type=min_p, default=0.0, help=text)
    add("--concurrency", type=COUNT, default=16, help="prompts in flight")
    add_engine_options(parser)


def plan(commands) -> None:
    """Add ``plan`` and its options."""
    parser = commands.add_parser(
        "plan",
        description="Print K/V bytes per token, K/V tokens on one GPU and their share of the "
        "baseline's, without a GPU or weights. Other memory: what HYPERDFLASH needs outside "
        "weights and K/V, at most; the target's own graphs are not counted. With --training print "
        "a training file's GPU hours, bytes and days instead.",
    )
    add, at_least_0 = parser.add_argument, number(float, "at least 0", lambda x: 0 <= x < math.inf)
    needed = "(no default: needed for K/V memory)"
    add("--target", help=f"folder or hub id; only its config.json is read {needed}")
    add("--draft", help="folder or hub id of the HyperDFlash drafter (needed)")
    add("--dspark", help="DSPARK draft to compare with (default: the target's own)")
    add("--gpu-gib", type=at_least_0, help=f"memory of one GPU, GiB {needed}")
    add("--weights-gib", type=at_least_0, help="weights on one GPU, GiB (default: index size / tp)")
    add("--tp", type=COUNT, nargs="+", default=[1], help="tensor-parallel sizes, one table for all")
    add("--dp-attention", action="store_true", help="attention data parallelism")
    add("--context-length", type=COUNT, help="context, tokens (default: the target's own)")
    add("--mem-fraction-static", type=SHARE, default=0.85, help="share of a GPU for weights, K/V")
    text = "requests at once (default: SGLang's choice for each method, which is shown)"
    add("--max-running-requests", type=COUNT, help=text)
    add("--json", action="store_true", help="print JSON")
    add("--verbose", action="store_true", help="show what SGLang and its libraries print")
    positive = number(float, "above 0", lambda x: 0 < x < math.inf)
    add = parser.add_argument_group("cost of a training").add_argument
    text = "training file whose cost is printed (default: K/V memory)"
    add("--training", type=Path, metavar="FILE", help=text)
    text = "conversations of all stages, or of each"
    add("--conversations", type=COUNT, nargs="+", default=[300_000], help=text)
    add("--tokens", type=COUNT, default=1000, help="tokens of a conversation")
    add("--answer-tokens", type=COUNT, default=800, help="its regenerated tokens")
    text = "of the stored states, as in `hyperdflash capture`; auto is counted as bf16"
    add("--states-dtype", choices=("auto", "fp8"), default="auto", help=text)
    add("--gpus", type=COUNT, nargs="+", default=[8, 16, 64], help="GPUs whose days are printed")
    add("--gpu-tflops", type=positive, default=989.0, help="bf16 peak of a GPU")
    add("--utilization", type=SHARE, default=0.4, help="share of the peak that is reached")
    text = "parameters of the target that a token uses"
    add("--active-parameters", type=positive, default=13e9, help=text)
    add("--decode-rate", type=positive, default=1000.0, help="answer tokens/s per serving GPU")
    add("--spread", type=at_least_0, default=0.5, help="standard deviation over mean of the tokens")
    add("--held-out", type=COUNT, default=1000, help="conversations that each checkpoint replays")
    add("--read-rate", type=positive, default=10.0, help="GB/s of states, to all GPUs together")
    add("--write-rate", type=positive, default=5.0, help="GB/s of states that are captured")
    text = "states on disk at once, as in `hyperdflash capture` (default: all of a stage)"
    add("--budget", type=positive, metavar="GIB", help=text)
