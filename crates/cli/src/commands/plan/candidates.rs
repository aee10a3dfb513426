//! Every cache that a model could have: each kind with each pair of dtypes, and a server's. Their sizes are to the byte
//! what `kvist run` and `kvist serve` reserve.
use super::ladder::Rung;
use kvist_cache::kinds;
use kvist_device::{Purpose, Registry};
use kvist_engine::memory::{CacheConfig, MemoryPlan};
use kvist_model::config::ModelConfig;
use kvist_server::config::TiersSection;
use kvist_server::{ServerConfig, request_bytes};
use serde::Serialize;

/// The command that makes the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Command {
    Run,
    Serve,
}

/// What all candidates have in common.
pub struct Asked<'a> {
    pub model: &'a ModelConfig,
    pub registry: &'a Registry,
    pub weight_bytes: u64,
    pub memory_bytes: u64,
    /// The cache by the flags; candidates differ from it in kind and dtypes.
    pub cache: &'a CacheConfig,
    /// Tokens of a prefill step, limited by the context.
    pub chunk: u32,
    /// Of a server.
    pub tiers: &'a TiersSection,
}

#[derive(Clone, Debug)]
pub struct Candidate {
    pub command: Command,
    pub kind: &'static str,
    pub rung: Rung,
    /// For the requested context.
    pub cache: CacheConfig,
    pub plan: MemoryPlan,
    /// Weights included and, for a server, requests and tiers.
    pub total_bytes: u64,
    pub fits: bool,
    /// The longest context that fits, up to the one asked for or, if that is longer, the model's own.
    pub context_fits_tokens: u32,
}

/// All candidates, the simplest kind first, each with the dtypes in the ladder's order. Leaves out what this model or
/// these flags do not allow.
pub fn all(asked: &Asked, ladder: &[Rung]) -> Vec<Candidate> {
    let backend = asked.cache.backend.as_str();
    let pairs = asked.registry.pairs().filter(|(id, _)| *id == backend);
    let kinds = pairs.map(|(_, kind)| (Command::Run, kind));
    let kinds = kinds.filter(|(_, kind)| !is_bounded(kind) || forgets(asked.model, asked.cache));
    // A server has the model's own windows. On a GPU it needs two memories, of which this plans one: `serve --dry-run` plans both.
    let serves = backend == "cpu" && asked.cache.window.is_none();
    let served = serves.then_some((Command::Serve, "paged"));
    let uses = kinds.chain(served);
    uses.flat_map(|(command, kind)| {
        ladder.iter().filter_map(move |rung| candidate(asked, command, kind, *rung))
    })
    .collect()
}

fn candidate(asked: &Asked, command: Command, kind: &'static str, rung: Rung) -> Option<Candidate> {
    let at = |context: u32| match command {
        Command::Run => run_at(asked, kind, rung, context),
        Command::Serve => serve_at(asked, rung, context),
    };
    let fits = |context: u32| at(context).is_some_and(|(.., total)| total <= asked.memory_bytes);
    let context = asked.cache.context_tokens;
    let (cache, plan, total_bytes) = at(context)?;
    let does_fit = total_bytes <= asked.memory_bytes;
    let longest = MemoryPlan::longest(context.max(asked.model.context), fits);
    Some(Candidate {
        command,
        kind,
        rung,
        cache,
        plan,
        total_bytes,
        fits: does_fit,
        // The requested context may not be a multiple of 64.
        context_fits_tokens: if does_fit { longest.max(context) } else { longest },
    })
}

type Sized = (CacheConfig, MemoryPlan, u64);

/// True if the cells of this kind do not grow with the text.
fn is_bounded(kind: &str) -> bool {
    kinds::traits(kind).is_some_and(|traits| traits.bounded)
}

/// The size of a `kvist run` session. `None` if there is no such cache, or its size overflows.
fn run_at(asked: &Asked, kind: &str, rung: Rung, context: u32) -> Option<Sized> {
    let mut cache = CacheConfig {
        kind: kind.into(),
        k: rung.k,
        v: rung.v,
        context_tokens: context,
        max_step_tokens: asked.chunk.min(context),
        ..asked.cache.clone()
    };
    if is_bounded(kind) {
        cache.window = ring_window(asked.model, &cache);
    }
    let plan = MemoryPlan::of_session(asked.model, asked.registry, &cache).ok()?;
    let total = plan.usage.with(Purpose::Weights, asked.weight_bytes).checked_total()?;
    Some((cache, plan, total))
}

/// A server with this cache and these tiers, the rest by default.
pub fn server(cache: &CacheConfig, tiers: &TiersSection) -> ServerConfig {
    let mut config = ServerConfig { tiers: tiers.clone(), ..ServerConfig::default() };
    config.cache.tokens = Some(cache.context_tokens);
    config.cache.kv = cache.k;
    config.cache.kv_v = Some(cache.v);
    config.cache.kv_recent = cache.recent.tokens;
    config
}

/// The cache of `kvist serve`, and the memory of its requests and its tiers. `None` also for dtypes that these tiers cannot pack.
fn serve_at(asked: &Asked, rung: Rung, context: u32) -> Option<Sized> {
    let cache = CacheConfig { k: rung.k, v: rung.v, context_tokens: context, ..asked.cache.clone() };
    let config = server(&cache, asked.tiers);
    config.check().ok()?;
    let engine = config.engine(asked.model);
    let plan = engine.paged.plan(asked.model, asked.registry).ok()?;
    let total = plan.usage.with(Purpose::Weights, asked.weight_bytes).checked_total()?;
    let total = total.checked_add(request_bytes(&config, asked.model.context))?;
    let total = total.checked_add(config.tiers.memory_bytes(&engine.paged, asked.model))?;
    Some((engine.paged.cache, plan, total))
}

/// True if a ring would store less than all of this context.
fn forgets(model: &ModelConfig, cache: &CacheConfig) -> bool {
    let windows = cache.groups(model).into_iter().filter_map(|group| group.visibility.window);
    windows.into_iter().any(|window| window < cache.context_tokens)
}

/// The `--window` of a ring that hides nothing from layers which see the whole context.
pub fn ring_window(model: &ModelConfig, cache: &CacheConfig) -> Option<u32> {
    let context = cache.context_tokens;
    let sees_all = |window: Option<u32>| window.is_none_or(|window| window >= context);
    cache.window.or(model.group_windows().into_iter().any(sees_all).then_some(context))
}

impl Candidate {
    /// Flags that select this candidate, for messages.
    pub fn flags(&self) -> String {
        let kind = match self.command {
            Command::Run => format!("--kind {} ", self.kind),
            Command::Serve => String::new(),
        };
        let (k, v) = (self.rung.k, self.rung.v);
        let v = if k == v { String::new() } else { format!(" --kv-v {v}") };
        format!("{kind}--kv {k}{v}")
    }

    /// The longest context that fits, up to the requested one.
    pub fn useful_context(&self) -> u32 {
        self.context_fits_tokens.min(self.cache.context_tokens)
    }
}

/// Of the caches for `command`, the one that fits the longest context; the first of several.
pub fn longest<'a>(
    candidates: impl DoubleEndedIterator<Item = &'a Candidate>,
    command: Command,
) -> Option<&'a Candidate> {
    let can =
        candidates.filter(|candidate| candidate.command == command && candidate.context_fits_tokens > 0);
    // Of equal candidates max_by_key returns the last, so iterate backwards.
    can.rev().max_by_key(|candidate| candidate.useful_context())
}

/// Of the caches for `command`, the smallest; the first of several.
pub fn smallest<'a>(
    candidates: impl Iterator<Item = &'a Candidate>,
    command: Command,
) -> Option<&'a Candidate> {
    candidates.filter(|candidate| candidate.command == command).min_by_key(|candidate| candidate.total_bytes)
}
