//! Options of tiers below the simulated cache.
use super::costs::CostArgs;
use super::spec;
use crate::options::{Size, TierLoad, wrong_usage};
use clap::ValueEnum;
use kvist_scheduler::{Recompute, Tier, Tiers, Write};
use kvist_simulator::fleet::Store;
use kvist_simulator::run::TierOrder;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

const TIERS: &str = "Tiers";

#[derive(clap::Args, Clone, Debug)]
pub struct TierArgs {
    /// A tier below the cache: NAME:CAPACITY,bw=RATE[,lat=TIME][,order=ORDER], as ram:64GiB,bw=20GB/s,lat=10us or
    /// disk:2TB,bw=3GB/s,lat=100us. Repeat it, fastest first. ORDER is which blocks a full tier drops: the least recently used (lru), or
    /// those that were written first (in-turn), as a tier named disk does. In a fleet every worker has such tiers, with `,durable` also after it
    /// has failed and joined again; the last may be one store for all, as store:20TB,bw=5GB/s,lat=1ms,shared=40GB/s: the bandwidth
    /// is that of a worker's link, and what all of them get together
    #[arg(long = "tier", value_name = "TIER", help_heading = TIERS)]
    pub tiers: Vec<TierSpec>,
    /// When blocks are copied to the tiers
    #[arg(long, value_enum, default_value_t = When::Through, requires = "tiers", help_heading = TIERS)]
    tier_write: When,
    /// Which blocks are loaded: those that come sooner than they would be computed, or all that a tier has
    #[arg(long, value_enum, default_value_t = TierLoad::Auto, value_name = "WHICH", requires = "tiers", help_heading = TIERS)]
    tier_load: TierLoad,
    /// Bytes of K and V of a token [default: those of --shape]
    #[arg(long, value_name = "SIZE", requires = "tiers", help_heading = TIERS)]
    token_bytes: Option<Size>,
    /// Bytes that may be on their way from the tiers at a time, and as many to them
    #[arg(long, value_name = "SIZE", default_value = "16GiB", requires = "tiers", help_heading = TIERS)]
    tier_in_flight: Size,
    /// A load may take this much longer than four times its estimate; then its tokens are computed
    #[arg(
        long, value_name = "TIME", value_parser = spec::duration, default_value = "100ms", requires = "tiers",
        help_heading = TIERS
    )]
    tier_grace: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum When {
    /// As soon as they are computed
    Through,
    /// Shortly before they are evicted
    Back,
}

/// A tier as given to the flag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TierSpec {
    name: String,
    /// `None`: without bound.
    pub capacity: Option<Size>,
    bytes_per_s: u64,
    latency: Duration,
    /// One store of all workers, and its bandwidth if that is bounded.
    shared: Option<Store>,
    /// Keeps its blocks when its worker fails.
    durable: bool,
    order: TierOrder,
}

impl FromStr for TierSpec {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (head, rest) = text.split_once(',').unwrap_or((text, ""));
        let how = "write a tier as NAME:CAPACITY,bw=RATE,lat=TIME, for example disk:2TB,bw=3GB/s,lat=100us";
        let (name, capacity) =
            head.split_once(':').ok_or_else(|| format!("`{text}` has no capacity: {how}"))?;
        if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_') {
            return Err(format!("`{name}` is not a name of letters, digits, - and _: {how}"));
        }
        let capacity = if capacity == "inf" { None } else { Some(capacity.parse::<Size>()?) };
        let (mut rate, mut latency, mut shared, mut durable, mut order) = (None, None, None, false, None);
        for field in rest.split(',').filter(|field| !field.is_empty()) {
            match field.split_once('=') {
                Some(("bw", value)) if rate.is_none() => rate = Some(bytes_per_s(name, field, value)?),
                Some(("lat", value)) if latency.is_none() => latency = Some(spec::duration(value)?),
                Some(("shared", value)) if shared.is_none() => {
                    shared = Some(Store { bytes_per_s: Some(bytes_per_s(name, field, value)?) });
                }
                None if field == "shared" && shared.is_none() => shared = Some(Store { bytes_per_s: None }),
                None if field == "durable" && !durable => durable = true,
                Some(("order", value)) if order.is_none() => order = Some(order_of(name, value)?),
                Some(("bw" | "lat" | "shared" | "order", _)) => return Err(twice(name, field)),
                None if matches!(field, "shared" | "durable") => return Err(twice(name, field)),
                _ => return Err(format!("`{field}` is unknown for a tier: {how}")),
            }
        }
        let bytes_per_s = rate.ok_or_else(|| format!("the tier {name} has no bw=RATE: {how}"))?;
        if durable && shared.is_some() {
            return Err(format!(
                "the tier {name} is shared, so it outlives every worker anyway: leave `durable` out"
            ));
        }
        let latency = latency.unwrap_or_default();
        let of_name = if name == "disk" { TierOrder::InTurn } else { TierOrder::Lru };
        if order.is_some_and(|order| order != TierOrder::Lru) && shared.is_some() {
            return Err(format!("the tier {name} is shared: of such a store only order=lru is modelled"));
        }
        let order = order.unwrap_or(if shared.is_some() { TierOrder::Lru } else { of_name });
        Ok(TierSpec { name: name.into(), capacity, bytes_per_s, latency, shared, durable, order })
    }
}

fn twice(name: &str, field: &str) -> String {
    format!("`{field}` is given twice for the tier {name}")
}

fn order_of(name: &str, order: &str) -> Result<TierOrder, String> {
    match order {
        "lru" => Ok(TierOrder::Lru),
        "in-turn" => Ok(TierOrder::InTurn),
        _ => Err(format!("`order={order}` of the tier {name}: it is lru or in-turn")),
    }
}

/// Reads the rate of `field`, which may end with `/s`.
fn bytes_per_s(name: &str, field: &str, rate: &str) -> Result<u64, String> {
    let bytes: Size = rate.strip_suffix("/s").unwrap_or(rate).parse()?;
    match bytes.0 {
        bytes @ ..1000 => Err(format!(
            "`{field}` of the tier {name}: {bytes} bytes/s is less than 1KB/s: write the unit too, as in 3GB/s"
        )),
        bytes => Ok(bytes),
    }
}

/// A size, or no bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierSize(pub Option<Size>);

impl FromStr for TierSize {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "inf" { Ok(TierSize(None)) } else { text.parse().map(|size| TierSize(Some(size))) }
    }
}

impl fmt::Display for TierSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(size) => size.fmt(f),
            None => f.write_str("inf"),
        }
    }
}

impl TierArgs {
    /// The capacity of each tier in bytes; `None` has no bound.
    pub fn capacities(&self) -> Vec<Option<u64>> {
        self.tiers.iter().map(|tier| tier.capacity.map(|size| size.0)).collect()
    }

    /// In which order each tier drops its blocks.
    pub fn orders(&self) -> Vec<TierOrder> {
        self.tiers.iter().map(|tier| tier.order).collect()
    }

    /// The last tier as the store of all workers, if it is one.
    pub fn store(&self) -> Option<Store> {
        self.tiers.last().and_then(|tier| tier.shared)
    }

    /// Which tiers keep their blocks when their worker fails.
    pub fn durable(&self) -> Vec<bool> {
        self.tiers.iter().map(|tier| tier.durable).collect()
    }

    /// Checks what only fleets have.
    pub fn check(&self, is_fleet: bool) -> anyhow::Result<()> {
        let names =
            |of: fn(&TierSpec) -> bool| self.tiers.iter().filter(move |tier| of(tier)).map(|tier| &tier.name);
        if let Some(name) = names(|tier| tier.shared.is_some() || tier.durable).next()
            && !is_fleet
        {
            return Err(wrong_usage(format!(
                "--tier {name}: shared and durable mean something in a fleet only: give --workers"
            )));
        }
        let before_last = &self.tiers[..self.tiers.len().saturating_sub(1)];
        match before_last.iter().find(|tier| tier.shared.is_some()) {
            Some(tier) => Err(wrong_usage(format!(
                "--tier {}: only the last tier can be shared by the workers",
                tier.name
            ))),
            None => Ok(()),
        }
    }

    /// Gives the last tier another capacity. With none, it is left out.
    pub fn resize_last(&mut self, size: TierSize) {
        match size.0 {
            Some(Size(0)) => drop(self.tiers.pop()),
            capacity => {
                self.tiers.iter_mut().next_back().into_iter().for_each(|tier| tier.capacity = capacity)
            }
        }
    }

    /// The scheduler's configuration; `None` without tiers.
    pub fn config(
        &self,
        costs: &CostArgs,
        block_tokens: u32,
        batch_tokens: u32,
    ) -> anyhow::Result<Option<Tiers>> {
        if self.tiers.is_empty() {
            return Ok(None);
        }
        let names: Vec<&str> = self.tiers.iter().map(|tier| tier.name.as_str()).collect();
        if let Some((_, name)) = names.iter().enumerate().find(|(i, name)| names[..*i].contains(name)) {
            return Err(wrong_usage(format!("--tier names {name} twice: give each tier a name of its own")));
        }
        let of_shape = costs.token_bytes()?;
        let token_bytes = self.token_bytes.map(|size| size.0 as f64).or(of_shape);
        let Some(token_bytes) = token_bytes.filter(|bytes| *bytes >= 1.0) else {
            return Err(wrong_usage(
                "--tier needs the bytes of K and V of a token, which these step times do not say: give --token-bytes",
            ));
        };
        let recompute = costs.recompute(batch_tokens)?;
        let tier = |tier: &TierSpec| Tier {
            name: tier.name.clone(),
            bytes_per_s: tier.bytes_per_s,
            latency_ns: nanoseconds(tier.latency),
        };
        Ok(Some(Tiers {
            list: self.tiers.iter().map(tier).collect(),
            block_bytes: (token_bytes * f64::from(block_tokens)) as u64,
            windows: Vec::new(),
            write: match self.tier_write {
                When::Through => Write::Through,
                When::Back => Write::Back { ahead_tokens: batch_tokens },
            },
            max_load_bytes: self.tier_in_flight.0,
            max_store_bytes: self.tier_in_flight.0,
            recompute: Recompute {
                per_token_ns: recompute.per_token,
                per_pair_ns: recompute.per_pair,
                learn: false,
            },
            grace_ns: nanoseconds(self.tier_grace),
            always: matches!(self.tier_load, TierLoad::Always),
        }))
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiers_are_read_and_refused() {
        let found: TierSpec = "disk:200GiB,bw=3GB/s,lat=100us".parse().unwrap();
        assert_eq!(found.capacity, Some(Size(200 << 30)));
        assert_eq!((found.bytes_per_s, found.latency), (3_000_000_000, Duration::from_micros(100)));
        let found: TierSpec = "s3:inf,bw=1G".parse().unwrap();
        assert_eq!((found.capacity, found.bytes_per_s, found.latency), (None, 1 << 30, Duration::ZERO));
        let found: TierSpec = "store:inf,bw=5GB/s,lat=1ms,shared=40GB/s".parse().unwrap();
        assert_eq!((found.shared, found.durable), (Some(Store { bytes_per_s: Some(40_000_000_000) }), false));
        let found: TierSpec = "store:inf,shared,bw=5GB/s".parse().unwrap();
        assert_eq!(found.shared, Some(Store { bytes_per_s: None }));
        let found: TierSpec = "disk:1TB,bw=3GB/s,durable".parse().unwrap();
        assert_eq!((found.shared, found.durable), (None, true));
        let orders = [
            ("disk:1GB,bw=1KB", TierOrder::InTurn),
            ("disk:1GB,bw=1KB,order=lru", TierOrder::Lru),
            ("ram:1GB,bw=1KB", TierOrder::Lru),
            ("nvme:1GB,order=in-turn,bw=1KB", TierOrder::InTurn),
            ("disk:1GB,bw=1KB,shared", TierOrder::Lru),
        ];
        for (text, order) in orders {
            assert_eq!(text.parse::<TierSpec>().unwrap().order, order, "{text}");
        }
        for (text, expected) in [
            ("disk:1GB,bw=1KB,order=fifo", "lru or in-turn"),
            ("disk:1GB,bw=1KB,order=lru,order=lru", "given twice"),
            ("disk:1GB,bw=1KB,order=in-turn,shared", "only order=lru"),
            ("disk:1GB,bw=1KB,durable,durable", "given twice"),
            ("disk:1GB,bw=1KB,shared,shared=2KB", "given twice"),
            ("disk:1GB,bw=1KB,shared=1KB,shared", "given twice"),
            ("disk:1GB,bw=1KB,shared=0", "write the unit"),
            ("disk:1GB,bw=1KB,shared,durable", "outlives every worker"),
            ("disk", "has no capacity"),
            (":1GB,bw=1KB", "is not a name"),
            ("disk:1GB", "has no bw=RATE"),
            ("disk:big,bw=1KB", "is not a size"),
            ("disk:1GB,bw=fast", "is not a size"),
            ("disk:1GB,bw=0", "write the unit"),
            ("disk:1GB,bw=1KB,bw=2KB", "given twice"),
            ("disk:1GB,bw=1KB,lat=soon", "is not a duration"),
            ("disk:1GB,bw=1KB,colour=red", "is unknown for a tier"),
        ] {
            let error = text.parse::<TierSpec>().unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
