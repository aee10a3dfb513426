//! `kvist serve`: the model behind an HTTP server.
mod speculation;

use crate::memory;
use crate::options::*;
use crate::{json, output};
use anyhow::Context;
use clap::ValueHint;
use kvist_device::{Bytes, Purpose, Registry, Storage};
use kvist_engine::frozen::{EnginePrefix, FrozenPrefix};
use kvist_engine::memory::MemoryPlan;
use kvist_engine::saved::Origin;
use kvist_engine::serving::Engine;
use kvist_model::Opened;
use kvist_server::{ServerConfig, ServerState, serve};
use serde::Serialize;
use speculation::{SpeculationFlags, SpeculationPlan};
use std::fs::File;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

#[derive(clap::Args)]
pub struct Args {
    /// A TOML file; flags override it (docs/serving.md lists its fields)
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    config: Option<PathBuf>,
    #[command(flatten)]
    model: ModelArgs,
    /// Where the model runs and K and V are stored: cpu, wgpu or wgpu:N (GPUs), cuda or cuda:N (GPUs of NVIDIA, experimental),
    /// if this program has them; `kvist devices` lists them
    #[arg(long, default_value = "cpu")]
    pub backend: String,
    /// The model's name for clients
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Sampling defaults: auto uses the model's own (generation_config.json), none uses OpenAI's
    #[arg(long, value_name = "WHICH", value_parser = ["auto", "none"])]
    generation_config: Option<String>,
    /// Address to listen on; without API keys, a loopback address
    #[arg(long)]
    host: Option<IpAddr>,
    /// Port to listen on; 0 picks a free one
    #[arg(long)]
    port: Option<u16>,
    /// Serve without API keys on an address that other machines can reach
    #[arg(long)]
    open: bool,
    /// Capacity of the cache in tokens, over all requests: 32768 or 32k
    #[arg(long, value_name = "TOKENS", value_parser = parse_context)]
    context: Option<u32>,
    /// Storage of K and V: f32, f16, bf16, q8, q4, t4, ...
    #[arg(long, value_name = "DTYPE")]
    kv: Option<Storage>,
    /// Storage of V, if it differs
    #[arg(long, value_name = "DTYPE")]
    kv_v: Option<Storage>,
    /// Tokens of a group that q8, q4 and t4 keep in f16 as well while they are the newest: a power of two up to 64 that
    /// divides a block; 0 for none
    #[arg(long, value_name = "TOKENS", value_parser = parse_recent)]
    kv_recent: Option<u32>,
    /// Tokens per block
    #[arg(long, value_name = "TOKENS")]
    block_tokens: Option<u32>,
    /// Eviction policy of cached blocks: lru, fifo, lfu, ...
    #[arg(long, value_name = "POLICY")]
    eviction: Option<String>,
    /// Order of requests: fcfs, sjf, srpt, edf, laxity, priority
    #[arg(long, value_name = "POLICY")]
    policy: Option<String>,
    /// Maximum requests in the batch
    #[arg(long, value_name = "N")]
    max_batch: Option<u32>,
    /// Maximum tokens of a step
    #[arg(long, value_name = "TOKENS")]
    max_batch_tokens: Option<u32>,
    /// Memory of the host for blocks that the cache evicts: 8GiB. Of use where the cache is in the memory of a GPU
    #[arg(long, value_name = "SIZE")]
    tier_ram: Option<Size>,
    /// When blocks are copied to the tiers: through (as soon as they are cached) or back (shortly before they are evicted)
    #[arg(long, value_name = "WHEN", value_parser = ["through", "back"])]
    tier_write: Option<String>,
    /// Begin with a prefix of `kvist prefix freeze` in the prefix index, where it stays: prompts that begin with it do not
    /// compute it, and all programs that use the file share its memory
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with = "record")]
    prefix: Option<PathBuf>,
    #[command(flatten)]
    speculation: SpeculationFlags,
    /// Maximum requests that wait; further ones are answered 429. Each key's name has a share of these places
    #[arg(long, value_name = "N")]
    max_queue: Option<usize>,
    /// End requests this long after their arrival
    #[arg(long, value_name = "SECONDS")]
    request_timeout: Option<f64>,
    /// After SIGTERM, let running requests continue for this long
    #[arg(long, value_name = "SECONDS")]
    grace: Option<f64>,
    /// Maximum size of a request's body
    #[arg(long, value_name = "SIZE")]
    max_body: Option<Size>,
    /// Allow calls from pages of this origin; may be given several times
    #[arg(long, value_name = "ORIGIN")]
    cors_origin: Vec<String>,
    /// Keep sessions in this directory, with their K and V: they survive a restart of the server
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    sessions_dir: Option<PathBuf>,
    /// Write prompts and answers into the log
    #[arg(long)]
    log_prompts: bool,
    /// Record arrivals, decisions and block events in this file, prompts included, for the dashboard and for replays
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    record: Option<PathBuf>,
    /// Let --record replace the contents of the file; without it the server does not start if the file is not empty
    #[arg(long, requires = "record")]
    record_overwrite: bool,
    /// Print the memory plan, and do not serve
    #[arg(long)]
    dry_run: bool,
    /// Print the plan as one JSON document
    #[arg(long, requires = "dry_run")]
    json: bool,
}

impl Args {
    /// The configuration file, overridden by flags, and checked.
    fn config(&self) -> anyhow::Result<ServerConfig> {
        let mut c = match &self.config {
            Some(path) => ServerConfig::read(path)?,
            None => ServerConfig::default(),
        };
        fn set<T: Clone>(field: &mut T, flag: &Option<T>) {
            if let Some(flag) = flag {
                *field = flag.clone();
            }
        }
        if self.model.source.model.is_some() {
            c.model.path = self.model.source.model.clone();
        }
        c.model.name = self.name.clone().or(c.model.name);
        c.model.generation_config = self.generation_config.clone().or(c.model.generation_config);
        set(&mut c.http.host, &self.host);
        set(&mut c.http.port, &self.port);
        c.http.open |= self.open;
        c.http.log_prompts |= self.log_prompts;
        c.sessions.dir = self.sessions_dir.clone().or(c.sessions.dir);
        c.http.cors_origins.extend(self.cors_origin.iter().cloned());
        c.cache.tokens = self.context.or(c.cache.tokens);
        set(&mut c.cache.kv, &self.kv);
        c.cache.kv_v = self.kv_v.or(c.cache.kv_v);
        set(&mut c.cache.kv_recent, &self.kv_recent);
        set(&mut c.cache.block_tokens, &self.block_tokens);
        set(&mut c.cache.eviction, &self.eviction);
        set(&mut c.scheduler.policy, &self.policy);
        set(&mut c.scheduler.max_batch, &self.max_batch);
        set(&mut c.scheduler.max_batch_tokens, &self.max_batch_tokens);
        set(&mut c.tiers.ram_bytes, &self.tier_ram.map(|size| size.0));
        set(&mut c.tiers.write, &self.tier_write);
        self.speculation.apply(&mut c.speculation);
        set(&mut c.limits.max_queue, &self.max_queue);
        set(&mut c.limits.request_timeout_s, &self.request_timeout);
        set(&mut c.limits.grace_s, &self.grace);
        set(&mut c.limits.max_body_bytes, &self.max_body.map(|size| size.0 as usize));
        if c.sessions.dir.is_some() && self.record.is_some() {
            let what = "--record and --sessions-dir exclude each other: what sessions bring back from files is not \
                        recorded, so the recording could not be replayed";
            return Err(wrong_usage(what));
        }
        c.check().map_err(|e| match &self.config {
            Some(path) => anyhow::anyhow!("{}: {e}", path.display()),
            None => wrong_usage(e.to_string()),
        })?;
        Ok(c)
    }
}

/// `kvist serve --dry-run --json`
#[derive(Serialize)]
struct Plan {
    version: u32,
    model: String,
    cache_tokens: u32,
    block_tokens: u32,
    k: String,
    v: String,
    kv_recent: u32,
    max_batch: u32,
    max_batch_tokens: u32,
    /// Absent if the server does not speculate.
    #[serde(skip_serializing_if = "Option::is_none")]
    speculation: Option<SpeculationPlan>,
    /// Memory of the host for tiers below the cache, and for what is on its way; absent without tiers.
    #[serde(skip_serializing_if = "Option::is_none")]
    tier_bytes: Option<u64>,
    /// Memory of the model and its cache; never exceeded.
    bound: json::MemoryBytes,
    /// Memory of all requests together: while they are prepared, and their prompts from then on.
    requests_bytes: u64,
    /// The sum, a draft model included, which must be available.
    total_bytes: u64,
    available_bytes: Option<u64>,
}

pub fn run(mut args: Args, quiet: bool) -> anyhow::Result<()> {
    let mut config = args.config()?;
    config.check_keys()?;
    for warning in config.warnings() {
        tracing::warn!(target: "kvist::server", "{warning}");
    }
    args.model.source.model = config.model.path.clone();
    let source = args.model.source.find(quiet)?;
    let opened = args.model.open_at(&source)?;
    config.model.path = source.path().map(Path::to_path_buf);
    config.model.name = config.model.name.or(source.title);
    if config.model.ships_sampling()
        && let Err(error) = opened.sampling()
    {
        anyhow::bail!("{error}; --generation-config none ignores it");
    }
    let registry = registry(&args.model.compute.get()?);
    let mut engine = config.engine(opened.config());
    engine.paged.cache.backend = backend_id(&args.backend).into();
    let speculation = speculation::of_section(&config.speculation)?;
    speculation.check_cache(engine.paged.cache.context_tokens)?;
    let draft = speculation.open_draft(&opened, &args.model, quiet)?;
    let texts = config.scheduler.max_batch;
    let draft_bytes =
        draft.as_ref().map(|draft| draft.bytes(&speculation, &engine.paged.cache, texts)).transpose()?;
    if let Some(path) = &args.prefix {
        let prefix = Arc::new(FrozenPrefix::open(path)?);
        let cache = engine.paged.block_aligned();
        let origin = Origin::new(opened.fingerprint()?, args.model.weights, &cache, opened.config());
        prefix.check(&origin)?;
        let salt = config.common_salt();
        let salt = salt.context("--prefix: with [[keys]] no two names share blocks, so none can share a prefix: remove one of both")?;
        engine.prefix = Some(EnginePrefix { prefix, salt, origin });
    }
    let plan = engine.paged.plan(opened.config(), &registry)?;
    let groups = engine.paged.cache.groups(opened.config());
    if engine.tiers.is_some() && groups.iter().any(|group| group.visibility.window.is_some()) {
        let what = "this model has layers with a sliding window, which tiers do not support yet: serve it without --tier-ram";
        return Err(wrong_usage(what));
    }
    if args.dry_run {
        let speculation = SpeculationPlan::of(&config, draft_bytes);
        return show_plan(&args, &config, &opened, &registry, &plan, speculation);
    }
    if let Some(tokenizer) = opened.tokenizer() {
        tokenizer.check()?; // fail now and not at the first request
    }
    let budget = args.model.budget();
    let free = MemoryPlan::free_after(&opened, &registry, args.model.weights, &budget)?;
    let requests_bytes = kvist_server::request_bytes(&config, opened.config().context);
    let longest = |free: u64| {
        let fits = |tokens: u32| {
            let mut shorter = engine.paged.clone();
            shorter.cache.context_tokens = tokens;
            shorter.plan(opened.config(), &registry).is_ok_and(|plan| plan.session_bound() <= free)
        };
        MemoryPlan::longest(engine.paged.cache.context_tokens, fits)
    };
    let needed = Needed {
        tokens: engine.paged.cache.context_tokens,
        cache: plan.session_bound(),
        requests: requests_bytes,
        tiers: config.tiers.memory_bytes(),
        draft: draft_bytes,
    };
    needed.check(free, budget.total(), registry.device().adapter(), longest)?;
    let address = (config.http.host, config.http.port);
    let taken = || format!("cannot listen on {}:{}; try another --port", address.0, address.1);
    // Check that the address is free, and release it at once, so that no client connects and waits while weights load.
    drop(std::net::TcpListener::bind(address).with_context(taken)?);
    // Open the recording before the weights are loaded, so that an error comes early.
    let record = args.record.as_deref().map(|path| record_file(path, args.record_overwrite)).transpose()?;
    let cache_tokens = engine.paged.cache.context_tokens;
    if config.model.ships_sampling()
        && let Some(line) = opened.sampling().ok().and_then(shipped_defaults)
    {
        tracing::info!(target: "kvist::server", "{line}");
    }
    // Reads all weights once, before they are loaded.
    let origin = match &config.sessions.dir {
        Some(_) => {
            Some(Origin::new(opened.fingerprint()?, args.model.weights, &engine.paged.cache, opened.config()))
        }
        None => None,
    };
    let paged = engine.paged.clone();
    let model = args.model.load(opened, Some(cache_tokens), &budget, quiet)?;
    let cache = &engine.paged.cache;
    let draft = draft.map(|draft| draft.load(&model, cache, quiet)).transpose()?;
    engine.speculator = speculation.speculator(draft.as_ref(), &model, cache, texts)?;
    let engine = Engine::start(model, &registry, engine)?;
    let state = ServerState::new(engine.clone(), &config, cache_tokens)?;
    if let Some((dir, origin)) = config.sessions.dir.as_deref().zip(origin) {
        state.keep_sessions(dir, &origin, &paged).context("--sessions-dir")?;
    }
    let runtime = kvist_server::runtime().context("cannot start threads for connections")?;
    let served = runtime.block_on(async {
        if let Some(file) = record {
            // Truncate only now: a server that does not start leaves an old recording intact. A pipe has no length.
            match file.set_len(0) {
                Err(error) if file.metadata().map_or(true, |there| there.is_file()) => {
                    return Err(error).context("--record: the content of the file cannot be removed");
                }
                _ => {}
            }
            let has_begun = state.live().record(&engine, file).await;
            anyhow::ensure!(has_begun, "--record: cannot start the thread that writes the file");
        }
        let listener = tokio::net::TcpListener::bind(address).await.with_context(taken)?;
        let address = listener.local_addr()?;
        let end = terminated();
        // On stdout, because a program that starts the server waits for this line. From now on a signal drains.
        let name = output::harmless(state.model_name());
        output::show(&format!("serving {name} on http://{address}\n"))?;
        serve(listener, state, end).await.context("the server failed")
    });
    // After the grace period a rendering or a tokenization that does not end must not keep the program alive.
    runtime.shutdown_timeout(Duration::from_secs(2));
    served
}

/// What a server needs besides the weights, in bytes.
struct Needed {
    /// Of the cache.
    tokens: u32,
    /// Working memory included.
    cache: u64,
    requests: u64,
    tiers: u64,
    draft: Option<u64>,
}

impl Needed {
    /// Refuses a server that does not fit into the `free` bytes that the weights leave. `longest` is the longest cache that
    /// fits into so many bytes.
    fn check(
        &self,
        free: u64,
        total: u64,
        adapter: Option<&str>,
        longest: impl Fn(u64) -> u32,
    ) -> anyhow::Result<()> {
        let free = free.saturating_sub(self.draft.unwrap_or(0));
        let taken = self.cache.saturating_add(self.requests);
        if taken.saturating_add(self.tiers) <= free {
            return Ok(());
        }
        if taken <= free {
            anyhow::bail!(
                "the tiers need {} (with what is on its way), and {} are free besides the rest; try a smaller --tier-ram",
                Bytes(self.tiers),
                Bytes(free - taken)
            );
        }
        let weights = if self.draft.is_some() { "the weights and the draft model" } else { "the weights" };
        let on = adapter.map_or(String::new(), |adapter| format!(" on {adapter}"));
        let context = match longest(free.saturating_sub(self.requests)) {
            0 => "a smaller --context".to_string(),
            tokens => format!("--context {tokens}"),
        };
        anyhow::bail!(
            "the cache of {} tokens needs {}{on} (working memory included), requests need {}, and {} of {} are free besides \
             {weights}; try {context}, --kv q8, --max-batch-tokens, --max-batch, --max-queue or --max-body",
            self.tokens,
            Bytes(self.cache),
            Bytes(self.requests),
            Bytes(free),
            Bytes(total)
        );
    }
}

/// Opens the file of `--record`. A recording cannot be made again, so it is not overwritten by default.
fn record_file(path: &Path, overwrite: bool) -> anyhow::Result<File> {
    let cannot = || format!("--record: cannot write {}", path.display());
    let file = File::options().write(true).create(true).truncate(false).open(path).with_context(cannot)?;
    let there = file.metadata().with_context(cannot)?;
    if there.is_file() && there.len() > 0 && !overwrite {
        anyhow::bail!(
            "--record: {} exists and has {}; use another name, move it away, or replace it with --record-overwrite",
            path.display(),
            Bytes(there.len())
        );
    }
    Ok(file)
}

/// Completes at SIGTERM or SIGINT (on Windows Ctrl-Break or Ctrl-C), which it listens for from this call on. A second
/// signal ends the program.
fn terminated() -> impl Future<Output = ()> {
    #[cfg(unix)]
    let signals = {
        use tokio::signal::unix::{SignalKind, signal};
        (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    };
    #[cfg(windows)]
    let signals = (tokio::signal::windows::ctrl_break(), tokio::signal::windows::ctrl_c());
    async move {
        let (Ok(mut terminate), Ok(mut interrupt)) = signals else {
            // Without handlers the signals end the program by default.
            return std::future::pending().await;
        };
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tokio::spawn(async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            std::process::exit(130);
        });
    }
}

fn show_plan(
    args: &Args,
    config: &ServerConfig,
    opened: &Opened,
    registry: &Registry,
    plan: &MemoryPlan,
    speculation: Option<SpeculationPlan>,
) -> anyhow::Result<()> {
    let weights = opened.weight_bytes(registry.device(), args.model.weights)?;
    let bound = plan.usage.with(Purpose::Weights, weights);
    let total = bound.checked_total().context("these sizes overflow: no machine has enough memory")?;
    let requests_bytes = kvist_server::request_bytes(config, opened.config().context);
    let draft_bytes = speculation.as_ref().and_then(|speculation| speculation.draft_model_bytes);
    let tier_bytes = config.tiers.memory_bytes();
    let total = total.saturating_add(requests_bytes).saturating_add(tier_bytes);
    let total = total.saturating_add(draft_bytes.unwrap_or(0));
    let available = args.model.memory.map(|size| size.0).or_else(memory::available);
    let report = Plan {
        version: json::VERSION,
        model: config.model_name(opened.name()),
        cache_tokens: config.cache_tokens(opened.config().context),
        block_tokens: config.cache.block_tokens,
        k: config.cache.kv.to_string(),
        v: config.cache.values().to_string(),
        kv_recent: config.cache.recent_tokens(),
        max_batch: config.scheduler.max_batch,
        max_batch_tokens: config.scheduler.max_batch_tokens,
        speculation,
        tier_bytes: config.tiers.is_on().then_some(tier_bytes),
        bound: bound.into(),
        requests_bytes,
        total_bytes: total,
        available_bytes: available,
    };
    if args.json {
        output::show_json(&report)?;
    } else {
        let mut lines = vec![
            format!("model            {}", report.model),
            format!(
                "cache            {} tokens in blocks of {}, K {}, V {}",
                report.cache_tokens, report.block_tokens, report.k, report.v
            ),
            format!(
                "batch            {} requests, {} tokens a step",
                report.max_batch, report.max_batch_tokens
            ),
            String::new(),
            format!("weights          {}", Bytes(report.bound.weights)),
            format!("KV cache         {}", Bytes(report.bound.kv_cache)),
            format!("  per token      {}", Bytes(plan.kv_bytes_per_token)),
            format!("scratch          {}", Bytes(report.bound.scratch)),
            format!("activations      {}", Bytes(report.bound.activations)),
            format!("requests         {}", Bytes(requests_bytes)),
        ];
        if let Some(speculation) = &report.speculation {
            let SpeculationPlan { speculate, max_draft_tokens, .. } = speculation;
            lines.insert(
                3,
                format!("speculation      {speculate}, at most {max_draft_tokens} draft tokens a step"),
            );
        }
        if let Some(bytes) = report.tier_bytes {
            let (held, write) = (Bytes(config.tiers.ram_bytes), &config.tiers.write);
            lines.push(format!("tiers            {}: {held} of RAM, written {write}", Bytes(bytes)));
        }
        if let Some(bytes) = draft_bytes {
            lines.push(format!("draft model      {}", Bytes(bytes)));
        }
        lines.push(format!("total bound      {}", Bytes(total)));
        if let Some(available) = available {
            lines.push(format!("available        {}", Bytes(available)));
        }
        output::show(&(lines.join("\n") + "\n"))?;
    }
    match available {
        Some(available) if total > available => {
            anyhow::bail!("{} are needed, {} are available", Bytes(total), Bytes(available))
        }
        _ => Ok(()),
    }
}
