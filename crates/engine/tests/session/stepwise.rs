//! Generations that their caller drives pass by pass: the same as `generate`, and in turns.
use crate::common::{f32_model as model, *};
use kvist_cache::{Refused, SeqId};
use kvist_device::StepError;
use kvist_engine::Error;
use kvist_engine::generate::{GenerateArgs, Generation, GenerationEnd, Limits, Stepwise, generate};
use kvist_engine::memory::CacheConfig;
use kvist_engine::sampler::{Sampler, SamplerConfig};
use kvist_engine::speculate::{DraftMode, DraftOptions};

const A: SeqId = SeqId::ONLY;
const B: SeqId = SeqId(1);

fn sampler(seed: u64) -> Sampler {
    let drawn =
        SamplerConfig { temperature: 0.9, top_k: 40, repetition_penalty: 1.2, ..SamplerConfig::greedy() };
    Sampler::new(SamplerConfig { repetition_window: 16, seed, ..drawn }).unwrap()
}

fn limits(max_tokens: usize, stop: &[&str]) -> Limits {
    let stop = stop.iter().map(|s| s.to_string()).collect();
    Limits { max_tokens, stop, ignore_eos: true, no_cache: false }
}

/// The text of [`generate`] in a session of its own.
fn whole(config: &CacheConfig, prompt: &[u32], seed: u64, limits: &Limits) -> Generation {
    let mut session = session(model(), config);
    let args = GenerateArgs {
        session: &mut session,
        seq: A,
        before: &[],
        prompt,
        tokenizer: model().tokenizer(),
        sampler: &mut sampler(seed),
        limits,
        speculation: None,
    };
    generate(args, &mut ()).unwrap()
}

fn tokens(text: &str) -> Vec<u32> {
    model().tokenizer().unwrap().encode(text, true).unwrap()
}

#[test]
fn steps_say_what_generate_says() {
    let prompt = tokens("A reference is a value that points to data owned by another value");
    let text = whole(&exact("cells", 128, 64), &prompt, 3, &limits(24, &[])).text;
    let stop = &text[text.char_indices().nth(20).unwrap().0..];
    let stop = &stop[..stop.char_indices().nth(3).unwrap().0];
    for (chunk, max_tokens, stops) in
        [(64, 24, &[][..]), (4, 24, &[]), (4, 24, &[stop]), (64, 1, &[]), (64, 0, &[])]
    {
        let limits = limits(max_tokens, stops);
        let config = exact("cells", 128, chunk);
        let expected = whole(&config, &prompt, 3, &limits);
        let mut session = session(model(), &config);
        let mut steps = Stepwise::new(&mut session, A, prompt.clone(), sampler(3), &limits, &[]).unwrap();
        let (mut text, mut passes) = (String::new(), 0);
        while steps.step(&mut session).unwrap() {
            assert!(steps.text().starts_with(&text), "text that was shown does not change");
            text = steps.text().to_owned();
            passes += 1;
        }
        assert_eq!((steps.tokens(), &*text), (&*expected.tokens, &*expected.text));
        assert_eq!(steps.finish(), Some(&expected.finish));
        assert_eq!(passes, prompt.len().div_ceil(chunk as usize) + expected.tokens.len().max(1) - 1);
        assert_eq!((steps.prompt_tokens(), steps.prompt_done()), (prompt.len(), prompt.len()));
        assert!(!steps.step(&mut session).unwrap(), "it has ended");
    }
}

/// With drafts: the same tokens and text, at the end of every kind of cache, in fewer passes, and where a text goes on.
#[test]
fn drafted_steps_say_what_plain_steps_say() {
    let prompt = tokens(&"| a | b |\n".repeat(8)); // the model repeats itself behind it
    let mut accepted = 0;
    let text = whole(&exact("cells", 256, 64), &prompt, 3, &limits(40, &[])).text;
    let stop = &text[text.char_indices().nth(30).unwrap().0..];
    let stop = &stop[..stop.char_indices().nth(3).unwrap().0];
    let options = DraftOptions { tokens: 7, ..DraftOptions::new(DraftMode::Suffix) };
    for kind in ["contiguous", "ring", "cells", "tree", "paged"] {
        for (chunk, max_tokens, stops) in [(64, 40, &[][..]), (8, 40, &[stop]), (64, 1, &[])] {
            let mut config = exact(kind, 256, chunk);
            config.window = (kind == "ring").then_some(128);
            let limits = limits(max_tokens, stops);
            let greedy = || Sampler::new(SamplerConfig::greedy()).unwrap();
            for sampler in [greedy, || sampler(3)] {
                let mut plain = session(model(), &config);
                let mut steps =
                    Stepwise::new(&mut plain, A, prompt.clone(), sampler(), &limits, &[]).unwrap();
                while steps.step(&mut plain).unwrap() {}

                options.prepare(&mut config).unwrap();
                let mut speculator = options.speculator(None, model(), &config, 1).unwrap();
                let mut drafted = session(model(), &config);
                let mut known = prompt.clone();
                let mut passes = 0;
                let mut same =
                    Stepwise::after(&mut drafted, A, &[], prompt.clone(), sampler(), &limits, &[]).unwrap();
                while same.step_drafted(&mut drafted, &mut speculator).unwrap() {
                    passes += 1;
                }
                assert_eq!((same.tokens(), same.text()), (steps.tokens(), steps.text()), "{kind} {chunk}");
                assert_eq!((same.finish(), same.prompt_tokens()), (steps.finish(), prompt.len()));
                let counts = speculator.counts().clone();
                let prefill = prompt.len().div_ceil(config.max_step_tokens as usize);
                assert_eq!(passes as u64, prefill as u64 + counts.target_passes, "{counts:?}");
                known.extend(same.tokens());

                // The text goes on: what the cache holds, and the last token, which it does not.
                let held = drafted.cache().next_position(A).unwrap() as usize;
                let (before, rest) = known.split_at(held);
                let limits = Limits { max_tokens: 12, stop: vec![], ..limits.clone() };
                let mut more =
                    Stepwise::after(&mut drafted, A, before, rest.to_vec(), greedy(), &limits, &[]).unwrap();
                while more.step_drafted(&mut drafted, &mut speculator).unwrap() {}
                let mut plain_more =
                    Stepwise::new(&mut plain, A, rest.to_vec(), greedy(), &limits, &[]).unwrap();
                while plain_more.step(&mut plain).unwrap() {}
                assert_eq!(more.tokens(), plain_more.tokens());
                let wrong = Stepwise::after(&mut drafted, A, &known, vec![1], greedy(), &limits, &[]);
                assert!(matches!(wrong.err(), Some(Error::Usage(why)) if why.contains("before the prompt")));
                accepted += speculator.counts().accepted;
            }
        }
    }
    assert!(accepted > 100, "{accepted}");
    let mut config = exact("cells", 64, 64);
    options.prepare(&mut config).unwrap();
    let mut speculator = options.speculator(None, model(), &config, 1).unwrap();
    let mut session = session(model(), &config);
    session.prefill(A, &prompt[..4], &mut |_| true).unwrap();
    let mut steps =
        Stepwise::new(&mut session, A, prompt[4..8].to_vec(), sampler(1), &limits(4, &[]), &[]).unwrap();
    let refused = steps.step_drafted(&mut session, &mut speculator).unwrap_err();
    assert!(refused.to_string().contains("Stepwise::after"), "{refused}");
}

#[test]
fn sequences_take_turns() {
    let prompts = [tokens("The borrow checker"), tokens("A vector owns its elements")];
    let config = exact("cells", 128, 64);
    let mut both = session(model(), &config);
    both.cache().sequences().unwrap().seq_new(B).unwrap();
    let mut steps: Vec<Stepwise> = [A, B]
        .iter()
        .zip(&prompts)
        .map(|(seq, prompt)| {
            Stepwise::new(&mut both, *seq, prompt.clone(), sampler(5), &limits(12, &[]), &[]).unwrap()
        })
        .collect();
    while steps.iter_mut().map(|one| one.step(&mut both).unwrap()).collect::<Vec<_>>().contains(&true) {}
    for (one, prompt) in steps.iter().zip(&prompts) {
        let expected = whole(&config, prompt, 5, &limits(12, &[]));
        assert_eq!(one.tokens(), expected.tokens);
    }
}

#[test]
fn what_cannot_go_on_is_refused_and_a_full_cache_ends_the_text() {
    let config = exact("cells", 10, 64);
    let mut small = session(model(), &config);
    let new = |session: &mut _, prompt: &[u32]| {
        Stepwise::new(session, A, prompt.to_vec(), sampler(1), &limits(50, &[]), &[])
    };
    assert!(matches!(new(&mut small, &[]).err(), Some(Error::EmptyPrompt)));
    assert!(matches!(
        new(&mut small, &[1; 11]).err(),
        Some(Error::PromptTooLong { tokens: 11, context: 10 })
    ));
    assert!(matches!(new(&mut small, &[u32::MAX]).err(), Some(Error::TokenOutsideVocabulary { .. })));
    let mut steps = new(&mut small, &[1; 4]).unwrap();
    while steps.step(&mut small).unwrap() {}
    assert_eq!((steps.finish(), steps.tokens().len()), (Some(&GenerationEnd::CacheFull), 7));
    assert_eq!(small.cache().next_position(A), Some(10));

    let mut stale = new(&mut small, &[]).err().map(|_| ()).and_then(|()| {
        small.truncate(A, 2).unwrap();
        new(&mut small, &[1; 3]).ok()
    });
    let stale = stale.as_mut().unwrap();
    assert!(stale.step(&mut small).unwrap());
    small.truncate(A, 1).unwrap();
    let refused = Refused::NotAtEnd { seq: A, expected: 1, got: 5 };
    assert!(matches!(stale.step(&mut small), Err(Error::Step(StepError::Refused(r))) if r == refused));
}

/// A rollback keeps what is before it, in every kind; a ring starts again. The sequence exists afterwards.
#[test]
fn a_session_is_cut_in_every_kind() {
    let prompt = tokens("A reference is a value that points to data");
    for kind in ["contiguous", "cells", "tree", "paged", "ring"] {
        let mut config = exact(kind, 64, 8);
        config.window = (kind == "ring").then_some(16);
        let mut session = session(model(), &config);
        let first = logits(&mut session, &prompt[..6]);
        session.prefill(A, &prompt[6..], &mut |_| true).unwrap();
        let kept = session.truncate(A, 3).unwrap();
        assert_eq!(kept, if kind == "ring" { 0 } else { 3 }, "{kind}");
        let again = logits(&mut session, &prompt[kept as usize..6]);
        let vocab = model().config().vocab;
        assert!(max_difference(&first[kept as usize * vocab..], &again) < 1e-3, "{kind}");
        assert_eq!(session.truncate(A, 0).unwrap(), 0);
        assert_eq!(session.cache().next_position(A), Some(0), "{kind}");
    }
}

/// A paged cache releases blocks behind a window. A cut that needs them was refused; now the text begins again.
#[test]
fn a_cut_into_released_blocks_begins_again() {
    let mut prompt = tokens(&"A reference is a value that points to data in memory. ".repeat(12));
    prompt.truncate(104);
    let mut config = exact("paged", 256, 16);
    config.window = Some(16);
    let mut session = session(model(), &config);
    session.prefill(A, &prompt, &mut |_| true).unwrap();
    assert_eq!(session.truncate(A, 103).unwrap(), 103);
    assert_eq!(session.truncate(A, 20).unwrap(), 0);
    assert_eq!(session.cache().next_position(A), Some(0));
    assert_eq!(session.report()[0].used_cells, 0, "nothing is left behind");
    session.prefill(A, &prompt[..20], &mut |_| true).unwrap();
}

/// A token outside the vocabulary was found only in its chunk: the chunks before it stayed.
#[test]
fn a_prompt_is_checked_before_its_first_chunk() {
    let mut session = session(model(), &exact("ring", 64, 8));
    let mut prompt = vec![1; 30];
    prompt[25] = u32::MAX;
    let refused = session.prefill(A, &prompt, &mut |_| true);
    assert!(matches!(refused, Err(Error::TokenOutsideVocabulary { .. })), "{refused:?}");
    assert_eq!(session.cache().next_position(A), Some(0));
}

#[test]
fn logits_can_be_kept_beyond_the_next_pass() {
    let mut session = session(model(), &exact("contiguous", 64, 8));
    let expected = logits(&mut session, &[5, 6, 7]);
    let taken = session.take_logits();
    assert_eq!(taken, expected);
    assert!(session.logits().is_empty());
    let next = logits(&mut session, &[8]);
    assert_eq!((taken, next.len()), (expected, model().config().vocab));
}
