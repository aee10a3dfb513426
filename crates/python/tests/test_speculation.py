"""Drafts in sessions and batches: the same tokens in fewer passes, counts, and clear refusals."""

import gc
import pathlib

import kvist
import pytest

MODELS = pathlib.Path(__file__).resolve().parents[2] / "model"
EMBEDDED = MODELS / "embedded"
TEXT = "| a | b |\n" * 12  # the embedded model goes on with it, and repeats itself
KINDS = ["contiguous", "ring", "cells", "tree", "paged"]
N = 40


def greedy(session, prompt=None, n=N, **options):
    options = {"temperature": 0, "repeat_penalty": 1.0, "ignore_eos": True, **options}
    generation = session.generate(prompt, max_tokens=n, **options)
    text = "".join(generation)
    assert text == generation.text
    return generation


def options_of(kind):
    return {"kind": kind, "kv": "f32", "context": 512, **({"window": 256} if kind == "ring" else {})}


@pytest.fixture(scope="module")
def plain(model):
    return greedy(model.session(kv="f32", context=512), TEXT)


@pytest.mark.parametrize("mode", ["auto", "ngram", "suffix", "draft", "eagle"])
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_texts_are_the_same(model, plain, kind, mode):
    of_kind = options_of(kind)
    session = model.session(speculate=mode, **of_kind)
    assert session.kind == (kind or ("cells" if mode in ("ngram", "draft") else "tree"))
    found = greedy(session, TEXT)
    expected = plain if kind != "ring" else greedy(model.session(**of_kind), TEXT)
    assert (found.tokens, found.text, found.finish_reason) == (expected.tokens, expected.text, "max_tokens")
    counts = session.speculation
    assert counts["target_passes"] + counts["accepted"] == N - 1 and "failure" not in counts
    assert len(session) == len(model.encode(TEXT)) + N
    if mode != "auto":  # which drafts as much as pays off on this machine
        assert counts["drafted"] >= counts["accepted"] > 0 and counts["drafts"] > 0
        assert counts["accepted_per_position"][0] >= counts["accepted_per_position"][-1]


def test_sampled_texts_and_stop_strings_are_the_same(model, plain):
    stop = plain.text[40:46]
    for options in ({"temperature": 1.0, "seed": 3}, {"stop": stop}, {"repeat_penalty": 1.3, "repeat_last": 20}):
        expected = greedy(model.session(kv="f32"), TEXT, **options)
        found = greedy(model.session(kv="f32", speculate="suffix"), TEXT, **options)
        assert (found.tokens, found.text, found.finish_reason) == (expected.tokens, expected.text, expected.finish_reason)


@pytest.mark.parametrize("kv", ["f32", "q8"])
@pytest.mark.parametrize("mode", ["suffix", "draft", "eagle"])
def test_branches_rollbacks_and_turns(model, kv, mode):
    """What a session does between generations is what it does without drafts."""

    def talk(session):
        said = [greedy(session, TEXT, 12).tokens]
        session.rollback(-5)
        said.append(greedy(session, " A slice", 12).tokens)
        other = session.fork()
        a = session.generate(" borrows", max_tokens=9, temperature=0, ignore_eos=True)
        b = other.generate(" owns", max_tokens=9, temperature=0, ignore_eos=True)
        for _ in range(9):
            next(a, None), next(b, None)
        a.result(), b.result()
        said += [a.tokens, b.tokens]
        del other, b
        left = session.generate(max_tokens=30, temperature=0, ignore_eos=True)
        next(left)  # and left
        said.append(session.forward(" them").argmax())
        session.rollback(0)
        said.append(greedy(session, TEXT, 12).tokens)
        return said

    # A draft leaves a generation somewhere else than a single token does.
    expected, found = talk(model.session(kv=kv, context=1024)), talk(model.session(kv=kv, context=1024, speculate=mode))
    assert expected[:4] + expected[5:] == found[:4] + found[5:]


def test_a_draft_model(model, plain):
    small = kvist.Model(deterministic=True)  # the model itself drafts well
    for mode in ("draft", "auto"):
        sessions = [model.session(kv="f32", context=512, speculate=mode, draft_model=small) for _ in range(2)]
        for session in sessions:
            assert greedy(session, TEXT).tokens == plain.tokens
        counts = sessions[0].speculation
        assert mode == "auto" or counts["accepted"] == counts["drafted"] > 0
    generation = model.generate(TEXT, max_tokens=N, temperature=0, repeat_penalty=1.0, ignore_eos=True, kv="f32", speculate="draft")
    assert generation.result() == plain.text


def test_models_and_heads_in_files(model, plain):
    for mode, path in [("draft", "tiny-rust-draft.gguf"), ("auto", "tiny-rust-draft.gguf"), ("eagle", "tiny-rust-eagle3"), ("auto", "tiny-rust-eagle3")]:
        session = model.session(kv="f32", context=512, speculate=mode, draft_model=EMBEDDED / path)
        assert greedy(session, TEXT).tokens == plain.tokens
        assert mode == "auto" or session.speculation["accepted"] > 0
        with kvist.Batch(model, context=512, kv="f32", max_batch=2, speculate=mode, draft_model=str(EMBEDDED / path)) as batch:
            assert batch.submit(TEXT, max_tokens=N, temperature=0, repeat_penalty=1.0, ignore_eos=True).result() == plain.text


def test_sessions_in_files_go_on_with_drafts(model, plain, tmp_path):
    session = model.session(kv="f32", context=512, speculate="suffix")
    first = greedy(session, TEXT, 10)
    session.save(tmp_path / "s.kvs")
    resumed = model.resume(tmp_path / "s.kvs", context=512, speculate="ngram")
    assert first.tokens + greedy(resumed, n=N - 10).tokens == plain.tokens
    assert resumed.speculation["accepted"] > 0
    prefix = model.freeze_prefix(TEXT, tmp_path / "p.kvp", kv="f32")
    begun = model.session(prefix=prefix, context=512, speculate="draft")
    assert greedy(begun).tokens == plain.tokens and begun.speculation["accepted"] > 0


@pytest.mark.parametrize("mode", ["auto", "ngram", "suffix", "draft", "eagle"])
def test_batches(model, plain, mode):
    prompts = [TEXT, TEXT + " It", "The borrow checker"]
    with kvist.Batch(model, context=2048, kv="f32", max_batch=3) as batch:
        expected = batch.generate(prompts, max_tokens=N, temperature=0, repeat_penalty=1.0, ignore_eos=True)
        assert "speculation" not in batch.stats()
    with kvist.Batch(model, context=2048, kv="f32", max_batch=3, speculate=mode, draft_tokens=6) as batch:
        assert batch.generate(prompts, max_tokens=N, temperature=0, repeat_penalty=1.0, ignore_eos=True) == expected
        counts = batch.stats()["speculation"]
        # The figures are those of the end of a step, and the last tokens come before it.
        assert 2 * N < counts["target_passes"] + counts["accepted"] <= 3 * (N - 1)
        assert mode == "auto" or counts["accepted"] > 0
    assert expected[0] == plain.text


def test_memory_is_freed(model):
    small = kvist.Model(memory="256MiB", threads=1)

    def room():
        """The longest session that fits."""
        low, high = 0, 1 << 20
        while low < high:
            middle = (low + high + 1) // 2
            try:
                small.session(context=middle)
                low = middle
            except kvist.OutOfMemory:
                high = middle - 1
        return low

    before = room()
    for mode in ("suffix", "draft", "eagle"):
        session = small.session(context=4096, speculate=mode)
        greedy(session, TEXT)
        assert mode == "suffix" or room() < before
        del session
        with kvist.Batch(small, context=1024, max_batch=2, speculate=mode) as batch:
            batch.generate([TEXT], max_tokens=8)
        del batch
        gc.collect()
        assert room() == before
    with pytest.raises(kvist.OutOfMemory, match="the draft model and its cache need .* `context`"):
        small.session(context=before - 8, speculate="draft")
    assert room() == before


def test_refusals(model, tmp_path):
    makers = (model.session, lambda **options: kvist.Batch(model, **options))
    other = MODELS / "tests" / "fixtures" / "parity" / "llama-gqa"
    for make in makers:
        for options, words in [
            ({"speculate": "lookup"}, "`speculate`: `lookup` is not a drafter: use auto, ngram, suffix, draft, eagle, or off"),
            ({"draft_tokens": 4}, "`draft_tokens`: nothing is drafted: give `speculate` too"),
            ({"speculate": "off", "draft_model": model}, "`draft_model`: nothing is drafted"),
            ({"speculate": "suffix", "draft_model": model}, "`draft_model`: suffix uses none"),
            ({"speculate": "suffix", "draft_tokens": 0}, "`draft_tokens`: 0 is not a number from 1 to 1024"),
            ({"speculate": "suffix", "draft_width": 65}, "`draft_width`: 65 is not a number from 1 to 64"),
            ({"speculate": "suffix", "context": 16}, "`draft_tokens` 16: the cache holds 16 tokens; use fewer, or a larger `context`"),
            ({"speculate": "suffix", "keep": "recent=64"}, "`speculate`.*keep.*leave one out"),
            ({"speculate": "eagle", "draft_model": model}, "`draft_model`: eagle needs a head .* give its folder"),
            ({"speculate": "eagle", "draft_model": tmp_path / "none"}, "not a folder"),
            ({"speculate": "eagle", "draft_model": "hf:ORG/NAME"}, "heads are not downloaded by name"),
            ({"speculate": "draft", "draft_model": EMBEDDED / "tiny-rust-eagle3"}, 'use it with `speculate` "eagle"'),
            ({"speculate": "draft", "draft_model": other}, "`draft_model` .*: the draft model has a vocabulary of .*: use a draft model"),
            ({"speculate": "draft", "draft_model": kvist.Model(other)}, "`draft_model` .*: the draft model has .* of the same family"),
        ]:
            with pytest.raises(kvist.Error, match=words):
                make(**options)
        with pytest.raises(TypeError, match="`draft_model`"):
            make(speculate="draft", draft_model=7)
        with pytest.raises(TypeError, match="`speculate`"):
            make(speculate=True)
        with pytest.raises(kvist.ModelError, match="none.gguf"):
            make(speculate="draft", draft_model=tmp_path / "none.gguf")
    assert model.session().speculation is None and model.session(speculate="off").speculation is None
    alone = kvist.Model(other)
    with pytest.raises(kvist.ArgumentError, match="draft needs a smaller model .* give it as `draft_model`"):
        alone.session(speculate="draft")
    with pytest.raises(kvist.ArgumentError, match="eagle needs a head .* as `draft_model`"):
        alone.session(speculate="eagle")
    with pytest.raises(TypeError, match="speculate"):
        model.freeze_prefix(TEXT, tmp_path / "p.kvp", speculate="suffix")


def test_trees_by_hand(model):
    """Draft nodes of the caller, over two passes: their logits are those of the texts that their paths are."""
    prompt = model.encode("A vector owns its")
    session = model.session(kind="tree", kv="f32", max_rows=8)
    assert session.generate(prompt, max_tokens=2, temperature=0, ignore_eos=True).result()
    text = session.tokens
    left = session.generate(max_tokens=9, temperature=0)

    def logits(*more):
        return model.session(kv="f32", max_rows=8).forward([*text, *more])[0]

    rows = session.forward([5, 6, 7], parents=[None, None, 0], rows="all")
    assert rows.shape == (3, model.vocab_size) and session.tokens == text
    for row, path in zip(rows, [[5], [6], [5, 7]]):
        assert (row == logits(*path)).all()
    assert (session.forward([8], parents=[2])[0] == logits(5, 7, 8)).all()
    with pytest.raises(kvist.Error, match="has changed since this generation began"):
        next(left)
    with pytest.raises(kvist.Refused):
        session.accept([0, 1])
    with pytest.raises(kvist.Refused):
        session.forward([9], parents=[4])
    session.accept([0, 2])
    assert session.tokens == [*text, 5, 7] and session.cached_tokens == len(session)
    assert (session.forward([9])[0] == logits(5, 7, 9)).all()
    session.forward([5], parents=[None])
    with pytest.raises(kvist.ArgumentError, match="call `accept` before `save`"):
        session.save("never.kvs")
    expected = greedy(model.session(kv="f32"), [*text, 5, 7, 9], 6)
    assert greedy(session, n=6).tokens == expected.tokens  # nodes are dropped
    session.forward([5], parents=[None])
    session.accept([])
    session.rollback(len(text))
    assert (session.forward([5])[0] == logits(5)).all()
    with pytest.raises(kvist.ArgumentError, match="`parents`: 1 for 2 tokens"):
        session.forward([5, 6], parents=[None])
    for kind in ("cells", "paged", "contiguous"):
        other = model.session(kind=kind)
        with pytest.raises(kvist.ArgumentError, match='kind="tree"'):
            other.forward([5], parents=[None])
        with pytest.raises(kvist.ArgumentError, match='kind="tree"'):
            other.accept([])
