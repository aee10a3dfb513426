"""Questions, 64 greedy tokens each: llama.cpp's, or another one where the two likeliest are nearly tied."""
import kvist
import numpy as np
import pytest
from conftest import ANSWER_TOKENS

# Every other kind of cache than `contiguous`, with room for all of a question and its answer.
KINDS = {
    "ring": ["--window", "256"],
    "cells": [],
    "tree": [],
    "paged": [],
}


def test_the_first_difference_is_at_a_tie(model, rival, prompts, answers, texts, tie, report):
    same, apart = 0, []
    for number, (prompt, (theirs, _), ours) in enumerate(zip(prompts, answers, texts)):
        at = next((i for i in range(ANSWER_TOKENS) if theirs[i] != ours[i]), None)
        if at is None:
            same += 1
            continue
        logits = rival.logits(prompt + theirs[:at])[-1]
        gap = float(logits[theirs[at]] - logits[ours[at]])
        said = [rival.detokenize([tokens[at]]) for tokens in (theirs, ours)]
        report(f"{model.stem}: question {number}, token {at}: llama.cpp {said[0]!r}, kvist {said[1]!r}, apart by {gap:.3f}")
        apart.append(gap)
    report(f"{model.stem}: {same} of {len(prompts)} answers are the same to the end; a tie is less than {tie:.3f}")
    assert all(gap <= tie for gap in apart), f"no tie: {apart}, where less than {tie:.3f} is one"


def test_every_place_of_an_answer(model, places, tie, report):
    """Not the first difference alone: kvist reads llama.cpp's answers and says what it would write at each place."""
    total, others, errors = 0, 0, []
    for place in places:
        ours = kvist.logits_of(model, place.tokens)[place.first:]
        total += len(ours)
        errors.append(np.abs(place.lead(ours) - place.lead(place.by_truth)))
        for row, (second, first) in zip(ours, place.two):
            choice = row.argmax()
            others += choice != first
            assert choice == first or row[choice] - row[first] <= tie
    worst, mean = max(e.max() for e in errors), np.concatenate(errors).mean()
    theirs = np.concatenate([place.errors for place in places]).mean()
    report(f"{model.stem}: kvist would write another token at {others} of {total} places of llama.cpp's answers")
    report(f"{model.stem}: the lead of the likeliest is off by {mean:.3f}, at most {worst:.3f}; llama.cpp {theirs:.3f}, {tie:.3f}")
    assert mean <= 1.5 * theirs


def test_decoded_weights_say_the_same(model, truth, prompts, report):
    """Nothing is rounded to 8 bits here on either side: every answer to the last token, or a tie of f32 sums.

    llama.cpp reads kvist's answer at once. If it finds each token the likeliest behind those before it, it would write the same.
    """
    same = 0
    for number, prompt in enumerate(prompts):
        ours = kvist.greedy(model, prompt, ANSWER_TOKENS, "--weights", "f32", "--kv", "f32")
        logits = truth.logits(prompt + ours[:-1])[len(prompt) - 1:]
        theirs = logits.argmax(-1)
        at = next((i for i in range(ANSWER_TOKENS) if theirs[i] != ours[i]), None)
        same += at is None
        if at is not None:
            gap = float(logits[at, theirs[at]] - logits[at, ours[at]])
            report(f"{model.stem}: weights decoded to f32: question {number}, token {at}: apart by {gap:.1e}")
            assert gap <= 0.01
    report(f"{model.stem}: weights decoded to f32: {same} of {len(prompts)} answers are the same to the end")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_says_the_same(model, prompts, texts, kind):
    """To the token, without ties: a float cache shows nothing of how its cells are handed out."""
    for prompt, text in list(zip(prompts, texts))[1:10:3]:
        assert kvist.greedy(model, prompt, ANSWER_TOKENS, "--kind", kind, *KINDS[kind]) == text
