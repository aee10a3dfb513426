"""Tiers below the cache of a batch: the same texts, other times; and clear errors."""

import pathlib
import threading
import time

import kvist
import pytest

TEXT = (
    "Returns the number of elements in the vector, also referred to as its length. The capacity of a vector is the amount of "
    "space allocated for any future elements that will be added onto the vector."
)
PROMPTS = [f"{i}. {TEXT[7 * i :]} {TEXT} {TEXT}" for i in range(4)]
SIZE = "128MiB"
# Whatever a tier has is loaded, however slow this machine is.
WAIT = {"load": "always", "grace": 600.0}

needs_disk = pytest.mark.skipif("disk" not in kvist.Tiers.built, reason="built without tiers on a disk")
needs_store = pytest.mark.skipif("store" not in kvist.Tiers.built, reason="built without stores")


def batch(model, tiers=None, context=256, **options):
    """So small that every prompt displaces the one before it."""
    return kvist.Batch(model, context=context, kv="f32", batch_tokens=64, tiers=tiers, **options)


def ask(batch, prompt):
    generation = batch.submit(prompt, max_tokens=12, temperature=0, ignore_eos=True)
    return generation.result(), generation


@pytest.fixture(scope="module")
def expected(model):
    with batch(model, context=4096) as plain:
        return [ask(plain, prompt)[0] for prompt in PROMPTS]


def settle(batch):
    """Waits until all copies are written."""
    until = time.monotonic() + 600
    while batch.stats()["tiers"]["store_bytes"] > 0:
        assert time.monotonic() < until, "copies do not end"
        batch.submit("A", max_tokens=1).result()
        time.sleep(0.01)


def run(model, tiers, expected, name):
    """Asks everything twice. Returns tokens of the second round that came from the tier."""
    with batch(model, tiers) as tiered:
        loaded = 0
        for _ in range(2):
            loaded = 0
            for prompt, text in zip(PROMPTS, expected):
                found, generation = ask(tiered, prompt)
                assert found == text
                assert list(generation.loaded_tokens) == [name]
                assert generation.loaded_tokens[name] <= generation.cached_tokens <= generation.prompt_tokens
                loaded += generation.loaded_tokens[name]
            settle(tiered)
        stats = tiered.stats()["tiers"]
        assert [store["name"] for store in stats["stores"]] == [name]
        assert stats["stores"][0]["loaded_tokens"] >= loaded and stats["loads"] > 0
        assert stats["stored_blocks"] > 0 and stats["failed_loads"] == 0 and stats["stores"][0]["errors"] == 0
    return loaded


@pytest.mark.parametrize("write", ["through", "back"])
def test_texts_are_the_same_with_memory_below(model, expected, write):
    tiers = kvist.Tiers(ram="64MiB", **WAIT, write=write)
    assert run(model, tiers, expected, "ram") >= 64
    # The second one has memory of its own.
    with batch(model, tiers) as another:
        assert ask(another, PROMPTS[0])[1].loaded_tokens == {"ram": 0}
        stats = another.stats()["tiers"]["stores"][0]
        assert stats["capacity_bytes"] == 64 << 20 and stats["bytes"] is not None


def test_a_batch_without_tiers_says_nothing_of_them(model):
    with batch(model) as plain:
        _, generation = ask(plain, PROMPTS[0])
        assert generation.loaded_tokens == {} and "tiers" not in plain.stats()


@needs_disk
def test_a_second_batch_finds_what_the_first_one_left_on_disk(model, expected, tmp_path):
    tiers = kvist.Tiers(disk=tmp_path / "blocks", disk_size=SIZE, **WAIT)
    assert run(model, tiers, expected, "disk") >= 64
    for round in range(3):  # the directory is free as soon as a batch is closed
        with batch(model, tiers) as second:
            text, generation = ask(second, PROMPTS[round])
            assert text == expected[round]
            assert generation.loaded_tokens["disk"] >= 32 and generation.cached_tokens >= 32
    # Other K and V are not found.
    with kvist.Batch(model, context=256, kv="f16", tiers=tiers) as other:
        assert ask(other, PROMPTS[0])[1].loaded_tokens == {"disk": 0}
    with kvist.Batch(kvist.Model(), context=256, kv="f32", tiers=tiers) as other:
        assert ask(other, PROMPTS[0])[1].loaded_tokens == {"disk": 0}, "another arithmetic"


@needs_disk
def test_a_batch_that_is_closed_in_mid_generation_frees_its_directory(model, tmp_path):
    tiers = kvist.Tiers(disk=tmp_path / "blocks", disk_size=SIZE)
    for _ in range(3):
        open_batch = batch(model, tiers)
        left = open_batch.submit(PROMPTS[0], max_tokens=100, ignore_eos=True)
        next(left)
        open_batch.close()
        # It may have ended before, on a busy machine.
        assert list(left) == [] or left.finish_reason in ("cancelled", "max_tokens", "cache_full")


@needs_disk
def test_a_directory_serves_one_batch_at_a_time(model, tmp_path):
    tiers = kvist.Tiers(disk=tmp_path / "blocks", disk_size=SIZE)
    with batch(model, tiers) as first:
        with pytest.raises(kvist.FileError, match="another process uses .*blocks"):
            batch(model, tiers)
        assert ask(first, PROMPTS[0])[0]
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"meow")
    with pytest.raises(kvist.FileError, match="photos contains files that are not a store's"):
        batch(model, kvist.Tiers(disk=tmp_path / "photos", disk_size=SIZE))
    assert [it.name for it in (tmp_path / "photos").iterdir()] == ["cat.jpg"]
    with pytest.raises(kvist.FileError, match="1048576 bytes is too small"):
        batch(model, kvist.Tiers(disk=tmp_path / "small", disk_size="1MiB"))
    with pytest.raises(kvist.OutOfMemory, match="`ram` or `disk_size`"):
        batch(model, kvist.Tiers(disk=tmp_path / "large", disk_size=1 << 52))


@needs_store
def test_batches_share_a_folder(model, expected, tmp_path):
    tiers = kvist.Tiers(store=f"fs://{tmp_path}/shared", **WAIT)
    assert run(model, tiers, expected, "fs") >= 64
    with batch(model, tiers) as first, batch(model, tiers) as second:
        for one in (first, second):
            text, generation = ask(one, PROMPTS[3])
            assert text == expected[3] and generation.loaded_tokens["fs"] >= 32
    # A store that does not answer costs hits, and no text.
    with batch(model, kvist.Tiers(store="redis://127.0.0.1:1/kvist", **WAIT)) as alone:
        text, generation = ask(alone, PROMPTS[0])
        assert text == expected[0] and generation.loaded_tokens == {"redis": 0}


@needs_store
@pytest.mark.parametrize("url", ["ftp://host", "not a url", "rediss://host/x"])
def test_a_wrong_url(model, url):
    with pytest.raises(kvist.ArgumentError, match="`store`"):
        batch(model, kvist.Tiers(store=url))


def test_two_threads_and_tiers(model, expected):
    texts = {}
    with batch(model, kvist.Tiers(ram="64MiB", **WAIT), context=512) as tiered:

        def work(i):
            for round in range(4):
                texts[i, round] = ask(tiered, PROMPTS[(i + round) % 4])[0]

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert len(texts) == 16
    assert all(text == expected[(i + round) % 4] for (i, round), text in texts.items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "at least one of `ram`, `disk` and `store`"),
        ({"ram": 0}, "at least one"),
        ({"ram": "many"}, "`ram`: .*many"),
        ({"ram": "4GiB", "write": "never"}, "`write`.*never"),
        ({"ram": "4GiB", "load": "some"}, "`load`.*some"),
        ({"ram": "4GiB", "grace": 0.0}, "`grace`: 0 seconds"),
        ({"ram": "4GiB", "grace": -1.0}, "`grace`: -1 seconds"),
        ({"ram": "4GiB", "grace": float("nan")}, "`grace`: NaN seconds"),
        ({"ram": "4GiB", "disk_size": "1GiB"}, "give `disk` too"),
    ],
)
def test_wrong_options(options, words):
    with pytest.raises(kvist.ArgumentError, match=words):
        kvist.Tiers(**options)


@needs_disk
def test_a_disk_needs_a_size(tmp_path):
    with pytest.raises(kvist.ArgumentError, match="`disk_size`.*blocks"):
        kvist.Tiers(disk=tmp_path / "blocks")
    assert not (tmp_path / "blocks").exists()
    assert "blocks" in repr(kvist.Tiers(disk=tmp_path / "blocks", disk_size=SIZE))


def test_unknown_options(model):
    with pytest.raises(TypeError, match="ram_size"):
        kvist.Tiers(ram_size=5)
    with pytest.raises(TypeError):
        kvist.Tiers(-5)
    with pytest.raises((TypeError, OverflowError, ValueError)):
        kvist.Tiers(ram=-5)
    with pytest.raises(TypeError, match="Tiers"):
        kvist.Batch(model, tiers={"ram": "4GiB"})
    with pytest.raises(TypeError, match="tier_ram"):
        kvist.Batch(model, tier_ram="4GiB")


@pytest.mark.parametrize(("argument", "feature"), [("disk", "disk-tier"), ("store", "shared-tier")])
def test_what_was_not_built_says_so(argument, feature, tmp_path):
    if argument in kvist.Tiers.built:
        pytest.skip("it is built")
    options = {"disk": {"disk": tmp_path, "disk_size": SIZE}, "store": {"store": "redis://localhost/x"}}[argument]
    with pytest.raises(kvist.ArgumentError, match=f"`{argument}`.*{feature}"):
        kvist.Tiers(**options)


def test_a_batch_that_cannot_use_tiers(model):
    tiers = kvist.Tiers(ram="64MiB")
    with pytest.raises(kvist.ArgumentError, match="prefix_cache"):
        batch(model, tiers, prefix_cache=False)
    with pytest.raises(kvist.ArgumentError, match="sliding window"):
        batch(model, tiers, window=32)
    with pytest.raises(kvist.OutOfMemory, match="`ram`"):
        batch(kvist.Model(memory="512MiB"), kvist.Tiers(ram="1GiB"))


def test_the_stub_names_the_figures(model):
    """`_native.pyi` says what `stats` has."""
    stub = (pathlib.Path(kvist.__file__).parent / "_native.pyi").read_text()
    with batch(model, kvist.Tiers(ram="64MiB")) as tiered:
        stats = tiered.stats()
    for name in [*stats, *stats["tiers"], *stats["tiers"]["stores"][0]]:
        assert f"\n    {name}: " in stub, name
