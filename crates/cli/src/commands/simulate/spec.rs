//! Values of flags that say more than one number: `lognormal:mean=512,variation=1.2`, `500ms`.
use kvist_cache::evict::parse_duration;
use kvist_simulator::workload::{Arrivals, Lengths};
use std::str::FromStr;
use std::time::Duration;

/// `name:key=value,...`, whose keys are taken one by one.
struct Spec<'a> {
    text: &'a str,
    name: &'a str,
    fields: Vec<(&'a str, &'a str)>,
}

impl<'a> Spec<'a> {
    fn parse(text: &'a str) -> Result<Self, String> {
        let (name, rest) = text.split_once(':').unwrap_or((text, ""));
        let fields = rest.split(',').filter(|field| !field.is_empty());
        let field = |field: &'a str| {
            field.split_once('=').ok_or_else(|| format!("`{field}` of `{text}`: write it as key=value"))
        };
        Ok(Spec { text, name, fields: fields.map(field).collect::<Result<_, _>>()? })
    }
    fn take<T: FromStr>(&mut self, key: &str) -> Result<T, String> {
        self.take_or(key)?.ok_or_else(|| format!("`{}` needs {key}=...", self.text))
    }
    fn take_or<T: FromStr>(&mut self, key: &str) -> Result<Option<T>, String> {
        let Some(at) = self.fields.iter().position(|(name, _)| *name == key) else { return Ok(None) };
        let (_, value) = self.fields.remove(at);
        value.parse().map(Some).map_err(|_| format!("`{value}` of `{}` is no value for {key}", self.text))
    }
    fn done<T>(self, value: T) -> Result<T, String> {
        match self.fields.first() {
            None => Ok(value),
            Some((key, _)) => Err(format!("`{}` has no {key}", self.text)),
        }
    }
}

pub fn lengths(text: &str) -> Result<Lengths, String> {
    if let Ok(tokens) = text.parse() {
        return Ok(Lengths::Deterministic { tokens });
    }
    let mut spec = Spec::parse(text)?;
    let lengths = match spec.name {
        "exponential" => Lengths::Exponential { mean: spec.take("mean")? },
        "hyperexponential" => Lengths::balanced(spec.take("mean")?, spec.take("variation")?),
        "uniform" => Lengths::Uniform { least: spec.take("least")?, most: spec.take("most")? },
        "lognormal" => Lengths::Lognormal { mean: spec.take("mean")?, variation: spec.take("variation")? },
        _ => {
            return Err(format!(
                "`{text}` is no distribution of lengths: take a number, exponential:mean=N, uniform:least=N,most=N, \
                 lognormal:mean=N,variation=X or hyperexponential:mean=N,variation=X"
            ));
        }
    };
    spec.done(lengths)
}

/// A shape of arrivals, still without its rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ArrivalShape(Arrivals);

impl ArrivalShape {
    pub fn at_rate(self, rate: f64) -> Arrivals {
        let mut arrivals = self.0;
        match &mut arrivals {
            Arrivals::Deterministic { per_s }
            | Arrivals::Poisson { per_s }
            | Arrivals::Gamma { per_s, .. }
            | Arrivals::OnOff { per_s, .. } => *per_s = rate,
            Arrivals::AtOnce => {}
        }
        arrivals
    }
}

impl FromStr for ArrivalShape {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let per_s = 1.0;
        let mut spec = Spec::parse(text)?;
        let arrivals = match spec.name {
            "poisson" => Arrivals::Poisson { per_s },
            "even" => Arrivals::Deterministic { per_s },
            "gamma" => Arrivals::Gamma { per_s, variation: spec.take("variation")? },
            "on-off" => Arrivals::OnOff { per_s, on_s: spec.take("on_s")?, off_s: spec.take("off_s")? },
            "at-once" => Arrivals::AtOnce,
            _ => {
                return Err(format!(
                    "`{text}` is no process of arrivals: take poisson, even, gamma:variation=X, \
                     on-off:on_s=X,off_s=X or at-once"
                ));
            }
        };
        spec.done(ArrivalShape(arrivals))
    }
}

pub fn duration(text: &str) -> Result<Duration, String> {
    parse_duration(text).ok_or_else(|| format!("`{text}` is no time: write it as 500ms, 2s, 5m or 1h"))
}

/// A number of blocks, or no bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capacity {
    /// So many.
    Blocks(u32),
    /// As many as are needed.
    Endless,
    /// What the hardware has, or no bound where it is not known.
    Hardware,
}

impl Capacity {
    /// `None` is without bound.
    pub fn blocks(self) -> Option<u32> {
        match self {
            Capacity::Blocks(n) => Some(n),
            Capacity::Endless | Capacity::Hardware => None,
        }
    }
}

impl std::fmt::Display for Capacity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Capacity::Blocks(n) => n.fmt(f),
            Capacity::Endless => f.write_str("inf"),
            Capacity::Hardware => f.write_str("auto"),
        }
    }
}

impl FromStr for Capacity {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "inf" => Ok(Capacity::Endless),
            "auto" => Ok(Capacity::Hardware),
            _ => text
                .parse()
                .map(Capacity::Blocks)
                .map_err(|_| format!("`{text}` is no number of blocks: give one below 4294967296, inf or auto")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distributions_are_read_and_refused_by_name() {
        assert_eq!(lengths("12"), Ok(Lengths::Deterministic { tokens: 12 }));
        assert_eq!(
            lengths("lognormal:variation=1.5,mean=300"),
            Ok(Lengths::Lognormal { mean: 300.0, variation: 1.5 })
        );
        for (text, part) in [
            ("normal:mean=3", "no distribution"),
            ("lognormal:mean=3", "variation=..."),
            ("uniform:least=1,most=x", "`x`"),
            ("exponential:mean=3,sd=2", "has no sd"),
            ("exponential:mean", "key=value"),
        ] {
            let refused = lengths(text).expect_err(text);
            assert!(refused.contains(part), "{text}: {refused}");
        }
    }

    #[test]
    fn arrivals_take_their_rate_later() {
        let gamma: ArrivalShape = "gamma:variation=2".parse().expect("a shape");
        assert_eq!(gamma.at_rate(7.0), Arrivals::Gamma { per_s: 7.0, variation: 2.0 });
        assert!("burst".parse::<ArrivalShape>().is_err_and(|e| e.contains("on-off")));
    }
}
