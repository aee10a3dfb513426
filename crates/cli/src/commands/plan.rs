//! `kvist plan`: the memory of a model and its cache, before anything is loaded; and which cache to choose.
mod candidates;
mod command_line;
mod ladder;
mod measure;
mod recommendation;
mod shortage;
mod text;
mod tiers;

use crate::commands::serve::tiers::TierFlags;
use crate::options::*;
use crate::{json, output};
use candidates::{Asked, ring_window};
use clap::ValueHint;
use kvist_device::{Bytes, Purpose, Registry, Usage};
use kvist_engine::memory::{CacheConfig, MemoryPlan};
use kvist_model::ModelSize;
use kvist_model::config::ModelConfig;
use kvist_model::weights::WeightFormat;
use ladder::{LADDER, Rung};
use recommendation::{Kl, Recommendation};
use serde::Serialize;
use std::path::PathBuf;
use tiers::Tiers;

#[derive(clap::Args)]
pub struct Args {
    /// A config.json or the folder of it, or what --model takes; without it the embedded model
    #[arg(value_hint = ValueHint::AnyPath, value_name = "MODEL", conflicts_with = "model")]
    path: Option<PathBuf>,
    #[command(flatten)]
    source: SourceArgs,
    #[command(flatten)]
    pub cache: CacheArgs,
    /// How linear layers are stored in memory: as-stored, f32, q8_0, int8
    #[arg(long, default_value = "as-stored", value_name = "FORM")]
    weights: WeightFormat,
    /// Memory bandwidth, from which the limit in tokens/s follows
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    bandwidth: Option<Size>,
    /// Recommend a cache that fits into this much memory; with --kind or --kv, refuse one that does not (exit status 1)
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    memory: Option<Size>,
    /// Run this model over this many tokens (512), to measure what each pair of dtypes costs it
    #[arg(
        long,
        value_name = "TOKENS",
        num_args = 0..=1,
        default_missing_value = "512",
        value_parser = parse_context,
        requires = "memory",
        conflicts_with_all = ["kind", "kv", "kv_v"]
    )]
    measure: Option<u32>,
    /// The text of --measure, UTF-8; without it held-out text of the embedded model
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "measure")]
    text: Option<PathBuf>,
    #[command(flatten)]
    tiers: TierFlags,
    #[command(flatten)]
    pub compute: ComputeArgs,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// `kvist plan --json`
#[derive(Serialize)]
struct Report {
    version: u32,
    model: String,
    context_tokens: u32,
    cache: json::CacheShape,
    /// Bytes of the file that have to be read from disk.
    weight_bytes_on_disk: u64,
    kv_bytes_per_token: u64,
    kv_bits_per_value: f64,
    /// The memory of a ring. Set if layers have a window of their own, shorter than the context, and the cache is no
    /// ring.
    #[serde(skip_serializing_if = "Option::is_none")]
    ring: Option<Ring>,
    /// The bound: weights, a full cache, scratch and activations at the largest step.
    bound: json::MemoryBytes,
    /// The bound without the weights: what each further session adds.
    session_bytes: u64,
    /// Of a server, in addition to the bound: with `--tier-ram`, `--tier-disk` or `--tier-store`.
    #[serde(flatten)]
    tiers: Option<Tiers>,
    /// Where the bound lies, if not all of it is the host's memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<DeviceMemory>,
    /// Weights and KV bytes that one token of decode must read at a full cache, and at an empty one.
    bytes_read_per_token: u64,
    bytes_read_per_token_empty: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    ceiling: Option<Ceiling>,
    /// With `--memory`, and neither `--kind` nor `--kv`; the fields above are then those of the cache for `kvist run`.
    #[serde(skip_serializing_if = "Option::is_none")]
    recommendation: Option<Recommendation>,
}

/// The bound by memory: a GPU's, and the host's.
#[derive(Serialize)]
struct DeviceMemory {
    /// The GPU's name.
    adapter: String,
    /// The GPU computes in the host's memory, so both take from it.
    unified_memory: bool,
    device_bytes: u64,
    /// What a step is uploaded from and read back to, and the same for blocks in transfer. Loading takes at most 32 MiB more for a moment.
    host_bytes: u64,
}

#[derive(Serialize)]
struct Ring {
    /// The largest of the model's own windows that are shorter than the context.
    window_tokens: u32,
    /// The `--window` to give if other layers see the whole context: the context's length.
    #[serde(skip_serializing_if = "Option::is_none")]
    window_flag_tokens: Option<u32>,
    kv_cache_bytes: u64,
}

/// Decode cannot be faster: every weight and every visible cell is read once per token.
#[derive(Serialize)]
struct Ceiling {
    bandwidth_bytes_per_second: u64,
    tokens_per_second: f64,
    tokens_per_second_empty: f64,
    /// The ceiling if weights cost nothing: this figure is often quoted.
    tokens_per_second_kv_alone: f64,
}

pub fn run(mut args: Args, quiet: bool) -> anyhow::Result<()> {
    args.source.model = args.source.model.or(args.path.take());
    let source = args.source.find_config(quiet)?;
    let registry = registry(&args.compute.get()?);
    let mut size = ModelSize::of(&source.file, registry.device(), args.weights)?;
    size.name = source.typed.unwrap_or(size.name);
    let context = args.cache.context.unwrap_or(size.config.context);
    let mut cache = args.cache.clone();
    cache.context = Some(context);
    let is_chosen = args.cache.kind.is_some() || args.cache.kv.is_some() || args.cache.kv_v.is_some();
    let tiers = tiers::section(&args, args.memory.is_some() && !is_chosen, &mut cache)?;
    let config = cache.config(&size.config, u64::from(context))?;
    tiers::check(&args, &tiers, &config, &size.config)?;
    let asked = args.memory.filter(|_| !is_chosen).map(|memory| Asked {
        model: &size.config,
        registry: &registry,
        weight_bytes: size.resident_bytes,
        memory_bytes: memory.0,
        cache: &config,
        chunk: args.cache.chunk(),
        tiers: &tiers,
    });
    let recommendation =
        asked.as_ref().map(|asked| recommend(&args, asked, &size.name, quiet)).transpose()?;
    let pick = recommendation.as_ref().and_then(|r| r.run.as_ref());
    let config = pick.map_or(&config, |pick| &pick.candidate.cache).clone();
    let plan = MemoryPlan::of_session(&size.config, &registry, &config)?;
    let bound = plan.usage.with(Purpose::Weights, size.resident_bytes);
    if bound.checked_total().is_none() {
        anyhow::bail!("these sizes overflow: no machine has enough memory");
    }

    // Tiers belong to the server; its cache may have other dtypes than that of `kvist run`.
    let served = recommendation.as_ref().and_then(|r| r.serve.as_ref());
    let served = served.map_or(&config, |pick| &pick.candidate.cache);
    let tiers = Tiers::of(&tiers, served, &size.config, registry.device());

    let visible = plan.kv_bytes_visible(&size.config, &config);
    let read = size.read_per_token.saturating_add(visible);
    let per_second = |bytes: u64, rate: u64| rate as f64 / bytes.max(1) as f64;
    let report = Report {
        version: json::VERSION,
        model: size.name.clone(),
        context_tokens: context,
        cache: json::CacheShape::new(&config, &size.config),
        weight_bytes_on_disk: size.stored_bytes,
        kv_bytes_per_token: plan.kv_bytes_per_token,
        kv_bits_per_value: plan.kv_bits_per_value(&size.config),
        ring: ring(&size.config, &registry, &config, plan.usage.of(Purpose::KvCache)),
        bound: bound.into(),
        session_bytes: plan.session_bound(),
        tiers,
        device: device_memory(&registry, &plan, bound.total()),
        bytes_read_per_token: read,
        bytes_read_per_token_empty: size.read_per_token,
        ceiling: args.bandwidth.map(|rate| Ceiling {
            bandwidth_bytes_per_second: rate.0,
            tokens_per_second: per_second(read, rate.0),
            tokens_per_second_empty: per_second(size.read_per_token, rate.0),
            tokens_per_second_kv_alone: per_second(visible, rate.0),
        }),
        recommendation,
    };
    if args.json {
        output::show_json(&report)?;
    } else {
        output::show(&report.text(&bound))?;
    }
    match (args.memory, &asked, &report.recommendation) {
        (_, Some(asked), Some(Recommendation { run: None, .. })) => {
            let packed = ModelSize::of(&source.file, registry.device(), WeightFormat::Q8_0);
            Err(shortage::nothing_fits(asked, packed.map_or(u64::MAX, |size| size.resident_bytes)))
        }
        (Some(memory), None, _) => report.check_memory(bound.total(), memory.0),
        _ => Ok(()),
    }
}

/// The memories of a session on a GPU, together `bound` bytes.
fn device_memory(registry: &Registry, plan: &MemoryPlan, bound: u64) -> Option<DeviceMemory> {
    let (device, host_bytes) = (registry.device(), plan.host_bytes);
    Some(DeviceMemory {
        adapter: device.adapter()?.into(),
        unified_memory: device.info().unified_memory,
        device_bytes: bound.saturating_sub(host_bytes),
        host_bytes,
    })
}

/// Every cache that this model could have in the memory, and the recommended one.
fn recommend(args: &Args, asked: &Asked, name: &str, quiet: bool) -> anyhow::Result<Recommendation> {
    let candidates = candidates::all(asked, LADDER);
    let Some(scored) = args.measure else {
        let kl = |rung: &Rung| rung.kl.map(Some).to_vec();
        return Ok(Recommendation::of(args, asked, Kl::reference(), candidates, &kl));
    };
    let measured = measure::measure(args, scored, asked.cache, LADDER, quiet)?;
    let kl = |rung: &Rung| vec![measured.kl_of(rung)];
    Ok(Recommendation::of(args, asked, Kl::measured(name, args, &measured), candidates, &kl))
}

/// The memory of a ring, if it is smaller. A ring forgets tokens outside the model's own window; other kinds keep them,
/// since a rollback may need them.
fn ring(model: &ModelConfig, registry: &Registry, config: &CacheConfig, kv_bytes: u64) -> Option<Ring> {
    let context = config.context_tokens;
    let shorter = |window: &Option<u32>| window.filter(|window| *window < context);
    let windows: Vec<Option<u32>> = model.group_windows().iter().map(shorter).collect();
    let window_tokens = windows.iter().flatten().copied().max()?;
    if config.kind_traits().bounded {
        return None;
    }
    let window = ring_window(model, config);
    let window_flag_tokens = window.filter(|_| config.window.is_none());
    // No hint if this kind or backend cannot be built.
    let as_ring = CacheConfig { kind: "ring".into(), window, ..config.clone() };
    let plan = MemoryPlan::of_session(model, registry, &as_ring).ok()?;
    let kv_cache_bytes = plan.usage.of(Purpose::KvCache);
    (kv_cache_bytes < kv_bytes).then_some(Ring { window_tokens, window_flag_tokens, kv_cache_bytes })
}

impl Report {
    /// Whether tiers take other memory than the cache: that of the host, beside a GPU with memory of its own.
    fn tiers_are_apart(&self) -> bool {
        self.device.as_ref().is_some_and(|device| !device.unified_memory)
    }

    /// Refuses a chosen cache, of `bound` bytes with its weights, that does not fit into `memory` bytes.
    fn check_memory(&self, bound: u64, memory: u64) -> anyhow::Result<()> {
        let tiers =
            self.tiers.as_ref().filter(|_| !self.tiers_are_apart()).map_or(0, |tiers| tiers.tier_bytes);
        let needed = bound.saturating_add(tiers);
        anyhow::ensure!(
            bound <= memory,
            "{} are needed, {} are available; try --kv q8, --context or --weights q8_0",
            Bytes(needed),
            Bytes(memory)
        );
        anyhow::ensure!(
            needed <= memory,
            "{} are needed, of which the tiers take {} (with what is on its way), and {} are available; try a smaller \
             --tier-ram or --tier-disk-size",
            Bytes(needed),
            Bytes(tiers),
            Bytes(memory)
        );
        Ok(())
    }

    fn text(&self, bound: &Usage) -> String {
        let c = &self.cache;
        let mut lines = vec![
            format!("model            {}", self.model),
            format!(
                "cache            {}:{}, K {}, V {}, {} tokens",
                c.backend, c.kind, c.k, c.v, self.context_tokens
            ),
            String::new(),
            format!(
                "weights          {} ({} on disk)",
                Bytes(self.bound.weights),
                Bytes(self.weight_bytes_on_disk)
            ),
            format!("KV cache         {}", Bytes(self.bound.kv_cache)),
            format!(
                "  per token      {} ({:.2} bits per value)",
                Bytes(self.kv_bytes_per_token),
                self.kv_bits_per_value
            ),
            format!("scratch          {}", Bytes(self.bound.scratch)),
            format!("activations      {}", Bytes(self.bound.activations)),
            format!("bound            {}", Bytes(bound.total())),
            format!("  per session    {}", Bytes(self.session_bytes)),
            format!(
                "read per token   {} at a full cache, {} at an empty one",
                Bytes(self.bytes_read_per_token),
                Bytes(self.bytes_read_per_token_empty)
            ),
        ];
        if let Some(DeviceMemory { adapter, unified_memory, device_bytes, host_bytes }) = &self.device {
            let unified = if *unified_memory { ", which computes in the host's memory" } else { "" };
            lines.insert(1, format!("device           {adapter}{unified}"));
            lines.push(format!("device memory    {}", Bytes(*device_bytes)));
            lines.push(format!("host memory      {}", Bytes(*host_bytes)));
        }
        if let Some(tiers) = &self.tiers {
            // With a recommendation the bound is that of `kvist run`, which has no tiers.
            let has_one_sum = self.recommendation.is_none() && !self.tiers_are_apart();
            lines.extend(tiers.lines(has_one_sum.then(|| bound.total())));
        }
        // The lines of a recommendation already have the memory of each kind.
        if let (Some(ring), None) = (&self.ring, &self.recommendation) {
            let (takes, window) = (Bytes(ring.kv_cache_bytes), ring.window_tokens);
            lines.push(match ring.window_flag_tokens {
                None => format!(
                    "hint             --kind ring takes {takes} for the KV cache: this model sees {window} tokens back, and a \
                     ring keeps that and one step"
                ),
                Some(flag) => format!(
                    "hint             --kind ring --window {flag} takes {takes} for the KV cache: layers of this model see \
                     {window} tokens back, and a ring keeps that and one step; the others see the whole context as before"
                ),
            });
        }
        if let Some(c) = &self.ceiling {
            lines.push(format!(
                "ceiling          {:.1} tokens/s at a full cache, {:.1} at an empty one ({:.1} if weights cost nothing)",
                c.tokens_per_second, c.tokens_per_second_empty, c.tokens_per_second_kv_alone
            ));
        }
        let text = lines.join("\n") + "\n";
        match &self.recommendation {
            Some(recommendation) => text + "\n" + &recommendation.text(),
            None => text,
        }
    }
}
