//! Distributions as text, `kind:name=value,name=value`, for flags and configuration.
//!
//! Every value is named, so no order needs to be remembered. Unknown and missing names are errors.
use super::{Agents, Arrivals, BadParameter, Chats, Contents, Lengths, Prefixes};
use std::str::FromStr;

/// Default if a description does not specify it. Fine enough for blocks of any power of two.
const TOKENS_PER_ID: u32 = 16;

/// A text that does not describe a distribution.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum BadSpec {
    #[error("there are no {what} `{found}`: use one of {known}")]
    UnknownKind { what: &'static str, found: String, known: String },
    #[error("`{found}` in `{text}`: expected name=value, as in `{example}`")]
    NotNamed { text: String, found: String, example: &'static str },
    #[error("`{kind}` does not read `{name}`: write it as `{example}`")]
    UnknownName { kind: String, name: String, example: &'static str },
    #[error("`{kind}` lacks `{name}`: write it as `{example}`")]
    Missing { kind: String, name: &'static str, example: &'static str },
    #[error("`{name}={found}`: expected {expected}")]
    BadValue { name: &'static str, found: String, expected: &'static str },
    #[error(transparent)]
    BadParameter(#[from] BadParameter),
}

/// Each kind with a complete example.
type Kinds = &'static [(&'static str, &'static str)];

const ARRIVALS: Kinds = &[
    ("deterministic", "deterministic:per_s=4"),
    ("poisson", "poisson:per_s=4"),
    ("gamma", "gamma:per_s=4,variation=2"),
    ("on_off", "on_off:per_s=10,on_s=1,off_s=3"),
    ("at_once", "at_once"),
];

const LENGTHS: Kinds = &[
    ("deterministic", "deterministic:tokens=100"),
    ("exponential", "exponential:mean=300"),
    ("hyperexponential", "hyperexponential:short=100,long=2000,share_short=0.9"),
    ("balanced", "balanced:mean=300,variation=2"),
    ("uniform", "uniform:least=10,most=1000"),
    ("lognormal", "lognormal:mean=400,variation=0.8"),
];

const CONTENTS: Kinds = &[
    ("unknown", "unknown"),
    ("prefixes", "prefixes:n=20,exponent=1,tokens=512,own_prompt=true,share=0.8,tokens_per_id=16"),
    ("chats", "chats:least_turns=1,most_turns=8,think_s=10,system_tokens=64,tokens_per_id=16"),
    ("agents", "agents:fan_out=3,depth=2,system_tokens=64,tokens_per_id=16"),
];

/// A parsed text.
pub(crate) struct Spec<'a> {
    kind: &'a str,
    example: &'static str,
    /// Values not taken yet.
    values: Vec<(&'a str, &'a str)>,
}

impl<'a> Spec<'a> {
    fn new(text: &'a str, what: &'static str, kinds: Kinds) -> Result<Spec<'a>, BadSpec> {
        let (kind, values) = text.trim().split_once(':').unwrap_or((text.trim(), ""));
        let Some((_, example)) = kinds.iter().find(|(name, _)| *name == kind) else {
            let known = kinds.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
            return Err(BadSpec::UnknownKind { what, found: kind.into(), known });
        };
        Self::named(values, text, kind, example)
    }

    /// A text of values alone, without a kind. `kind` stands for it in errors.
    pub(crate) fn of_values(
        text: &'a str,
        kind: &'a str,
        example: &'static str,
    ) -> Result<Spec<'a>, BadSpec> {
        Self::named(text, text, kind, example)
    }

    /// `values` are a part of `text`.
    fn named(
        values: &'a str,
        text: &'a str,
        kind: &'a str,
        example: &'static str,
    ) -> Result<Spec<'a>, BadSpec> {
        let values = values
            .split(',')
            .map(str::trim)
            .filter(|value| !value.is_empty())
            .map(|value| {
                let (name, value) = value.split_once('=').ok_or_else(|| BadSpec::NotNamed {
                    text: text.into(),
                    found: value.into(),
                    example,
                })?;
                Ok((name.trim(), value.trim()))
            })
            .collect::<Result<Vec<_>, BadSpec>>()?;
        Ok(Spec { kind, example, values })
    }

    /// Takes the value of `name`. If it is given twice, the last one counts.
    pub(crate) fn take<T: FromStr>(
        &mut self,
        name: &'static str,
        expected: &'static str,
    ) -> Result<T, BadSpec> {
        let Some(value) = self.values.iter().rev().find(|(n, _)| *n == name).map(|(_, value)| *value) else {
            return Err(BadSpec::Missing { kind: self.kind.into(), name, example: self.example });
        };
        self.values.retain(|(n, _)| *n != name);
        value.parse().map_err(|_| BadSpec::BadValue { name, found: value.into(), expected })
    }

    pub(crate) fn number(&mut self, name: &'static str) -> Result<f64, BadSpec> {
        self.take(name, "a number")
    }

    fn count_or(&mut self, name: &'static str, otherwise: u32) -> Result<u32, BadSpec> {
        if self.has(name) { self.count(name) } else { Ok(otherwise) }
    }

    /// True if `name` has a value that was not taken yet.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.values.iter().any(|(n, _)| *n == name)
    }

    pub(crate) fn count(&mut self, name: &'static str) -> Result<u32, BadSpec> {
        self.take(name, "a whole number from 0 to 4294967295")
    }

    /// Returns an error if a value was not taken.
    pub(crate) fn end(self) -> Result<(), BadSpec> {
        match self.values.first() {
            None => Ok(()),
            Some((name, _)) => Err(BadSpec::UnknownName {
                kind: self.kind.into(),
                name: (*name).into(),
                example: self.example,
            }),
        }
    }
}

impl FromStr for Arrivals {
    type Err = BadSpec;
    fn from_str(text: &str) -> Result<Arrivals, BadSpec> {
        let mut spec = Spec::new(text, "arrivals", ARRIVALS)?;
        let arrivals = match spec.kind {
            "deterministic" => Arrivals::Deterministic { per_s: spec.number("per_s")? },
            "poisson" => Arrivals::Poisson { per_s: spec.number("per_s")? },
            "gamma" => Arrivals::Gamma { per_s: spec.number("per_s")?, variation: spec.number("variation")? },
            "on_off" => Arrivals::OnOff {
                per_s: spec.number("per_s")?,
                on_s: spec.number("on_s")?,
                off_s: spec.number("off_s")?,
            },
            _ => Arrivals::AtOnce,
        };
        spec.end()?;
        arrivals.check()?;
        Ok(arrivals)
    }
}

impl FromStr for Lengths {
    type Err = BadSpec;
    fn from_str(text: &str) -> Result<Lengths, BadSpec> {
        let mut spec = Spec::new(text, "lengths", LENGTHS)?;
        let lengths = match spec.kind {
            "deterministic" => Lengths::Deterministic { tokens: spec.count("tokens")? },
            "exponential" => Lengths::Exponential { mean: spec.number("mean")? },
            "hyperexponential" => Lengths::Hyperexponential {
                short: spec.number("short")?,
                long: spec.number("long")?,
                share_short: spec.number("share_short")?,
            },
            "balanced" => {
                let (mean, variation) = (spec.number("mean")?, spec.number("variation")?);
                if !variation.is_finite() || variation < 1.0 {
                    let expected = "at least 1: a hyperexponential is at least as variable as an exponential";
                    let found = variation.to_string();
                    return Err(BadSpec::BadValue { name: "variation", found, expected });
                }
                Lengths::balanced(mean, variation)
            }
            "uniform" => Lengths::Uniform { min: spec.count("least")?, max: spec.count("most")? },
            _ => Lengths::Lognormal { mean: spec.number("mean")?, variation: spec.number("variation")? },
        };
        spec.end()?;
        lengths.check("the length")?;
        Ok(lengths)
    }
}

impl FromStr for Contents {
    type Err = BadSpec;
    fn from_str(text: &str) -> Result<Contents, BadSpec> {
        let mut spec = Spec::new(text, "contents", CONTENTS)?;
        let contents = match spec.kind {
            "prefixes" => Contents::Prefixes(Prefixes {
                n_prefixes: spec.count("n")?,
                exponent: spec.number("exponent")?,
                prefix_tokens: spec.count("tokens")?,
                own_prompt: spec.take("own_prompt", "true or false")?,
                share: if spec.has("share") { spec.number("share")? } else { 1.0 },
                tokens_per_id: spec.count_or("tokens_per_id", TOKENS_PER_ID)?,
            }),
            "chats" => Contents::Chats(Chats {
                turns: Lengths::Uniform { min: spec.count("least_turns")?, max: spec.count("most_turns")? },
                think_s: spec.number("think_s")?,
                system_tokens: spec.count("system_tokens")?,
                tokens_per_id: spec.count_or("tokens_per_id", TOKENS_PER_ID)?,
            }),
            "agents" => Contents::Agents(Agents {
                fan_out: spec.count("fan_out")?,
                depth: spec.count("depth")?,
                system_tokens: spec.count("system_tokens")?,
                tokens_per_id: spec.count_or("tokens_per_id", TOKENS_PER_ID)?,
            }),
            _ => Contents::Unknown,
        };
        spec.end()?;
        contents.check()?;
        Ok(contents)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_are_read() {
        let arrivals = [
            Arrivals::Deterministic { per_s: 4.0 },
            Arrivals::Poisson { per_s: 4.0 },
            Arrivals::Gamma { per_s: 4.0, variation: 2.0 },
            Arrivals::OnOff { per_s: 10.0, on_s: 1.0, off_s: 3.0 },
            Arrivals::AtOnce,
        ];
        for ((_, text), expected) in ARRIVALS.iter().zip(arrivals) {
            assert_eq!(text.parse(), Ok(expected));
        }
        let lengths = [
            Lengths::Deterministic { tokens: 100 },
            Lengths::Exponential { mean: 300.0 },
            Lengths::Hyperexponential { short: 100.0, long: 2000.0, share_short: 0.9 },
            Lengths::balanced(300.0, 2.0),
            Lengths::Uniform { min: 10, max: 1000 },
            Lengths::Lognormal { mean: 400.0, variation: 0.8 },
        ];
        for ((_, text), expected) in LENGTHS.iter().zip(lengths) {
            assert_eq!(text.parse(), Ok(expected));
        }
        assert_eq!((ARRIVALS.len(), LENGTHS.len()), (5, 6));
        for (_, text) in CONTENTS {
            text.parse::<Contents>().unwrap();
        }
        assert_eq!(" uniform: most=9 , least=2".parse(), Ok(Lengths::Uniform { min: 2, max: 9 }));
    }

    #[test]
    fn what_is_wrong_is_said() {
        let arrivals = |text: &str| text.parse::<Arrivals>().unwrap_err().to_string();
        let lengths = |text: &str| text.parse::<Lengths>().unwrap_err().to_string();
        let contents = |text: &str| text.parse::<Contents>().unwrap_err().to_string();
        for (error, says) in [
            (arrivals("fish"), "there are no arrivals `fish`: use one of deterministic, poisson,"),
            (arrivals(""), "there are no arrivals ``"),
            (arrivals("poisson"), "`poisson` lacks `per_s`: write it as `poisson:per_s=4`"),
            (arrivals("poisson:4"), "`4` in `poisson:4`: expected name=value"),
            (arrivals("poisson:per_s=4,variation=2"), "`poisson` does not read `variation`"),
            (arrivals("poisson:per_s=fast"), "`per_s=fast`: expected a number"),
            (arrivals("poisson:per_s=-1"), "the arrival rate is -1: expected a finite number above 0"),
            (lengths("uniform:least=9,most=2"), "the length is 9 to 2"),
            (lengths("deterministic:tokens=1.5"), "`tokens=1.5`: expected a whole number"),
            (lengths("balanced:mean=3,variation=0.5"), "`variation=0.5`: expected at least 1"),
            (
                contents("prefixes:n=0,exponent=1,tokens=5,own_prompt=true,tokens_per_id=16"),
                "the number of prefixes is 0",
            ),
            (
                contents("prefixes:n=1,exponent=1,tokens=5,own_prompt=true,share=1.5"),
                "the share of requests with a prefix is 1.5: expected 0 to 1",
            ),
            (
                contents("prefixes:n=1,exponent=1,tokens=5,own_prompt=true,share=NaN"),
                "the share of requests with a prefix is NaN",
            ),
            (contents("agents:fan_out=3"), "`agents` lacks `depth`"),
            (
                contents("agents:fan_out=1000,depth=2,system_tokens=16777216"),
                "the system prompt is 16777216 tokens for 1001001 requests per tree: expected at most 134217728 ids",
            ),
            (
                contents("agents:fan_out=1,depth=1,system_tokens=4294967295"),
                "the length of system prompts is 4294967295: expected at most 16777216",
            ),
            (
                contents("chats:least_turns=1,most_turns=2,think_s=1,system_tokens=4294967295"),
                "the length of system prompts is 4294967295",
            ),
            (
                contents("chats:least_turns=1,most_turns=2,think_s=1e300,system_tokens=1"),
                "the time to think is",
            ),
            (
                contents("prefixes:n=4294967295,exponent=1,tokens=5,own_prompt=true"),
                "the number of prefixes is 4294967295: expected at most 10000000",
            ),
            (
                lengths("deterministic:tokens=4294967295"),
                "the length is 4294967295: expected at most 16777216",
            ),
            (lengths("lognormal:mean=5,variation=1e200"), "the length is 1000"),
            (arrivals("gamma:per_s=1,variation=1e200"), "the variation of arrivals is 1000"),
            (
                arrivals("on_off:per_s=1,on_s=1e-12,off_s=1"),
                "the mean number of arrivals while on is 0.000000000001",
            ),
        ] {
            assert!(error.starts_with(says), "{error}\n  is not: {says}");
        }
    }
}
