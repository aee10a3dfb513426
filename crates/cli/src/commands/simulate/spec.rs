//! Values of flags.
use kvist_cache::evict::parse_duration;
use std::str::FromStr;
use std::time::Duration;

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
            _ => text.parse().map(Capacity::Blocks).map_err(|_| {
                format!("`{text}` is no number of blocks: give one below 4294967296, inf or auto")
            }),
        }
    }
}
