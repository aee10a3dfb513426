//! The flags of `kvist serve`, and the configuration that they and its file make.
use super::speculation::SpeculationFlags;
use super::tiers::TierFlags;
use crate::options::*;
use clap::ValueHint;
use kvist_device::Storage;
use kvist_engine::keep::KeepConfig;
use kvist_engine::memory::step_tokens;
use kvist_server::ServerConfig;
use kvist_server::config::EventEndpoint;
use std::net::IpAddr;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    /// A TOML file; flags override it (docs/serving.md lists its fields)
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Where the model runs and K and V are stored: cpu, wgpu or wgpu:N (GPUs), cuda or cuda:N (NVIDIA GPUs),
    /// if this program has them; `kvist devices` lists them
    #[arg(long, default_value = "cpu")]
    pub backend: String,
    /// The model's name for clients
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Sampling defaults: auto uses the model's own (generation_config.json), none uses OpenAI's
    #[arg(long, value_name = "WHICH", value_parser = ["auto", "none"])]
    pub generation_config: Option<String>,
    /// Address to listen on; without API keys, a loopback address
    #[arg(long)]
    pub host: Option<IpAddr>,
    /// Port to listen on; 0 picks a free one
    #[arg(long)]
    pub port: Option<u16>,
    /// Serve without API keys on an address that other machines can reach
    #[arg(long)]
    pub open: bool,
    /// Capacity of the cache in tokens, over all requests: 32768 or 32k
    #[arg(long, value_name = "TOKENS", value_parser = parse_context)]
    pub context: Option<u32>,
    /// Storage of K and V: f32, f16, bf16, q8, q4, t4, ...
    #[arg(long, value_name = "DTYPE")]
    pub kv: Option<Storage>,
    /// Storage of V, if it differs
    #[arg(long, value_name = "DTYPE")]
    pub kv_v: Option<Storage>,
    /// Tokens of a group that q8, q4 and t4 keep in f16 as well while they are the newest: a power of two up to 64 that
    /// divides a block; 0 for none
    #[arg(long, value_name = "TOKENS", value_parser = parse_recent)]
    pub kv_recent: Option<u32>,
    /// Tokens per block
    #[arg(long, value_name = "TOKENS")]
    pub block_tokens: Option<u32>,
    /// Eviction policy of cached blocks: lru, fifo, lfu, ...
    #[arg(long, value_name = "POLICY")]
    pub eviction: Option<String>,
    /// Keep only these tokens of every request, as kvist run --keep does: sinks=4,recent=1024,top=2048; prompts may then be
    /// longer than the cache, up to the model's context, and requests share no blocks
    #[arg(long, value_name = "BUDGET", conflicts_with_all = ["prefix", "record", "sessions_dir"])]
    pub keep: Option<KeepConfig>,
    /// Order of requests: fcfs, sjf, srpt, edf, laxity, priority
    #[arg(long, value_name = "POLICY")]
    pub policy: Option<String>,
    /// Maximum requests in the batch
    #[arg(long, value_name = "N")]
    pub max_batch: Option<u32>,
    /// Maximum tokens of a step [default: 256, over CUDA 1024]
    #[arg(long, value_name = "TOKENS")]
    pub max_batch_tokens: Option<u32>,
    #[command(flatten)]
    pub tiers: TierFlags,
    /// Begin with a prefix of `kvist prefix freeze` in the prefix index, where it stays: prompts that begin with it do not
    /// compute it, and on the CPU all programs that use the file share its memory
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with = "record")]
    pub prefix: Option<PathBuf>,
    #[command(flatten)]
    pub speculation: SpeculationFlags,
    /// Maximum requests that wait; further ones are answered 429. Each key's name has a share of these places
    #[arg(long, value_name = "N")]
    pub max_queue: Option<usize>,
    /// End requests this long after their arrival
    #[arg(long, value_name = "SECONDS")]
    pub request_timeout: Option<f64>,
    /// After SIGTERM, let running requests continue for this long
    #[arg(long, value_name = "SECONDS")]
    pub grace: Option<f64>,
    /// Maximum size of a request's body
    #[arg(long, value_name = "SIZE")]
    pub max_body: Option<Size>,
    /// Allow calls from pages of this origin; may be given several times
    #[arg(long, value_name = "ORIGIN")]
    pub cors_origin: Vec<String>,
    /// Keep sessions in this directory, with their K and V: they survive a restart of the server
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub sessions_dir: Option<PathBuf>,
    /// Record sessions in the shared store (--tier-store): any worker of a fleet continues a session whose worker is gone
    #[arg(long)]
    pub sessions_shared: bool,
    /// The same in a store of its own, which unlike one of blocks must evict nothing: redis://HOST:6379/PREFIX
    #[arg(long, value_name = "URL")]
    pub sessions_store: Option<String>,
    /// Publish there which prefixes the cache has, for routers that send a prompt where its prefix is: vLLM's KV events over
    /// ZeroMQ, such as tcp://127.0.0.1:5557
    #[arg(long, value_name = "ENDPOINT")]
    pub kv_events: Option<EventEndpoint>,
    /// Repeat KV events there for routers that have missed some
    #[arg(long, value_name = "ENDPOINT")]
    pub kv_events_replay: Option<EventEndpoint>,
    /// Topic of KV events; by default the empty one
    #[arg(long, value_name = "TOPIC")]
    pub kv_events_topic: Option<String>,
    /// Tell routers what the tiers in RAM and on a disk have, too
    #[arg(long)]
    pub kv_events_tiers: bool,
    /// Write prompts and answers into the log
    #[arg(long)]
    pub log_prompts: bool,
    /// Record arrivals, decisions and block events in this file, prompts included, for the dashboard and for replays
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub record: Option<PathBuf>,
    /// Let --record replace the contents of the file; without it the server does not start if the file is not empty
    #[arg(long, requires = "record")]
    pub record_overwrite: bool,
    /// Print the memory plan, and do not serve
    #[arg(long)]
    pub dry_run: bool,
    /// Print the plan as one JSON document
    #[arg(long, requires = "dry_run")]
    pub json: bool,
}

impl Args {
    /// The configuration file, overridden by flags, and checked.
    pub fn config(&self) -> anyhow::Result<ServerConfig> {
        let mut c = match &self.config {
            Some(path) => ServerConfig::read(path)?,
            None => ServerConfig::default(),
        };
        if backend_id(&self.backend) == "cuda" {
            c.suggest_batch_tokens(step_tokens("cuda"));
        }
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
        c.sessions.shared |= self.sessions_shared;
        c.sessions.store = self.sessions_store.clone().or(c.sessions.store);
        c.http.cors_origins.extend(self.cors_origin.iter().cloned());
        c.cache.tokens = self.context.or(c.cache.tokens);
        set(&mut c.cache.kv, &self.kv);
        c.cache.kv_v = self.kv_v.or(c.cache.kv_v);
        set(&mut c.cache.kv_recent, &self.kv_recent);
        set(&mut c.cache.block_tokens, &self.block_tokens);
        set(&mut c.cache.eviction, &self.eviction);
        c.cache.keep = self.keep.or(c.cache.keep);
        c.cache.prefix = self.prefix.clone().or(c.cache.prefix);
        set(&mut c.scheduler.policy, &self.policy);
        set(&mut c.scheduler.max_batch, &self.max_batch);
        set(&mut c.scheduler.max_batch_tokens, &self.max_batch_tokens);
        self.tiers.apply(&mut c.tiers);
        c.kv_events.endpoint = self.kv_events.or(c.kv_events.endpoint);
        c.kv_events.replay_endpoint = self.kv_events_replay.or(c.kv_events.replay_endpoint);
        set(&mut c.kv_events.topic, &self.kv_events_topic);
        c.kv_events.tiers |= self.kv_events_tiers;
        self.speculation.apply(&mut c.speculation);
        set(&mut c.limits.max_queue, &self.max_queue);
        set(&mut c.limits.request_timeout_s, &self.request_timeout);
        set(&mut c.limits.grace_s, &self.grace);
        set(&mut c.limits.max_body_bytes, &self.max_body.map(|size| size.0 as usize));
        if let Some(keep) = c.cache.keep
            && (self.record.is_some() || c.cache.prefix.is_some())
        {
            return Err(wrong_usage(format!(
                "--record and --prefix do not go with keep = \"{keep}\": what is removed is not recorded, and a thinned text \
                 has no prefix to share"
            )));
        }
        if c.cache.prefix.is_some() && self.record.is_some() {
            let what =
                "--record and --prefix (cache.prefix) exclude each other: a replay would not have the prefix";
            return Err(wrong_usage(what));
        }
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
