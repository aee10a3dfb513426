//! Parameters of eviction policies by name, as flags and configuration pass them.
use super::{Entry, PolicyError};
use std::time::Duration;

/// The half-life of decaying policies if none is given.
pub(super) const DEFAULT_HALF_LIFE: Duration = Duration::from_secs(300);

/// A parameter that some policies read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// The name in configuration. Flags use `-` instead of `_`.
    pub name: &'static str,
    /// The expected format of the value, for error messages.
    pub expected: &'static str,
}

impl Parameter {
    /// The time in which the weight of a use halves.
    pub const HALF_LIFE: Parameter =
        Parameter { name: "half_life", expected: "a duration above zero, as 300s, 250ms, 5m or 1h" };
    /// Every parameter.
    pub const ALL: &[Parameter] = &[Parameter::HALF_LIFE];
}

/// Parameter values. An absent one takes its default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parameters {
    /// [`Parameter::HALF_LIFE`]; five minutes if absent.
    pub half_life: Option<Duration>,
}

impl Parameters {
    /// Parses and sets one parameter by name.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), PolicyError> {
        if name != Parameter::HALF_LIFE.name {
            return Err(PolicyError::UnknownParameter { parameter: name.to_owned() });
        }
        let Parameter { name: parameter, expected } = Parameter::HALF_LIFE;
        let bad = || PolicyError::BadValue { parameter, value: value.to_owned(), expected };
        self.half_life = Some(parse_duration(value).filter(|d| !d.is_zero()).ok_or_else(bad)?);
        Ok(())
    }

    pub(super) fn half_life(&self) -> Duration {
        self.half_life.unwrap_or(DEFAULT_HALF_LIFE)
    }

    /// Checks that `entry` reads every given parameter, and that the values are valid.
    pub(super) fn check(&self, entry: &Entry) -> Result<(), PolicyError> {
        let Parameter { name: parameter, expected } = Parameter::HALF_LIFE;
        match self.half_life {
            Some(_) if !entry.parameters.contains(&Parameter::HALF_LIFE) => {
                Err(PolicyError::NotItsParameter { policy: entry.name, parameter })
            }
            Some(Duration::ZERO) => {
                Err(PolicyError::BadValue { parameter, value: "0s".to_owned(), expected })
            }
            _ => Ok(()),
        }
    }
}

/// Parses a number with a unit: `ns`, `us`, `ms`, `s`, `m` or `h`. `None` for everything else, including a missing
/// unit.
pub fn parse_duration(text: &str) -> Option<Duration> {
    let unit_at = text.find(|c: char| c.is_ascii_alphabetic())?;
    let (number, unit) = text.split_at(unit_at);
    let seconds_per_unit = match unit {
        "ns" => 1e-9,
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return None,
    };
    Duration::try_from_secs_f64(number.parse::<f64>().ok()? * seconds_per_unit).ok()
}
