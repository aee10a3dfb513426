//! Options of the step-cost model.
use super::layers::LayerArgs;
use crate::options::wrong_usage;
use anyhow::Context;
use clap::ValueHint;
use kvist_cache::RecomputeCost;
use kvist_scheduler::TokenWork;
use kvist_simulator::cost::{
    BatchShape, ConstantRates, Hardware, LONGEST_STEP_NS, MeasuredTable, ModelShape, Roofline, StepCost,
    recompute_cost,
};
use std::path::{Path, PathBuf};

const COST: &str = "Time of a step";

#[derive(clap::Args, Clone, Debug)]
pub struct CostArgs {
    /// A machine by name, for a roofline: its arithmetic, bandwidth and memory
    #[arg(long, value_name = "NAME", value_parser = hardware, help_heading = COST)]
    hardware: Option<Hardware>,
    /// A model's shape by name, for a roofline
    #[arg(long, value_name = "NAME", value_parser = shape, help_heading = COST)]
    shape: Option<ModelShape>,
    /// Share of the roofline that is reached
    #[arg(long, default_value_t = 1.0, value_name = "X", help_heading = COST)]
    efficiency: f64,
    /// Constant rates instead: prompt tokens per millisecond
    #[arg(
        long, value_name = "N", requires = "decode_rate", conflicts_with_all = ["hardware", "shape"],
        help_heading = COST
    )]
    prefill_rate: Option<f64>,
    /// Constant rates instead: generated tokens per millisecond, over all sequences
    #[arg(long, value_name = "N", requires = "prefill_rate", help_heading = COST)]
    decode_rate: Option<f64>,
    /// A measured table instead (docs/traces.md)
    #[arg(
        long, value_name = "FILE", value_hint = ValueHint::FilePath,
        conflicts_with_all = ["hardware", "shape", "prefill_rate"], help_heading = COST
    )]
    costs: Option<PathBuf>,
    /// What is priced, and which cache it needs.
    #[command(flatten)]
    pub layers: LayerArgs,
}

const HARDWARE: &str = "h100-sxm";
const SHAPE: &str = "llama-3.1-8b";

fn hardware(name: &str) -> Result<Hardware, String> {
    let known = || Hardware::names().collect::<Vec<_>>().join(", ");
    Hardware::preset(name).ok_or_else(|| format!("there is no such machine: use one of {}", known()))
}

fn shape(name: &str) -> Result<ModelShape, String> {
    let known = || ModelShape::names().collect::<Vec<_>>().join(", ");
    ModelShape::preset(name).ok_or_else(|| format!("there is no such model: use one of {}", known()))
}

impl CostArgs {
    fn roofline(&self) -> anyhow::Result<Roofline> {
        let missing = || wrong_usage("a preset is missing");
        let hardware = self.hardware.clone().or_else(|| Hardware::preset(HARDWARE)).ok_or_else(missing)?;
        let preset = self.shape.clone().or_else(|| ModelShape::preset(SHAPE)).ok_or_else(missing)?;
        let model = self.layers.shape(preset)?;
        if !(self.efficiency > 0.0 && self.efficiency <= 1.0) {
            return Err(wrong_usage(format!(
                "--efficiency {}: the share must be above 0 and at most 1",
                self.efficiency
            )));
        }
        Ok(Roofline { efficiency: self.efficiency, ..Roofline::ideal(hardware, model) })
    }

    /// Everything that the step times depend on, the contents of a table included.
    pub fn identity(&self) -> anyhow::Result<String> {
        let table = self.costs.as_ref().map(|file| {
            std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))
        });
        Ok(format!("{self:?} {:?}", table.transpose()?))
    }

    pub fn get(&self) -> anyhow::Result<Box<dyn StepCost>> {
        let cost = self.model()?;
        let work = priced(&*cost, 1);
        let longest_ns = work.prefill_ns.max(work.decode_ns);
        if longest_ns > LONGEST_STEP_NS {
            return Err(wrong_usage(format!(
                "a step of one token takes {longest_ns} ns ({}): give higher rates or a higher --efficiency, so that it \
                 takes at most 2^53 ns",
                cost.name()
            )));
        }
        Ok(cost)
    }

    /// Situations that the simulation may reach but `--costs` did not measure, one sentence each.
    pub fn beyond(
        &self,
        max_batch: u32,
        batch_tokens: u32,
        longest: u64,
        block_tokens: u32,
    ) -> anyhow::Result<Vec<String>> {
        let Some(file) = &self.costs else { return Ok(Vec::new()) };
        let (file, table) = (file.display(), table(file)?);
        let range = table.range();
        let guess = "beyond it times are guesses along the last slope";
        let mut beyond = Vec::new();
        if f64::from(max_batch) > range.sequences {
            beyond.push(format!(
                "{file} was measured up to {} decoding sequences, --max-batch is {max_batch}: {guess}",
                range.sequences
            ));
        }
        if f64::from(batch_tokens) > range.prefill_tokens {
            beyond.push(format!(
                "{file} was measured up to {} prompt tokens a step, --batch-tokens is {batch_tokens}: {guess}",
                range.prefill_tokens
            ));
        }
        if longest as f64 > range.context_tokens {
            beyond.push(format!(
                "{file} was measured up to {} tokens of context, the longest request needs {longest}: {guess}",
                range.context_tokens
            ));
        }
        let measured = table.setting().map_or(0, |setting| setting.block_tokens);
        if measured != 0 && measured != block_tokens {
            beyond.push(format!(
                "{file} was measured with blocks of {measured} tokens, but here they have {block_tokens}: give \
                 --block-tokens {measured}, or measure again"
            ));
        }
        Ok(beyond)
    }

    /// What drafts of `draft_tokens` tokens may need and `--costs` did not measure, one sentence each.
    pub fn beyond_drafts(
        &self,
        max_batch: u32,
        batch_tokens: u32,
        draft_tokens: u32,
    ) -> anyhow::Result<Vec<String>> {
        let Some(file) = self.costs.as_ref().filter(|_| draft_tokens > 0) else { return Ok(Vec::new()) };
        let (file, range) = (file.display(), table(file)?.range());
        let mut beyond = Vec::new();
        let rows = draft_tokens + 1;
        match range.draft_rows {
            None => beyond.push(format!(
                "{file} does not say what drafts cost: each draft token is priced as one more sequence; measure again \
                 with kvist bench calibrate"
            )),
            Some(measured) if f64::from(rows) > measured => beyond.push(format!(
                "{file} was measured up to {measured} tokens of a sequence in a step, a draft and the token before it \
                 have {rows}: beyond it times are guesses along the last slope"
            )),
            Some(_) => {}
        }
        let all = u64::from(max_batch).saturating_mul(rows.into()).min(batch_tokens.into());
        if all as f64 > range.sequences {
            beyond.push(format!(
                "{file} was measured up to {} decoding sequences, which is as many tokens; drafts make it up to {all}: \
                 beyond it times are guesses along the last slope",
                range.sequences
            ));
        }
        Ok(beyond)
    }

    fn model(&self) -> anyhow::Result<Box<dyn StepCost>> {
        if let Some(file) = &self.costs {
            return Ok(Box::new(table(file)?));
        }
        if let (Some(prefill), Some(decode)) = (self.prefill_rate, self.decode_rate) {
            let rates = ConstantRates::new(prefill, decode);
            let why = "--prefill-rate and --decode-rate are tokens per millisecond, above 0 (2e-10 at least) and finite";
            return Ok(Box::new(rates.ok_or_else(|| wrong_usage(why))?));
        }
        Ok(Box::new(self.roofline()?))
    }

    /// The costs for policies that weigh work: a prompt token costs its share of a full step of `batch_tokens`, a
    /// generated token a step of its own. `None` without a cost model; [`CostArgs::get`] reports the error.
    pub fn work(&self, batch_tokens: u32) -> Option<TokenWork> {
        Some(priced(&*self.get().ok()?, batch_tokens))
    }

    /// The cost of recomputing blocks, for eviction policies, in steps of `batch_tokens`.
    pub fn recompute(&self, batch_tokens: u32) -> anyhow::Result<RecomputeCost> {
        Ok(recompute_cost(&*self.get()?, batch_tokens))
    }

    /// Bytes of K and V per token; `None` if no model is given.
    pub fn token_bytes(&self) -> anyhow::Result<Option<f64>> {
        if self.names_no_machine() {
            return self.layers.token_bytes();
        }
        Ok(Some(self.roofline()?.model.kv_bytes_per_token()))
    }

    fn names_no_machine(&self) -> bool {
        self.costs.is_some() || self.prefill_rate.is_some()
    }

    /// Tokens that fit into the memory in addition to the weights; `None` if no machine is given.
    pub fn cache_tokens(&self) -> anyhow::Result<Option<u64>> {
        if self.names_no_machine() {
            return Ok(None);
        }
        let roofline = self.roofline()?;
        match roofline.cache_tokens() {
            0 => Err(wrong_usage(format!(
                "{} does not fit into the memory of {}: use another machine, or a smaller model",
                roofline.model.name, roofline.hardware.name
            ))),
            tokens => Ok(Some(tokens)),
        }
    }
}

/// Reads a table of step costs.
pub fn table(file: &Path) -> anyhow::Result<MeasuredTable> {
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    Ok(MeasuredTable::parse(&file.display().to_string(), &text)?)
}

fn priced(cost: &dyn StepCost, batch_tokens: u32) -> TokenWork {
    let chunk = u64::from(batch_tokens.max(1));
    let (mut prefill, mut decode) = (BatchShape::default(), BatchShape::default());
    prefill.add_prefill(0, chunk);
    decode.add_decode(0);
    TokenWork { prefill_ns: cost.step_ns(&prefill).div_ceil(chunk), decode_ns: cost.step_ns(&decode) }
}
