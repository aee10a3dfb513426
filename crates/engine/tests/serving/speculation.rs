//! The serving engine speculates, and every request gets the same answer as without drafts: text, log-probabilities,
//! and the way it ends.
use crate::engines::*;
use crate::oracle::Oracle;
use kvist_device::{Registry, Storage};
use kvist_engine::devices;
use kvist_engine::generate::{GenerateArgs, Limits, generate};
use kvist_engine::memory::CacheConfig;
use kvist_engine::sampler::{Sampler, SamplerConfig};
use kvist_engine::serving::*;
use kvist_engine::session::ModelSession;
use kvist_engine::speculate::{Bounds, DraftModel, Drafter, Suffix};
use kvist_engine::text::Stops;
use kvist_model::Model;
use kvist_testing::SplitMix64;
use std::sync::Arc;
use std::time::{Duration, Instant};

const TEXT: &str = "Returns the number of elements in the vector, also referred to as its length. The capacity of a \
     vector is the amount of space allocated for any future elements that will be added onto the vector. This is not \
     to be confused with the length of a vector, which specifies the number of actual elements within the vector.";
const NEW_TOKENS: u32 = 60;

/// Tokens with even and odd ids alternate; the text is complete after 30.
struct Alternating(u32);

impl Constraint for Alternating {
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), String> {
        let first = (self.0 + 1) % 2;
        logits.iter_mut().skip(first as usize).step_by(2).for_each(|logit| *logit = f32::NEG_INFINITY);
        Ok(())
    }
    fn accept(&mut self, token: u32) -> Result<bool, String> {
        assert_eq!(token % 2, self.0 % 2, "token {} of the text", self.0);
        self.0 += 1;
        Ok(self.0 == 30)
    }
}

fn sampled(seed: u64, frequency_penalty: f32) -> SamplerConfig {
    SamplerConfig {
        temperature: 0.8,
        top_p: 0.95,
        repetition_penalty: 1.05,
        repetition_window: 16,
        frequency_penalty,
        seed,
        ..SamplerConfig::greedy()
    }
}

/// A batch of eight: branches of one prompt, a prompt of several chunks, and every way to choose tokens. `stop` is a stop
/// string.
fn jobs(all: &[u32], stop: &str) -> Vec<Job> {
    let job = |prompt: &[u32]| greedy(prompt, NEW_TOKENS);
    vec![
        job(&all[..40]),
        Job { sampling: sampled(1, 0.0), ..job(&all[..40]) },
        Job { sampling: sampled(2, 0.4), ..job(&all[..40]) },
        job(all),
        Job { logit_bias: [(300, 3.0), (301, -5.0)].into(), ..job(&all[..33]) },
        Job { stop: Arc::new(Stops::new(&[stop.to_owned()])), ..job(&all[..40]) },
        Job { constraint: Some(Box::new(Alternating(0))), ..job(&all[10..20]) },
        Job { logprobs: Some(3), prompt_logprobs: true, sampling: sampled(3, 0.0), ..job(&all[..50]) },
    ]
}

/// What `kvist run` writes.
fn alone(
    model: &Arc<Model>,
    registry: &Registry,
    kv: Storage,
    prompt: &[u32],
    sampling: SamplerConfig,
) -> (Vec<u32>, String) {
    let config = CacheConfig { k: kv, v: kv.for_values(), ..CacheConfig::new(1024) };
    let mut session = ModelSession::new(model, registry, &config).unwrap();
    let limits =
        Limits { max_tokens: NEW_TOKENS as usize, stop: Vec::new(), ignore_eos: true, no_cache: false };
    let mut sampler = Sampler::new(sampling).unwrap();
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

/// All drafters, for these texts.
fn drafters(texts: &[Vec<u32>]) -> Vec<Box<dyn Drafter>> {
    let vocab = model().config().vocab as u32;
    let cache = CacheConfig { max_rows: 32, max_step_tokens: 64, ..CacheConfig::new(2048) };
    vec![
        Box::new(Suffix::default()),
        Box::new(Oracle { texts: texts.to_vec(), vocab, random: SplitMix64(7) }),
        Box::new(DraftModel::new(model(), model(), &devices::all(), &cache).unwrap()),
    ]
}

#[tokio::test]
async fn the_same_answers_with_drafts() {
    let all = tokens(TEXT);
    let (_, text) = alone(model(), &devices::all(), Storage::F32, &all[..40], SamplerConfig::greedy());
    let words: Vec<&str> = text.split_whitespace().collect();
    let stop = format!("{} {}", words[5], words[6]);

    // Without drafts, one by one.
    let mut expected = Vec::new();
    for job in jobs(&all, &stop) {
        let (prompt, sampling) = (job.prompt.clone(), job.sampling);
        let is_plain = job.logit_bias.is_empty() && job.constraint.is_none() && job.stop.is_empty();
        let heard = receive(&mut engine(config(1024)).submit(job).unwrap()).await;
        if is_plain {
            let alone = alone(model(), &devices::all(), Storage::F32, &prompt, sampling);
            assert_eq!((&heard.tokens, &heard.text), (&alone.0, &alone.1));
        }
        expected.push(([&prompt[..], &heard.tokens].concat(), heard));
    }
    let finishes: Vec<_> = expected.iter().map(|(_, heard)| heard.done.clone().unwrap().finish).collect();
    assert_eq!(finishes[5], FinishReason::Stop(stop.clone()));
    assert_eq!((&finishes[6], expected[6].1.tokens.len()), (&FinishReason::EndOfText, 30));
    let texts: Vec<Vec<u32>> = expected.iter().map(|(text, _)| text.clone()).collect();

    // With room for all; with room for about two requests, so that some are preempted; with blocks of one token.
    for (context, block_tokens, max) in [(1024, 16, 64), (192, 16, 40), (1024, 1, 64), (256, 7, 17)] {
        for (d, drafter) in drafters(&texts).into_iter().enumerate() {
            let mut config = config(context);
            config.paged.block_tokens = block_tokens;
            config.scheduler.max_batch_tokens = max;
            config.scheduler.wait_for_prefix = d == 0;
            let engine = engine(speculating(config, SMALL, drafter));
            let mut usage = DraftUsage::default();
            for round in 0..2 {
                let mut generations = submit_together(&engine, jobs(&all, &stop)).await;
                for (i, generation) in generations.iter_mut().enumerate() {
                    let heard = receive(generation).await;
                    let what = format!(
                        "job {i}, drafter {d}, round {round}, {context} cells, blocks of {block_tokens}"
                    );
                    let (_, expected) = &expected[i];
                    assert_eq!(heard.tokens, expected.tokens, "{what}");
                    assert_eq!(heard.text, expected.text, "{what}");
                    // Printed numbers differ if one of their bits does.
                    let numbers =
                        |heard: &Received| format!("{:?} {:?}", heard.prompt_scores, heard.logprobs);
                    assert_eq!(numbers(&heard), numbers(expected), "{what}");
                    let (done, plain) = (heard.done.unwrap(), expected.done.as_ref().unwrap());
                    assert_eq!(done.finish, plain.finish, "{what}");
                    assert_eq!(done.usage.completion_tokens, plain.usage.completion_tokens, "{what}");
                    assert_eq!(plain.usage.drafts, None);
                    let drafts = done.usage.drafts.expect("the engine speculates");
                    usage.draft_tokens += drafts.draft_tokens;
                    usage.accepted_tokens += drafts.accepted_tokens;
                }
            }
            engine.until_idle().await;
            let used = engine.inspect(|state| state.scheduler.used_cells()).await.unwrap();
            assert_eq!(used, 0, "a rejected node is still held");
            let stats = engine.stats();
            let (counters, counts) = (stats.counters, stats.speculation.unwrap());
            assert_eq!(counters.failed_steps, 0);
            assert_eq!(counters.preemptions > 0, context < 1024, "{counters:?}");
            assert!(usage.accepted_tokens > 100, "drafter {d}: {usage:?}");
            assert_eq!(
                (counters.draft_tokens, counters.accepted_tokens),
                (usage.draft_tokens, usage.accepted_tokens)
            );
            assert_eq!((counts.drafts, counts.drafted), (counters.drafts, counters.draft_tokens));
            assert_eq!(counts.accepted_per_position.iter().sum::<u64>(), counters.accepted_tokens);
            assert_eq!(counts.accepted_per_position.len(), 4, "an entry for each position");
        }
    }
}

/// Packed weights and a packed cache with `--deterministic`.
#[tokio::test]
async fn the_same_text_of_packed_numbers_with_drafts() {
    let (model, registry) = deterministic();
    let all = tokens(TEXT);
    let prompts: Vec<&[u32]> =
        vec![&all[..40], &all, &all[..33], &all[10..20], &all[..40], &all[5..30], &all[..21], &all[3..50]];
    for kv in [Storage::Q8, Storage::T4_O] {
        let alone: Vec<Vec<u32>> = prompts
            .iter()
            .map(|prompt| alone(model, registry, kv, prompt, SamplerConfig::greedy()).0)
            .collect();
        let texts =
            prompts.iter().zip(&alone).map(|(prompt, answer)| [prompt, &answer[..]].concat()).collect();
        let mut config = config(1024);
        (config.paged.cache.k, config.paged.cache.v) = (kv, kv.for_values());
        // Room for the largest trees of all requests in a step, which fill the recent rows.
        config.scheduler.max_batch_tokens = 160;
        let bounds = Bounds { tokens: 16, depth: 8, width: 4 };
        let vocab = model.config().vocab as u32;
        let oracle = Oracle { texts, vocab, random: SplitMix64(1) };
        let engine =
            Engine::start(model.clone(), registry, speculating(config, bounds, Box::new(oracle))).unwrap();
        for round in 0..2 {
            let mut generations: Vec<GenerationHandle> =
                prompts.iter().map(|prompt| engine.submit(greedy(prompt, NEW_TOKENS)).unwrap()).collect();
            for (i, generation) in generations.iter_mut().enumerate() {
                let heard = receive(generation).await;
                assert_eq!(heard.tokens, alone[i], "{kv}, round {round}, prompt {i}");
            }
        }
        assert!(engine.stats().counters.accepted_tokens > 100);
    }
}

/// What one tenant's answers taught is not proposed to another.
#[tokio::test]
async fn tenants_do_not_draft_from_each_others_answers() {
    let engine = engine(speculating(config(1024), SMALL, Box::new(Suffix::default())));
    let drafts = async |salt: &str| {
        let job = Job { salt: salt.into(), ..greedy(&tokens(TEXT)[..40], NEW_TOKENS) };
        receive(&mut engine.submit(job).unwrap()).await.done.unwrap().usage.drafts.unwrap()
    };
    let (first, again, other) = (drafts("ann").await, drafts("ann").await, drafts("ben").await);
    assert!(again.accepted_tokens > first.accepted_tokens, "nothing was learned: {first:?}, {again:?}");
    assert_eq!(other, first, "as if there were no other tenant");
}

/// A step gives several tokens, and the pace counts tokens.
#[tokio::test]
async fn a_pace_counts_accepted_drafts() {
    let prompt = &tokens(TEXT)[..40];
    let (answer, _) = alone(model(), &devices::all(), Storage::F32, prompt, SamplerConfig::greedy());
    let texts = vec![[prompt, &answer].concat()];
    let oracle = Oracle { texts, vocab: model().config().vocab as u32, random: SplitMix64(3) };
    let engine = engine(speculating(config(1024), SMALL, Box::new(oracle)));
    let begun = Instant::now();
    let job = Job { pace: Some(20), ..greedy(prompt, NEW_TOKENS) };
    let done = receive(&mut engine.submit(job).unwrap()).await.done.unwrap();
    assert!(done.usage.drafts.unwrap().accepted_tokens > 10);
    // Sixty tokens at twenty a second, less those of the last step.
    let took = begun.elapsed();
    assert!(took >= Duration::from_millis(2600), "{took:?}");
}

/// A drafter that fails ends speculation, and no request.
#[tokio::test]
async fn a_drafter_that_fails_ends_speculation_alone() {
    struct Fails(u32);
    impl Drafter for Fails {
        fn propose(
            &mut self,
            requests: &mut [kvist_engine::speculate::DraftRequest<'_>],
        ) -> Result<(), kvist_model::Error> {
            self.0 += 1;
            assert!(self.0 <= 5, "it is asked again after a failure");
            if self.0 == 5 {
                return Err(kvist_model::Error::Usage("on purpose".into()));
            }
            for request in requests {
                request.tree.push(None, 7, 0.5);
            }
            Ok(())
        }
    }
    let prompt = &tokens(TEXT)[..40];
    let (expected, _) = alone(model(), &devices::all(), Storage::F32, prompt, SamplerConfig::greedy());
    let engine = engine(speculating(config(1024), SMALL, Box::new(Fails(0))));
    let heard = receive(&mut engine.submit(greedy(prompt, NEW_TOKENS)).unwrap()).await;
    assert_eq!((heard.tokens, heard.failure), (expected, None));
    let drafts = heard.done.unwrap().usage.drafts;
    assert_eq!(drafts.map(|drafts| drafts.draft_tokens), Some(4), "the counts stay");
}
