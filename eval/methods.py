"""The methods that can be compared: their names, server arguments, and the draft each needs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.errors import EvalError
from sglang_hyperdflash.serving.settings import COPY, WIDTH
from sglang_hyperdflash.tools.checksum import file_hash, short_hash
from sglang_hyperdflash.tools.ownership import location
from sglang_hyperdflash.tools.provenance import without_machine

BASELINE, NOISE = "baseline", "baseline-again"
DRAFT_OPTION = "--speculative-draft-model-path"
COPIED = "32768"


@dataclass(frozen=True)
class Kind:
    """How SGLang serves a method, and the draft that it needs."""

    label: str  # in tables and charts
    algorithm: str | None  # None: no speculation
    num_drafts: int  # of a round
    draft_option: str | None = None  # the option of ``python -m eval`` that names the draft
    draft_required: bool = True  # False: the target may carry its own draft
    options: tuple[str, ...] = ()  # of its server, after the algorithm and the draft
    environment: tuple[tuple[str, str], ...] = ()  # of its server


def _mtp(steps: int) -> Kind:
    options = ("--speculative-num-steps", str(steps), "--speculative-eagle-topk", "1")
    options += ("--speculative-num-draft-tokens", str(steps + 1))
    return Kind(f"MTP ({steps})", "EAGLE", steps, "mtp_draft", False, options)


def _block(label: str, draft: str, width: str = "full", copied: str = "0") -> Kind:
    """A block drafter under HYPERDFLASH: like other methods it drafts six tokens a round."""
    environment = ((WIDTH, width), (COPY, copied))
    return Kind(label, "HYPERDFLASH", 6, f"{draft}_draft", environment=environment)


KINDS: Mapping[str, Kind] = {
    BASELINE: Kind("baseline", None, 0),
    "mtp3": _mtp(3),
    "mtp6": _mtp(6),
    "dflash6": Kind("Vanilla DFlash (6)", "DFLASH", 6, "dflash_draft"),
    "hyperdflash6": _block("HyperDFlash (6)", "hyperdflash"),
    "hyperdflash-copies": _block("HyperDFlash and copies (6)", "hyperdflash", copied=COPIED),
    # The default settings of a server.
    "hyperdflash-adaptive": _block(
        "HyperDFlash, adaptive width", "hyperdflash", "adaptive", COPIED
    ),
    "hyperdflash2": _block("HyperDFlash-2 (6)", "hyperdflash2"),
    "hyperdflash2-copies": _block("HyperDFlash-2 and copies (6)", "hyperdflash2", copied=COPIED),
    # The source, head and loss of another method on our layers, served by our worker.
    "dspark-style": _block("DSpark-style (6)", "dspark_style"),
    "dflash2-style": _block("DFlash 2-style (6)", "dflash2_style"),
    # Bundled in V4-Flash-0731, whose config says five drafts.
    "dspark": Kind("DSpark", "DSPARK", 5, "dspark_draft", draft_required=False),
    "ngram": Kind("n-gram", "NGRAM", 6, options=("--speculative-num-draft-tokens", "7")),
}


def label(method: str) -> str:
    """A method's name in tables and charts."""
    if method == NOISE:
        return "baseline, again (noise floor)"
    return KINDS[method].label if method in KINDS else method


def is_hyperdflash(method: str) -> bool:
    """Whether it is one of this project's methods."""
    return method.startswith("hyperdflash")


# Methods with copies, and the same without.
COPYING = {"hyperdflash-copies": "hyperdflash6", "hyperdflash2-copies": "hyperdflash2"}


def drafting(methods: Iterable[str]) -> list[str]:
    """The methods that draft, once each, in their order."""
    return [m for m in dict.fromkeys(methods) if m not in (BASELINE, NOISE)]


@dataclass(frozen=True)
class Method:
    """A method to run."""

    name: str
    arguments: tuple[str, ...]  # of its server
    num_drafts: int  # of a round
    url: str | None = None  # of a running server, instead of arguments and environment
    environment: tuple[tuple[str, str], ...] = ()  # of its server

    def identity(self) -> dict[str, Any]:
        """What two runs must share for their numbers to be of one method.

        A draft counts by its path (``without_machine``) and by its files: a retrained drafter is
        another one.
        """
        arguments, draft = list(self.arguments), {}
        if DRAFT_OPTION in arguments:
            index = arguments.index(DRAFT_OPTION)
            folder = arguments[index + 1]
            del arguments[index : index + 2]
            files = [*Path(folder).glob("*.safetensors"), *Path(folder).glob("config.json")]
            hashes = sorted([path.name, file_hash(path)] for path in files)
            draft = {"draft": without_machine(location(folder)), "draft files": short_hash(hashes)}
        server = {"arguments": arguments, "url": self.url, "environment": dict(self.environment)}
        return server | draft


def resolve(
    names: Sequence[str], drafts: Mapping[str, str | Path | None], urls: Mapping[str, str]
) -> list[Method]:
    """Methods by name, the baseline first.

    ``drafts`` holds folders or hub ids by draft option, ``urls`` running servers by method. Raises
    ``EvalError`` for an unknown method, a missing draft, or without a baseline to compare with.
    """
    methods = []
    for name in dict.fromkeys([*names, *urls]):
        if name not in KINDS:
            raise EvalError(f"unknown method {name!r}; known are {', '.join(KINDS)}.")
        kind = KINDS[name]
        if name in urls:
            methods.append(Method(name, (), kind.num_drafts, urls[name]))
            continue
        draft = drafts.get(kind.draft_option or "")
        if kind.draft_option and kind.draft_required and not draft:
            option = "--" + kind.draft_option.replace("_", "-")
            raise EvalError(f"method {name} needs {option}: the folder or hub id of its draft.")
        if draft and Path(draft).is_absolute() and not Path(draft).is_dir():
            raise EvalError(f"method {name}: its draft {draft} is not a folder.")
        arguments = ("--speculative-algorithm", kind.algorithm) if kind.algorithm else ()
        if draft is not None:
            arguments += (DRAFT_OPTION, str(draft))
        arguments += kind.options
        methods.append(Method(name, arguments, kind.num_drafts, None, kind.environment))
    if BASELINE not in {method.name for method in methods}:
        raise EvalError(f"--methods must include {BASELINE}: speedup and identity refer to it.")
    return sorted(methods, key=lambda method: list(KINDS).index(method.name))


def parse_urls(pairs: Sequence[str]) -> dict[str, str]:
    """Running servers by method, from ``name=url`` options; raises ``EvalError`` for others."""
    urls = {}
    for pair in pairs:
        name, separator, url = pair.partition("=")
        if not separator or not url.startswith(("http://", "https://")):
            raise EvalError(f"--server takes name=url, found {pair!r}.")
        urls[name] = url.rstrip("/")
    return urls
