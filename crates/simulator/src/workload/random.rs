//! Random numbers that are the same on every machine and in every version.

/// xoshiro256++ (Blackman and Vigna, "Scrambled Linear Pseudorandom Number Generators", ACM TOMS 47(4), 2021), seeded
/// by splitmix64 (Steele, Lea, Flood, OOPSLA 2014). Integers are exact on every machine; values computed with
/// logarithms are as exact as the platform's.
#[derive(Clone, Debug)]
pub struct Random {
    state: [u64; 4],
}

impl Random {
    /// Streams of one seed with different numbers are independent.
    pub fn new(seed: u64, stream: u64) -> Random {
        let mut at = seed ^ split_mix(stream.wrapping_mul(0xd129_0d3f_2a5b_8e47).wrapping_add(1));
        let state = [(); 4].map(|()| {
            at = at.wrapping_add(0x9e37_79b9_7f4a_7c15);
            split_mix(at)
        });
        Random { state }
    }

    pub fn next_u64(&mut self) -> u64 {
        let s = &mut self.state;
        let result = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// Uniform in [0, 1), in steps of 2^-53.
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform in 0..n, without bias (Lemire, "Fast Random Integer Generation in an Interval", ACM TOMACS 29(1),
    /// 2019). Returns 0 for n = 0.
    pub fn below(&mut self, n: u64) -> u64 {
        let reject_below = n.wrapping_neg().checked_rem(n).unwrap_or(0);
        loop {
            let product = u128::from(self.next_u64()) * u128::from(n);
            if product as u64 >= reject_below {
                return (product >> 64) as u64;
            }
        }
    }

    /// Exponential with mean 1.
    pub fn exponential(&mut self) -> f64 {
        -(1.0 - self.unit()).ln()
    }

    /// Normal with mean 0 and variance 1 (Box and Muller, "A Note on the Generation of Random Normal Deviates", 1958).
    pub fn normal(&mut self) -> f64 {
        let radius = (2.0 * self.exponential()).sqrt();
        radius * (2.0 * std::f64::consts::PI * self.unit()).cos()
    }

    /// Gamma with this shape and a mean equal to the shape (Marsaglia and Tsang, "A Simple Method for Generating Gamma
    /// Variables", ACM TOMS 26(3), 2000). The shape must be above 0.
    pub fn gamma(&mut self, shape: f64) -> f64 {
        if shape < 1.0 {
            let smaller = (1.0 - self.unit()).powf(1.0 / shape);
            return self.gamma(shape + 1.0) * smaller;
        }
        let d = shape - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        loop {
            let x = self.normal();
            let v = (1.0 + c * x).powi(3);
            if v > 0.0 && (1.0 - self.unit()).ln() < 0.5 * x * x + d - d * v + d * v.ln() {
                return d * v;
            }
        }
    }
}

fn split_mix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::statistics::{mean, variance};

    /// The first outputs of the authors' C program from state 1, 2, 3, 4.
    #[test]
    fn as_the_authors_have_it() {
        let mut random = Random { state: [1, 2, 3, 4] };
        let first: Vec<u64> = (0..4).map(|_| random.next_u64()).collect();
        assert_eq!(first, [41_943_041, 58_720_359, 3_588_806_011_781_223, 3_591_011_842_654_386]);
    }

    #[test]
    fn streams_differ_and_repeat() {
        let first = |seed, stream| {
            let mut random = Random::new(seed, stream);
            [(); 3].map(|()| random.next_u64())
        };
        assert_eq!(first(1, 2), first(1, 2));
        let mut all: Vec<_> =
            (0..50).flat_map(|seed| (0..4).map(move |stream| first(seed, stream))).collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 200);
    }

    #[test]
    fn whole_numbers_are_uniform() {
        let mut random = Random::new(5, 0);
        let mut counts = [0u32; 7];
        for _ in 0..70_000 {
            counts[random.below(7) as usize] += 1;
        }
        // Pearson's chi-squared with 6 degrees of freedom stays below 22.5 in 999 of 1,000 cases.
        let chi: f64 = counts.iter().map(|n| (f64::from(*n) - 10_000.0).powi(2) / 10_000.0).sum();
        assert!(chi < 22.5, "{counts:?}");
        assert_eq!((random.below(0), random.below(1)), (0, 0));
    }

    #[test]
    fn moments() {
        type Draw = fn(&mut Random) -> f64;
        let table: [(&str, Draw, f64, f64); 6] = [
            ("unit", Random::unit, 0.5, 1.0 / 12.0),
            ("exponential", Random::exponential, 1.0, 1.0),
            ("normal", Random::normal, 0.0, 1.0),
            ("gamma 0.25", |r| r.gamma(0.25), 0.25, 0.25),
            ("gamma 1", |r| r.gamma(1.0), 1.0, 1.0),
            ("gamma 9", |r| r.gamma(9.0), 9.0, 9.0),
        ];
        for (name, draw, m, v) in table {
            let mut random = Random::new(11, 0);
            let values: Vec<f64> = (0..200_000).map(|_| draw(&mut random)).collect();
            let (mean, variance) = (mean(&values).unwrap(), variance(&values).unwrap());
            let standard_error = (v / 200_000.0f64).sqrt();
            assert!((mean - m).abs() < 4.0 * standard_error, "{name}: mean {mean}, not {m}");
            assert!((variance / v - 1.0).abs() < 0.03, "{name}: variance {variance}, not {v}");
        }
    }
}
