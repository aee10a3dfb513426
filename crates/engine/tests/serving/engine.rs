//! Tests the engine thread without HTTP: generated text equals that of a single request, whatever else runs,
//! and no cells stay in use at the end.
use crate::engines::*;
use kvist_device::{Registry, Storage};
use kvist_engine::devices;
use kvist_engine::generate::{GenerateArgs, Limits, generate};
use kvist_engine::memory::CacheConfig;
use kvist_engine::sampler::{Sampler, SamplerConfig};
use kvist_engine::serving::*;
use kvist_engine::session::ModelSession;
use kvist_engine::text::Stops;
use kvist_model::Model;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Only ends tests that would hang; nothing is measured against it.
const PATIENCE: Duration = Duration::from_secs(600);

const TEXT: &str = "Returns the number of elements in the vector, also referred to as its length. The capacity of a \
     vector is the amount of space allocated for any future elements that will be added onto the vector. This is not \
     to be confused with the length of a vector, which specifies the number of actual elements within the vector.";

/// The output of `kvist run`.
fn alone(prompt: &[u32], max_tokens: usize) -> (Vec<u32>, String) {
    alone_with(model(), &devices::all(), Storage::F32, prompt, max_tokens)
}

fn alone_with(
    model: &Arc<Model>,
    registry: &Registry,
    kv: Storage,
    prompt: &[u32],
    max_tokens: usize,
) -> (Vec<u32>, String) {
    let config = CacheConfig { k: kv, v: kv.for_values(), ..CacheConfig::new(1024) };
    let mut session = ModelSession::new(model, registry, &config).unwrap();
    let limits = Limits { max_tokens, stop: Vec::new(), ignore_eos: true, no_cache: false };
    let mut sampler = Sampler::new(SamplerConfig::greedy()).unwrap();
    let what = GenerateArgs {
        session: &mut session,
        seq: kvist_cache::SeqId::ONLY,
        before: &[],
        prompt,
        tokenizer: model.tokenizer(),
        sampler: &mut sampler,
        limits: &limits,
        speculation: None,
    };
    let made = generate(what, &mut ()).unwrap();
    (made.tokens, made.text)
}

async fn cache_is_unused(engine: &Engine) {
    tokio::time::timeout(PATIENCE, engine.until_idle()).await.expect("a job is still live");
    let (used, running, waiting) = engine
        .inspect(|state| {
            let scheduler = &state.scheduler;
            (scheduler.used_cells(), scheduler.n_running(), scheduler.n_waiting())
        })
        .await
        .unwrap();
    assert_eq!((used, running, waiting), (0, 0, 0), "cells in use, requests running and waiting");
}

#[tokio::test]
async fn the_same_text_in_any_company() {
    let all = tokens(TEXT);
    let prompts: Vec<&[u32]> = vec![&all[..40], &all[..33], &all, &all[10..20], &all[..1], &all[..40]];
    let alone: Vec<_> = prompts.iter().map(|prompt| alone(prompt, 60)).collect();
    // Context sizes with room for all requests, and for about two, so that requests are preempted; and blocks
    // of one token.
    for (context, block_tokens, max) in [(1024, 16, 64), (176, 16, 64), (1024, 1, 64), (256, 7, 9)] {
        let mut config = config(context);
        config.paged.block_tokens = block_tokens;
        config.scheduler.max_batch_tokens = max;
        config.fit();
        let engine = engine(config);
        for round in 0..2 {
            let jobs = prompts.iter().map(|prompt| greedy(prompt, 60));
            let mut generations = submit_together(&engine, jobs).await;
            for (i, generation) in generations.iter_mut().enumerate() {
                let heard = receive(generation).await;
                let what = format!("prompt {i}, round {round}, {context} cells in blocks of {block_tokens}");
                assert_eq!(heard.tokens, alone[i].0, "{what}");
                assert_eq!(heard.text, alone[i].1, "{what}");
                let done = heard.done.expect("it ended");
                assert_eq!(done.finish, FinishReason::Length, "{what}");
                let usage = done.usage;
                assert_eq!(usage.completion_tokens, 60);
                assert_eq!(usage.prompt_tokens as usize, prompts[i].len());
                let (cached, miss) = heard.admitted.expect("it was admitted");
                assert_eq!(cached, usage.cached_tokens);
                assert!(miss.is_some(), "it was asked to explain");
                if round == 1 && context == 1024 {
                    let whole_blocks = (prompts[i].len() as u32 - 1) / block_tokens * block_tokens;
                    assert_eq!(cached, whole_blocks, "{what}: everything before was kept");
                }
            }
        }
        cache_is_unused(&engine).await;
        let stats = engine.stats();
        assert_eq!(stats.counters.preemptions > 0, context < 1024, "{stats:?}");
    }
}

/// Quantized weights and cache with `--deterministic`: chunked prefill, batching, prefix hits and preemption do
/// not change the output.
#[tokio::test]
async fn the_same_text_of_packed_numbers_when_asked() {
    let (model, registry) = deterministic();
    let all = tokens(TEXT);
    let prompts: Vec<&[u32]> = vec![&all[..40], &all, &all[..33], &all[10..20]];
    for kv in [Storage::Q8, Storage::Q4, Storage::T4_O, Storage::F16] {
        let alone: Vec<_> =
            prompts.iter().map(|prompt| alone_with(model, registry, kv, prompt, 60).0).collect();
        for (context, max) in [(1024, 64), (176, 9)] {
            let mut config = config(context);
            (config.paged.cache.k, config.paged.cache.v) = (kv, kv.for_values());
            config.scheduler.max_batch_tokens = max;
            config.fit();
            let engine = Engine::start(model.clone(), registry, config).unwrap();
            for round in 0..2 {
                let mut generations: Vec<GenerationHandle> =
                    prompts.iter().map(|prompt| engine.submit(greedy(prompt, 60)).unwrap()).collect();
                for (i, generation) in generations.iter_mut().enumerate() {
                    let heard = receive(generation).await;
                    assert_eq!(heard.tokens, alone[i], "{kv}, {context} cells, round {round}, prompt {i}");
                }
            }
            cache_is_unused(&engine).await;
        }
    }
}

#[tokio::test]
async fn a_request_whose_client_left_holds_nothing() {
    let all = tokens(TEXT);
    let engine = engine(config(4096));
    let mut first = engine.submit(greedy(&all, 3000)).unwrap();
    assert!(matches!(first.next().await, Some(Event::Admitted { .. })));
    assert!(matches!(first.next().await, Some(Event::Token(_))));
    drop(first);
    cache_is_unused(&engine).await;
    // The next request gets prefix hits on the blocks it computed.
    let mut second = engine.submit(greedy(&all, 1)).unwrap();
    let heard = receive(&mut second).await;
    assert!(heard.admitted.unwrap().0 + 16 >= all.len() as u32);
    cache_is_unused(&engine).await;
}

/// More jobs than the queue has places: the next ones are sent as places free up, also while other jobs have them all.
#[tokio::test]
async fn all_jobs_get_their_texts_in_a_small_queue() {
    let all = tokens(TEXT);
    let mut small = config(4096);
    (small.scheduler.max_batch, small.max_queue) = (2, 1);
    small.fit();
    let engine = engine(small);
    let prompts: Vec<&[u32]> = (2..11).map(|n| &all[..n]).collect();
    let alone: Vec<String> = prompts.iter().map(|prompt| alone(prompt, 8).1).collect();
    let jobs = || prompts.iter().map(|prompt| greedy(prompt, 8));
    let (first, second) = tokio::join!(engine.generate_all(jobs()), engine.generate_all(jobs()));
    assert_eq!((first.as_ref(), second.as_ref()), (Ok(&alone), Ok(&alone)));
    assert_eq!(engine.generate_all([]).await, Ok(Vec::new()));
    let unknown = [greedy(&all[..3], 3000), greedy(&[u32::MAX], 8)];
    let failed = engine.generate_all(unknown).await;
    assert!(
        matches!(failed, Err(Unserved::Failed(Failure::UnknownToken { token: u32::MAX, .. }))),
        "{failed:?}"
    );
    cache_is_unused(&engine).await;
    engine.drain();
    assert_eq!(engine.generate_all(jobs()).await, Err(Rejected::Draining.into()));
}

#[tokio::test]
async fn queues_end_and_deadlines_pass() {
    let all = tokens(TEXT);
    let mut small = config(4096);
    small.scheduler.max_batch = 1;
    small.max_queue = 2;
    small.fit();
    let engine = engine(small);
    // At this pace what runs outlasts the test.
    let slow = |max_new| Job { pace: Some(1), ..greedy(&all, max_new) };
    let mut running = engine.submit(slow(3000)).unwrap();
    assert!(matches!(running.next().await, Some(Event::Admitted { .. })));
    // Pause the engine, so that the deadline passes after the queue has been checked.
    let (release, released) = std::sync::mpsc::channel::<()>();
    let still = engine.clone();
    let (standing, stands) = tokio::sync::oneshot::channel();
    let answer = tokio::spawn(async move {
        let stand = move |_: &mut EngineState| {
            let _ = standing.send(());
            released.recv().is_ok()
        };
        still.inspect(stand).await
    });
    stands.await.unwrap();
    let mut late =
        engine.submit(Job { deadline: Some(Instant::now() + Duration::from_millis(30)), ..slow(5) }).unwrap();
    let waiting = engine.submit(slow(5)).unwrap();
    assert_eq!(engine.submit(greedy(&all, 5)).err(), Some(Rejected::Full { waiting: 2, is_shared: false }));
    drop(release);
    assert_eq!(answer.await.unwrap(), Some(false));
    let heard = receive(&mut late).await;
    assert_eq!(heard.done.unwrap().finish, FinishReason::Deadline);
    assert!(heard.admitted.is_none());
    drop(waiting);
    engine.cancel_all();
    let heard = receive(&mut running).await;
    assert_eq!(heard.done.unwrap().finish, FinishReason::Cancelled);
    engine.drain();
    assert_eq!(engine.submit(greedy(&all, 5)).err(), Some(Rejected::Draining));
    cache_is_unused(&engine).await;
}

/// Under `edf` the one job with a target goes first, although it came last and its target has passed; and it is not ended.
#[tokio::test]
async fn a_target_ranks_a_job_and_does_not_end_it() {
    let all = tokens(TEXT);
    let mut config = config(1024);
    (config.scheduler.policy, config.scheduler.max_batch) = ("edf".into(), 1);
    let engine = engine(config);
    let deadline = Some(Instant::now() + Duration::from_secs(3600));
    let target = Some(Instant::now());
    let jobs =
        [Job { deadline, ..greedy(&all, 5) }, greedy(&all, 5), Job { target, deadline, ..greedy(&all, 5) }];
    let mut generations = submit_together(&engine, jobs).await;
    let mut admitted = Vec::new();
    for generation in &mut generations {
        let Some(Event::Admitted { at, .. }) = generation.next().await else { panic!("it was not admitted") };
        admitted.push(at);
        assert_eq!(receive(generation).await.done.unwrap().finish, FinishReason::Length);
    }
    assert!(admitted[2] < admitted[0] && admitted[0] < admitted[1], "{admitted:?}");
    cache_is_unused(&engine).await;
}

/// A job can ask for a slow pace, because the embedded model is too fast to watch. A paced job does not slow
/// down other jobs, and the engine still handles messages at once.
#[tokio::test]
async fn a_pace_is_kept_until_somebody_has_none() {
    let all = tokens(TEXT);
    let engine = engine(config(4096));
    let slow = |max_new| Job { pace: Some(1), ..greedy(&all, max_new) };
    let begun = Instant::now();
    let mut watched = engine.submit(slow(3)).unwrap();
    let heard = receive(&mut watched).await;
    assert_eq!(heard.tokens.len(), 3);
    let took = begun.elapsed();
    assert!(took >= Duration::from_secs(2), "two pauses of a second, and {took:?} in all");
    // A thousand tokens at this pace would take a quarter of an hour.
    let mut watched = engine.submit(slow(1000)).unwrap();
    assert!(matches!(watched.next().await, Some(Event::Admitted { .. })));
    let mut hurried = engine.submit(greedy(&all, 1000)).unwrap();
    let (went_along, fast) = tokio::join!(receive(&mut watched), async {
        let heard = receive(&mut hurried).await;
        // The rest of the slow job is paced again, so it is cancelled instead of awaited.
        engine.cancel_all();
        heard
    });
    assert_eq!(fast.tokens.len(), 1000);
    assert!(went_along.tokens.len() >= 990, "{} tokens", went_along.tokens.len());
    // A deadline also ends a job during a pause.
    let deadline = Some(Instant::now() + Duration::from_millis(50));
    let mut late = engine.submit(Job { deadline, ..slow(3000) }).unwrap();
    assert_eq!(receive(&mut late).await.done.unwrap().finish, FinishReason::Deadline);
    cache_is_unused(&engine).await;
}

#[tokio::test]
async fn what_never_fits_is_said() {
    let engine = engine(config(64));
    let mut generation = engine.submit(greedy(&tokens(TEXT), 40)).unwrap();
    let heard = receive(&mut generation).await;
    let Some(Failure::NeverFits { needed, capacity: 64 }) = heard.failure else { panic!("{heard:?}") };
    assert_eq!(needed, tokens(TEXT).len() as u64 + 40);
    cache_is_unused(&engine).await;
}

/// Regression: an unknown token was detected inside a step, which then failed three times for all requests in
/// the batch.
#[tokio::test]
async fn a_token_that_the_model_does_not_know_fails_its_own_request() {
    let engine = engine(config(1024));
    let vocab = model().config().vocab as u32;
    let mut prompt = tokens(TEXT);
    let mut running = engine.submit(greedy(&prompt, 40)).unwrap();
    assert!(matches!(running.next().await, Some(Event::Admitted { .. })));
    prompt.push(vocab + 3);
    let mut bad = engine.submit(greedy(&prompt, 40)).unwrap();
    let heard = receive(&mut bad).await;
    assert_eq!(heard.failure, Some(Failure::UnknownToken { token: vocab + 3, vocab }));
    assert!(heard.admitted.is_none());
    let mut tokens = 0;
    while let Some(event) = running.next().await {
        match event {
            Event::Token(_) => tokens += 1,
            Event::Failed(failure) => panic!("{failure}"),
            Event::Done(_) | Event::Admitted { .. } | Event::Prompt(_) => {}
        }
    }
    assert_eq!(tokens, 40);
    let failed = engine.inspect(|state| state.scheduler.counters().failed_steps).await.unwrap();
    assert_eq!(failed, 0);
    cache_is_unused(&engine).await;
}

/// A grammar that grows too large fails its own request, with an error of its own.
#[tokio::test]
async fn a_grammar_that_fails_says_so() {
    struct Fails(u32);
    impl Constraint for Fails {
        fn mask(&mut self, _: &mut [f32]) -> Result<(), String> {
            self.0 += 1;
            if self.0 > 3 { Err("too large".into()) } else { Ok(()) }
        }
        fn accept(&mut self, _: u32) -> Result<bool, String> {
            Ok(false)
        }
    }
    let engine = engine(config(1024));
    let job = Job { constraint: Some(Box::new(Fails(0))), ..greedy(&tokens(TEXT), 10) };
    let heard = receive(&mut engine.submit(job).unwrap()).await;
    assert_eq!((heard.tokens.len(), heard.failure), (3, Some(Failure::Grammar("too large".into()))));
    cache_is_unused(&engine).await;
}

#[tokio::test]
async fn a_stop_string_is_no_part_of_the_text() {
    let prompt = tokens("The capacity of a vector is");
    let (_, text) = alone(&prompt, 40);
    let words: Vec<&str> = text.split_whitespace().collect();
    let stop = format!("{} {}", words[3], words[4]);
    let engine = engine(config(1024));
    let mut generation = engine
        .submit(Job { stop: Arc::new(Stops::new(std::slice::from_ref(&stop))), ..greedy(&prompt, 40) })
        .unwrap();
    let heard = receive(&mut generation).await;
    assert_eq!(heard.done.unwrap().finish, FinishReason::Stop(stop.clone()));
    assert_eq!(heard.text, text[..text.find(&stop).unwrap()]);
}

#[tokio::test]
async fn logprobs_are_those_of_the_model() {
    let prompt = tokens("The capacity of a vector is");
    let engine = engine(config(1024));
    let mut generation = engine.submit(Job { logprobs: Some(5), ..greedy(&prompt, 6) }).unwrap();
    let mut n = 0;
    while let Some(event) = generation.next().await {
        let Event::Token(token) = event else { continue };
        let logprob = token.logprob.unwrap();
        assert_eq!(logprob.top.len(), 5);
        assert_eq!(logprob.top[0], (token.id, logprob.logprob), "greedy takes the likeliest");
        assert!(logprob.top.is_sorted_by(|a, b| a.1 >= b.1));
        let sum: f32 = logprob.top.iter().map(|(_, l)| l.exp()).sum();
        assert!(sum > 0.0 && sum <= 1.0 + 1e-5, "{sum}");
        n += 1;
    }
    assert_eq!(n, 6);
}

/// The scores of a prompt are reported once and in order, even if parts are recomputed after preemption.
#[tokio::test]
async fn prompts_are_scored_once_however_often_they_are_computed() {
    let all = tokens(TEXT);
    let ask = |n: usize, max_new: u32| Job {
        logprobs: Some(2),
        prompt_logprobs: true,
        ..greedy(&all[..n], max_new)
    };
    let scores = async |generation: &mut GenerationHandle| {
        let mut scores: Vec<LogProb> = Vec::new();
        let mut tokens = 0;
        while let Some(event) = generation.next().await {
            match event {
                Event::Prompt(more) => {
                    assert_eq!(tokens, 0, "a token before the prompt was scored");
                    scores.extend(more);
                }
                Event::Token(_) => tokens += 1,
                Event::Admitted { cached_tokens, miss, .. } => {
                    assert_eq!((cached_tokens, miss), (0, None), "the index has no logits");
                }
                Event::Done(done) => assert_eq!(done.usage.completion_tokens, tokens),
                Event::Failed(failure) => panic!("{failure}"),
            }
        }
        (scores, tokens)
    };
    let roomy = engine(config(1024));
    let (expected, none) = scores(&mut roomy.submit(ask(60, 0)).unwrap()).await;
    assert_eq!((expected.len(), none), (59, 0));
    let narrow = engine(config(176));
    // Different salts, so that the requests share no blocks and exceed the cache.
    let salted = |i: u32| Job { salt: i.to_string().into(), ..ask(60, 40) };
    let mut running = submit_together(&narrow, (0..4).map(salted)).await;
    for generation in &mut running {
        let (found, tokens) = scores(generation).await;
        assert_eq!(tokens, 40);
        assert_eq!(found.len(), expected.len());
        for (a, b) in found.iter().zip(&expected) {
            assert!((a.logprob - b.logprob).abs() < 2e-3, "{a:?}, {b:?}");
            assert_eq!(a.top.len(), 2);
        }
    }
    assert!(narrow.stats().counters.preemptions > 0, "no request was computed again");
}

#[tokio::test]
async fn a_client_that_does_not_read_is_cut_off() {
    let engine = engine(config(8192));
    let mut generation = engine.submit(greedy(&tokens(TEXT), 6000)).unwrap();
    tokio::time::timeout(PATIENCE, engine.until_idle()).await.expect("it was not ended");
    let heard = receive(&mut generation).await;
    assert_eq!(heard.tokens.len(), 4096, "what waits is bounded");
    assert_eq!(heard.failure, Some(Failure::Unread(4096)), "{:?}", heard.done);
    cache_is_unused(&engine).await;
}

/// A panic on the engine thread ends every request without an event and wakes everything that waits for the
/// engine.
#[tokio::test]
async fn an_engine_that_dies_is_known_to_be_dead() {
    let engine = engine(config(1024));
    assert!(engine.is_alive());
    let job = Job { pace: Some(1), ..greedy(&tokens(TEXT), 600) };
    let mut generation = engine.submit(job).unwrap();
    assert_eq!(engine.inspect(|_| -> u32 { panic!("on purpose") }).await, None);
    tokio::time::timeout(PATIENCE, engine.until_ended()).await.expect("the end was not reported");
    assert!(!engine.is_alive());
    let heard = receive(&mut generation).await;
    assert!(heard.done.is_none() && heard.failure.is_none());
    tokio::time::timeout(PATIENCE, engine.until_idle()).await.expect("a dead engine is idle");
}

/// When the first step ended and how long it took.
#[derive(Clone, Default)]
struct FirstStep(Arc<std::sync::Mutex<Option<(Instant, Duration)>>>);

impl Watcher for FirstStep {
    fn stepped(&mut self, now_ns: u64, end_ns: u64, _: &mut EngineState) {
        if end_ns > now_ns {
            self.0.lock().unwrap().get_or_insert((Instant::now(), Duration::from_nanos(end_ns - now_ns)));
        }
    }
}

/// Regression: queue time was measured until the admission was reported, so it included the first step and
/// equalled the time to first token.
#[tokio::test]
async fn a_request_is_admitted_when_its_first_step_begins() {
    let (first, mut settings) = (FirstStep::default(), config(4096));
    settings.watchers.push(Box::new(first.clone()));
    let engine = engine(settings);
    let before = Instant::now();
    let mut generation = engine.submit(greedy(&tokens(TEXT), 1)).unwrap();
    let Some(Event::Admitted { at, .. }) = generation.next().await else { panic!("it was not admitted") };
    receive(&mut generation).await;
    // Wait until the watchers of that iteration have run.
    engine.inspect(|_| ()).await;
    let (ended, took) = first.0.lock().unwrap().unwrap();
    assert!(at >= before && at + took <= ended, "{took:?} were counted as waiting");
}

/// The sampler's repetition penalty sees the prompt when the first token is sampled.
#[tokio::test]
async fn a_repetition_penalty_looks_at_the_prompt() {
    let engine = engine(config(1024));
    let mut prompt = tokens(TEXT);
    let next = receive(&mut engine.submit(greedy(&prompt, 1)).unwrap()).await.tokens[0];
    prompt.insert(0, next);
    let plain = receive(&mut engine.submit(greedy(&prompt, 1)).unwrap()).await.tokens[0];
    assert!(prompt.contains(&plain));
    let sampling =
        SamplerConfig { repetition_penalty: 100.0, repetition_window: usize::MAX, ..SamplerConfig::greedy() };
    let penalised = Job { sampling, ..greedy(&prompt, 3) };
    let heard = receive(&mut engine.submit(penalised).unwrap()).await;
    assert_eq!(heard.tokens.len(), 3);
    assert!(heard.tokens.iter().all(|token| !prompt.contains(token)), "{:?}", heard.tokens);
    assert!(heard.tokens[0] != heard.tokens[1] && heard.tokens[1] != heard.tokens[2], "{:?}", heard.tokens);
}

/// A client that hangs up in mid-resize changed the cache, and the engine went on to tell the old capacity.
#[tokio::test]
async fn a_resize_that_is_not_waited_for_is_told() {
    let engine = engine(config(512));
    let mut resize = Box::pin(engine.resize(1024, PATIENCE));
    // Polled once: the engine has the order.
    let sent = |context: &mut std::task::Context<'_>| {
        let _ = resize.as_mut().poll(context);
        std::task::Poll::Ready(())
    };
    std::future::poll_fn(sent).await;
    drop(resize);
    assert_eq!(engine.inspect(|state| state.scheduler.free_cells()).await, Some(1024));
    assert_eq!(engine.capacity_tokens(), 1024);
}
