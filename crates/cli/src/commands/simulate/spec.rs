//! Values of flags.
use kvist_cache::evict::parse_duration;
use std::str::FromStr;
use std::time::Duration;

pub fn duration(text: &str) -> Result<Duration, String> {
    parse_duration(text).ok_or_else(|| format!("`{text}` is not a duration: write it as 500ms, 2s, 5m or 1h"))
}

/// A number of blocks, or no bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capacity {
    /// This number of blocks.
    Blocks(u32),
    /// No bound.
    Endless,
    /// What fits into the hardware; no bound if that is unknown.
    Hardware,
}

impl Capacity {
    /// `None` means no bound.
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
                format!("`{text}` is not a number of blocks: give one below 4294967296, inf or auto")
            }),
        }
    }
}
