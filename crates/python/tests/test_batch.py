import asyncio
import threading

import kvist
import pytest

PROMPTS = ["A trait is", "A macro is", "A slice is", "The compiler"]


@pytest.fixture(scope="module")
def batch(model):
    with kvist.Batch(model, context=4096, kv="f32", max_batch=4) as batch:
        yield batch


def alone(model, prompt, n=12):
    return model.generate(prompt, max_tokens=n, temperature=0, kv="f32").result()


def test_a_batch_writes_what_sessions_write(model, batch):
    texts = batch.generate(PROMPTS, max_tokens=12, temperature=0)
    assert texts == [alone(model, prompt) for prompt in PROMPTS]


def test_streams_and_prefixes(model, batch):
    long = "The borrow checker is a part of the compiler that checks every reference. " * 4
    first = batch.submit(long, max_tokens=8, temperature=0)
    pieces = list(first)
    assert "".join(pieces) == first.text == alone(model, long, 8)
    assert first.finish_reason == "max_tokens" and len(first.tokens) == 8
    second = batch.submit(long, max_tokens=8, temperature=0)
    assert second.result() == first.text
    assert second.cached_tokens > 16 and second.prompt_tokens == len(model.encode(long))
    assert batch.stats()["recent_hit_tokens"] >= second.cached_tokens


def test_many_async_streams(model, batch):
    async def one(prompt):
        return "".join([piece async for piece in batch.submit(prompt, max_tokens=12, temperature=0)])

    async def all_of_them():
        return await asyncio.gather(*(one(prompt) for prompt in PROMPTS * 4))

    assert asyncio.run(all_of_them()) == [alone(model, prompt) for prompt in PROMPTS] * 4


def test_closing_and_dropping_cancels(batch):
    # A machine that lets this thread wait may end a generation first.
    for _ in range(100):
        generation = batch.submit("The", max_tokens=3000, ignore_eos=True)
        next(generation)
        generation.close()
        assert list(generation) == []
        if generation.finish_reason == "cancelled":
            break
    assert generation.finish_reason == "cancelled"
    dropped = batch.submit("The", max_tokens=3000, ignore_eos=True)
    next(dropped)
    del dropped
    # One more request ends only in steps after the others were removed.
    assert batch.submit("A", max_tokens=2, ignore_eos=True).result()
    assert batch.stats()["running"] <= 1


def test_more_prompts_than_the_queue_has_places(model):
    # They raised Busy, and what had been sent was cancelled.
    with kvist.Batch(model, context=1024, kv="f32", max_batch=2, max_queue=2) as batch:
        texts = batch.generate(PROMPTS * 3, max_tokens=12, temperature=0)
        assert texts == [alone(model, prompt) for prompt in PROMPTS] * 3
        assert batch.generate([]) == []


def test_long_texts_are_read_side_by_side(model):
    # While the first was read, the others collected unread tokens, and at 4096 of them all texts were lost.
    with kvist.Batch(model, context=1 << 14, kv="q8", max_batch=2) as batch:
        texts = batch.generate(PROMPTS[:2], max_tokens=4500, temperature=0, ignore_eos=True)
        assert all(len(model.encode(text)) > 2000 for text in texts)


def test_many_threads_submit(model, batch):
    texts = {}

    def work(i):
        texts[i] = batch.submit(PROMPTS[i % 4], max_tokens=12, temperature=0).result()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert [texts[i] for i in range(12)] == [alone(model, prompt) for prompt in PROMPTS] * 3


def test_errors(model):
    with kvist.Batch(model, context=64, max_batch=2) as batch:
        with pytest.raises(ValueError, match="only"):
            batch.submit([1] * 100, max_tokens=4).result()
        with pytest.raises(ValueError, match="no tokens"):
            batch.submit([])
        with pytest.raises(ValueError, match="vocabulary"):
            batch.submit([10**7]).result()
    with pytest.raises(kvist.Error, match="closed"):
        batch.submit("A")
    batch.close()
    with pytest.raises(ValueError, match="policy|polic"):
        kvist.Batch(model, policy="best")
    with pytest.raises(ValueError):
        kvist.Batch(model, max_batch=0)
    with pytest.raises(ValueError, match="max_queue"):
        kvist.Batch(model, max_queue=0)
