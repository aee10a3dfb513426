//! Sessions that keep only some of their tokens: what stays is what a naive implementation over exported attention keeps,
//! cells stay within their bound, and a budget that is never exceeded changes nothing.
use crate::common::{f32_model as model, *};
use kvist_cache::kinds::BLOCK_TOKENS;
use kvist_cache::{Cache, GroupId, SeqId, Span, Step, StepPlan, StepRequest, kinds};
use kvist_device::reference::Reference;
use kvist_device::*;
use kvist_engine::chat::Chat;
use kvist_engine::frozen::{FrozenPrefix, FrozenText, begin_with, freeze, share};
use kvist_engine::generate::{GenerateArgs, GenerationEnd, Limits, generate};
use kvist_engine::keep::{KeepBy, KeepConfig, OBSERVED, POOLED};
use kvist_engine::memory::{CacheConfig, MemoryPlan};
use kvist_engine::sampler::{Sampler, SamplerConfig};
use kvist_engine::saved::{self, Origin, SavedSession, SavedText};
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use kvist_model::weights::WeightFormat;
use kvist_model::{Model, ModelFile, Opened};
use std::collections::BTreeMap;
use std::sync::Arc;

const ONLY: SeqId = SeqId::ONLY;

fn keep(text: &str) -> Option<KeepConfig> {
    Some(text.parse().unwrap())
}

/// Tokens without a meaning; every vocabulary of the fixtures has them.
fn tokens(n: u32) -> Vec<u32> {
    (0..n).map(|i| 3 + (i * i * 7 + i * 13 + (i / 5) * 3) % 60).collect()
}

fn stored(session: &mut ModelSession) -> Vec<u32> {
    session.cache().sequences().unwrap().stored(ONLY).unwrap().into_iter().flatten().collect()
}

/// The model over the scalar reference, which exports attention in f64, and a cache that is thinned by hand.
struct Naive {
    network: Box<dyn Network>,
    cache: Cache,
    plan: StepPlan,
    /// What every step gave to each position, with its number of queries that count.
    steps: Vec<(u32, BTreeMap<u32, f64>)>,
    keep: KeepConfig,
}

impl Naive {
    fn new(file: &ModelFile, config: &CacheConfig) -> Naive {
        let budget = MemoryBudget::unlimited();
        let model = Model::load(file, Reference, &texts(), &budget, &mut |_, _| {}).unwrap();
        let groups = config.groups(model.config());
        let mut cache =
            Cache::new(groups.iter().map(|group| kinds::build(&config.kind, group).unwrap()).collect());
        cache.sequences().unwrap().seq_new(ONLY).unwrap();
        let spec =
            PoolSpec { capacity_cells: cache.capacity_cells(), ..config.pool_spec(model.layout(), &budget) };
        let network = model.open(&Reference, &spec, &config.step_limits()).unwrap();
        Naive { network, cache, plan: StepPlan::default(), steps: Vec::new(), keep: config.keep.unwrap() }
    }

    /// Computes tokens and returns the logits of the last one.
    fn feed(&mut self, tokens: &[u32]) -> Vec<f32> {
        let n = tokens.len() as u32;
        let spans = [Span::chain(ONLY, self.cache.next_position(ONLY).unwrap(), n)];
        let free = self.cache.occupancy().map(|group| group.free_cells).min().unwrap();
        if n > free {
            self.thin();
        }
        let mass = match self.keep.by {
            KeepBy::None => None,
            KeepBy::Last => Some(MassQueries::Last(OBSERVED)),
            KeepBy::Attention => Some(MassQueries::All),
        };
        let step = Step::begin(&mut self.cache, &StepRequest { spans: &spans }, &mut self.plan).unwrap();
        let rows = [WantedRow::logits(n - 1)];
        let inputs = StepInputs { tokens, rows: &rows, taps: &[], given: Given::Nothing, mass };
        InFlight::submit(step, &mut *self.network, &inputs).unwrap().finish().unwrap().commit();
        let output = self.network.output();
        let mut received: BTreeMap<u32, f64> = BTreeMap::new();
        for g in 0..self.plan.n_groups() {
            for (_, position, mass) in output.mass.received(&self.plan, GroupId(g as u16)) {
                *received.entry(position).or_default() += f64::from(mass);
            }
        }
        self.steps.push((n.min(OBSERVED), received));
        output.logits().to_vec()
    }

    fn importance(&self, stored: &[u32]) -> Vec<f64> {
        let mut steps = self.steps.as_slice();
        if self.keep.by == KeepBy::Last {
            // The newest steps that have as many queries as are observed.
            let enough = |from: &usize| self.steps[*from..].iter().map(|(n, _)| n).sum::<u32>() >= OBSERVED;
            let from = (0..self.steps.len()).rev().find(enough).unwrap_or(0);
            steps = &steps[from..];
        }
        let sum = |position: &u32| -> f64 { steps.iter().filter_map(|(_, step)| step.get(position)).sum() };
        let sums: Vec<f64> = stored.iter().map(sum).collect();
        if self.keep.by != KeepBy::Last {
            return sums;
        }
        let near = |i: usize| &sums[i.saturating_sub(POOLED)..(i + POOLED + 1).min(sums.len())];
        (0..sums.len()).map(|i| near(i).iter().copied().fold(0.0, f64::max)).collect()
    }

    /// Removes token by token what is neither a sink, nor recent, nor among the most important.
    fn thin(&mut self) {
        let next = self.cache.next_position(ONLY).unwrap();
        let stored: Vec<u32> =
            self.cache.sequences().unwrap().stored(ONLY).unwrap().into_iter().flatten().collect();
        let importance = self.importance(&stored);
        let keep = self.keep.keep;
        let mut middle: Vec<(f64, u32)> = importance.into_iter().zip(stored).collect();
        middle.retain(|(_, position)| *position >= keep.sinks && position + keep.recent < next);
        middle.sort_by(|a, b| b.partial_cmp(a).unwrap());
        for (_, position) in middle.into_iter().skip(keep.top_k as usize) {
            self.cache.sequences().unwrap().seq_rm(ONLY, position, position + 1).unwrap();
        }
    }
}

/// The CPU's kernels and the session's bookkeeping choose what a naive H2O, SnapKV and StreamingLLM choose.
#[test]
fn what_stays_is_what_a_naive_implementation_keeps() {
    // Shared K and V; windows and soft caps; windows and sinks of heads.
    for family in ["llama-gqa", "llama-shared-kv", "gemma2", "gpt-oss"] {
        let file = ModelFile::Path(fixtures("parity").join(family));
        for by in KeepBy::ALL {
            for (kind, step) in [("cells", 1), ("cells", 7), ("tree", 16)] {
                let keep = keep(&format!("sinks=2,recent=9,top=13,by={}", by.name()));
                let config = CacheConfig { keep, recent: Recent::default(), ..exact(kind, 120, 16) };
                let mut session = session(&load_f32(&file), &config);
                let reference = CacheConfig { backend: "reference".into(), ..config.clone() };
                let mut naive = Naive::new(&file, &reference);
                for (i, chunk) in tokens(120).chunks(step).enumerate() {
                    session.forward(&[SequenceInput::chain(ONLY, chunk)], LogitRows::LastOfEach).unwrap();
                    let expected = naive.feed(chunk);
                    let what = format!("{family} {kind} by {} step {i} of {step}", by.name());
                    let kept: Vec<u32> = naive
                        .cache
                        .sequences()
                        .unwrap()
                        .stored(ONLY)
                        .unwrap()
                        .into_iter()
                        .flatten()
                        .collect();
                    assert_eq!(stored(&mut session), kept, "{what}");
                    let difference = max_difference(session.logits(), &expected);
                    assert!(difference < 2e-3, "{what}: logits differ by {difference}");
                }
                assert!(session.removed_tokens() >= 120 - 24 - 16);
            }
        }
    }
}

/// A budget that no text exceeds: the same tokens as without one.
#[test]
fn a_budget_that_is_not_exceeded_changes_nothing() {
    let prompt = tokens(100);
    for kind in ["cells", "tree", "paged"] {
        for by in ["none", "last", "attention"] {
            let plain = exact(kind, 160, 32);
            let kept =
                CacheConfig { keep: keep(&format!("sinks=4,recent=100,top=60,by={by}")), ..plain.clone() };
            let expected = greedy(&mut session(model(), &plain), &prompt, 60, false);
            let mut session = session(model(), &kept);
            assert_eq!(greedy(&mut session, &prompt, 60, false), expected, "{kind} by {by}");
            assert_eq!(session.removed_tokens(), 0);
        }
    }
}

/// Prompts and answers of ten times the budget: cells and bytes stay within the bound of the budget and a chunk.
#[test]
fn a_text_of_ten_times_the_budget_runs_in_the_cells_of_the_budget() {
    let text = tokens(400);
    for (kind, block) in [("cells", 1), ("tree", 1), ("paged", BLOCK_TOKENS)] {
        for (k, by) in [("f16", "attention"), ("q8", "last"), ("q4", "none")] {
            let keep = keep(&format!("sinks=4,recent=20,top=16,by={by}"));
            let storage: Storage = k.parse().unwrap();
            let config = CacheConfig { k: storage, v: storage, keep, max_rows: 1, ..exact(kind, 1000, 16) };
            let budget = keep.unwrap().budget(block);
            let bound = (budget + 16).next_multiple_of(block);
            let mut session = session(model(), &config);
            assert_eq!(session.cache().capacity_cells()[0], bound, "{kind}");
            let registry = kvist_engine::devices::on(&compute());
            let plan = MemoryPlan::of_session(model().config(), &registry, &config).unwrap();
            let mut sampler = Sampler::new(SamplerConfig::greedy()).unwrap();
            let limits = Limits { max_tokens: 100, stop: vec![], ignore_eos: true, no_cache: false };
            let what = GenerateArgs {
                session: &mut session,
                seq: ONLY,
                before: &[],
                prompt: &text,
                tokenizer: None,
                sampler: &mut sampler,
                limits: &limits,
                speculation: None,
            };
            let done = generate(what, &mut ()).unwrap();
            assert_eq!(
                (done.tokens.len(), done.finish),
                (100, GenerationEnd::MaxTokens),
                "{kind} {k} by {by}"
            );
            assert_eq!(session.cache().next_position(ONLY), Some(499));
            let left = stored(&mut session);
            assert!(left.len() as u32 <= bound && left.starts_with(&[0, 1, 2, 3]), "{kind}: {left:?}");
            assert!(left.ends_with(&(480..499).collect::<Vec<_>>()), "the newest stay: {left:?}");
            assert!(session.kv_bytes() <= plan.usage.of(Purpose::KvCache), "{kind} {k}");
        }
    }
}

/// The text, and not only the cells, has an end.
#[test]
fn a_text_ends_at_its_context() {
    let config = CacheConfig { keep: keep("recent=8,by=none"), ..exact("cells", 60, 8) };
    let mut session = session(model(), &config);
    let mut sampler = Sampler::new(SamplerConfig::greedy()).unwrap();
    let limits = Limits { max_tokens: 100, stop: vec![], ignore_eos: true, no_cache: false };
    let prompt = tokens(40);
    let what = GenerateArgs {
        session: &mut session,
        seq: ONLY,
        before: &[],
        prompt: &prompt,
        tokenizer: None,
        sampler: &mut sampler,
        limits: &limits,
        speculation: None,
    };
    let done = generate(what, &mut ()).unwrap();
    assert_eq!((done.finish, done.tokens.len()), (GenerationEnd::CacheFull, 21));
    let error = kvist_engine::check_prompt(&config, 61).unwrap_err().to_string();
    assert!(error.contains("60"), "{error}");
}

/// Files hold whole texts, with what was removed later.
#[test]
fn a_session_that_keeps_only_some_tokens_is_in_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kept");
    let text = tokens(20);
    let plain = exact("cells", 100, 16);
    let kept = CacheConfig { keep: keep("recent=40"), ..plain.clone() };
    let opened = Opened::open(&ModelFile::Embedded, true).unwrap();
    let origin = Origin::new(opened.fingerprint().unwrap(), WeightFormat::F32, &plain, model().config());
    let saved = || SavedText { tokens: &text, messages: &[] };
    let frozen = || FrozenText { tokens: &text, system: None };
    let filled = |config: &CacheConfig| {
        let mut session = session(model(), config);
        session.prefill(ONLY, &text, &mut |_| true).unwrap();
        session
    };
    let mut thin = filled(&kept);
    for refused in [
        saved::save(&mut thin, ONLY, saved(), &origin, &path).unwrap_err(),
        freeze(&mut thin, ONLY, frozen(), &origin, &path).unwrap_err(),
        share(&mut thin, ONLY, frozen(), &origin).unwrap_err(),
    ] {
        assert!(refused.to_string().contains("keeps only sinks=0,recent=40"), "{refused}");
        assert!(!path.exists());
    }
    let mut whole = filled(&plain);
    saved::save(&mut whole, ONLY, saved(), &origin, &path).unwrap();
    let file = SavedSession::open(&path).unwrap();
    let mut thin = session(model(), &kept);
    let refused = saved::resume(&mut thin, ONLY, &file, &origin, usize::MAX).unwrap_err();
    assert!(refused.to_string().contains("keeps only"), "{refused}");
    freeze(&mut whole, ONLY, frozen(), &origin, &path).unwrap();
    let file = Arc::new(FrozenPrefix::open(&path).unwrap());
    let refused = begin_with(&mut thin, ONLY, &file, &origin, usize::MAX).unwrap_err();
    assert!(refused.to_string().contains("keeps only"), "{refused}");
    assert_eq!(thin.cache().next_position(ONLY), Some(0));
}

#[test]
fn a_text_that_is_shortened_forgets_what_came_after() {
    for kind in ["cells", "paged"] {
        let config =
            CacheConfig { keep: keep("sinks=1,recent=16,top=16,by=attention"), ..exact(kind, 500, 16) };
        let mut session = session(model(), &config);
        session.prefill(ONLY, &tokens(200), &mut |_| true).unwrap();
        let before = stored(&mut session);
        let at = config.cut_before(190);
        assert_eq!(session.truncate(ONLY, at).unwrap(), at);
        let cut: Vec<u32> = before.into_iter().filter(|position| *position < at).collect();
        assert_eq!(stored(&mut session), cut, "{kind}: nothing that was removed comes back");
        session.prefill(ONLY, &tokens(200), &mut |_| true).unwrap();
        assert_eq!(session.cache().next_position(ONLY), Some(at + 200));
        session.clear().unwrap();
        session.prefill(ONLY, &tokens(100), &mut |_| true).unwrap();
        assert_eq!(session.cache().next_position(ONLY), Some(100));
    }
}

#[test]
fn what_cannot_be_kept_is_refused() {
    let registry = kvist_engine::devices::on(&compute());
    for kind in ["contiguous", "ring"] {
        let config = CacheConfig { keep: keep("recent=8"), ..exact(kind, 60, 8) };
        let error = ModelSession::new(model(), &registry, &config).map(drop).unwrap_err().to_string();
        assert!(error.contains(kind) && error.contains("cells, tree or paged"), "{error}");
    }
    let device = kvist_testing::recording::Recording::default();
    let config = CacheConfig { keep: keep("recent=8,top=2"), ..exact("cells", 60, 8) };
    let error = config.check_keep(&device).unwrap_err().to_string();
    assert!(error.contains("does not return attention mass") && error.contains("by=none"), "{error}");
    let config = CacheConfig { keep: keep("recent=8,top=2,by=none"), ..config };
    config.check_keep(&device).unwrap();

    let config = CacheConfig { keep: keep("recent=8"), ..exact("cells", 60, 8) };
    let mut chat = Chat::new(ModelSession::new(model(), &registry, &config).unwrap(), None);
    let error = chat.fork(None).map(drop).unwrap_err().to_string();
    assert!(error.contains("without --keep"), "{error}");
}

/// The mass of a step that fails, or of a device without it, is an error and no silent zero.
#[test]
fn a_device_without_mass_refuses_the_step() {
    let file = ModelFile::Path(cases("parity").remove(0));
    let device = kvist_testing::recording::Recording::default();
    let budget = MemoryBudget::unlimited();
    let model = Arc::new(Model::load(&file, device.clone(), &texts(), &budget, &mut |_, _| {}).unwrap());
    let config = CacheConfig { backend: "recording".into(), ..exact("cells", 32, 8) };
    let mut cache = Cache::new(
        config.groups(model.config()).iter().map(|group| kinds::build("cells", group).unwrap()).collect(),
    );
    cache.sequences().unwrap().seq_new(ONLY).unwrap();
    let spec =
        PoolSpec { capacity_cells: cache.capacity_cells(), ..config.pool_spec(model.layout(), &budget) };
    let mut network = model.open(&device, &spec, &config.step_limits()).unwrap();
    let mut plan = StepPlan::default();
    let spans = [Span::chain(ONLY, 0, 1)];
    let step = Step::begin(&mut cache, &StepRequest { spans: &spans }, &mut plan).unwrap();
    let mass = Some(MassQueries::All);
    let inputs = StepInputs { tokens: &[1], rows: &[], taps: &[], given: Given::Nothing, mass };
    let error = InFlight::submit(step, &mut *network, &inputs).map(drop).unwrap_err().to_string();
    assert!(error.contains("does not return attention mass"), "{error}");
    assert_eq!(cache.next_position(ONLY), Some(0));
}
