//! Options of speculative decoding.
use super::replay;
use crate::options::wrong_usage;
use anyhow::ensure;
use clap::ValueHint;
use kvist_simulator::speculation::{Acceptance, DraftSpec, Observed, Speculation};
use std::path::PathBuf;

const SPECULATION: &str = "Speculation";

#[derive(clap::Args, Clone, Debug)]
pub struct SpeculateArgs {
    /// Verify chains of draft tokens while decoding: tokens=N,accept=P[,draft_ms=MS]. P is the probability that a draft
    /// token is accepted, or one for each depth, 0.8/0.6/0.4; MS the time that proposing drafts adds to a step
    #[arg(long, value_name = "DRAFTS", help_heading = SPECULATION)]
    speculate: Option<DraftSpec>,
    /// Draft and accept as many tokens as the decode steps of this recording did, instead of tokens and accept
    #[arg(long, value_name = "RECORDING", value_hint = ValueHint::FilePath, help_heading = SPECULATION)]
    speculate_from: Option<PathBuf>,
    /// The drafts of `speculate_from`.
    #[arg(skip)]
    observed: Option<Observed>,
}

impl SpeculateArgs {
    pub fn is_on(&self) -> bool {
        self.speculate.is_some() || self.speculate_from.is_some()
    }

    /// Checks the flags, and reads the recording.
    pub fn read(&mut self) -> anyhow::Result<()> {
        let given = self.speculate.as_ref().map(|drafts| drafts.acceptance.is_some());
        let Some(file) = &self.speculate_from else {
            return match given {
                Some(false) => Err(wrong_usage(
                    "--speculate does not say what is drafted: give tokens and accept, or --speculate-from",
                )),
                _ => Ok(()),
            };
        };
        if given == Some(true) {
            return Err(wrong_usage(
                "--speculate-from says what is drafted and accepted: --speculate can only add draft_ms",
            ));
        }
        let mut observed = Observed::default();
        replay::each_step(file, &mut |replayed| observed.add(&replayed))?;
        ensure!(
            !observed.is_empty(),
            "{} has no drafts: record a server or a simulation that speculates",
            file.display()
        );
        self.observed = Some(observed);
        Ok(())
    }

    fn acceptance(&self) -> Option<Acceptance> {
        match &self.observed {
            Some(observed) => Some(Acceptance::Observed(observed.clone())),
            None => self.speculate.as_ref()?.acceptance.clone(),
        }
    }

    /// How runs of the load of `seed` speculate; `None`: they do not.
    pub fn get(&self, seed: u64) -> Option<Speculation> {
        let draft_ns = self.speculate.as_ref().map_or(0, |drafts| drafts.draft_ns);
        Some(Speculation { acceptance: self.acceptance()?, draft_ns, seed })
    }

    /// The largest draft; 0 without speculation.
    pub fn max_tokens(&self) -> u32 {
        self.acceptance().map_or(0, |acceptance| acceptance.max_tokens())
    }
}
