//! Options of the simulated model's layers: what each of them sees, and the cache that follows from it.
use crate::options::{SourceArgs, parse_context, wrong_usage};
use clap::ValueHint;
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::{PagedSpec, PrefixSpec, RecomputeCost};
use kvist_device::Storage;
use kvist_engine::devices;
use kvist_engine::executor::PagedConfig;
use kvist_engine::memory::CacheConfig;
use kvist_model::ModelSize;
use kvist_model::config::{ModelConfig, Role};
use kvist_model::weights::WeightFormat;
use kvist_simulator::cost::{ExpertShape, ModelShape, WindowedLayers};
use std::path::PathBuf;

const LAYERS: &str = "Layers";

#[derive(clap::Args, Clone, Debug)]
pub struct LayerArgs {
    /// A model: a config.json or the folder of it, a .gguf file, or a name that `kvist models` lists; of hf:ORG/NAME only the
    /// config is downloaded. The cache gets its layer groups, with their windows, and a roofline its sizes
    #[arg(
        short, long, value_name = "MODEL", value_hint = ValueHint::AnyPath, conflicts_with = "shape",
        help_heading = LAYERS
    )]
    model: Option<PathBuf>,
    /// Download nothing: use only cached files
    #[arg(long, requires = "model", help_heading = LAYERS)]
    offline: bool,
    /// Storage of K and V of --model, as in `kvist serve --kv` [default: f16]
    #[arg(long, value_name = "DTYPE", requires = "model", help_heading = LAYERS)]
    kv: Option<Storage>,
    /// A query sees at most this many positions, its own included; a shorter window of the model's own stays
    #[arg(long, value_name = "TOKENS", value_parser = parse_context, help_heading = LAYERS)]
    window: Option<u32>,
    /// First positions that stay visible in addition to --window
    #[arg(long, default_value_t = 0, value_name = "TOKENS", requires = "window", help_heading = LAYERS)]
    sinks: u32,
    /// What --model names.
    #[arg(skip)]
    found: Option<Found>,
}

/// A model whose weights are not loaded.
#[derive(Clone, Debug)]
struct Found {
    name: String,
    config: ModelConfig,
    /// Bytes of the weights as their file stores them.
    weight_bytes: u64,
}

/// Without a model: what a block costs.
pub struct Blocks {
    pub bytes: Option<u64>,
    pub cost: RecomputeCost,
}

impl LayerArgs {
    /// Finds the model, and reads its sizes.
    pub fn read(&mut self, quiet: bool) -> anyhow::Result<()> {
        if self.model.is_none() {
            return Ok(());
        }
        let source = SourceArgs { model: self.model.clone(), offline: self.offline }.find_config(quiet)?;
        let registry = devices::all();
        let size = ModelSize::of(&source.file, registry.device(), WeightFormat::AsStored)?;
        let name = source.typed.unwrap_or(size.name);
        self.found = Some(Found { name, config: size.config, weight_bytes: size.stored_bytes });
        Ok(())
    }

    /// The flag by which the layers of a model are given, if any is.
    pub fn flag(&self) -> Option<&'static str> {
        match (&self.model, self.window) {
            (Some(_), _) => Some("--model"),
            (None, Some(_)) => Some("--window"),
            (None, None) => None,
        }
    }

    /// Whether some layers see a window only.
    pub fn has_windows(&self) -> bool {
        self.groups(0).iter().any(|group| group.visibility.window.is_some())
    }

    /// The layer groups, of `capacity_tokens` each.
    fn groups(&self, capacity_tokens: u32) -> Vec<GroupSpec> {
        let visibility = Visibility { window: self.window, sinks: self.sinks };
        match &self.found {
            Some(found) => self.config(capacity_tokens).groups(&found.config),
            None => vec![GroupSpec { capacity_tokens, visibility, max_step_tokens: 1 }],
        }
    }

    /// The policy of a server's cache.
    fn config(&self, capacity_tokens: u32) -> CacheConfig {
        let k = self.kv.unwrap_or(Storage::F16);
        CacheConfig {
            k,
            v: k.for_values(),
            window: self.window,
            sinks: self.sinks,
            ..CacheConfig::new(capacity_tokens)
        }
    }

    /// The cache: with a model that of a server, which also says what its blocks cost.
    pub fn paged(
        &self,
        block_tokens: u32,
        capacity_tokens: u32,
        prefix: Option<PrefixSpec>,
        otherwise: Blocks,
    ) -> PagedSpec {
        if let Some(found) = &self.found {
            let paged = PagedConfig { cache: self.config(capacity_tokens), block_tokens, prefix };
            return paged.spec(&found.config);
        }
        let block_bytes = otherwise.bytes.into_iter().collect();
        let prefix = prefix.map(|prefix| PrefixSpec { block_bytes, cost: otherwise.cost, ..prefix });
        PagedSpec { block_tokens, groups: self.groups(capacity_tokens), rollback_tokens: 0, prefix }
    }

    /// The model's sizes for a roofline; those of `preset` if there is no --model.
    pub fn shape(&self, preset: ModelShape) -> anyhow::Result<ModelShape> {
        let shape = match &self.found {
            Some(found) => found.shape(&self.config(0))?,
            None => preset,
        };
        Ok(ModelShape { windowed: self.windowed(shape.layers), ..shape })
    }

    /// The layers with a window, of `n_layers`; the largest window stands for all of them.
    fn windowed(&self, n_layers: u32) -> Option<WindowedLayers> {
        let seen: Vec<u32> = self.seen(n_layers).into_iter().flatten().collect();
        let window = *seen.iter().max()?;
        Some(WindowedLayers { layers: seen.len() as u32, window })
    }

    /// How many positions each layer sees at most, sinks included; `None` for all.
    fn seen(&self, n_layers: u32) -> Vec<Option<u32>> {
        let groups = self.groups(0);
        let of = |visibility: Visibility| visibility.window.map(|w| w.saturating_add(visibility.sinks));
        match &self.found {
            Some(found) => {
                let layers = found.config.layout().layers;
                layers.iter().map(|layer| of(groups[layer.group.0 as usize].visibility)).collect()
            }
            None => vec![of(groups[0].visibility); n_layers as usize],
        }
    }

    /// Bytes of K and V per token; `None` if no model is given.
    pub fn token_bytes(&self) -> anyhow::Result<Option<f64>> {
        let shape = self.found.as_ref().map(|found| found.shape(&self.config(0)));
        Ok(shape.transpose()?.map(|shape| shape.kv_bytes_per_token()))
    }

    /// What the layers see, for the report; `None` if there is neither a model nor a window.
    pub fn describe(&self) -> Option<String> {
        let groups = self.groups(0);
        let Some(found) = &self.found else {
            return self.window.map(|_| format!("all see {}", sight(groups[0].visibility)));
        };
        let layers = found.config.layout().layers;
        let parts = groups.iter().enumerate().map(|(i, group)| {
            let n = layers.iter().filter(|layer| layer.group.0 as usize == i).count();
            format!("{n} see {}", sight(group.visibility))
        });
        Some(parts.collect::<Vec<_>>().join(", "))
    }
}

fn sight(visibility: Visibility) -> String {
    match (visibility.window, visibility.sinks) {
        (None, _) => "every token".into(),
        (Some(window), 0) => format!("the last {window} tokens"),
        (Some(window), sinks) => format!("the last {window} tokens and the first {sinks}"),
    }
}

impl Found {
    /// Sizes for a roofline, of a cache of this policy. Weights count as many bytes as in their file.
    fn shape(&self, cache: &CacheConfig) -> anyhow::Result<ModelShape> {
        let config = &self.config;
        let (mut parameters, mut of_experts, mut expert_bytes) = (0, 0, 0);
        for tensor in config.tensors() {
            let n_weights = tensor.shape.iter().map(|n| *n as u64).product::<u64>();
            if tensor.role == Role::Expert {
                of_experts += n_weights;
                expert_bytes += config.stored_experts.stored_bytes(&tensor.shape).unwrap_or(0) as u64;
            } else {
                parameters += n_weights;
            }
        }
        let layout = config.layout();
        let layer = layout.layers.first().ok_or_else(|| wrong_usage("--model has no layers"))?;
        let lookup = if config.tie_embeddings { 0 } else { config.vocab as u64 * config.hidden as u64 };
        let experts = config.experts.filter(|_| of_experts > 0).map(|experts| ExpertShape {
            parameters: of_experts,
            bytes_per_weight: expert_bytes as f64 / of_experts as f64,
            per_layer: experts.routing.n_experts as u32,
            per_token: experts.routing.used as u32,
        });
        Ok(ModelShape {
            name: self.name.clone(),
            parameters,
            lookup_parameters: lookup,
            layers: config.n_layers as u32,
            query_heads: config.n_heads as u32,
            kv_heads: config.n_kv_heads as u32,
            head_dim: config.head_dim as u32,
            bytes_per_weight: self.weight_bytes.saturating_sub(expert_bytes) as f64
                / parameters.max(1) as f64,
            bytes_per_kv_value: layer.cell_bytes(cache.k, cache.v) as f64 / (2.0 * config.head_dim as f64),
            windowed: None,
            borrowing_layers: (layout.layers.len() - layout.owners().count()) as u32,
            experts,
            source: "its config".into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use kvist_engine::memory::MemoryPlan;
    use kvist_server::ServerConfig;
    use std::path::Path;

    #[derive(Parser)]
    #[command(no_binary_name = true)]
    struct Flags {
        #[command(flatten)]
        layers: LayerArgs,
        /// [`LayerArgs`] excludes it.
        #[arg(long)]
        shape: Option<String>,
    }

    fn layers(model: Option<&str>, more: &[&str]) -> LayerArgs {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/parity");
        let model =
            model.map(|name| format!("--model={}", fixtures.join(name).join("config.json").display()));
        let flags = model.iter().map(String::as_str).chain(more.iter().copied());
        let mut layers = Flags::try_parse_from(flags).unwrap().layers;
        layers.read(true).unwrap();
        layers
    }

    /// Layer groups, windows, capacities and the prefix index are those of `kvist serve` for the same model and cells, and K
    /// and V take as many bytes as its memory plan says.
    #[test]
    fn the_cache_of_a_model_is_that_of_its_server() {
        for name in
            ["gemma3", "gpt-oss", "qwen2-window-mixed", "mistral-window", "llama-shared-kv", "llama-gqa"]
        {
            for (kv, block_tokens, tokens) in [("f16", 16, 640), ("q8", 8, 641)] {
                let layers = layers(Some(name), &["--kv", kv]);
                let model = &layers.found.as_ref().unwrap().config;
                let mut server = ServerConfig::default();
                server.cache.kv = kv.parse().unwrap();
                (server.cache.tokens, server.cache.block_tokens) = (Some(tokens), block_tokens);
                let paged = server.engine(model).paged;
                let expected = paged.spec(model);
                let otherwise = Blocks { bytes: Some(1), cost: RecomputeCost::default() };
                let found = layers.paged(block_tokens, tokens, Some(PrefixSpec::default()), otherwise);
                let groups = |spec: &PagedSpec| -> Vec<(u32, Visibility)> {
                    spec.groups.iter().map(|group| (group.capacity_tokens, group.visibility)).collect()
                };
                assert_eq!(groups(&found), groups(&expected), "{name}");
                assert_eq!(found.rollback_tokens, expected.rollback_tokens, "{name}");
                assert_eq!(format!("{:?}", found.prefix), format!("{:?}", expected.prefix), "{name}");
                let plan: MemoryPlan = paged.plan(model, &devices::all()).unwrap();
                let bytes = layers.token_bytes().unwrap().unwrap();
                assert!((bytes - plan.kv_bytes_per_token as f64).abs() < 1e-6, "{name}: {bytes}");
            }
        }
    }

    #[test]
    fn a_roofline_knows_windows_and_experts() {
        let preset = || ModelShape::preset("llama-3.1-8b").unwrap();
        let gemma = layers(Some("gemma3"), &[]);
        let shape = gemma.shape(preset()).unwrap();
        assert_eq!((shape.layers, shape.windowed), (4, Some(WindowedLayers { layers: 3, window: 7 })));
        assert_eq!((shape.experts, shape.lookup_parameters), (None, 0), "its embeddings are tied");
        assert_eq!(shape.weight_bytes(), gemma.found.as_ref().unwrap().weight_bytes as f64);
        assert_eq!(gemma.describe().unwrap(), "3 see the last 7 tokens, 1 see every token");

        let routed = layers(Some("gpt-oss"), &[]);
        let shape = routed.shape(preset()).unwrap();
        let experts = shape.experts.unwrap();
        assert_eq!((experts.per_layer, experts.per_token), (5, 2));
        let bytes = routed.found.as_ref().unwrap().weight_bytes as f64;
        assert!((shape.weight_bytes() - bytes).abs() < 1e-6 * bytes);

        let borrowing = layers(Some("llama-shared-kv"), &[]).shape(preset()).unwrap();
        assert!(borrowing.borrowing_layers > 0 && borrowing.windowed.is_none());

        // A window without a model is that of all layers; the model's own stays if it is shorter.
        let flags = ["--window", "1k", "--sinks", "4"];
        let shape = layers(None, &flags).shape(preset()).unwrap();
        assert_eq!(shape.windowed, Some(WindowedLayers { layers: 32, window: 1028 }));
        assert_eq!(layers(None, &flags).describe().unwrap(), "all see the last 1024 tokens and the first 4");
        let shape = layers(Some("gemma3"), &["--window", "5"]).shape(preset()).unwrap();
        assert_eq!(shape.windowed, Some(WindowedLayers { layers: 4, window: 5 }));
        let shape = layers(None, &[]).shape(preset()).unwrap();
        assert_eq!((shape, layers(None, &[]).describe()), (preset(), None));
    }
}
