//! Speculative decoding changes no text: every drafter, kind of cache and fixture, and sampling to the last token.
use crate::common::*;
use crate::oracle::Oracle;
use kvist_cache::SeqId;
use kvist_device::Storage;
use kvist_engine::devices;
use kvist_engine::executor::SampledToken;
use kvist_engine::generate::{GenerateArgs, Generation, GenerationEnd, Limits, Speculation, generate};
use kvist_engine::memory::CacheConfig;
use kvist_engine::sampler::{Sampler, SamplerConfig};
use kvist_engine::speculate::*;
use kvist_model::{Error, Model, ModelFile};
use kvist_testing::SplitMix64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

const KINDS: [&str; 5] = ["contiguous", "ring", "cells", "tree", "paged"];
const BOUNDS: Bounds = Bounds { tokens: 7, depth: 4, width: 3 };

fn drafters(model: &Arc<Model>, text: &[u32], config: &CacheConfig) -> Vec<Box<dyn Drafter>> {
    let vocab = model.config().vocab as u32;
    let draft = CacheConfig { max_rows: 64, max_step_tokens: 64, ..config.clone() };
    let itself = DraftModel::new(model, model, &devices::on(&compute()), &draft).unwrap();
    vec![
        Box::new(Ngram { min: 1, max: 8 }),
        Box::new(Suffix::default()),
        Box::new(Oracle { texts: vec![text.to_vec()], vocab, random: SplitMix64(text.len() as u64) }),
        Box::new(itself),
    ]
}

fn run(
    model: &Arc<Model>,
    config: &CacheConfig,
    prompt: &[u32],
    sampler: SamplerConfig,
    n: usize,
    speculator: Option<&mut Speculator>,
) -> Generation {
    let mut session = session(model, config);
    let limits = Limits { max_tokens: n, stop: vec![], ignore_eos: true, no_cache: false };
    let mut sampler = Sampler::new(sampler).unwrap();
    let speculation = speculator.map(|speculator| Speculation { speculator });
    let what = GenerateArgs {
        session: &mut session,
        seq: SeqId::ONLY,
        before: &[],
        prompt,
        tokenizer: None,
        sampler: &mut sampler,
        limits: &limits,
        speculation,
    };
    generate(what, &mut ()).unwrap()
}

fn speculator(drafter: Box<dyn Drafter>) -> Speculator {
    Speculator::new(vec![drafter], SpeculationConfig { bounds: BOUNDS, adaptive: false })
}

/// A cache that verifies `BOUNDS`, of `kind`, with K and V as `storage`.
fn cache(kind: &str, context: u32, storage: Storage) -> CacheConfig {
    CacheConfig { k: storage, v: storage, max_rows: 32, ..exact(kind, context, 32) }
}

#[test]
fn greedy_texts_are_the_same() {
    let mut accepted = [0; 4];
    for case in cases("parity") {
        let expected = Expected::read(&case);
        let model = load(ModelFile::Path(case.clone())).unwrap();
        let n = expected.generated.len();
        let context = (expected.tokens.len() + n + 16) as u32;
        for storage in [Storage::F32, Storage::F16] {
            let greedy = SamplerConfig::greedy();
            let plain =
                run(&model, &cache("contiguous", context, storage), &expected.tokens, greedy, n, None).tokens;
            let text = [&expected.tokens[..], &plain].concat();
            for kind in KINDS {
                let config = cache(kind, context, storage);
                for (i, drafter) in drafters(&model, &text, &config).into_iter().enumerate() {
                    let mut speculator = speculator(drafter);
                    let out = run(&model, &config, &expected.tokens, greedy, n, Some(&mut speculator));
                    assert_eq!(out.tokens, plain, "{case:?}, {kind} of {storage}, drafter {i}");
                    let counts = speculator.counts();
                    assert_eq!(counts.target_passes + counts.accepted, n as u64 - 1, "{counts:?}");
                    accepted[i] += counts.accepted;
                }
            }
        }
    }
    assert!(accepted.iter().all(|n| *n > 1000), "drafts were hardly accepted: {accepted:?}");
}

/// Sampled texts are the same too, with the same seed: verification draws as decoding would. Penalties see the same text.
#[test]
fn sampled_texts_are_the_same() {
    let model = load(ModelFile::Embedded).unwrap();
    let prompt: Vec<u32> = (40..80).collect();
    for (seed, penalty) in [(1, 0.0), (2, 0.7), (3, -0.3)] {
        let sampler = SamplerConfig {
            temperature: 0.9,
            top_p: 0.95,
            repetition_penalty: 1.1,
            repetition_window: 16,
            frequency_penalty: penalty,
            seed,
            ..SamplerConfig::greedy()
        };
        let config = cache("tree", 200, Storage::F16);
        let plain = run(&model, &config, &prompt, sampler, 100, None).tokens;
        let text = [&prompt[..], &plain].concat();
        let mut accepted = 0;
        for drafter in drafters(&model, &text, &config) {
            let mut speculator = speculator(drafter);
            let out = run(&model, &config, &prompt, sampler, 100, Some(&mut speculator));
            assert_eq!(out.tokens, plain, "seed {seed}");
            accepted += speculator.counts().accepted;
        }
        assert!(accepted > 30, "{accepted} draft tokens accepted");
    }
}

/// `auto` decides by times, which differ from run to run; its texts do not.
#[test]
fn what_pays_changes_no_text() {
    let model = load(ModelFile::Embedded).unwrap();
    let prompt: Vec<u32> = (40..80).chain(40..80).collect();
    let config = cache("tree", 400, Storage::F16);
    let greedy = SamplerConfig::greedy();
    let plain = run(&model, &config, &prompt, greedy, 200, None).tokens;
    let text = [&prompt[..], &plain].concat();
    let config_of = SpeculationConfig { bounds: BOUNDS, adaptive: true };
    let mut speculator = Speculator::new(drafters(&model, &text, &config), config_of);
    assert_eq!(run(&model, &config, &prompt, greedy, 200, Some(&mut speculator)).tokens, plain);
    // And a second text with the same drafters: nothing of the first one is left that could disturb it.
    let out = run(&model, &config, &prompt[..50], greedy, 100, None).tokens;
    let mut speculator = Speculator::new(
        vec![Box::new(Suffix::default()), Box::new(Ngram::default())],
        SpeculationConfig { bounds: BOUNDS, adaptive: true },
    );
    for _ in 0..2 {
        assert_eq!(run(&model, &config, &prompt[..50], greedy, 100, Some(&mut speculator)).tokens, out);
    }
}

/// Near its end, a cache has room for a token but not for a tree: the text ends where it would without drafts.
#[test]
fn a_full_cache_ends_the_same_text() {
    let model = load(ModelFile::Embedded).unwrap();
    let prompt: Vec<u32> = (40..72).collect();
    for kind in ["contiguous", "cells", "tree", "paged"] {
        let config = cache(kind, 64, Storage::F32);
        let plain = run(&model, &config, &prompt, SamplerConfig::greedy(), 100, None);
        let text = [&prompt[..], &plain.tokens, &[7; 8]].concat();
        for drafter in drafters(&model, &text, &config) {
            let mut speculator = speculator(drafter);
            let out = run(&model, &config, &prompt, SamplerConfig::greedy(), 100, Some(&mut speculator));
            assert_eq!((&out.tokens, &out.finish), (&plain.tokens, &GenerationEnd::CacheFull), "{kind}");
        }
    }
}

/// 10^5 pairs of tokens drawn through trees, against the exact distribution of a small model (Pearson's chi-squared).
#[test]
fn verified_samples_have_the_models_distribution() {
    const VOCAB: usize = 5;
    // Logits after nothing, and after each first token.
    let logits = |before: Option<u32>| -> Vec<f32> {
        let at = before.map_or(0, |token| token as usize + 1);
        (0..VOCAB).map(|i| ((i * 7 + at * 3) % 11) as f32 / 4.0).collect()
    };
    let probabilities = |before| {
        let weights: Vec<f64> = logits(before).iter().map(|x| f64::from(*x).exp()).collect();
        let sum: f64 = weights.iter().sum();
        weights.into_iter().map(move |w| w / sum).collect::<Vec<_>>()
    };
    let mut tree = DraftTree::default();
    for (token, children) in [(1, &[0, 3][..]), (4, &[2]), (0, &[])] {
        let node = tree.push(None, token, 0.3);
        for child in children {
            tree.push(Some(node), *child, 0.3);
        }
    }
    let config = SamplerConfig { temperature: 1.0, seed: 11, ..SamplerConfig::greedy() };
    let mut sampler = Sampler::new(config).unwrap();
    let mut counts = [[0u32; VOCAB]; VOCAB];
    let draws = 100_000;
    for _ in 0..draws {
        let mut verified = Verified::default();
        let mut drawn: Vec<u32> = Vec::new();
        let choose = |row: usize| {
            let before = row.checked_sub(1).map(|node| tree.tokens()[node]);
            let token = sampler.sample(&logits(before))?;
            drawn.push(token);
            Ok::<_, Error>(SampledToken { token, finished: drawn.len() == 2 })
        };
        verify(&tree, choose, &mut verified).unwrap();
        if verified.tokens.len() == 1 {
            // Decoding goes on with a pass of its own.
            verified.tokens.push(sampler.sample(&logits(Some(verified.tokens[0]))).unwrap());
        }
        counts[verified.tokens[0] as usize][verified.tokens[1] as usize] += 1;
    }
    let first = probabilities(None);
    let mut chi_squared = 0.0;
    for (a, row) in counts.iter().enumerate() {
        for (b, &count) in row.iter().enumerate() {
            let expected = first[a] * probabilities(Some(a as u32))[b] * f64::from(draws);
            chi_squared += (f64::from(count) - expected).powi(2) / expected;
        }
    }
    // 24 degrees of freedom: 51.2 is exceeded once in a thousand. The seed is fixed, so this always comes out the same.
    assert!(chi_squared < 51.2, "chi-squared {chi_squared}");
}

/// Texts with a common beginning share its cells in the draft model's cache, so a fan-out over a long prompt fits where copies
/// would not; and a text for which there is no room costs the others nothing.
#[test]
fn branches_share_the_draft_models_cache() {
    let model = load(ModelFile::Embedded).unwrap();
    let trunk: Vec<u32> = (0..100).map(|i| 40 + i * 7 % 90).collect();
    let texts: Vec<Vec<u32>> = (0..8).map(|i| [&trunk[..], &[50 + i, 60, 70 + i]].concat()).collect();
    let open = |context| {
        let config = CacheConfig { max_rows: 64, ..exact("tree", context, 64) };
        DraftModel::new(&model, &model, &devices::on(&compute()), &config).unwrap()
    };
    let propose = |drafter: &mut DraftModel, texts: &[(u64, &[u32])]| {
        let mut trees = vec![DraftTree::default(); texts.len()];
        let requests = texts.iter().zip(&mut trees);
        let mut requests: Vec<DraftRequest<'_>> = requests
            .map(|((id, tokens), tree)| DraftRequest { id: *id, salt: "", tokens, bounds: BOUNDS, tree })
            .collect();
        drafter.prepare(&mut requests).unwrap();
        drafter.propose(&mut requests).unwrap();
        trees
    };
    // A draft model computes a long prompt over several proposals.
    let settled = |drafter: &mut DraftModel, texts: &[(u64, &[u32])]| {
        (0..16).for_each(|_| drop(propose(drafter, texts)));
        propose(drafter, texts)
    };
    let all: Vec<(u64, &[u32])> = (0..).zip(&texts).map(|(id, text)| (id, &text[..])).collect();
    let expected: Vec<DraftTree> =
        all.iter().map(|text| settled(&mut open(1000), &[*text]).remove(0)).collect();
    assert!(expected.iter().all(|tree| tree.len() == BOUNDS.tokens as usize), "{expected:?}");

    let mut drafter = open(300);
    assert!(settled(&mut drafter, &all[..1]) == expected[..1]);
    assert!(propose(&mut drafter, &all[1..2]) == expected[1..2], "the trunk is there already");
    assert!(settled(&mut drafter, &all) == expected);
    // Branches end, and what they shared stays for the others.
    (0..4).for_each(|id| drafter.end(id, "", &[], 0));
    assert!(settled(&mut drafter, &all[4..]) == expected[4..]);

    let long: Vec<u32> = (0..400).map(|i| 40 + i * 11 % 90).collect();
    let mut with_long = all.clone();
    with_long.push((9, &long));
    for n in 0..100 {
        let trees = propose(&mut drafter, &with_long);
        assert!(n < 16 || trees[..8] == expected, "proposal {n}");
        assert!(trees[8].is_empty(), "400 tokens do not fit into 300 cells");
    }
}

/// A drafter that costs more time than it saves reads no hidden states, except shortly before it is tried again.
#[test]
fn a_drafter_that_loses_reads_nothing() {
    struct Loser(Vec<kvist_cache::LayerId>, Arc<AtomicU32>);
    impl Drafter for Loser {
        fn taps(&self) -> &[kvist_cache::LayerId] {
            &self.0
        }
        fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<(), Error> {
            self.1.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(20)); // at least
            for request in requests {
                request.tree.push(None, 7, 0.001);
            }
            Ok(())
        }
    }
    let taps = vec![kvist_cache::LayerId(1)];
    let config = SpeculationConfig { bounds: BOUNDS, adaptive: true };
    let trials = Arc::new(AtomicU32::new(0));
    let mut speculator = Speculator::new(vec![Box::new(Loser(taps.clone(), trials.clone()))], config);
    let text = DraftContext { id: 1, salt: "", tokens: &[1, 2, 3], max_new: 100 };
    let mut drafts = Vec::new();
    // Passes in a row with hidden states.
    let (mut read, mut in_a_row) = (0, 0);
    for pass in 0..1000 {
        let before = trials.load(Ordering::Relaxed);
        speculator.propose(&[text], 0, 16, false, &mut drafts).unwrap();
        in_a_row = if speculator.taps() == taps { in_a_row + 1 } else { 0 };
        read += u32::from(in_a_row > 0);
        if trials.load(Ordering::Relaxed) > before {
            let has_all = in_a_row == pass + 1; // they never stopped
            assert!(has_all || in_a_row > 10, "pass {pass}: a trial needs the hidden states of some tokens");
        }
        speculator.passed(Some((1, Duration::from_millis(10))));
    }
    // A trial takes two passes or more; they may take two at first, and 1 % of the others.
    let trials = trials.load(Ordering::Relaxed);
    assert!((1..=8).contains(&trials), "{trials} trials");
    assert!(read < 200, "{read} of 1000 passes had hidden states");
}

#[test]
fn a_draft_model_of_another_family_is_refused() {
    let target = load(ModelFile::Embedded).unwrap();
    let other = load(ModelFile::Path(cases("parity")[0].clone())).unwrap();
    let config = cache("tree", 64, Storage::F16);
    let refused =
        DraftModel::new(&other, &target, &devices::on(&compute()), &config).err().unwrap().to_string();
    assert!(refused.contains("vocabulary of") || refused.contains("another tokenizer"), "{refused}");
    assert!(refused.contains("same family"), "{refused}");
}
