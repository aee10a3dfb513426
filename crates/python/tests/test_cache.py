import kvist
import numpy as np
import pytest
from kvist import cache


def run(keys, step, tokens, group=None):
    """What a kernel does: copies, then a write for each token."""
    step = step if group is None else step.group(group)
    for source, target, length in step.copies:
        keys[target : target + length] = keys[source : source + length]
    keys[step.slots] = tokens


def seen(keys, step, query):
    """The tokens that a query sees, in the order of their cells."""
    mask = step.mask()
    return list(keys[: mask.shape[1]][mask[query]])


def test_a_step_says_what_to_write_and_read():
    blocks = cache.Paged(capacity=256, block_tokens=4)
    prompt = np.arange(10, 20, dtype=np.uint32)
    assert blocks.open(1, prompt) == 0
    with blocks.begin([(1, 10)]) as step:
        assert step.n_tokens == 10 and step.cells_end >= 10
        assert step.slots.dtype == np.uint32 and len(set(step.slots)) == 10
        assert list(step.positions) == list(range(10))
        assert list(step.query_start) == [0, 10] and list(step.kv_len) == [10]
        assert step.copies.shape == (0, 3)
        tables = step.block_tables()
        assert tables.dtype == np.int32 and tables.shape == (1, 3)
        cells = [tables[0][c // 4] * 4 + c % 4 for c in range(10)]
        assert cells == list(step.slots)
        assert step.block_tables(2).shape == (1, 5)
        mask = step.mask()
        assert mask.shape == (10, step.cells_end)
        assert [int(row.sum()) for row in mask] == list(range(1, 11)), "causal"
        step.commit()
    assert blocks.length(1) == 10
    assert list(blocks.block_table(1)) == list(tables[0])


def test_a_dropped_step_leaves_the_cache_as_it_was():
    blocks = cache.Paged(capacity=64, block_tokens=4)
    blocks.open(1, [1, 2, 3, 4, 5])
    with blocks.begin([(1, 5)]) as step:
        step.commit()
    blocks.fork(1, 2)
    before = blocks.report(), blocks.free_cells, blocks.block_table(1).tolist()
    with blocks.begin([(1, 3), (2, 2)]) as step:
        assert len(step.copies) > 0, "a copy on write"
    assert (blocks.report(), blocks.free_cells, blocks.block_table(1).tolist()) == before
    with pytest.raises(RuntimeError, match="kernel"):
        with blocks.begin([(1, 3)]):
            raise RuntimeError("the kernel failed")
    step = blocks.begin([(2, 1)])
    del step
    assert (blocks.report(), blocks.free_cells, blocks.block_table(1).tolist()) == before
    ended = blocks.begin([(2, 1)])
    ended.drop()
    for get in (lambda: ended.slots, lambda: ended.mask(), lambda: ended.commit()):
        with pytest.raises(kvist.Busy, match="has ended"):
            get()


def test_while_a_step_is_in_flight_nothing_else_is_done():
    cells = cache.Cache("cells", 32)
    cells.new_sequence(1)
    step = cells.begin([(1, 2)])
    for other in (
        lambda: cells.new_sequence(2),
        lambda: cells.begin([(1, 1)]),
        lambda: cells.fork(1, 2),
        lambda: cells.remove(1),
        lambda: cells.report(),
    ):
        with pytest.raises(kvist.Busy, match="in flight"):
            other()
    step.commit()
    cells.new_sequence(2)


def test_prefix_hits():
    blocks = cache.Paged(capacity=64, block_tokens=4)
    prompt = list(range(12))
    blocks.watch()
    blocks.open(1, prompt)
    with blocks.begin([(1, 12)]) as step:
        step.commit()
    assert blocks.store(1, prompt) == 3
    assert blocks.lookup(prompt + [99]) == 12
    assert blocks.lookup(prompt) == 8, "the last token is always computed"
    assert blocks.lookup(prompt, salt="another tenant") == 0
    assert blocks.explain([0, 1, 2, 3, 9, 9, 9, 9, 9])[0] == "diverged"
    assert blocks.open(2, prompt + [7]) == 12
    assert list(blocks.block_table(2)) == list(blocks.block_table(1))
    events = blocks.events()
    assert [e["change"] for e in events].count("store") == 3
    assert [e["change"] for e in events].count("hit") == 3
    assert blocks.events() == []
    stored = blocks.prefix_events()
    assert [e["event"] for e in stored] == ["stored"] * 3 and stored[0]["tokens"] == [0, 1, 2, 3]
    blocks.remove(1), blocks.remove(2)
    free = blocks.free_cells
    assert blocks.evict(64) == 3 and blocks.free_cells == free + 12
    assert blocks.explain(prompt + [99])[0] == "evicted"


def test_refusals_change_nothing():
    blocks = cache.Paged(capacity=16, block_tokens=4)
    blocks.open(1, [1])
    with pytest.raises(kvist.NoSpace, match="16 are free"):
        blocks.begin([(1, 17)])
    with pytest.raises(kvist.Refused, match="no sequence 5"):
        blocks.begin([(5, 1)])
    with pytest.raises(kvist.Refused, match="two spans"):
        blocks.begin([(1, 1), (1, 1)])
    with pytest.raises(kvist.Refused, match="empty"):
        blocks.begin([])
    with pytest.raises(kvist.Refused, match="exists already"):
        blocks.open(1, [1])
    with pytest.raises(kvist.Refused, match="shorten"):
        blocks.rollback(1, 3)
    assert blocks.length(1) == 0 and blocks.free_cells == 16
    for bad in (
        lambda: cache.Cache("heap", 8),
        lambda: cache.Cache("ring", 8),
        lambda: cache.Paged(capacity=0),
        lambda: cache.Paged(capacity=16, policy="best"),
        lambda: cache.Paged(capacity=16, half_life="5m"),
        lambda: cache.Paged(capacity=16, windows=[]),
        lambda: cache.Cache("cells", 8).lookup([1]),
        lambda: cache.Cache("contiguous", 8).new_sequence(1),
        lambda: blocks.block_table(1, group=3),
        lambda: blocks.block_table(77),
    ):
        with pytest.raises(ValueError):
            bad()


@pytest.mark.parametrize("kind", ["contiguous", "cells", "tree", "paged"])
def test_drafts_and_rollbacks(kind):
    made = cache.Cache(kind, 64)
    if kind != "contiguous":
        made.new_sequence(0)
    keys = np.full(64, -1, dtype=np.int64)
    with made.begin([(0, 5)]) as step:
        run(keys, step, np.arange(5))
        step.commit()
    with made.begin([(0, 3)]) as step:  # three drafts, of which one is accepted
        run(keys, step, np.arange(5, 8))
        step.commit(keep=[1])
    assert made.length(0) == 6
    made.rollback(0, 4)
    with made.begin([(0, 2)]) as step:
        run(keys, step, np.array([40, 41]))
        assert sorted(seen(keys, step, 1)) == [0, 1, 2, 3, 40, 41]
        step.commit()
    made.rollback(0, 0)
    assert made.length(0) == 0
    with pytest.raises(kvist.Refused, match="planned"):
        with made.begin([(0, 2)]) as step:
            step.commit(keep=[3])


@pytest.mark.parametrize("kind", ["tree", "paged"])
def test_draft_trees(kind):
    made = cache.Cache(kind, 64)
    made.new_sequence(1)
    keys = np.full(64, -1, dtype=np.int64)
    with made.begin([(1, 2)]) as step:
        run(keys, step, np.array([0, 1]))
        step.commit()
    with made.begin([(1, [None, 0, 0, 2])]) as step:  # node 0; below it 1 and 2; below 2, node 3
        run(keys, step, np.array([10, 11, 12, 13]))
        assert list(step.positions) == [2, 3, 3, 4]
        assert sorted(seen(keys, step, 3)) == [0, 1, 10, 12, 13]
        assert sorted(seen(keys, step, 1)) == [0, 1, 10, 11]
        moves = step.moves([[0, 2, 3]])
        for source, target, length in moves:
            keys[target : target + length] = keys[source : source + length].copy()
        step.commit(keep=[[0, 2, 3]])
    assert made.length(1) == 5 and (kind == "paged") == (len(moves) > 0)
    with made.begin([(1, 1)]) as step:
        run(keys, step, np.array([20]))
        assert sorted(seen(keys, step, 0)) == [0, 1, 10, 12, 13, 20]


def test_windows_have_groups_of_their_own():
    made = cache.Paged(capacity=64, block_tokens=4, windows=[None, 8], prefix=False)
    made.new_sequence(1)
    assert made.n_groups == 2 and made.capacity_cells == [64, 64]
    for _ in range(5):
        with made.begin([(1, 4)]) as step:
            full, window = step.group(0), step.group(1)
            assert [int(full.mask()[3].sum()), int(window.mask()[3].sum())] == [
                int(step.kv_len[0]),
                min(8, int(step.kv_len[0])),
            ]
            step.commit()
    assert -1 in made.block_table(1, group=1) and -1 not in made.block_table(1)
    with made.begin([(1, 1)]) as step:
        view = step.group(1)
        with pytest.raises(ValueError, match="does not exist"):
            step.group(2)
        del view
        assert step.n_tokens == 1, "a view that is gone ends no step"


def test_random_steps_against_a_model_of_texts():
    """Texts in plain lists; after every step, what each query sees is exactly its text."""
    random = np.random.default_rng(5)
    blocks = cache.Paged(capacity=512, block_tokens=8)
    keys = np.full(512, -1, dtype=np.int64)
    texts, n = {}, 0
    for _ in range(400):
        action = random.integers(6)
        if action == 0 or not texts:
            n += 1
            prompt = random.integers(0, 2, size=random.integers(1, 40)).astype(np.uint32)
            hit = blocks.open(n, prompt)
            texts[n] = list(prompt[:hit])
        elif action == 1:
            n += 1
            source = int(random.choice(list(texts)))
            if texts[source]:
                blocks.fork(source, n)
                texts[n] = list(texts[source])
        elif action == 2 and len(texts) > 3:
            gone = int(random.choice(list(texts)))
            blocks.remove(gone)
            del texts[gone]
        elif action == 3:
            cut = int(random.choice(list(texts)))
            length = int(random.integers(0, len(texts[cut]) + 1))
            blocks.rollback(cut, length)
            texts[cut] = texts[cut][:length]
        chosen = [int(seq) for seq in texts if random.random() < 0.5] or [next(iter(texts))]
        new = {seq: random.integers(0, 2, size=random.integers(1, 6)) for seq in chosen}
        try:
            step = blocks.begin([(seq, len(new[seq])) for seq in chosen])
        except kvist.NoSpace:
            if blocks.evict(64) == 0:
                for seq in list(texts)[:3]:
                    blocks.remove(seq)
                    del texts[seq]
            continue
        with step:
            run(keys, step, np.concatenate([new[seq] for seq in chosen]))
            query = 0
            tables, start = step.block_tables(), step.query_start
            for i, seq in enumerate(chosen):
                query = int(start[i + 1]) - 1
                whole = texts[seq] + list(new[seq])
                cells = [tables[i][p // 8] * 8 + p % 8 for p in range(len(whole))]
                assert list(keys[cells]) == whole
                assert sorted(np.flatnonzero(step.mask()[query])) == sorted(cells)
            if random.random() < 0.8:
                step.commit()
                for seq in chosen:
                    texts[seq] += list(new[seq])
                    blocks.store(seq, texts[seq])
    assert n > 50
