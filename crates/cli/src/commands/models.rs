//! `kvist models`: the models on this machine, the name of each, and whether it can run here.
use crate::options::*;
use crate::{json, output, source};
use anyhow::Context;
use kvist_device::{Bytes, MemoryBudget, Registry, Storage};
use kvist_engine::Error;
use kvist_engine::memory::{CacheConfig, MemoryPlan};
use kvist_hub::stores::{self, Found};
use kvist_model::weights::WeightFormat;
use kvist_model::{ModelFile, Opened};
use serde::Serialize;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    /// Memory that a model and its cache may take; by default the free memory of the machine
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    memory: Option<Size>,
    /// Storage of K and V, for the context that fits
    #[arg(long, default_value = "f16", value_name = "DTYPE")]
    kv: Storage,
    #[command(flatten)]
    compute: ComputeArgs,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// `kvist models --json`
#[derive(Serialize)]
struct Report {
    version: u32,
    /// Memory that a model may take; null where the system does not report it.
    memory_bytes: Option<u64>,
    looked_in: Vec<PathBuf>,
    models: Vec<Model>,
}

#[derive(Serialize)]
struct Model {
    /// What `--model` takes.
    name: String,
    store: &'static str,
    path: PathBuf,
    /// Null if unknown.
    family: Option<String>,
    /// On disk.
    bytes: u64,
    quantisation: Option<String>,
    runs: bool,
    /// Why it does not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    why_not: Option<String>,
    /// Positions it was trained on.
    context_trained_tokens: Option<u32>,
    /// The longest context, up to the trained one, whose session fits into the memory.
    context_fits_tokens: Option<u32>,
}

pub fn run(args: Args) -> anyhow::Result<()> {
    let hub = source::hub(true);
    let places = &hub.settings().places;
    let mut looked_in = vec![places.hugging_face.clone()];
    looked_in.extend(places.llama_cpp.iter().chain(&places.lm_studio).chain(&places.ollama).cloned());
    let memory = args.memory.map(|size| size.0).or_else(crate::memory::available);
    let registry = registry(&args.compute.get()?);
    let describe = |found| describe_model(found, &registry, args.kv, memory);
    let report = Report {
        version: json::VERSION,
        memory_bytes: memory,
        looked_in,
        models: stores::list(places).into_iter().map(describe).collect(),
    };
    match args.json {
        true => output::show_json(&report),
        false => output::show(&output::harmless(&report.text())),
    }
    .context("cannot list the models")
}

/// Reads a model's headers. An error is reported in the model's line and does not fail the list.
fn describe_model(found: Found, registry: &Registry, kv: Storage, memory: Option<u64>) -> Model {
    let Found { name, store, path, bytes, quant, trouble } = found;
    let mut model = Model {
        name,
        store,
        family: None,
        bytes,
        quantisation: quant,
        runs: false,
        why_not: trouble,
        context_trained_tokens: None,
        context_fits_tokens: None,
        path,
    };
    if model.why_not.is_none()
        && let Err(error) = model.read_headers(registry, kv, memory)
    {
        model.why_not = Some(match error {
            Error::UnknownArchitecture { found, .. } => {
                model.family = Some(found);
                "kvist does not run this family".into()
            }
            Error::TensorEncoding { found, .. } => format!("kvist does not read weights of {found}"),
            // Remove the path: the line has it already.
            error => {
                let message = error.to_string();
                let path = model.path.display().to_string();
                message.strip_prefix(&path).unwrap_or(&message).trim_start_matches([':', ' ']).into()
            }
        });
    }
    model
}

impl Model {
    fn read_headers(&mut self, registry: &Registry, kv: Storage, memory: Option<u64>) -> Result<(), Error> {
        let opened = Opened::open_without_texts(&ModelFile::Path(self.path.clone()), true)?;
        let config = opened.config();
        self.family = Some(config.family.name().into());
        self.context_trained_tokens = Some(config.context);
        // The file is a better source for the quantisation than its name; this also checks that every tensor is there.
        let weights = opened.weight_bytes(registry.device(), WeightFormat::AsStored)?;
        self.quantisation = Some(opened.stored_as()?);
        self.runs = true;
        let budget = memory.map_or_else(MemoryBudget::unlimited, MemoryBudget::new);
        let fits = match MemoryPlan::free_after(&opened, registry, WeightFormat::AsStored, &budget) {
            Ok(free) => {
                let cache = CacheConfig { k: kv, v: kv.for_values(), ..CacheConfig::new(config.context) };
                MemoryPlan::longest_context(config, registry, &cache, free)
            }
            Err(_) => 0,
        };
        self.context_fits_tokens = Some(fits);
        if fits == 0 {
            let memory = memory.unwrap_or_default();
            self.runs = false;
            self.why_not =
                Some(format!("it takes {} and more, and {} are free", Bytes(weights), Bytes(memory)));
        }
        Ok(())
    }

    /// The columns of a line: name, family, size, quantisation, context.
    fn cells(&self) -> [String; 5] {
        let or_nothing = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".into());
        let context = match (&self.why_not, self.context_fits_tokens, self.context_trained_tokens) {
            (Some(why), ..) => format!("no: {}", why.replace(['\n', '\t'], " ")),
            (None, Some(fits), Some(trained)) if fits < trained => format!("{fits} of {trained}"),
            (None, fits, _) => fits.map_or_else(|| "-".into(), |fits| fits.to_string()),
        };
        [
            self.name.clone(),
            or_nothing(&self.family),
            Bytes(self.bytes).to_string(),
            or_nothing(&self.quantisation),
            context,
        ]
    }
}

impl Report {
    fn text(&self) -> String {
        if self.models.is_empty() {
            let places = self.looked_in.iter().map(|path| format!("  {}\n", path.display()));
            return format!(
                "no models in\n{}`kvist run --model hf:ORG/NAME` downloads one from the Hugging Face Hub\n",
                places.collect::<String>()
            );
        }
        let head = ["name", "family", "size", "weights", "context that fits"].map(String::from);
        let rows: Vec<[String; 5]> =
            std::iter::once(head).chain(self.models.iter().map(Model::cells)).collect();
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths = [0, 1, 2, 3].map(width);
        let mut text = String::new();
        for row in &rows {
            for (cell, width) in row.iter().zip(widths) {
                text += &format!("{cell:width$}  ");
            }
            text += &row[4];
            text.push('\n');
        }
        text
    }
}
