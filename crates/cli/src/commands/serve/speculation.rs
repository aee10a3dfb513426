//! `--speculate` for a server: flags override the section `[speculation]` of its configuration.
use crate::options::{Mode, SpeculationArgs, wrong_usage};
use clap::{ValueEnum, ValueHint};
use kvist_server::ServerConfig;
use kvist_server::config::SpeculationSection;
use serde::Serialize;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct SpeculationFlags {
    /// Propose tokens and verify several in one step: the same answers, sooner where proposals are right
    #[arg(long, value_name = "HOW")]
    speculate: Option<Mode>,
    /// The draft model, as --model takes it
    #[arg(long, value_name = "MODEL", value_hint = ValueHint::AnyPath)]
    draft_model: Option<PathBuf>,
    /// Most tokens of a request's draft
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=1024))]
    draft_tokens: Option<u32>,
    /// Most tokens on one path of a draft [default: 8; 5 with draft]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=1024))]
    draft_depth: Option<u32>,
    /// Most continuations that a draft proposes after the same token; 1 drafts chains [default: 4; 1 with draft]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    draft_width: Option<u32>,
}

impl SpeculationFlags {
    /// Overrides `section` with the flags that are given.
    pub fn apply(&self, section: &mut SpeculationSection) {
        if let Some(mode) = self.speculate {
            if let Some(value) = mode.to_possible_value() {
                section.speculate = value.get_name().into();
            }
            if !matches!(mode, Mode::Draft | Mode::Eagle | Mode::Auto) {
                section.draft_model = None; // the file's
            }
        }
        section.draft_model = self.draft_model.clone().or(section.draft_model.take());
        section.draft_tokens = self.draft_tokens.unwrap_or(section.draft_tokens);
        section.draft_depth = self.draft_depth.or(section.draft_depth);
        section.draft_width = self.draft_width.or(section.draft_width);
    }
}

/// The section as the flags of other commands.
pub fn of_section(section: &SpeculationSection) -> anyhow::Result<SpeculationArgs> {
    Ok(SpeculationArgs {
        speculate: Mode::from_str(&section.speculate, false).map_err(wrong_usage)?,
        // `off` may leave one in the file.
        draft_model: section.draft_model.clone().filter(|_| section.is_on()),
        draft_tokens: section.draft_tokens,
        draft_depth: section.draft_depth,
        draft_width: section.draft_width,
    })
}

/// What speculation adds to the plan of a server.
#[derive(Serialize)]
pub struct SpeculationPlan {
    pub speculate: String,
    /// Largest number of draft tokens in a step, over all requests.
    pub max_draft_tokens: u32,
    /// Weights and cache of the draft model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub draft_model_bytes: Option<u64>,
}

impl SpeculationPlan {
    /// `None` if the server does not speculate.
    pub fn of(config: &ServerConfig, draft_model_bytes: Option<u64>) -> Option<Self> {
        let speculation = &config.speculation;
        speculation.is_on().then(|| SpeculationPlan {
            speculate: speculation.speculate.clone(),
            max_draft_tokens: speculation.step_tokens(&config.scheduler),
            draft_model_bytes,
        })
    }
}
