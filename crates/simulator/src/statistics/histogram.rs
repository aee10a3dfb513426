//! Compact histogram of whole numbers.
use super::Spread;
use serde::Serialize;

/// Each power of two has 2^`BITS` buckets, so a value is known to 1/128 of itself.
const BITS: u32 = 7;

/// Counts of whole numbers in buckets whose width grows with the value, after HdrHistogram (Tene, 2012). Count, sum,
/// mean and maximum are exact; percentiles are off by less than 0.8%. Takes at most 60 KB, whatever is recorded.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Histogram {
    counts: Vec<u64>,
    n: u64,
    sum: u128,
    max: u64,
}

impl Histogram {
    pub fn record(&mut self, value: u64) {
        self.record_n(value, 1);
    }

    /// Records the same value `n` times.
    pub fn record_n(&mut self, value: u64, n: u64) {
        if n == 0 {
            return;
        }
        let bucket = bucket(value);
        if bucket >= self.counts.len() {
            self.counts.resize(bucket + 1, 0);
        }
        self.counts[bucket] += n;
        self.n += n;
        self.sum += u128::from(value) * u128::from(n);
        self.max = self.max.max(value);
    }

    pub fn merge(&mut self, other: &Histogram) {
        if other.counts.len() > self.counts.len() {
            self.counts.resize(other.counts.len(), 0);
        }
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
        self.n += other.n;
        self.sum += other.sum;
        self.max = self.max.max(other.max);
    }

    /// Number of recorded values.
    pub fn n(&self) -> u64 {
        self.n
    }

    /// The value at or below which a fraction `p` lies, as the middle of its bucket. `None` if nothing was recorded.
    pub fn percentile(&self, p: f64) -> Option<f64> {
        let rank = ((p.clamp(0.0, 1.0) * self.n as f64).ceil() as u64).max(1);
        let mut below = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            below += count;
            if below >= rank {
                let (low, width) = bounds(bucket);
                return Some((low as f64 + (width - 1) as f64 / 2.0).min(self.max as f64));
            }
        }
        None
    }

    /// Summary in units of `unit`: 1e9 converts nanoseconds to seconds.
    pub fn spread(&self, unit: f64) -> Option<Spread> {
        Some(Spread {
            n: self.n,
            mean: (self.n > 0).then(|| self.sum as f64 / self.n as f64 / unit)?,
            p50: self.percentile(0.5)? / unit,
            p90: self.percentile(0.9)? / unit,
            p99: self.percentile(0.99)? / unit,
            max: self.max as f64 / unit,
        })
    }

    /// The cumulative distribution: (upper end of a bucket in units of `unit`, share at or below), for a plot.
    pub(crate) fn cdf(&self, unit: f64) -> Vec<(f64, f64)> {
        let mut below = 0;
        let mut points = Vec::new();
        for (bucket, count) in self.counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            below += count;
            let (low, width) = bounds(bucket);
            points.push(((low + (width - 1)).min(self.max) as f64 / unit, below as f64 / self.n as f64));
        }
        points
    }
}

/// Index of the bucket of `value`. Buckets 0 to 255 are for one value each; above, there are 128 per power of two.
fn bucket(value: u64) -> usize {
    let shift = (u64::BITS - value.leading_zeros()).saturating_sub(BITS + 1);
    ((u64::from(shift) << BITS) + (value >> shift)) as usize
}

/// The smallest value of a bucket, and how many values it covers.
fn bounds(bucket: usize) -> (u64, u64) {
    let shift = (bucket >> BITS).saturating_sub(1) as u32;
    (((bucket as u64) - (u64::from(shift) << BITS)) << shift, 1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_cover_all_numbers_in_order() {
        let mut next = 0u128;
        for at in 0..=bucket(u64::MAX) {
            let (low, width) = bounds(at);
            assert_eq!(u128::from(low), next, "bucket {at}");
            assert_eq!((bucket(low), bucket(low + (width - 1))), (at, at), "bucket {at}");
            assert!(width == 1 || width * 128 <= low, "bucket {at} of {width} from {low}");
            next += u128::from(width);
        }
        assert_eq!(next, 1 << 64);
    }

    #[test]
    fn against_sorted_values() {
        let mut random = kvist_testing::SplitMix64(1);
        let mut values: Vec<u64> = (0..10_000).map(|_| random.next() >> (20 + random.below(40))).collect();
        let (mut whole, mut part) = (Histogram::default(), Histogram::default());
        for (i, value) in values.iter().enumerate() {
            if i % 3 == 0 { whole.record(*value) } else { part.record(*value) }
        }
        whole.merge(&part);
        values.sort_unstable();
        let sum: u128 = values.iter().map(|v| u128::from(*v)).sum();
        let spread = whole.spread(1.0).unwrap();
        assert_eq!(spread.mean, sum as f64 / 10_000.0);
        assert_eq!(spread.max, values[9_999] as f64);
        for (p, found) in [(0.5, spread.p50), (0.9, spread.p90), (0.99, spread.p99)] {
            let exact = values[(p * 10_000.0) as usize - 1] as f64;
            assert!((found - exact).abs() <= exact * 0.008, "p{p}: {found} instead of {exact}");
        }
        assert_eq!(Histogram::default().spread(1.0), None);
        assert_eq!(whole.cdf(1.0).last(), Some(&(values[9_999] as f64, 1.0)));
    }
}
