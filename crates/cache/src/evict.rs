//! Which cached block goes first when room is needed: eviction policies, and the order they induce.
//!
//! A [`Policy`] turns every use of a block into a [`Rank`]; the block with the smallest rank goes first. An
//! [`Order`] keeps the evictable blocks by rank. A block that somebody holds is simply not in the order.
//!
//! Promised: a rank is *static between two uses of its block*, also under policies whose scores decay with time (they
//! compute in a logarithmic domain in which time passes for all blocks alike). So the order is a map and never a
//! sort, nothing is touched because time passes, and every operation is O(log n) or better.
//! Refused: reading a clock (time comes in with [`Use`]), evicting by itself, and knowing what a block contains.
mod cost;
mod decay;
mod fifo;
mod flat;
mod lfu;
mod lfu_decay;
mod lru;
mod opt;
mod order;
mod parameters;

pub use flat::{Flat, FlatSlots, Touched};
pub use opt::next_uses;
pub use order::Order;
pub use parameters::{DEFAULT_HALF_LIFE, Parameter, Parameters, parse_duration};

/// One use of one block: when it was stored, and each time a prefix that contains it is hit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Use {
    /// The time of the caller, in nanoseconds. Uses of one step may share it.
    pub now_ns: u64,
    /// Rises with every use of any block, so that it breaks every tie.
    pub tick: u64,
    /// What recomputing the block would cost, in any unit that is the same for all blocks. Negative and NaN
    /// count as 0.
    pub cost: f64,
    /// What dropping the block frees, in bytes.
    pub bytes: u64,
    /// `opt` alone reads it: when the block is used next, in any rising count; `None` is never.
    pub next_use: Option<u64>,
}

/// The smallest goes first. Ranks of one policy are comparable with each other, and with nothing else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    /// What the policy judges by.
    value: u64,
    /// Breaks ties: of equals, the least recently used goes first.
    tick: u64,
}

impl Rank {
    /// By a count.
    pub fn by(value: u64, tick: u64) -> Rank {
        Rank { value, tick }
    }

    /// By the time of the last use alone.
    #[inline]
    pub fn by_recency(tick: u64) -> Rank {
        Rank { value: tick, tick }
    }

    /// By a score. Not NaN; infinities are fine.
    pub fn by_score(score: f64, tick: u64) -> Rank {
        debug_assert!(!score.is_nan(), "a score of tick {tick} is NaN");
        let bits = (score + 0.0).to_bits(); // −0 counts as 0
        // IEEE 754 orders by magnitude: flip negatives, lift the rest above them.
        let value = if bits >> 63 == 1 { !bits } else { bits | 1 << 63 };
        Rank { value, tick }
    }
}

/// How blocks are judged. One policy per file.
///
/// Blocks are known by dense numbers, *slots*, which their owner hands out and reuses; a policy keeps at most a few
/// bytes per slot. Every slot goes through `stored`, any number of `used`, and `forgotten`.
pub trait Policy: Send {
    /// Its name in [`POLICIES`].
    fn name(&self) -> &'static str;
    /// A block came to lie in `slot`, which no live block uses. Counts as its first use.
    fn stored(&mut self, slot: u32, at: &Use) -> Rank;
    /// The block in `slot` was hit.
    fn used(&mut self, slot: u32, at: &Use) -> Rank;
    /// Is the rank the tick of the last use, and nothing else? Then that a sequence lets a block go is a use of it too,
    /// and the last one: [`Rank::by_recency`], and hits before it need not be told.
    fn by_recency(&self) -> bool {
        false
    }
    /// The block in `slot` is gone, and whatever was known of it with it.
    fn forgotten(&mut self, slot: u32);
    /// Does a newcomer compete with those who are here, and stay out if it ranks smallest? Where the caller can
    /// choose not to cache, as in a replay.
    fn bypasses(&self) -> bool {
        false
    }
}

/// A policy one can ask for by name.
pub struct Entry {
    /// As in flags and configuration.
    pub name: &'static str,
    /// One line for people who choose.
    pub summary: &'static str,
    /// What it reads of [`Parameters`].
    pub parameters: &'static [Parameter],
    /// It needs to know the future: [`build_for_serving`] refuses it.
    pub simulator_only: bool,
    build: fn(&Parameters) -> Box<dyn Policy>,
}

/// Every policy. A new one: one file and one entry.
pub const POLICIES: &[Entry] = &[
    Entry {
        name: "lru",
        summary: "least recently used first",
        parameters: &[],
        simulator_only: false,
        build: |_| Box::new(lru::Lru),
    },
    Entry {
        name: "fifo",
        summary: "stored first, gone first",
        parameters: &[],
        simulator_only: false,
        build: |_| Box::new(fifo::Fifo::default()),
    },
    Entry {
        name: "lfu",
        summary: "fewest uses since it was stored first, then least recently used",
        parameters: &[],
        simulator_only: false,
        build: |_| Box::new(lfu::Lfu::default()),
    },
    Entry {
        name: "lfu_decay",
        summary: "fewest uses first, where a use counts half as much after every half-life",
        parameters: &[Parameter::HALF_LIFE],
        simulator_only: false,
        build: |parameters| Box::new(lfu_decay::LfuDecay::new(parameters.half_life())),
    },
    Entry {
        name: "cost",
        summary: "least recompute cost x decayed uses / bytes first",
        parameters: &[Parameter::HALF_LIFE],
        simulator_only: false,
        build: |parameters| Box::new(cost::Cost::new(parameters.half_life())),
    },
    Entry {
        name: "opt",
        summary: "used farthest in the future first; a bound that no policy beats",
        parameters: &[],
        simulator_only: true,
        build: |_| Box::new(opt::Opt),
    },
];

/// Why there is no such policy.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the fields' names are what there is to say
pub enum PolicyError {
    /// No policy of this name; `serving` says for what it was asked, and so what there is instead.
    UnknownPolicy { name: String, serving: bool },
    /// It needs the future, which a server does not have.
    SimulatorOnly { name: &'static str },
    /// No policy has a parameter of this name.
    UnknownParameter { parameter: String },
    /// The parameter was given, and the policy does not read it.
    NotItsParameter { policy: &'static str, parameter: &'static str },
    /// The value is no value of the parameter.
    BadValue { parameter: &'static str, value: String, expected: &'static str },
}

impl std::fmt::Display for PolicyError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let list = |f: &mut std::fmt::Formatter<'_>, served: bool| {
            let entries = POLICIES.iter().filter(|entry| !served || !entry.simulator_only);
            f.write_str(&entries.map(|entry| entry.name).collect::<Vec<_>>().join(", "))
        };
        match self {
            PolicyError::UnknownPolicy { name, serving } => {
                write!(f, "there is no eviction policy `{name}`: take one of ")?;
                list(f, *serving)
            }
            PolicyError::SimulatorOnly { name } => {
                write!(
                    f,
                    "eviction policy `{name}` needs to know the future; outside the simulator take one of "
                )?;
                list(f, true)
            }
            PolicyError::UnknownParameter { parameter } => {
                let known = Parameter::ALL.iter().map(|p| p.name).collect::<Vec<_>>().join(", ");
                write!(f, "no eviction policy has a parameter `{parameter}`: there is {known}")
            }
            PolicyError::NotItsParameter { policy, parameter } => {
                write!(f, "eviction policy `{policy}` has no parameter `{parameter}`")?;
                let readers = POLICIES.iter().filter(|e| e.parameters.iter().any(|p| p.name == *parameter));
                let readers = readers.map(|entry| entry.name).collect::<Vec<_>>().join(" and ");
                write!(f, ": leave it out, or take {readers}")
            }
            PolicyError::BadValue { parameter, value, expected } => {
                write!(f, "`{value}` is no value of parameter `{parameter}`: expected {expected}")
            }
        }
    }
}
impl std::error::Error for PolicyError {}

/// The policy `name`. Refused: an unknown name, and a parameter which that policy does not read.
pub fn build(name: &str, parameters: &Parameters) -> Result<Box<dyn Policy>, PolicyError> {
    let unknown = || PolicyError::UnknownPolicy { name: name.to_owned(), serving: false };
    let entry = POLICIES.iter().find(|entry| entry.name == name).ok_or_else(unknown)?;
    parameters.check(entry)?;
    Ok((entry.build)(parameters))
}

/// As [`build`], for whoever has no trace to look ahead in: refuses those that need the future.
pub fn build_for_serving(name: &str, parameters: &Parameters) -> Result<Box<dyn Policy>, PolicyError> {
    match POLICIES.iter().find(|entry| entry.name == name) {
        Some(entry) if entry.simulator_only => Err(PolicyError::SimulatorOnly { name: entry.name }),
        Some(_) => build(name, parameters),
        None => Err(PolicyError::UnknownPolicy { name: name.to_owned(), serving: true }),
    }
}

/// What a policy keeps for each slot; `None` for slots without a block.
#[derive(Clone, Debug)]
struct PerSlot<T>(Vec<Option<T>>);

impl<T> Default for PerSlot<T> {
    fn default() -> Self {
        PerSlot(Vec::new())
    }
}

impl<T: Copy> PerSlot<T> {
    fn set(&mut self, slot: u32, value: T) {
        let at = slot as usize;
        if at >= self.0.len() {
            self.0.resize(at + 1, None);
        }
        self.0[at] = Some(value);
    }
    fn get(&self, slot: u32) -> T {
        let value = self.0.get(slot as usize).copied().flatten();
        value.unwrap_or_else(|| panic!("slot {slot} was used before a block was stored in it"))
    }
    fn clear(&mut self, slot: u32) {
        if let Some(value) = self.0.get_mut(slot as usize) {
            *value = None;
        }
    }
}
