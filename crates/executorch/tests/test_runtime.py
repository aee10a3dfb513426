"""One .pte under every cache: plain decode, batches, forks, admission, rollback, windows, draft trees, dtypes."""

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from executorch.extension.llm.cache.reference_cache import CacheConfig as ReferenceConfig
from executorch.extension.llm.cache.reference_cache import (
    AttendSpec,
    CellReferenceCache,
    ContiguousReferenceCache,
    LayerPolicy,
    MaskKind,
    attend,
)
from executorch.extension.llm.cache.update_and_attend import REGISTRY

import kvist.executorch as ke
from kvist.executorch.export import Exportable
from kvist.executorch.op import update_and_attend

TEXT = [5, 17, 3, 88, 41, 9, 60, 22, 75, 13, 2, 34]


def config(program, capacity=64, **more):
    return ke.make_config(program.cache_params, capacity, torch.float32, **more)


def close(found, expected, tolerance=1e-4):
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def decode(program, session, tokens, chunks):
    rows, start = [], 0
    for n in chunks:
        positions = range(start, start + n)
        rows.append(program.run(session, tokens[start : start + n], positions, range(n))[0])
        start += n
    return torch.cat(rows)


def test_metadata(program):
    assert program.cache_params == ke.ModelCacheParams(n_layers=3, n_kv_heads=2, head_dim=16)


def test_a_program_of_another_schema_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["kvist.executorch.export"], "SCHEMA_VERSION", 2)
    export_op(tmp_path / "op.pte")
    with pytest.raises(ke.CacheError, match="schema_version is 2, this reader knows 1"):
        ke.Program(tmp_path / "op.pte")
    if "KVIST_EXECUTORCH_LIBRARY" in os.environ:  # the reader of C++ and Rust
        host = Path(os.environ["KVIST_EXECUTORCH_LIBRARY"]).with_name("host")
        ran = subprocess.run([host, tmp_path / "op.pte", "f32", "1"], capture_output=True, text=True)
        assert ran.returncode != 0 and "schema_version is 2, this reader knows 1" in ran.stderr


@pytest.mark.parametrize("backend", ["kvist", "kvist-reference"])
def test_plain_decode_in_chunks(program, alone, backend):
    session = ke.make_decode_session(backend, config(program))
    close(decode(program, session, TEXT, [7, 1, 3, 1]), alone(TEXT))
    assert session.seq_len() == len(TEXT)


class OneCall(torch.nn.Module):
    def forward(self, q, k, v, position):
        return update_and_attend(q, k, v, position, 0, 0.25, torch.float32)


# Only the op, so that nothing else rounds: 1e-5 in f32, one program under every cache.


def export_op(path):
    n = torch.export.Dim("n", min=1, max=32)
    inputs = (torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), torch.arange(3).unsqueeze(-1))
    ke.export_module(OneCall(), inputs, ({2: n}, {2: n}, {2: n}, {0: n}), path, n_layers=1, n_kv_heads=2, head_dim=16, xnnpack=False)


@pytest.fixture(scope="module")
def op(tmp_path_factory):
    path = tmp_path_factory.mktemp("op") / "op.pte"
    export_op(path)
    return ke.Program(path)


@pytest.fixture
def beside(op):
    """Executes the same random rows on a session and on ExecuTorch's reference cache, and compares."""
    torch.manual_seed(0)
    installed = []

    def install(cache, **more):
        reference = cache(ReferenceConfig(n_layers=1, n_kv_heads=2, head_dim=16, capacity=64, **more))
        REGISTRY.install("reference", reference)
        installed.append(reference)
        return reference

    def step(session, positions):
        inputs = rows(positions)
        with REGISTRY.active("reference"):
            expected = OneCall()(*inputs)
        (found,) = op.execute(session, inputs)
        close(found, expected, 1e-5)

    yield install, step
    REGISTRY.uninstall("reference")


def rows(positions):
    n = len(positions)
    return tuple(torch.randn(1, heads, n, 16) * 3 for heads in (4, 2, 2)) + (torch.tensor(list(positions)).unsqueeze(-1),)


def test_the_kernel_as_the_reference_cache(op, beside):
    install, step = beside
    install(ContiguousReferenceCache)
    session = ke.make_decode_session("kvist", config(op))
    start = 0
    for n in (9, 1, 1, 20, 5, 1):
        step(session, range(start, start + n))
        start += n


@pytest.mark.parametrize("window", [0, 4])
def test_the_kernel_as_the_reference_cells(op, beside, window):
    """Batches, a fork, admission beside decodes, rollback and eviction, with all history and in a window."""
    install, step = beside
    reference = install(CellReferenceCache, layers=[LayerPolicy.ring(window) if window else LayerPolicy.flat()])
    session = ke.make_seq_session("kvist", config(op, windows=[window] if window else []))
    caches = (reference, session)

    def batch(*tokens):  # (sequence, position)
        for cache in caches:
            cache.begin_step([seq for seq, _ in tokens])
        step(session, [position for _, position in tokens])

    batch(*((0, p) for p in range(7)))
    batch((0, 7), (1, 0), (1, 1), (0, 8), (1, 2))
    for cache in caches:
        cache.seq_cp(0, 2)
    batch((0, 9), (2, 9), (1, 3))
    for cache in caches:
        cache.seq_rm(2, 8)
    batch((2, 8), (2, 9), (0, 10))
    for cache in caches:
        cache.seq_rm(1)
        cache.seq_cp(2, 3)
    batch((3, 10), (2, 10), (0, 11), (3, 11))
    # In a window kvist lets go of what no query will see again; the reference keeps it until seq_rm.
    if not window:
        assert [session.seq_len(s) for s in range(4)] == [reference.seq_len(s) for s in range(4)] == [12, 0, 11, 12]


def test_the_kernel_in_a_ring_as_the_reference(op, beside):
    install, step = beside
    reference = install(CellReferenceCache, layers=[LayerPolicy.ring(5)])
    session = ke.make_decode_session("kvist", config(op, windows=[5], max_step_tokens=8))
    start = 0
    for n in (8, 1, 1, 3, 8, 1, 5, 1):
        reference.begin_step([0] * n)
        step(session, range(start, start + n))
        start += n


def test_the_kernel_on_a_tree_as_the_reference(op):
    """ExecuTorch's reference has no tree cache: its attention gets the ancestors of every node as an explicit mask."""
    torch.manual_seed(0)
    session = ke.make_tree_session("kvist", config(op))
    keys, values, sees = [], [], []

    def step(positions, ancestors):
        q, k, v, position = rows(positions)
        first = len(sees)
        for row in range(len(ancestors)):
            keys.append(k[:, :, row]), values.append(v[:, :, row]), sees.append(ancestors[row])
        mask = torch.tensor([[key in seen for key in range(len(sees))] for seen in sees[first:]])
        expected = attend(q, torch.stack(keys, 2), torch.stack(values, 2), AttendSpec(MaskKind.EXPLICIT, mask), 0.25, torch.float32)
        (found,) = op.execute(session, (q, k, v, position))
        close(found, expected, 1e-5)

    prefix = list(range(5))
    step(range(5), [prefix[: p + 1] for p in prefix])
    # The example of the design: node 1 and 2 hang on 0, 3 on 1. Nodes are rows 5 to 8.
    session.propose([-1, 0, 0, 1])
    step([5, 6, 6, 7], [prefix + nodes for nodes in ([5], [5, 6], [5, 7], [5, 6, 8])])
    session.propose([3, 2])
    step([8, 7], [prefix + [5, 6, 8, 9], prefix + [5, 7, 10]])
    session.commit([0, 2, 5])
    step([8], [prefix + [5, 7, 10, 11]])


def test_as_the_reference_caches(program, llama):
    """The same inputs through ExecuTorch's reference cache and the eager model."""
    reference = ContiguousReferenceCache(ReferenceConfig(n_layers=3, n_kv_heads=2, head_dim=16, capacity=64))
    eager = Exportable(llama, features=(0, 2))
    session = ke.make_decode_session("kvist", config(program))
    REGISTRY.install("reference", reference)
    try:
        start = 0
        for n in (7, 1, 3, 1):
            inputs = (torch.tensor([TEXT[start : start + n]]), torch.arange(start, start + n).unsqueeze(-1), torch.arange(n))
            with REGISTRY.active("reference"), torch.no_grad():
                expected = eager(*inputs)
            for found, wanted in zip(program.execute(session, inputs), expected):
                close(found, wanted)
            start += n
    finally:
        REGISTRY.uninstall("reference")


def test_batches_as_the_reference_cells(program, llama):
    """Interleaved tokens of two sequences, a fork and a rollback, step by step beside ExecuTorch's reference cells."""
    reference = CellReferenceCache(ReferenceConfig(n_layers=3, n_kv_heads=2, head_dim=16, capacity=64))
    eager = Exportable(llama, features=(0, 2))
    session = ke.make_seq_session("kvist", config(program))
    REGISTRY.install("reference", reference)

    def step(tokens, positions, seqs):
        inputs = (torch.tensor([tokens]), torch.tensor(positions).unsqueeze(-1), torch.arange(len(tokens)))
        reference.begin_step(seqs)
        session.begin_step(seqs)
        with REGISTRY.active("reference"), torch.no_grad():
            expected = eager(*inputs)
        for found, wanted in zip(program.execute(session, inputs), expected):
            close(found, wanted)

    try:
        step([5, 40, 17, 41, 3], [0, 0, 1, 1, 2], [0, 1, 0, 1, 0])
        for cache in (reference, session):
            cache.seq_cp(0, 2)
        step([50, 60, 70], [3, 3, 2], [0, 2, 1])
        for cache in (reference, session):
            cache.seq_rm(2, 2)
        step([80, 81, 90], [2, 3, 4], [2, 2, 0])
        for cache in (reference, session):
            cache.seq_rm(0, 0, 2)
        step([1, 2], [5, 4], [0, 2])
        assert [session.seq_len(s) for s in range(3)] == [reference.seq_len(s) for s in range(3)]
    finally:
        REGISTRY.uninstall("reference")


def test_batched_sequences(program, alone):
    session = ke.make_seq_session("kvist", config(program))
    texts = {0: TEXT[:6], 1: TEXT[3:10], 2: TEXT[6:]}
    for name, length in ((0, 4), (1, 2), (2, 5)):
        session.begin_step([name] * length)
        program.run(session, texts[name][:length], range(length))
    held = {0: 4, 1: 2, 2: 5}
    session.begin_step([0, 1, 2])
    logits, *_ = program.run(session, [texts[s][held[s]] for s in range(3)], [held[s] for s in range(3)], range(3))
    for s in range(3):
        close(logits[s], alone(texts[s][: held[s] + 1])[-1])


def test_agent_fork_and_keep(program, alone):
    session = ke.make_seq_session("kvist", config(program, capacity=20))
    session.begin_step([0] * 12)
    program.run(session, TEXT, range(12))
    for branch in (1, 2, 3):
        session.seq_cp(0, branch)
    assert session.can_extend(8) and not session.can_extend(9)  # the trunk counts once
    session.begin_step([1, 2, 3])
    logits, *_ = program.run(session, [70, 71, 72], [12] * 3, range(3))
    for i, token in enumerate((70, 71, 72)):
        close(logits[i], alone(TEXT + [token])[-1])
    session.seq_keep(2)
    assert [session.seq_len(s) for s in range(4)] == [0, 0, 13, 0]
    assert session.can_extend(7) and not session.can_extend(8)


def test_admission_while_others_decode(program, alone):
    session = ke.make_seq_session("kvist", config(program))
    session.begin_step([0] * 4)
    program.run(session, TEXT[:4], range(4))
    session.seq_cp(0, 3)  # the system prompt
    new = [66, 67, 68]
    session.begin_step([0] + [3] * 3)
    logits, *_ = program.run(session, [TEXT[4]] + new, [4, 4, 5, 6], [0, 3])
    close(logits[0], alone(TEXT[:5])[-1])
    close(logits[1], alone(TEXT[:4] + new)[-1])


def test_rollback_and_another_answer(program, alone):
    session = ke.make_decode_session("kvist", config(program))
    decode(program, session, TEXT, [10])
    session.rewind(6)
    logits, *_ = program.run(session, [90], [6])
    close(logits[-1], alone(TEXT[:6] + [90])[-1])
    with pytest.raises(ke.CacheError, match="only shorten"):
        session.rewind(8)
    session.clear()
    close(decode(program, session, TEXT, [3, 2]), alone(TEXT)[:5])


@pytest.mark.parametrize("kind", ["decode", "seq"])
def test_sliding_window(program, alone, kind):
    long = (TEXT * 5)[:50]
    expected = alone(long, window=8)
    windowed = config(program, capacity=64, windows=[8], max_step_tokens=16)
    if kind == "decode":
        session = ke.make_decode_session("kvist", windowed)  # a ring
        found = decode(program, session, long, [16] + [1] * 34)
    else:
        session = ke.make_seq_session("kvist", windowed)
        session.begin_step([0] * 16)
        rows = [program.run(session, long[:16], range(16), range(16))[0]]
        for i in range(16, 50):
            session.begin_step([0])
            rows.append(program.run(session, [long[i]], [i])[0])
        found = torch.cat(rows)
    close(found, expected)


def test_draft_trees(program, alone):
    """The example of the design: parents -1, 0, 0, 1. Node 2 does not see node 1."""
    session = ke.make_tree_session("kvist", config(program))
    program.run(session, TEXT[:5], range(5))
    tokens, parents, depths = [60, 61, 62, 63], [-1, 0, 0, 1], [0, 1, 1, 2]
    session.propose(parents)
    logits, *_ = program.run(session, tokens, [5 + d for d in depths], range(4))
    for node, path in enumerate([[60], [60, 61], [60, 62], [60, 61, 63]]):
        close(logits[node], alone(TEXT[:5] + path)[-1])
    # One frontier more, as a draft grows its tree level by level.
    session.propose([3, 2])
    logits, *_ = program.run(session, [64, 65], [8, 7], range(2))
    close(logits[0], alone(TEXT[:5] + [60, 61, 63, 64])[-1])
    close(logits[1], alone(TEXT[:5] + [60, 62, 65])[-1])
    with pytest.raises(ke.CacheError, match="does not continue a chain"):
        session.commit([0, 3])
    session.commit([0, 2, 5])
    assert session.seq_len() == 8
    logits, *_ = program.run(session, [66], [8])
    close(logits[-1], alone(TEXT[:5] + [60, 62, 65, 66])[-1])


STORAGES = {
    "f16": (torch.float16, {}, 0.002),
    "bf16": (torch.bfloat16, {}, 0.02),
    "q8": (torch.uint8, {"bits": 8}, 0.03),
    "q4": (torch.uint8, {"bits": 4, "group_size": 32}, 0.4),
}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", ["decode", "ring", "seq", "tree"])
def test_storage_is_chosen_at_run_time(program, alone, kind, storage):
    """The same file with every cache and every storage."""
    dtype, more, tolerance = STORAGES[storage]
    config = ke.make_config(program.cache_params, 64, dtype, max_step_tokens=16, **more)
    if kind in ("decode", "ring"):
        config.windows = [8] if kind == "ring" else []
        text = TEXT * 3
        found = decode(program, ke.make_decode_session("kvist", config), text, [6] + [1] * 30)
        expected = alone(text, window=8 if kind == "ring" else None)
    elif kind == "seq":
        session = ke.make_seq_session("kvist", config)
        session.begin_step([0] * 6)
        program.run(session, TEXT[:6], range(6))
        session.seq_cp(0, 1)
        session.begin_step([0, 1, 2, 2])  # two branches, and another text
        found = [program.run(session, [70, 71, 1, 2], [6, 6, 0, 1], range(4))[0]]
        session.seq_rm(1, 4)
        session.begin_step([1, 0])
        found.append(program.run(session, [72, 73], [4, 7], range(2))[0])
        found = torch.cat(found)
        texts = [TEXT[:6] + [70], TEXT[:6] + [71], [1], [1, 2], TEXT[:4] + [72], TEXT[:6] + [70, 73]]
        expected = torch.stack([alone(text)[-1] for text in texts])
    else:
        session = ke.make_tree_session("kvist", config)
        program.run(session, TEXT[:5], range(5))
        session.propose([-1, 0, 0, 1])
        nodes, *_ = program.run(session, [60, 61, 62, 63], [5, 6, 6, 7], range(4))
        session.commit([0, 2])
        after, *_ = program.run(session, [64], [7])
        found = torch.cat([nodes, after])
        expected = torch.stack([alone(TEXT[:5] + path)[-1] for path in ([60], [60, 61], [60, 62], [60, 61, 63], [60, 62, 64])])
    error = (found - expected).square().mean().sqrt() / expected.std()
    assert 0 < error < tolerance, error


def test_refusals_change_nothing(program, alone):
    with pytest.raises(ke.CacheError, match="no cache mlx:seq; there are kvist-reference:contiguous"):
        ke.make_seq_session("mlx", config(program))
    with pytest.raises(ke.CacheError, match="capacity"):
        ke.make_seq_session("kvist", config(program, capacity=0))
    with pytest.raises(ke.CacheError, match="min_chunk is -1"):
        ke.make_seq_session("kvist", config(program, min_chunk=-1))
    with pytest.raises(ke.CacheError, match="3 bits"):
        ke.make_seq_session("kvist", ke.make_config(program.cache_params, 64, torch.uint8, bits=3))
    session = ke.make_decode_session("kvist", config(program, capacity=8))
    with pytest.raises(ke.CacheError, match="has no begin_step"):
        session.begin_step([0])
    decode(program, session, TEXT, [4])
    with pytest.raises(ke.CacheError, match="continues at position 4, not 3"):
        program.run(session, [1], [3])  # a rewrite
    with pytest.raises(ke.CacheError, match="continues at position 4, not 5"):
        program.run(session, [1], [5])  # a gap
    with pytest.raises(ke.CacheError, match="position"):
        program.run(session, [1, 2], [4, 4])
    with pytest.raises(ke.CacheError, match="4 are free"):
        program.run(session, TEXT[:5], range(4, 9))
    assert session.seq_len() == 4
    close(program.run(session, [TEXT[4]], [4])[0][-1], alone(TEXT[:5])[-1])

    session = ke.make_seq_session("kvist", config(program, capacity=8))
    with pytest.raises(ke.CacheError, match="no step is declared"):
        program.run(session, [1], [0])
    session.begin_step([0, 0])
    with pytest.raises(ke.CacheError, match="2 tokens were declared, the execution carries 1"):
        program.run(session, [1], [0])
    with pytest.raises(ke.CacheError, match="no step is declared"):  # it is spent
        program.run(session, [1, 2], [0, 1])
    with pytest.raises(ke.CacheError, match="9 tokens need as many cells"):
        session.begin_step([0] * 9)
    with pytest.raises(ke.CacheError, match="has no propose"):
        session.propose([-1])


def test_a_program_needs_an_active_cache(program):
    with pytest.raises(RuntimeError):
        program._forward.execute([torch.tensor([[1]]), torch.tensor([[0]]), torch.tensor([0])])


def test_sessions_share_one_program(program, alone):
    """Weights load once; a cache is chosen per execution."""
    a, b = (ke.make_decode_session("kvist", config(program)) for _ in range(2))
    assert a.cache_key != b.cache_key
    other = TEXT[::-1]
    for i in range(6):
        close(program.run(a, [TEXT[i]], [i])[0][-1], alone(TEXT[: i + 1])[-1])
        close(program.run(b, [other[i]], [i])[0][-1], alone(other[: i + 1])[-1])


def test_two_threads_get_an_error_and_no_race(program):
    """Sessions that nothing else uses are independent; one that is in use says so. Which calls collide depends on the machine, what
    they may return does not."""
    session = ke.make_seq_session("kvist", config(program))
    wrong = []

    def ask():
        for _ in range(2000):
            try:
                session.seq_len(0)
            except ke.CacheError as why:
                if "in use" not in str(why):
                    wrong.append(why)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


def test_ten_thousand_sessions_leave_nothing(program):
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4

    def some(n):
        for _ in range(n):
            session = ke.make_seq_session("kvist", config(program))
            session.begin_step([0])
            session.close()
        gc.collect()

    some(1000)
    before = resident()
    some(10000)
    assert resident() - before < 2048  # KiB
