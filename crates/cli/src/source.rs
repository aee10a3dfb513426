//! `--model`: a path, a name of the Hugging Face Hub, or a model that another program has downloaded.
use crate::{output, progress};
use clap::{Args, ValueHint};
use indicatif::{ProgressBar, ProgressStyle};
use kvist_device::Bytes;
use kvist_engine::devices;
use kvist_hub::{Hub, Name, Progress, Resolved, Settings};
use kvist_model::ModelFile;
use kvist_model::ModelSize;
use kvist_model::weights::WeightFormat;
use std::path::{Path, PathBuf};

#[derive(Args, Clone, Debug)]
pub struct SourceArgs {
    /// A Hugging Face folder, a .gguf file, or a name that `kvist models` lists; hf:ORG/NAME[:QUANT|:FILE] is downloaded from
    /// the Hugging Face Hub; without it the embedded model
    #[arg(short, long, value_name = "MODEL", value_hint = ValueHint::AnyPath)]
    pub model: Option<PathBuf>,
    /// Download nothing: use only cached files
    #[arg(long)]
    pub offline: bool,
}

/// A model that is on this machine.
pub struct Source {
    pub file: ModelFile,
    /// The `--model` argument, if it was a name and not a path.
    pub typed: Option<String>,
    /// The model's name, if its path does not contain it.
    pub title: Option<String>,
}

impl Source {
    pub fn path(&self) -> Option<&Path> {
        match &self.file {
            ModelFile::Path(path) => Some(path),
            ModelFile::Embedded => None,
        }
    }
}

impl SourceArgs {
    /// Finds the model on this machine; downloads missing files.
    pub fn find(&self, quiet: bool) -> anyhow::Result<Source> {
        find(self.model.as_deref(), self.offline, quiet, Hub::resolve)
    }

    /// As `find`, for sizes only: of a safetensors model on the Hub only its config.json is downloaded.
    pub fn find_config(&self, quiet: bool) -> anyhow::Result<Source> {
        find(self.model.as_deref(), self.offline, quiet, Hub::resolve_config)
    }
}

fn find(
    model: Option<&Path>,
    offline: bool,
    quiet: bool,
    resolve: fn(&Hub, &Path, &mut dyn Progress) -> Result<Resolved, kvist_hub::Error>,
) -> anyhow::Result<Source> {
    let Some(typed) = model else {
        return Ok(Source { file: ModelFile::Embedded, typed: None, title: None });
    };
    let resolved = resolve(&hub(offline), typed, &mut Bar { quiet, bar: ProgressBar::hidden() })?;
    let is_path = matches!(Name::parse(typed)?, Name::Path(_));
    Ok(Source {
        file: ModelFile::Path(resolved.path),
        typed: (!is_path).then(|| typed.display().to_string()),
        title: resolved.title,
    })
}

/// The Hub and the caches, configured by this program's environment.
pub fn hub(offline: bool) -> Hub {
    let mut settings = Settings::from_env(&|name| std::env::var_os(name));
    settings.offline |= offline;
    Hub::new(settings)
}

/// A bar per file at a terminal, a line per file elsewhere.
struct Bar {
    quiet: bool,
    bar: ProgressBar,
}

impl Progress for Bar {
    fn begin(&mut self, file: &str, size: u64, done: u64) {
        self.bar = progress::bar("downloading", size, self.quiet);
        if self.bar.is_hidden() {
            let rest = match done {
                0 => String::new(),
                done => format!(", {} of them are here", Bytes(done)),
            };
            self.note(&format!("downloading {file} ({}{rest})", Bytes(size)));
            return;
        }
        let style = "{msg} {wide_bar} {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} {eta}";
        if let Ok(style) = ProgressStyle::with_template(style) {
            self.bar.set_style(style);
        }
        self.bar.set_message(file.to_string());
        // The bar's rate then counts only what is downloaded now.
        self.bar.set_position(done);
        self.bar.reset_eta();
    }

    fn at(&mut self, done: u64) {
        self.bar.set_position(done);
    }

    fn end(&mut self) {
        self.bar.finish_and_clear();
        self.bar = ProgressBar::hidden();
    }

    fn note(&mut self, text: &str) {
        if !self.quiet {
            self.bar.suspend(|| output::note(text));
        }
    }

    /// Refuses an unsupported family before its weights (gigabytes) are downloaded.
    fn accept(&mut self, config: &Path) -> Result<(), String> {
        let registry = devices::all();
        let size = ModelSize::of(&ModelFile::Path(config.into()), registry.device(), WeightFormat::AsStored);
        size.map(drop).map_err(|error| error.to_string())
    }
}
