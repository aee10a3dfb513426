//! The source of a driver's decisions: a seed, or a fuzzer's bytes.

/// Random numbers for tests: splitmix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA
/// 2014). The field is the seed.
#[derive(Clone, Debug)]
pub struct SplitMix64(pub u64);

impl SplitMix64 {
    /// The next 64 bits.
    #[allow(clippy::should_implement_trait)] // it never ends, which `Iterator` would not express
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// A number below `n`, which must be at least 1. The bias is negligible with 64 bits.
    pub fn below(&mut self, n: u32) -> u32 {
        (self.next() % u64::from(n)) as u32
    }
    /// An index into a list of `n` elements; 0 if `n` is 0.
    pub fn index(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
    /// A random element of `list`, which must not be empty.
    pub fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.index(list.len())]
    }
    /// Uniform in [0, 1), in steps of 2^-53.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// A stream of decisions. It ends when the bytes run out, or after the given number of operations from a seed.
pub struct Choices<'b> {
    source: Source<'b>,
}

enum Source<'b> {
    Seed {
        random: SplitMix64,
        /// Operations left.
        n_operations: u64,
    },
    Bytes(&'b [u8]),
}

impl<'b> Choices<'b> {
    /// Decisions for `n_operations` operations from this seed.
    pub fn from_seed(seed: u64, n_operations: u64) -> Self {
        Choices { source: Source::Seed { random: SplitMix64(seed), n_operations } }
    }
    /// Decisions until the bytes run out.
    pub fn from_bytes(bytes: &'b [u8]) -> Self {
        Choices { source: Source::Bytes(bytes) }
    }

    /// Whether there is another operation.
    pub fn go_on(&mut self) -> bool {
        match &mut self.source {
            Source::Bytes(bytes) => !bytes.is_empty(),
            Source::Seed { n_operations, .. } => {
                *n_operations = n_operations.saturating_sub(1);
                *n_operations > 0
            }
        }
    }

    /// A number below `n`; 0 if the bytes have run out or if `n` is 0.
    pub fn below(&mut self, n: u32) -> u32 {
        let mut byte = || match &mut self.source {
            Source::Seed { random, .. } => (random.next() >> 32) as u32,
            Source::Bytes(bytes) => match bytes.split_first() {
                Some((&first, rest)) => {
                    *bytes = rest;
                    u32::from(first)
                }
                None => 0,
            },
        };
        if n <= 1 {
            return 0;
        }
        if n <= 256 { byte() % n } else { (byte() << 8 | byte() & 0xff) % n }
    }

    /// True with probability 1 / `n`.
    pub fn one_in(&mut self, n: u32) -> bool {
        self.below(n) == n - 1
    }

    /// A random element of `list`.
    pub fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len() as u32) as usize]
    }
}
