import asyncio
import gc
import threading

import kvist
import numpy as np
import pytest

PROMPT = "The borrow checker"


def greedy(session, prompt=None, n=12, **options):
    return session.generate(prompt, max_tokens=n, temperature=0, **options)


@pytest.fixture(scope="module")
def expected(model):
    """What the model says, one pass for each token, and the tokens."""
    session = model.session(kind="contiguous", kv="f32")
    logits = session.forward(PROMPT)
    tokens = []
    while len(tokens) < 12:
        tokens.append(int(logits[0].argmax()))
        logits = session.forward([tokens[-1]])
    return tokens


def test_a_model_says_what_it_is(model):
    assert model.vocab_size > 1000 and model.context > 100 and model.n_layers > 1
    assert not model.has_chat_template
    tokens = model.encode("Hello, world")
    assert model.decode(tokens).strip() == "Hello, world"
    assert model.name in repr(model)


def test_fast_prefill():
    """It changes the logits a little where the CPU has AVX2, AVX-512 or AMX, and nothing elsewhere."""
    fast = kvist.Model(fast_prefill=True)
    assert "".join(greedy(fast.session(), PROMPT, n=4))
    with pytest.raises(ValueError, match="fast_prefill.*deterministic"):
        kvist.Model(fast_prefill=True, deterministic=True)


@pytest.mark.parametrize("kind", [kind for kind in kvist.cache.KINDS if kind != "ring"])
def test_every_kind_generates_the_same_text(model, expected, kind):
    session = model.session(kind=kind, kv="f32")
    generation = greedy(session, PROMPT)
    pieces = list(generation)
    assert generation.tokens == expected
    assert "".join(pieces) == generation.text == model.decode(expected)
    assert generation.finish_reason == "max_tokens"
    assert session.tokens == model.encode(PROMPT) + expected
    assert session.text.endswith(generation.text)
    assert session.kind == kind and len(session) == len(session.tokens)
    assert session.cached_tokens == len(session) - 1, "the last token is computed with the next"
    assert generation.prompt_tokens == len(model.encode(PROMPT))
    prefill, decode = generation.times
    assert prefill > 0 and decode > 0


def test_a_ring_forgets_and_goes_on(model):
    session = model.session(kind="ring", window=16, sinks=2, chunk=8, kv="f32")
    first = greedy(session, PROMPT, n=40)
    first.result()
    assert len(first.tokens) == 40 and session.report()[0]["used_cells"] < 40
    session.rollback(len(model.encode(PROMPT)))
    again = greedy(session, n=40)
    again.result()
    assert again.tokens == first.tokens, "a rollback computes the text again"


def test_a_generation_computes_only_what_is_asked_for(model, expected):
    session = model.session(kv="f32")
    generation = greedy(session, PROMPT)
    assert session.cached_tokens == 0, "nothing yet"
    next(generation)
    next(generation)
    n = len(generation.tokens)
    assert n < 12 and session.tokens == model.encode(PROMPT) + expected[:n]
    assert generation.finish_reason is None
    generation.close()
    assert list(generation) == [] and generation.finish_reason == "cancelled"
    rest = greedy(session, n=12 - n)
    rest.result()
    assert generation.tokens + rest.tokens == expected


def test_stop_strings_and_limits(model, expected):
    text = model.decode(expected)
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    generation = greedy(model.session(kv="f32"), PROMPT, stop=[stop, "never there"])
    assert generation.result() == text[: text.index(stop)]
    assert generation.finish_reason == "stop"
    assert greedy(model.session(kv="f32"), PROMPT, stop=stop).result() == text[: text.index(stop)]
    generation = greedy(model.session(), PROMPT, n=0)
    assert list(generation) == [] and generation.finish_reason == "max_tokens"
    small = greedy(model.session(context=10), PROMPT, n=100)
    small.result()
    assert small.finish_reason == "cache_full"


def test_seeds_repeat_texts(model):
    def draw(seed):
        return model.generate(PROMPT, max_tokens=12, temperature=1.0, seed=seed).result()

    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(4)}) > 1


def test_branches_share_and_take_turns(model):
    session = model.session(kind="cells", kv="f32")
    greedy(session, "Rust has two kinds of strings.", n=8).result()
    shared = session.report()[0]["used_cells"]
    other = session.fork()
    assert other.tokens == session.tokens
    assert session.report()[0]["used_cells"] == shared, "a fork takes no cell"
    a, b = greedy(session, " The first is"), greedy(other, " The second is")
    taken = [piece for pair in zip(a, b) for piece in pair]
    assert taken
    a.result(), b.result()
    alone = model.session(kind="cells", kv="f32")
    greedy(alone, "Rust has two kinds of strings.", n=8).result()
    assert greedy(alone, " The first is").result() == a.text
    del other, b
    gc.collect()
    sequences = session.report()[0]["sequences"]
    assert len(sequences) == 1, "a branch that is dropped gives its cells back"


@pytest.mark.parametrize("kv", ["f32", "q8", "q4", "t4-o"])
def test_a_rollback_leaves_nothing_behind(model, kv):
    session = model.session(kv=kv, context=256)
    first = greedy(session, PROMPT, n=20)
    first.result()
    n = len(model.encode(PROMPT))
    session.rollback(n)
    assert session.tokens == model.encode(PROMPT)
    again = greedy(session, n=20)
    again.result()
    assert again.tokens == first.tokens
    session.rollback(-5)
    assert session.tokens == (model.encode(PROMPT) + first.tokens)[:-5]
    session.rollback(0)
    assert session.tokens == [] and session.cached_tokens == 0
    for bad in (1, -1, 2**40):
        with pytest.raises(ValueError, match="cannot be rolled back"):
            session.rollback(bad)


def test_logits_are_the_models_memory(model):
    session = model.session(kv="f32", max_rows=8)
    tokens = model.encode(PROMPT)
    last = session.forward(tokens)
    assert last.shape == (1, model.vocab_size) and last.dtype == np.float32
    assert last.base is not None and last.flags.c_contiguous
    copy = last.copy()
    session.rollback(0)
    every = session.forward(tokens, rows="all")
    assert every.shape == (len(tokens), model.vocab_size)
    np.testing.assert_array_equal(every[-1], last[0])
    for _ in range(3):
        session.forward([5])
    np.testing.assert_array_equal(last, copy), "later passes do not write there"
    last[:] = 0  # it is the caller's
    with pytest.raises(ValueError, match="max_rows"):
        session.forward(list(range(9)), rows="all")
    assert session.tokens == tokens + [5] * 3, "a refused pass changes nothing"
    with pytest.raises(ValueError, match="neither"):
        session.forward([1], rows="some")
    with pytest.raises(ValueError, match="no tokens"):
        session.forward([])


def test_a_generation_after_the_text_has_changed_is_refused(model):
    session = model.session()
    generation = greedy(session, PROMPT)
    next(generation)
    session.rollback(2)
    with pytest.raises(kvist.Error, match="has changed"):
        next(generation)


def test_async(model, expected):
    async def one(prompt):
        pieces = []
        async for piece in greedy(model.session(kv="f32"), prompt):
            pieces.append(piece)
        return "".join(pieces)

    async def both():
        return await asyncio.gather(one(PROMPT), one(PROMPT))

    assert asyncio.run(both()) == [model.decode(expected)] * 2

    async def cancelled():
        session = model.session()
        generation = session.generate(PROMPT, max_tokens=2000, ignore_eos=True)

        async def read():
            async for _ in generation:
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0)
        while not generation_has_begun(session):
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return generation

    def generation_has_begun(session):
        try:
            return len(session) > 8
        except kvist.Busy:
            return False

    generation = asyncio.run(cancelled())
    assert list(generation) == []


def test_two_threads_on_one_session_get_an_error_and_no_race(model, expected):
    session = model.session(kv="f32", context=2048)
    outcomes, start = [], threading.Barrier(8)

    def work():
        start.wait()
        for _ in range(40):
            try:
                session.forward([7])
                outcomes.append("done")
            except kvist.Busy as busy:
                assert "another thread" in str(busy)
                outcomes.append("busy")

    threads = [threading.Thread(target=work) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(outcomes) == 320 and session.tokens == [7] * outcomes.count("done")
    assert session.cached_tokens == outcomes.count("done")
    session.rollback(0)
    generation = greedy(session, PROMPT)
    generation.result()
    assert generation.tokens == expected, "the session is as good as new"


def test_threads_on_sessions_of_their_own(model, expected):
    texts = []
    root = model.session(kv="f32")

    def work(session):
        texts.append(greedy(session, PROMPT).result())

    sessions = [root, root.fork(), root.fork(), model.session(kv="f32")]
    threads = [threading.Thread(target=work, args=(session,)) for session in sessions]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert texts == [model.decode(expected)] * 4


def test_errors_are_a_family(model):
    with pytest.raises(kvist.ModelError, match="no-such-model"):
        kvist.Model("/no-such-model")
    with pytest.raises(kvist.OutOfMemory):
        kvist.Model(memory="1MB")
    with pytest.raises(MemoryError):
        kvist.Model(memory="30MB").session(context=4096 * 64, kv="f32")
    with pytest.raises(kvist.ArgumentError, match="give `context` 16 or more"):  # not the program's flag
        model.session(context=8).generate(list(range(1, 17)), max_tokens=1)
    with pytest.raises(ValueError, match="temperature"):
        model.generate(PROMPT, temperature=-1)
    with pytest.raises(ValueError, match="there is no cache"):
        model.session(kind="heap")
    with pytest.raises(ValueError, match="`kv`"):
        model.session(kv="f17")
    with pytest.raises(ValueError, match="window"):
        model.session(kind="ring")
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_token'"):
        model.generate(PROMPT, max_token=3)
    with pytest.raises(TypeError, match="`max_tokens`"):
        model.generate(PROMPT, max_tokens="many")
    with pytest.raises(ValueError, match="empty"):
        model.generate(PROMPT, stop="")
    with pytest.raises(ValueError, match="vocabulary"):
        model.generate([10**6])
    with pytest.raises(ValueError, match="vocabulary"):
        model.decode([10**6])
    with pytest.raises(ValueError, match="no tokens"):
        model.session().generate()
    with pytest.raises(ValueError, match="cache holds"):
        model.session(context=4).generate([1] * 5)
    with pytest.raises(ValueError, match="chat template"):
        model.chat([{"role": "user", "content": "Hello"}])
    with pytest.raises(ValueError, match="one sequence"):
        model.session(kind="contiguous").fork()
    for error in (kvist.ArgumentError, kvist.OutOfMemory, kvist.NoSpace, kvist.Busy, kvist.ModelError):
        assert issubclass(error, kvist.Error)
    assert issubclass(kvist.NoSpace, kvist.Refused)


def test_a_full_cache_is_no_damage(model):
    session = model.session(context=64)
    fork = session.fork()
    session.forward([3] * 40)
    with pytest.raises(kvist.NoSpace):
        fork.forward([4] * 40)
    assert fork.tokens == [] and len(session) == 40
    fork.forward([4] * 10)
    assert len(fork) == 10
