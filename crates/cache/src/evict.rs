//! Eviction policies: which cached block is evicted first when space is needed.
//!
//! An [`EvictionPolicy`] turns every use of a block into a [`Rank`]; the block with the smallest rank is evicted first.
//! An [`Order`] keeps the evictable blocks sorted by rank. Blocks that a sequence uses are not in the order.
//!
//! A rank is *static between two uses of its block*, even under policies whose scores decay with time: they compute
//! in a logarithmic domain in which time passes equally for all blocks. The order is therefore a sorted map that
//! never needs re-sorting, no block is updated just because time passes, and every operation is O(log n) or better.
//!
//! Policies do not read a clock (the time comes in with [`Use`]), do not evict, and do not know what a block
//! contains.
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

pub use flat::{Flat, FlatEntries, Touched};
pub use opt::next_uses;
pub use order::Order;
pub use parameters::{Parameter, Parameters, parse_duration};

/// One use of one block: when it is stored, and every time a prefix that contains it is hit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Use {
    /// The caller's time, in nanoseconds. Uses in one step may share it.
    pub now_ns: u64,
    /// Increases with every use of any block, so it breaks all ties.
    pub tick: u64,
    /// The cost of recomputing the block, in any unit that is the same for all blocks. Negative values and NaN count
    /// as 0.
    pub cost: f64,
    /// Bytes that evicting the block frees.
    pub bytes: u64,
    /// When the block is used next, in any increasing count; `None` is never. Only `opt` reads it.
    pub next_use: Option<u64>,
}

/// The eviction rank of a block: the smallest is evicted first. Only ranks of the same policy can be compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    /// The policy's criterion.
    value: u64,
    /// Breaks ties: among equals, the least recently used block is evicted first.
    tick: u64,
}

impl Rank {
    /// Ranks by a count.
    pub fn by(value: u64, tick: u64) -> Rank {
        Rank { value, tick }
    }

    /// Ranks by the time of the last use only.
    #[inline]
    pub fn by_recency(tick: u64) -> Rank {
        Rank { value: tick, tick }
    }

    /// Ranks by a score. It must not be NaN; infinities are allowed.
    pub fn by_score(score: f64, tick: u64) -> Rank {
        debug_assert!(!score.is_nan(), "a score of tick {tick} is NaN");
        let bits = (score + 0.0).to_bits(); // −0 counts as 0
        // IEEE 754 bits order by magnitude: invert negative numbers, and move the others above them.
        let value = if bits >> 63 == 1 { !bits } else { bits | 1 << 63 };
        Rank { value, tick }
    }
}

/// An eviction policy. One policy per file.
///
/// A policy knows blocks by dense numbers, called *entries*, which the caller assigns and reuses; a policy keeps at
/// most a few bytes per entry. The calls for an entry are `stored`, then any number of `used`, then `removed`.
pub trait EvictionPolicy: Send {
    /// Its name in [`POLICIES`].
    fn name(&self) -> &'static str;
    /// A block was stored in `entry`, which no live block uses. This counts as its first use.
    fn stored(&mut self, entry: u32, at: &Use) -> Rank;
    /// The block in `entry` was hit.
    fn used(&mut self, entry: u32, at: &Use) -> Rank;
    /// True if the rank is the tick of the last use and nothing else. Then a block's release by a sequence also
    /// counts as a use, and as the last one: the caller sets [`Rank::by_recency`] and need not report earlier hits.
    fn by_recency(&self) -> bool {
        false
    }
    /// The block in `entry` is gone. The policy drops everything it knows about it.
    fn removed(&mut self, entry: u32);
    /// The block in `from` is in `to` now, which no live block uses. Its rank stays what it is. Needed only by policies
    /// that remember something of their entries.
    fn moved(&mut self, from: u32, to: u32) {
        let _ = (from, to);
    }
    /// True if a new block competes with the cached ones and is not cached if it ranks smallest. For callers that can
    /// choose not to cache, such as a replay.
    fn bypasses(&self) -> bool {
        false
    }
}

/// A policy that can be selected by name.
pub struct Entry {
    /// The name in flags and configuration.
    pub name: &'static str,
    /// A one-line description for users.
    pub summary: &'static str,
    /// The [`Parameters`] that the policy reads.
    pub parameters: &'static [Parameter],
    /// True if the policy needs to know the future; [`build_for_serving`] refuses it.
    pub simulator_only: bool,
    build: fn(&Parameters) -> Box<dyn EvictionPolicy>,
}

/// Every policy. A new one needs one file and one entry here.
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
        summary: "stored first, evicted first",
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

/// Why a policy could not be built.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the field names document themselves
pub enum PolicyError {
    /// There is no policy of this name. `serving` says whether it was requested for serving, which decides the
    /// alternatives to list.
    UnknownPolicy { name: String, serving: bool },
    /// The policy needs to know the future, which a server does not.
    SimulatorOnly { name: &'static str },
    /// No policy has a parameter of this name.
    UnknownParameter { parameter: String },
    /// The parameter was given, but the policy does not read it.
    NotItsParameter { policy: &'static str, parameter: &'static str },
    /// The value is not valid for the parameter.
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
                write!(f, "there is no eviction policy `{name}`: use one of ")?;
                list(f, *serving)
            }
            PolicyError::SimulatorOnly { name } => {
                write!(
                    f,
                    "eviction policy `{name}` needs to know the future; outside the simulator use one of "
                )?;
                list(f, true)
            }
            PolicyError::UnknownParameter { parameter } => {
                let known = Parameter::ALL.iter().map(|p| p.name).collect::<Vec<_>>().join(", ");
                write!(f, "no eviction policy has a parameter `{parameter}`; the parameters are {known}")
            }
            PolicyError::NotItsParameter { policy, parameter } => {
                write!(f, "eviction policy `{policy}` has no parameter `{parameter}`")?;
                let readers = POLICIES.iter().filter(|e| e.parameters.iter().any(|p| p.name == *parameter));
                let readers = readers.map(|entry| entry.name).collect::<Vec<_>>().join(" and ");
                write!(f, ": leave it out, or use {readers}")
            }
            PolicyError::BadValue { parameter, value, expected } => {
                write!(f, "`{value}` is not a valid value of parameter `{parameter}`: expected {expected}")
            }
        }
    }
}
impl std::error::Error for PolicyError {}

/// Builds the policy `name`. Refuses an unknown name, and a parameter that the policy does not read.
pub fn build(name: &str, parameters: &Parameters) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
    let unknown = || PolicyError::UnknownPolicy { name: name.to_owned(), serving: false };
    let entry = POLICIES.iter().find(|entry| entry.name == name).ok_or_else(unknown)?;
    parameters.check(entry)?;
    Ok((entry.build)(parameters))
}

/// Like [`build`], but also refuses policies that need to know the future.
pub fn build_for_serving(
    name: &str,
    parameters: &Parameters,
) -> Result<Box<dyn EvictionPolicy>, PolicyError> {
    match POLICIES.iter().find(|entry| entry.name == name) {
        Some(entry) if entry.simulator_only => Err(PolicyError::SimulatorOnly { name: entry.name }),
        Some(_) => build(name, parameters),
        None => Err(PolicyError::UnknownPolicy { name: name.to_owned(), serving: true }),
    }
}

/// The data a policy keeps per entry; `None` for entries without a block.
#[derive(Clone, Debug)]
struct PerEntry<T>(Vec<Option<T>>);

impl<T> Default for PerEntry<T> {
    fn default() -> Self {
        PerEntry(Vec::new())
    }
}

impl<T: Copy> PerEntry<T> {
    fn set(&mut self, entry: u32, value: T) {
        let at = entry as usize;
        if at >= self.0.len() {
            self.0.resize(at + 1, None);
        }
        self.0[at] = Some(value);
    }
    fn get(&self, entry: u32) -> T {
        let value = self.0.get(entry as usize).copied().flatten();
        value.unwrap_or_else(|| panic!("entry {entry} was used before a block was stored in it"))
    }
    fn relocate(&mut self, from: u32, to: u32) {
        let value = self.get(from);
        self.clear(from);
        self.set(to, value);
    }
    fn clear(&mut self, entry: u32) {
        if let Some(value) = self.0.get_mut(entry as usize) {
            *value = None;
        }
    }
}
