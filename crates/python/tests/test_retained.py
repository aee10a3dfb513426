"""Prompts that a batch keeps, what it forgets, and another capacity: as `kvist.cache` and `/v1/cache` of the server."""

import re
import threading
import time

import kvist
import pytest

needs_disk = pytest.mark.skipif("disk" not in kvist.Tiers.built, reason="built without tiers on a disk")


def small(model, context=512, **options):
    return kvist.Batch(model, context=context, kv="f32", batch_tokens=128, **options)


def prompt(number, length=128):
    """Tokens that no other number has."""
    return [300 + (number * 997 + i * 31) % 3000 for i in range(length)]


def ask(batch, tokens, max_tokens=1, **options):
    """The number of tokens that were cached."""
    generation = batch.submit(tokens, max_tokens=max_tokens, temperature=0, ignore_eos=True, **options)
    generation.result()
    return generation.cached_tokens


def fill(batch):
    """More prompts than the cache has room for."""
    for number in range(10, 20):
        ask(batch, prompt(number))


def retained(batch):
    """The figure is that of the last step that ended, which may be the one before a text's last: two more texts are later steps."""
    for _ in range(2):
        ask(batch, [1, 2])
    return batch.stats()["retained_tokens"]


def test_a_kept_prompt_outlives_others(model):
    with small(model) as batch:
        assert retained(batch) == 0
        ask(batch, prompt(0), cache={"ttl_s": 3600})
        ask(batch, prompt(1))
        fill(batch)
        assert retained(batch) == 128
        assert (ask(batch, prompt(1)), ask(batch, prompt(0))) == (0, 112)


def test_the_more_urgent_to_keep_displaces_the_less(model):
    with small(model) as batch:
        ask(batch, prompt(0), cache={"priority": 2})
        ask(batch, prompt(1), cache={"priority": 1, "ttl_s": None})
        # Half of the cache is kept now.
        ask(batch, prompt(2), cache={})
        ask(batch, prompt(3), cache={"pin": True, "priority": 0, "ttl_s": 3600.5})
        fill(batch)
        assert retained(batch) == 256
        assert [ask(batch, prompt(number)) for number in (1, 2, 3, 0)] == [0, 0, 112, 112]


def test_time_ends_what_is_kept(model):
    """A nanosecond later it is kept like any other prompt."""
    with small(model) as batch:
        ask(batch, prompt(0), cache={"ttl_s": 1e-9, "priority": 255})
        ask(batch, prompt(1), cache={"priority": 0})
        ask(batch, prompt(2), cache={"priority": 0})
        fill(batch)
        assert (ask(batch, prompt(0)), ask(batch, prompt(1)), ask(batch, prompt(2))) == (0, 112, 112)


def test_salts_share_nothing_and_are_forgotten(model):
    with small(model, 4096) as batch:
        assert [ask(batch, prompt(0), salt=salt) for salt in ("", "a", "a", "b")] == [0, 0, 112, 0]
        ask(batch, prompt(0), salt="a", cache={"pin": True})
        assert batch.forget("a") == {"deleted_blocks": 8, "pending_tiers": []}
        assert retained(batch) == 0
        assert [ask(batch, prompt(0), salt=salt) for salt in ("a", "", "b")] == [0, 112, 112]
        # The prompt's blocks, and none of `retained`'s two tokens, which fill no block.
        assert [batch.forget()["deleted_blocks"] for _ in range(2)] == [8, 0]
        assert batch.forget("never")["deleted_blocks"] == 0
        assert ask(batch, prompt(0)) == 0


@needs_disk
def test_tiers_forget_too(model, tmp_path):
    tiers = kvist.Tiers(disk=tmp_path / "blocks", disk_size="128MiB", load="always", grace=600.0)

    def loaded(batch, salt):
        generation = batch.submit(prompt(0), max_tokens=1, salt=salt)
        generation.result()
        return generation.loaded_tokens["disk"]

    with small(model, tiers=tiers) as batch:
        for salt in ("a", "b"):
            ask(batch, prompt(0), salt=salt)
        until = time.monotonic() + 600
        while batch.stats()["tiers"]["store_bytes"] > 0:
            assert time.monotonic() < until, "copies do not end"
            time.sleep(0.01)
            ask(batch, [1, 2])
    with small(model, tiers=tiers) as batch:
        assert loaded(batch, "a") == 112
        for salt in ("a", "b"):
            # A call waits two seconds at most, and the machine may be slow.
            while batch.forget(salt)["pending_tiers"]:
                pass
        assert loaded(batch, "a") == 0
    with small(model, tiers=tiers) as batch:
        assert loaded(batch, "b") == 0


def test_texts_stay_the_same_while_the_cache_grows_and_shrinks(model):
    prompts = [prompt(number, 200) for number in range(6)]
    with small(model, 4096) as plain:
        expected = plain.generate(prompts, max_tokens=60, temperature=0, ignore_eos=True)
    texts = {}
    with small(model) as batch:

        def work(i):
            generation = batch.submit(prompts[i], max_tokens=60, temperature=0, ignore_eos=True)
            texts[i] = generation.result()

        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        [thread.start() for thread in threads]
        # Six texts need 1,560 tokens together.
        for tokens in (512, 304, 2048, 270, 640):
            assert batch.resize(tokens) == -(-tokens // 16) * 16
        [thread.join() for thread in threads]
        assert [texts[i] for i in range(6)] == expected
        retained(batch)  # later steps
        assert batch.stats()["capacity_cells"] == 640


def test_a_larger_cache_takes_longer_texts_and_more_of_them(model):
    with small(model, 128) as batch:
        with pytest.raises(kvist.ArgumentError, match="which has only 128"):
            ask(batch, prompt(0, 400))
        assert batch.resize(1000) == 1008
        assert ask(batch, prompt(0, 400), max_tokens=20) == 0
        with small(model, 4096) as plain:
            for tokens in (prompt(0, 400), prompt(1, 700)):
                options = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
                assert batch.submit(tokens, **options).result() == plain.submit(tokens, **options).result()


def test_a_capacity_that_cannot_be(model):
    batch = small(kvist.Model(memory="256MiB"))

    def refused():
        while True:
            running = batch.submit(prompt(0), max_tokens=300, ignore_eos=True)
            next(running)
            try:
                batch.resize(256)
            except kvist.Refused as why:
                running.close()
                return str(why)
            batch.resize(512)  # it had ended before, on a busy machine: again

    with batch:
        assert re.match(r"the cache keeps its 512 tokens: request \d+ needs 432 tokens of the cache, and 256", refused())
        with pytest.raises(kvist.OutOfMemory, match="keeps its 512 tokens"):
            batch.resize(1 << 30)
        for tokens in (0, -1, 1 << 31, 1 << 40):
            with pytest.raises(kvist.ArgumentError, match=f"`tokens`: {tokens} is not a number from 1 to 2147483647"):
                batch.resize(tokens)
        for timeout in (-1.0, float("nan"), 1e9):
            with pytest.raises(kvist.ArgumentError, match="`timeout`: .* is not a time"):
                batch.resize(512, timeout=timeout)
    for closed in (lambda: batch.resize(512), batch.forget, lambda: batch.submit("A", cache={})):
        with pytest.raises(kvist.Error, match="closed"):
            closed()


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        ({"ttl": 3}, "there is no 'ttl'; its keys are pin, ttl_s, priority"),
        ({3: 3}, "there is no 3"),
        ({"ttl_s": 0}, "`ttl_s` is 0: give seconds"),
        ({"ttl_s": float("nan")}, "`ttl_s` is NaN"),
        ({"ttl_s": 2_592_001}, "`ttl_s` is 2592001: .* at most 2592000"),
        ({"ttl_s": "1h"}, "`cache`: `ttl_s`: .*str"),
        ({"priority": 256}, "`priority` is 256: give a number from 0 to 255"),
        ({"priority": -1}, "`priority` is -1"),
        ({"priority": 1.5}, "`cache`: `priority`: .*float"),
        ({"pin": "yes"}, "`cache`: `pin`: .*str"),
    ],
)
def test_wrong_values(model, cache, words):
    with small(model) as batch:
        with pytest.raises(kvist.ArgumentError, match=words):
            batch.submit("A", cache=cache)


def test_wrong_types(model):
    with small(model) as batch:
        with pytest.raises(TypeError, match="cache"):
            batch.submit("A", cache=True)
        with pytest.raises(TypeError, match="salt"):
            batch.submit("A", salt=None)
        with pytest.raises(TypeError):
            batch.resize("8k")
    with small(model, prefix_cache=False) as batch:
        with pytest.raises(kvist.ArgumentError, match="leave `prefix_cache` on"):
            batch.submit("A", cache={"pin": True})
        assert batch.forget() == {"deleted_blocks": 0, "pending_tiers": []}
