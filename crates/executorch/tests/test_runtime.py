"""One .pte under every cache: plain decode, batches, forks, admission, rollback, windows, draft trees, dtypes."""

import gc
import threading

import pytest
import torch
from executorch.extension.llm.cache.reference_cache import CacheConfig as ReferenceConfig
from executorch.extension.llm.cache.reference_cache import CellReferenceCache, ContiguousReferenceCache
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
    constants = {"kv_cache.schema_version": 2}
    with pytest.raises(ke.CacheError, match="schema_version is 2, this reader knows 1"):
        ke.read_kv_cache_metadata(constants.__getitem__)


@pytest.mark.parametrize("backend", ["kvist", "kvist-reference"])
def test_plain_decode_in_chunks(program, alone, backend):
    session = ke.make_decode_session(backend, config(program))
    close(decode(program, session, TEXT, [7, 1, 3, 1]), alone(TEXT))
    assert session.seq_len() == len(TEXT)


class OneCall(torch.nn.Module):
    def forward(self, q, k, v, position):
        return update_and_attend(q, k, v, position, 0, 0.25, torch.float32)


def test_the_kernel_as_the_reference_cache(tmp_path):
    """Only the op, so that nothing else rounds: 1e-5, for a sequence in chunks."""
    n = torch.export.Dim("n", min=1, max=32)
    inputs = (torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), torch.arange(3).unsqueeze(-1))
    ke.export_module(
        OneCall(), inputs, ({2: n}, {2: n}, {2: n}, {0: n}), tmp_path / "op.pte", n_layers=1, n_kv_heads=2, head_dim=16, xnnpack=False
    )
    op = ke.Program(tmp_path / "op.pte")
    session = ke.make_decode_session("kvist", config(op))
    reference = ContiguousReferenceCache(ReferenceConfig(n_layers=1, n_kv_heads=2, head_dim=16, capacity=64))
    REGISTRY.install("reference", reference)
    torch.manual_seed(0)
    start = 0
    try:
        for n in (9, 1, 1, 20, 5, 1):
            inputs = tuple(torch.randn(1, heads, n, 16) * 3 for heads in (4, 2, 2)) + (torch.arange(start, start + n).unsqueeze(-1),)
            with REGISTRY.active("reference"):
                expected = OneCall()(*inputs)
            (found,) = op.execute(session, inputs)
            close(found, expected, 1e-5)
            start += n
    finally:
        REGISTRY.uninstall("reference")


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


@pytest.mark.parametrize("dtype, more, tolerance", [
    (torch.float16, {}, 0.01), (torch.bfloat16, {}, 0.1), (torch.uint8, {"bits": 8}, 0.1), (torch.uint8, {"bits": 4, "group_size": 32}, 1.0),
])
def test_storage_is_chosen_at_run_time(program, alone, dtype, more, tolerance):
    session = ke.make_decode_session("kvist", ke.make_config(program.cache_params, 64, dtype, **more))
    found, expected = decode(program, session, TEXT, [6] + [1] * 6), alone(TEXT)
    assert 0 < (found - expected).abs().max() < tolerance * expected.std()


def test_refusals_change_nothing(program, alone):
    with pytest.raises(ke.CacheError, match="no cache mlx:seq; there are kvist-reference:contiguous"):
        ke.make_seq_session("mlx", config(program))
    with pytest.raises(ke.CacheError, match="capacity"):
        ke.make_seq_session("kvist", config(program, capacity=0))
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
    assert a.key != b.key
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
