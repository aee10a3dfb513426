//! Options of sampling, and the defaults that a model ships.
use super::wrong_usage;
use anyhow::anyhow;
use clap::Args;
use kvist_engine::sampler::{Sampler, SamplerConfig};
use kvist_model::Opened;
use kvist_model::generation_config::SamplingDefaults;

#[derive(Args, Clone, Debug)]
pub struct SamplingArgs {
    /// 0 picks the likeliest token, after the penalty [default: the model's generation_config.json, or 0.8]
    #[arg(long, allow_negative_numbers = true)]
    pub temperature: Option<f32>,
    /// Pick the likeliest token, whatever the other flags and the model's defaults say; only --repeat-penalty affects
    /// it
    #[arg(long, conflicts_with = "temperature")]
    pub greedy: bool,
    /// Sample among the K likeliest tokens; 0 is all [default: the model's, or 40]
    #[arg(long)]
    pub top_k: Option<u32>,
    /// Sample among the likeliest that together reach this probability [default: the model's, or 0.95]
    #[arg(long, allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Drop tokens less likely than this share of the likeliest [default: the model's, or 0.05]
    #[arg(long, allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// Make tokens of the recent text less likely; 1 is off [default: the model's, or 1]
    #[arg(long, allow_negative_numbers = true)]
    pub repeat_penalty: Option<f32>,
    /// Number of recent tokens that the penalty covers [default: the model's, or 64]
    #[arg(long, value_name = "TOKENS")]
    pub repeat_last: Option<usize>,
    /// The same seed gives the same text; without one, kvist draws one and prints it in the summary
    #[arg(long)]
    pub seed: Option<u64>,
}

impl SamplingArgs {
    pub fn seed(&self) -> u64 {
        self.seed.unwrap_or_else(|| {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            now.map_or(0, |t| t.as_nanos() as u64 % 1_000_000_007)
        })
    }

    pub fn sampler(&self, opened: &Opened, seed: u64) -> anyhow::Result<Sampler> {
        let shipped = match self.asks_the_model() {
            true => *opened.sampling().map_err(|e| anyhow!("{e}"))?,
            false => SamplingDefaults::default(),
        };
        Sampler::new(self.config(&shipped, seed)).map_err(|e| wrong_usage(e.to_string()))
    }

    /// The model's defaults in effect in addition to these flags, as text; `None` if there are none.
    pub fn of_the_model(&self, opened: &Opened) -> Option<String> {
        let shipped = opened.sampling().ok().filter(|_| self.asks_the_model())?;
        shipped_defaults(&self.counting(shipped))
    }

    /// The model's defaults that no flag replaces.
    fn counting(&self, shipped: &SamplingDefaults) -> SamplingDefaults {
        SamplingDefaults {
            temperature: shipped.temperature.filter(|_| self.temperature.is_none()),
            top_k: shipped.top_k.filter(|_| self.top_k.is_none()),
            top_p: shipped.top_p.filter(|_| self.top_p.is_none()),
            min_p: shipped.min_p.filter(|_| self.min_p.is_none()),
            repetition_penalty: shipped.repetition_penalty.filter(|_| self.repeat_penalty.is_none()),
            repetition_window: shipped.repetition_window.filter(|_| self.repeat_last.is_none()),
        }
    }

    /// True if at least one setting is left to the model's defaults.
    fn asks_the_model(&self) -> bool {
        let all_are_given = self.temperature.is_some()
            && self.top_k.is_some()
            && self.top_p.is_some()
            && self.min_p.is_some()
            && self.repeat_penalty.is_some()
            && self.repeat_last.is_some();
        !self.greedy && !all_are_given
    }

    /// Flags come first, then the model's defaults, then our own. `--greedy` ignores the model's defaults: a repetition
    /// penalty would choose a token other than the likeliest.
    fn config(&self, shipped: &SamplingDefaults, seed: u64) -> SamplerConfig {
        let none = SamplingDefaults::default();
        let shipped = if self.greedy { &none } else { shipped };
        let temperature = if self.greedy { Some(0.0) } else { self.temperature };
        let base = SamplerConfig::of_model(shipped, seed);
        SamplerConfig {
            temperature: temperature.unwrap_or(base.temperature),
            top_k: self.top_k.map_or(base.top_k, |k| k as usize),
            top_p: self.top_p.unwrap_or(base.top_p),
            min_p: self.min_p.unwrap_or(base.min_p),
            repetition_penalty: self.repeat_penalty.unwrap_or(base.repetition_penalty),
            repetition_window: self.repeat_last.unwrap_or(base.repetition_window),
            ..base
        }
    }
}

/// The sampling defaults that a model ships, in one line of text; `None` if it ships none. They are printed because
/// they change the output without any flag.
pub fn shipped_defaults(shipped: &SamplingDefaults) -> Option<String> {
    let mut parts: Vec<String> = Vec::new();
    let mut say =
        |name: &str, value: Option<String>| parts.extend(value.map(|value| format!("{name} {value}")));
    say("temperature", shipped.temperature.map(|x| x.to_string()));
    say("top_k", shipped.top_k.map(|k| k.to_string()));
    say("top_p", shipped.top_p.map(|x| x.to_string()));
    say("min_p", shipped.min_p.map(|x| x.to_string()));
    say("repetition_penalty", shipped.repetition_penalty.map(|x| x.to_string()));
    let window = |tokens: usize| match tokens {
        usize::MAX => "whole text".to_string(),
        tokens => format!("last {tokens} tokens"),
    };
    say("penalty over the", shipped.repetition_window.map(window));
    (!parts.is_empty()).then(|| format!("sampling defaults of the model: {}", parts.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        sampling: SamplingArgs,
    }

    /// Regression: like transformers and vLLM, we must use the model's own defaults; ours were used.
    #[test]
    fn what_a_model_ships_stands_between_flags_and_our_defaults() {
        let with = |flags: &[&str], shipped: &SamplingDefaults| {
            let line = Line::parse_from(std::iter::once(&"kvist").chain(flags));
            line.sampling.config(shipped, 7)
        };
        let ours = with(&[], &SamplingDefaults::default());
        assert_eq!((ours.temperature, ours.top_k, ours.top_p, ours.min_p), (0.8, 40, 0.95, 0.05));
        assert_eq!((ours.repetition_penalty, ours.repetition_window, ours.seed), (1.0, 64, 7));
        let shipped = SamplingDefaults {
            temperature: Some(0.6),
            top_k: Some(20),
            repetition_penalty: Some(1.1),
            repetition_window: Some(usize::MAX),
            ..SamplingDefaults::default()
        };
        let theirs = with(&[], &shipped);
        assert_eq!((theirs.temperature, theirs.top_k, theirs.top_p, theirs.min_p), (0.6, 20, 0.95, 0.05));
        assert_eq!((theirs.repetition_penalty, theirs.repetition_window), (1.1, usize::MAX));
        let flags = with(&["--temperature", "1", "--top-k", "0", "--repeat-last", "8"], &shipped);
        assert_eq!((flags.temperature, flags.top_k, flags.repetition_window), (1.0, 0, 8));
        // Regression: a penalty that the model ships made `--greedy` choose other tokens than the likeliest.
        let greedy = with(&["--greedy"], &shipped);
        assert_eq!((greedy.temperature, greedy.repetition_penalty), (0.0, 1.0));
        assert_eq!(with(&["--greedy", "--repeat-penalty", "1.5"], &shipped).repetition_penalty, 1.5);
        assert_eq!(with(&["--temperature", "0"], &shipped).repetition_penalty, 1.1);
    }

    /// Regression: no output said which of the model's defaults were in effect.
    #[test]
    fn defaults_that_count_are_told() {
        let with = |flags: &[&str], shipped: &SamplingDefaults| {
            let line = Line::parse_from(std::iter::once(&"kvist").chain(flags));
            shipped_defaults(&line.sampling.counting(shipped))
        };
        let shipped = SamplingDefaults {
            temperature: Some(0.7),
            top_p: Some(0.8),
            repetition_penalty: Some(1.1),
            repetition_window: Some(usize::MAX),
            ..SamplingDefaults::default()
        };
        let all = "sampling defaults of the model: temperature 0.7, top_p 0.8, repetition_penalty 1.1, penalty over the \
                   whole text";
        assert_eq!(with(&[], &shipped).as_deref(), Some(all));
        let rest = "sampling defaults of the model: top_p 0.8, repetition_penalty 1.1";
        let flags = ["--temperature", "1", "--repeat-last", "8"];
        assert_eq!(with(&flags, &shipped).as_deref(), Some(rest));
        assert_eq!(with(&[], &SamplingDefaults::default()), None);
    }
}
