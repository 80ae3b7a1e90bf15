"""A store in any order of writes, failures, kills, damage and reads, against lists of samples."""

import os
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from sglang_hyperdflash.tools.atomic import WriteFailed
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.ownership import InUse, NotOurs
from sglang_hyperdflash.training.process_group import ProcessGroup
from sglang_hyperdflash.training.samples import Sample
from sglang_hyperdflash.training.store import writer as writer_module
from sglang_hyperdflash.training.store.manifest import Data, Manifest, data_digest
from sglang_hyperdflash.training.store.reader import StoreReader
from sglang_hyperdflash.training.store.stream import StreamReader
from sglang_hyperdflash.training.store.writer import StoreWriter, open_writer
from tests.unit.training.store import small
from tests.unit.training.store.small import IDENTITY, KIND, D, broken, content, flip, near

VOCABULARY = 50
# The last three hold a token that the target does not have.
SAMPLES = [Sample(list(range(n)), ((2, 3), (4, n))) for n in (5, 9, 6, 7, 11, 8)]
SAMPLES += [Sample([1, token, 2], ((1, 3),)) for token in (-1, VOCABULARY, 2**31 - 1)]
RANGES = [(0, 2), (2, 4), (4, 6)]
DATA = Data(data_digest(SAMPLES[:6]), 6, 1)
NAMES = ("a", "b")
CLOCK = 1_700_000_000 * 10**9


@dataclass
class Written:
    """A shard as it should be: numbers of its samples, None for one that is not finite."""

    file: str
    samples: list[int | None]
    size: int
    turn: int

    @property
    def kept(self) -> list[int]:
        return [i for i in self.samples if i is not None]


FAULTS = {"shard": ".partial", "line": "", "flush": ".jsonl"}


def failing(fault: str):
    """The disk is full where a shard or a line is flushed, or in the middle of a line."""
    fsync, write = os.fsync, os.write

    def flushed(number: int) -> None:
        if os.readlink(f"/proc/self/fd/{number}").endswith(FAULTS[fault]):
            raise OSError(122, "Disk quota exceeded")
        fsync(number)

    def written(number: int, line) -> int:
        if len(line) <= 5:
            raise OSError(28, "No space left on device")
        return write(number, line[:-5])

    return mock.patch("os.write", written) if fault == "line" else mock.patch("os.fsync", flushed)


# Most shards are of samples that can be read.
numbers = st.one_of(*[st.integers(0, 5)] * 5, st.integers(6, len(SAMPLES) - 1))
names = st.sampled_from(NAMES)


class StoreMachine(RuleBasedStateMachine):
    """Two writers, each of a stream or of a share of one data set, and their readers."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.open: dict[str, tuple[ExitStack, StoreWriter]] = {}
        self.shards: dict[str, dict[int, Written]] = {name: {} for name in NAMES}
        self.ends, self.turn = dict.fromkeys(NAMES, 0), 0
        self.corrupt: set[str] = set()
        self.gone: set[str] = set()
        self.held_out: dict[int, bool] = {}
        self.clock_was_wrong = False

    @initialize(
        finite=st.sampled_from([True, False, False]),
        fp8=st.booleans(),
        layers=st.booleans(),
        most=st.sampled_from([6, 99]),
    )
    def begin(self, finite, fp8, layers, most):
        self.finite = finite
        self.identity = replace(IDENTITY, fp8=fp8, layer_ids=(1, 3, 5) if layers else ())
        self.writer("a")
        self.stream, self.most = StreamReader(self.folder, most, VOCABULARY), most

    def teardown(self) -> None:
        for held, _ in self.open.values():
            held.close()
        shutil.rmtree(self.folder)

    # --- writing

    def writer(self, name: str) -> StoreWriter:
        """An open one; when it is opened, it knows what it wrote and what it has to repeat."""
        if name not in self.open:
            held, lost = ExitStack(), self.corrupt | self.gone
            writer = held.enter_context(small.opened(self.folder, name, self.identity))
            self.open[name], written = (held, writer), self.shards[name]
            assert writer.position == self.ends[name]
            assert set(writer.damaged) == lost & {shard.file for shard in written.values()}
            shards = sorted(self.shards[name].items())
            left_out = [n + i for n, s in shards for i, x in enumerate(s.samples) if x is None]
            assert writer.left_out == left_out
            if self.finite:
                writer.begin(DATA)
                assert writer.missing(RANGES) == [r for r in RANGES if not self.done(r[0], name)]
        return self.open[name][1]

    def done(self, start: int, by: str) -> bool:
        """Whether a range is there, as a writer sees it: it looks into its own shards alone."""
        lost = self.gone | {file for file in self.corrupt if file.startswith(by)}
        return any(start in some and some[start].file not in lost for some in self.shards.values())

    def parts(self, number: int, wrong: bool) -> tuple[torch.Tensor, ...]:
        n = len(SAMPLES[number].tokens)
        layers = small.residual(n, 3 * D, 1)[:, : 3 * D * bool(self.identity.layer_ids)]
        return broken(small.residual(n)) if wrong else small.residual(n), layers

    def add(self, name: str, start: int, chosen: list[int], wrong: int, skew: int) -> None:
        plain = writer_module.write_shard

        def write_shard(path, tensors):
            digest = plain(path, tensors)
            os.utime(path, ns=(0, CLOCK + skew + self.turn * 10**9))
            return digest

        self.turn += 1
        states = [self.parts(number, i == wrong) for i, number in enumerate(chosen)]
        with mock.patch.object(writer_module, "write_shard", write_shard):
            self.writer(name).add(start, [SAMPLES[number] for number in chosen], states)

    def manifest(self, name: str) -> Path:
        return self.folder / "manifests" / f"{name}.jsonl"

    @rule(
        name=names,
        chosen=st.lists(numbers, min_size=1, max_size=3),
        wrong=st.sampled_from([9, 9, 0, 1]),
        skew=st.sampled_from([0, 0, 0, 10**18, -(10**18)]),
        fault=st.sampled_from(["", "", "", "kill", *FAULTS]),
        cut=st.floats(0, 1, exclude_max=True),
    )
    def write(self, name, chosen, wrong, skew, fault, cut):
        path, start = self.manifest(name), self.writer(name).position
        assert start == self.ends[name]
        if self.finite:
            start, end = RANGES[chosen[0] % 3]
            chosen = list(range(start, end))
        file, before = f"{name}-{start:08d}.safetensors", path.read_bytes()
        shown = self.folder / "shards" / file
        if start in self.shards[name] and fault != "flush":
            fault = ""
        if fault in FAULTS:
            with failing(fault), pytest.raises(WriteFailed, match=name):
                self.add(name, start, chosen, wrong, skew)
        else:
            self.add(name, start, chosen, wrong, skew)
        assert not shown.with_name(f"{file}.partial").exists()
        line = path.read_bytes().removeprefix(before)
        if fault in ("shard", "line"):
            assert not line
            return
        assert line.count(b"\n") == 1 and path.read_bytes() == before + line
        if fault == "kill":  # the shard is there, its line in part; and what another write began
            self.close(name)
            os.truncate(path, len(before) + int(cut * len(line)))
            shown.with_name(f"{file}.partial").write_bytes(b"half")
            return
        samples = [None if i == wrong else number for i, number in enumerate(chosen)]
        self.shards[name][start] = Written(file, samples, shown.stat().st_size, self.turn)
        self.ends[name] = max(self.ends[name], start + len(chosen))
        self.corrupt.discard(file)
        self.gone.discard(file)
        self.clock_was_wrong |= skew != 0

    @rule(name=names)
    def close(self, name):
        if name in self.open:
            self.open.pop(name)[0].close()

    @rule(name=names)
    def another_writer_is_refused(self, name):
        self.writer(name)
        with pytest.raises(InUse, match=f"{name}.jsonl"):
            small.opened(self.folder, name, self.identity).__enter__()
        for change, value in (("fp8", not self.identity.fp8), ("dtype", "float32")):
            other = replace(self.identity, **{change: value})
            with pytest.raises(NotOurs, match=f"{change} was"):
                small.opened(self.folder, "c", other).__enter__()
        if self.manifest(name).stat().st_size:
            with pytest.raises(NotOurs, match="length was unset"):
                open_writer(self.folder, self.identity, name, KIND, {"length": 3}).__enter__()

    @precondition(lambda self: not self.finite)
    @rule(name=names, count=st.integers(0, 4), reservoir=st.sampled_from([0.0, 0.5]))
    def retain(self, name, count, reservoir):
        written = self.shards[name]
        sizes = [written[start].size for start in sorted(written)]
        budget = sum(sizes[len(sizes) - min(count, len(sizes)) :])
        others = {p.name for p in self.folder.glob("shards/*") if not p.name.startswith(name)}
        self.writer(name).retain(budget, reservoir)
        left = sorted(Manifest.read(self.manifest(name)).shards)
        if not reservoir:
            assert left == sorted(written)[len(written) - min(count, len(written)) :]
        assert sum(written[start].size for start in left) <= budget
        newest = [
            s for s in written if sum(written[t].size for t in written if t >= s) <= budget / 2
        ]
        assert set(newest) <= set(left)
        self.shards[name] = {start: written[start] for start in left}
        files = {shard.file for shard in self.shards[name].values()} - self.gone
        left_files = {path.name for path in self.folder.glob("shards/*.safetensors")}
        assert left_files == files | {file for file in others if file.endswith(".safetensors")}

    @precondition(lambda self: self.whole_files())
    @rule(data=st.data(), where=st.sampled_from([0.99, 0.6, 0.3, 0.0]), remove=st.booleans())
    def damage(self, data, where, remove):
        file = data.draw(st.sampled_from(self.whole_files()))
        path = self.folder / "shards" / file
        if remove:
            path.unlink()
            self.gone.add(file)
        else:
            flip(path, int(where * path.stat().st_size), 16)
            self.corrupt.add(file)

    def whole_files(self) -> list[str]:
        files = {shard.file for written in self.shards.values() for shard in written.values()}
        return sorted(files - self.corrupt - self.gone)

    # --- reading

    def right(self, states, row: int, number: int, most: int = 99) -> bool:
        """Whether a row holds a sample's states, and then zeros."""
        n = min(len(SAMPLES[number].tokens), most)
        both = states.residual, states.layers
        for read, wanted in zip(both, self.parts(number, False), strict=True):
            assert read.dtype == torch.bfloat16 and not read[row, n:].any()
            same = near if self.identity.fp8 else torch.equal
            if wanted.shape[1] and not same(read[row, :n], wanted[-n:]):
                return False
        return True

    def to_read(self) -> list[Written]:
        """What a reader opens, in its order: the first writer's of a range that is there."""
        if not self.finite:
            return [self.shards[n][start] for n in NAMES for start in sorted(self.shards[n])]
        every = [[each[n] for each in self.shards.values() if n in each] for n, _ in RANGES]
        there = [[s for s in some if s.file not in self.gone] or some[-1:] for some in every]
        return [some[0] for some in there if some]

    @rule(backwards=st.booleans(), ahead=st.booleans())
    def read(self, backwards, ahead):
        shards = self.to_read()
        missing = [shard.file for shard in shards if shard.file in self.gone]
        held = sum(len(shard.samples) for shard in shards)
        if missing or (self.finite and held < 6):
            match = missing[0] if missing else f"{held} of 6 samples"
            with pytest.raises(HyperDFlashConfigError, match=match):
                StoreReader(self.folder)
            return
        source = StoreReader(self.folder)
        every = [(number, shard.file) for shard in shards for number in shard.kept]
        assert source.lengths.tolist() == [len(SAMPLES[number].tokens) for number, _ in every]
        for i, (_, file) in enumerate(every):
            if file in self.corrupt:
                for use in (source.states, lambda ids: source.samples[ids[0]].tokens):
                    with pytest.raises(HyperDFlashConfigError, match=f"{file} is corrupt"):
                        use([i])
        order = [i for i, (_, file) in enumerate(every) if file not in self.corrupt]
        order = order[::-1] if backwards else order
        for ids in (order, order[:1]) if order else ():
            if ahead:
                source.prefetch(ids)
            states = source.states(ids)
            for row, i in enumerate(ids):
                number = every[i][0]
                assert content(source.samples[i]) == SAMPLES[number]
                assert self.right(states, row, number)

    @precondition(lambda self: not self.finite)
    @rule()
    def follow(self):
        stream = self.stream
        stream.refresh(ProcessGroup())
        shards = {s.file: s for written in self.shards.values() for s in written.values()}
        listed = [path.name for path, *_ in stream._shards]
        assert set(listed) <= shards.keys() - self.gone
        known = {file: s for file, s in shards.items() if s.kept and max(s.kept) < 6}
        sure = [file for file in known if file not in self.corrupt | self.gone]
        readable = [file for file in listed if file not in self.corrupt]
        for name in NAMES if self.clock_was_wrong else ("",):
            wanted = [file for file in sure if file.startswith(name)]
            wanted.sort(key=lambda file: shards[file].turn)
            assert [file for file in readable if file.startswith(name)] == wanted
        assert stream.written == sum(self.ends.values())
        every = [(number, file) for file in listed for number in shards[file].kept]
        assert len(stream.samples) == len(stream.held_out) == len(every)
        if not every:
            return
        states = stream.states(list(range(len(every))))
        for i, (number, file) in enumerate(every):
            if file in self.corrupt and not stream.samples[i].spans:  # found out: teaches nothing
                assert not states.residual[i].any() and not states.layers[i].any()
                continue
            tokens, cut = SAMPLES[number].tokens, max(len(SAMPLES[number].tokens) - self.most, 0)
            spans = ((max(a - cut, 0), max(b - cut, 0)) for a, b in SAMPLES[number].spans)
            assert content(stream.samples[i]) == Sample(tokens[cut:], tuple(spans))
            assert self.right(states, i, number, self.most)
            flag = bool(stream.held_out[i])
            assert self.held_out.setdefault(number, flag) == flag


StoreMachine.TestCase.settings = settings(
    deadline=None, derandomize=True, database=None, max_examples=40, stateful_step_count=25
)
TestStore = StoreMachine.TestCase
