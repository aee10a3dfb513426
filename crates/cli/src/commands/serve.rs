//! `kvist serve`: the model behind an HTTP server.
mod args;
mod memory;
mod speculation;
pub mod tiers;

use crate::options::*;
use crate::output;
use anyhow::Context;
pub use args::Args;
use kvist_device::Bytes;
use kvist_engine::frozen::{EnginePrefix, FrozenPrefix};
use kvist_engine::memory::MemoryPlan;
use kvist_engine::saved::Origin;
use kvist_engine::serving::Engine;
use kvist_server::config::{OpenSessions, OpenTiers};
use kvist_server::{KvEventSockets, ServerState, serve};
use memory::Needed;
use speculation::SpeculationPlan;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

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
    engine.check_keep(registry.device())?;
    let speculation = speculation::of_section(&config.speculation)?;
    speculation.check_cache(engine.paged.cache.context_tokens)?;
    let draft = speculation.open_draft(&opened, &args.model, quiet)?;
    let texts = config.scheduler.max_batch;
    let draft_bytes =
        draft.as_ref().map(|draft| draft.bytes(&speculation, &engine.paged.cache, texts)).transpose()?;
    if let Some(path) = &config.cache.prefix {
        let prefix = Arc::new(FrozenPrefix::open(path)?);
        let cache = engine.paged.block_aligned();
        let origin = Origin::new(opened.fingerprint()?, args.model.weights, &cache, opened.config());
        prefix.check(&origin)?;
        let salt = config.common_salt();
        let salt = salt.context("--prefix (cache.prefix): with [[keys]] no two names share blocks, so none can share a prefix: remove one of both")?;
        engine.prefix = Some(EnginePrefix { prefix, salt, origin });
    }
    let plan = engine.paged.plan(opened.config(), &registry)?;
    tiers::check(&config, &engine, opened.config())?;
    let budget = args.model.budget()?;
    let needed = Needed {
        tokens: engine.paged.cache.context_tokens,
        cache: plan.session_bound(),
        requests: kvist_server::request_bytes(&config, opened.config().context),
        tiers: config.tier_bytes(opened.config()),
        draft: draft_bytes,
        is_apart: !registry.device().info().unified_memory,
    };
    if args.dry_run {
        let speculation = SpeculationPlan::of(&config, draft_bytes);
        let available = Some(budget.total()).filter(|total| *total < u64::MAX);
        let model = (&opened, &registry);
        memory::show_plan(&args, &config, model, &plan, speculation, &needed, available)?;
    } else if let Some(tokenizer) = opened.tokenizer() {
        tokenizer.check()?; // fail now and not at the first request
    }
    let free = MemoryPlan::free_after(&opened, &registry, args.model.weights, &budget)?;
    let longest = |free: u64| {
        let fits = |tokens: u32| {
            let mut shorter = engine.paged.clone();
            shorter.cache.context_tokens = tokens;
            shorter.plan(opened.config(), &registry).is_ok_and(|plan| plan.session_bound() <= free)
        };
        MemoryPlan::longest(engine.paged.cache.context_tokens, fits)
    };
    needed.check(free, budget.total(), crate::memory::available(), registry.device().adapter(), longest)?;
    if args.dry_run {
        return Ok(());
    }
    let address = (config.http.host, config.http.port);
    let taken = || format!("cannot listen on {}:{}; try another --port", address.0, address.1);
    // Check that the address is free, and release it at once, so that no client connects and waits while weights load.
    drop(std::net::TcpListener::bind(address).with_context(taken)?);
    let kv_events =
        KvEventSockets::bind(&config.kv_events).context("--kv-events, --kv-events-replay ([kv_events])")?;
    // Open the recording before the weights are loaded, so that an error comes early.
    let record = args.record.as_deref().map(|path| record_file(path, args.record_overwrite)).transpose()?;
    let tiers = tiers::open(&config, &engine, &opened, args.model.weights, &registry)?;
    let shared_sessions = OpenSessions::open(&config, opened.config().context)
        .context("--sessions-store, --tier-store (sessions.store, tiers.store)")?;
    engine.tiers = tiers.as_ref().map(OpenTiers::config);
    let text_tokens = match config.cache.keep {
        None => engine.paged.cache.context_tokens,
        Some(_) => config.text_tokens(opened.config().context),
    };
    if config.model.ships_sampling()
        && let Some(line) = opened.sampling().ok().and_then(shipped_defaults)
    {
        tracing::info!(target: "kvist::server", "{line}");
    }
    // Reads all weights once, before they are loaded.
    let origin = match config.sessions.dir.is_some() || shared_sessions.is_some() {
        true => {
            Some(Origin::new(opened.fingerprint()?, args.model.weights, &engine.paged.cache, opened.config()))
        }
        false => None,
    };
    let paged = engine.paged.clone();
    let model = args.model.load(opened, Some(text_tokens), &budget, quiet)?;
    let cache = &engine.paged.cache;
    let draft = draft.map(|draft| draft.load(&model, cache, quiet)).transpose()?;
    engine.speculator = speculation.speculator(draft.as_ref(), &model, cache, texts)?;
    let engine = Engine::start(model, &registry, engine)?;
    let state = ServerState::new(engine.clone(), &config, text_tokens)?;
    if let Some((dir, origin)) = config.sessions.dir.as_deref().zip(origin.as_ref()) {
        // What was computed behind rounded K and V differs from what others compute.
        let rounded = if config.tiers.ram_packed { ", behind blocks rounded to q8" } else { "" };
        let numerics = registry.device().numerics() + rounded;
        state.keep_sessions(dir, (origin, &numerics), &paged).context("--sessions-dir")?;
    }
    if let Some((shared, origin)) = shared_sessions.as_ref().zip(origin.as_ref()) {
        state.share_sessions(shared.store(), origin).context("--sessions-shared")?;
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
        if let Some(sockets) = kv_events {
            let salt = config.kv_events.salt(&config)?;
            state.publish_events(sockets, salt).await.context("--kv-events")?;
        }
        let listener = tokio::net::TcpListener::bind(address).await.with_context(taken)?;
        let address = listener.local_addr()?;
        let end = terminated();
        // On stdout, because a program that starts the server waits for this line. From now on a signal drains.
        let name = output::harmless(state.model_name());
        output::show(&format!("serving {name} on http://{address}\n"))?;
        serve(listener, state, end).await.context("the server failed")
    });
    if let Some(tiers) = tiers {
        tiers.flush(&engine, Duration::from_secs(2));
    }
    // After the grace period a rendering or a tokenization that does not end must not keep the program alive.
    runtime.shutdown_timeout(Duration::from_secs(2));
    served
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
