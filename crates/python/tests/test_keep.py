"""Sessions and batches that keep only some tokens of a text: flat memory, the program's text, clear refusals."""

import json
import subprocess
import sys

import kvist
import pytest

BUDGET = "sinks=4,recent=20,top=16"
CELLS = 4 + 20 + 16 + 16
TEXT = "".join(f"{i}. The capacity of a vector is the space for its elements. " for i in range(40))


def kept(model, by="last", **options):
    return model.session(kv="f32", keep=f"{BUDGET},by={by}", chunk=16, **options)


def greedy(session, prompt=None, n=40):
    generation = session.generate(prompt, max_tokens=n, temperature=0, repeat_penalty=1.0, ignore_eos=True)
    generation.result()
    return generation


@pytest.mark.parametrize(("by", "kind"), [("last", "cells"), ("attention", "tree"), ("none", "cells")])
def test_a_text_of_ten_times_the_budget_is_that_of_the_program(tmp_path, by, kind):
    (tmp_path / "long.txt").write_text(TEXT)
    model = kvist.Model()
    session = kept(model, by, kind=kind)
    generation = greedy(session, TEXT)
    assert generation.prompt_tokens > 10 * 40 and generation.finish_reason == "max_tokens"
    arguments = ["run", "-q", "--raw", "--greedy", "--ignore-eos", "--json", "-n", "40", "--file", tmp_path / "long.txt"]
    arguments += ["--kv", "f32", "--kind", kind, "--chunk", "16", "--keep", f"{BUDGET},by={by}"]
    done = subprocess.run([sys.executable, "-m", "kvist", *arguments], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert generation.tokens == report["tokens"]
    assert session.removed_tokens == report["removed_tokens"]
    assert 36 <= session.cached_tokens - session.removed_tokens <= CELLS


@pytest.mark.parametrize("kind", ["cells", "tree", "paged"])
def test_memory_is_flat(model, kind):
    session = kept(model, kind=kind)
    tokens = model.encode(TEXT)
    sizes = []
    for _ in range(5):
        session.forward(tokens[:200])
        sizes.append(session.kv_bytes)
    assert sizes == sizes[:1] * 5 and len(session) == 1000
    assert session.removed_tokens >= 1000 - 2 * CELLS


def test_a_budget_that_is_not_exceeded_changes_nothing(model):
    plain = greedy(model.session(kv="f32"), "The borrow checker", 20)
    session = model.session(kv="f32", keep="sinks=4,recent=40,top=16")
    assert greedy(session, "The borrow checker", 20).tokens == plain.tokens
    assert session.removed_tokens == 0 and model.session().removed_tokens == 0
    one = model.generate("The borrow checker", max_tokens=20, temperature=0, kv="f32", keep="recent=40", ignore_eos=True)
    assert one.result() and len(one.tokens) == 20


def test_a_text_that_is_rolled_back_goes_on(model):
    session = kept(model)
    session.forward(TEXT)
    n, removed = len(session), session.removed_tokens
    session.rollback(-3)
    assert len(session) == n - 3 and session.removed_tokens == removed
    assert len(greedy(session, " An owner", 8).tokens) == 8
    session.rollback(0)
    assert greedy(session, "The borrow checker", 8).tokens == greedy(model.session(kv="f32"), "The borrow checker", 8).tokens


def test_the_longest_text(model):
    session = kept(model, context=100)
    with pytest.raises(kvist.ArgumentError, match="101 tokens"):
        session.forward([300] * 101)
    generation = greedy(session, [300] * 90)
    assert generation.finish_reason == "cache_full" and len(generation.tokens) == 11
    # Unless it is given: what the model was trained on.
    with pytest.raises(kvist.ArgumentError, match=str(model.context)):
        kept(model).forward([300] * (model.context + 1))


def test_texts_of_a_batch_are_longer_than_its_cache(model):
    prompts = [TEXT, "1" + TEXT]
    with kvist.Batch(model, context=640, kv="f32", batch_tokens=64, keep=BUDGET) as batch:
        for _ in range(2):
            sent = [batch.submit(prompt, max_tokens=12, ignore_eos=True) for prompt in prompts]
            for generation in sent:
                assert generation.result() and len(generation.tokens) == 12
                assert generation.prompt_tokens > 600 and generation.cached_tokens == 0
        stats = batch.stats()
        assert stats["removed_tokens"] > 2 * 2 * 400 and stats["used_cells"] <= stats["capacity_cells"] == 640
        with pytest.raises(kvist.ArgumentError, match="`cache` keeps .* leave `prefix_cache` on, and `keep` out"):
            batch.submit("A", cache={})
    with kvist.Batch(model, context=640) as batch:
        assert "removed_tokens" not in batch.stats()


def test_refusals(model, tmp_path):
    for keep, words in [
        ("4", "`keep`: `4` is not NAME=VALUE"),
        ("sinks=4", "`keep`: `recent` is missing"),
        ("recent=0", "recent=0"),
        ("recent=9,by=luck", "luck"),
    ]:
        with pytest.raises(kvist.ArgumentError, match=words):
            model.session(keep=keep)
        with pytest.raises(kvist.ArgumentError, match=words):
            kvist.Batch(model, keep=keep)
    with pytest.raises(kvist.ArgumentError, match="contiguous removes nothing .* cells, tree or paged"):
        model.session(keep=BUDGET, kind="contiguous")
    with pytest.raises(TypeError, match="`keep`"):
        model.session(keep=4)
    session = kept(model)
    session.forward("The borrow checker")
    with pytest.raises(kvist.ArgumentError, match="a session without `keep` can fork"):
        session.fork()
    with pytest.raises(kvist.ArgumentError, match="keeps only sinks=4,.* is not saved"):
        session.save(tmp_path / "kept.kvs")
    whole = model.session(kv="f32")
    whole.forward("The borrow checker")
    whole.save(tmp_path / "whole.kvs")
    with pytest.raises(TypeError, match="keep"):
        model.resume(tmp_path / "whole.kvs", keep=BUDGET)
    with pytest.raises(TypeError, match="keep"):
        model.freeze_prefix("The borrow checker", tmp_path / "p.kvp", keep=BUDGET)
    prefix = model.freeze_prefix("The borrow checker", tmp_path / "p.kvp")
    with pytest.raises(kvist.ArgumentError, match="`keep`.*`prefix`"):
        model.session(prefix=prefix, keep=BUDGET)
    for options in ({"prefix": prefix}, {"tiers": kvist.Tiers(ram="64MiB")}):
        with pytest.raises(kvist.ArgumentError, match="leave out `keep`, or `prefix` and `tiers`"):
            kvist.Batch(model, keep=BUDGET, **options)
    with pytest.raises(kvist.ArgumentError, match="holds 64 tokens, and a request that keeps .* needs"):
        kvist.Batch(model, context=64, keep=BUDGET)
    assert sorted(it.name for it in tmp_path.iterdir()) == ["p.kvp", "whole.kvs"]
