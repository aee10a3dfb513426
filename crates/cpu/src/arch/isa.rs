//! The instruction sets of this CPU, and the choice among them.
#[cfg(target_arch = "x86_64")]
use super::amx::Amx;
#[cfg(target_arch = "x86_64")]
use super::avx2::Avx2;
#[cfg(target_arch = "x86_64")]
use super::avx512::Avx512;
#[cfg(target_arch = "aarch64")]
use super::neon::{DOTPROD, I8MM, Neon, WORDS};
use super::{Kernel, Portable, Simd, TileIsa, Uses};
use std::fmt;
use std::str::FromStr;

/// An instruction set that this CPU supports.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    Portable(Portable),
    /// `Portable` with tiles in plain loops, for tests of the kernels over tiles.
    #[cfg(feature = "testing")]
    EmulatedTiles(Portable),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2<false>),
    #[cfg(target_arch = "x86_64")]
    Avx2Vnni(Avx2<true>),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512<false>),
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16(Avx512<true>),
    #[cfg(target_arch = "x86_64")]
    Amx(Amx),
    #[cfg(target_arch = "aarch64")]
    Neon(Neon<WORDS>),
    #[cfg(target_arch = "aarch64")]
    NeonDotprod(Neon<DOTPROD>),
    #[cfg(target_arch = "aarch64")]
    NeonI8mm(Neon<I8MM>),
}

impl Isa {
    /// All instruction sets that this CPU supports, the best one last.
    pub fn available() -> Vec<Isa> {
        let mut all = vec![Isa::Portable(Portable)];
        #[cfg(target_arch = "x86_64")]
        {
            all.extend(Avx2::<false>::detect().map(Isa::Avx2));
            all.extend(Avx2::<true>::detect().map(Isa::Avx2Vnni));
            all.extend(Avx512::<false>::detect().map(Isa::Avx512));
            all.extend(Avx512::<true>::detect().map(Isa::Avx512Bf16));
            all.extend(Amx::detect().map(Isa::Amx));
        }
        #[cfg(target_arch = "aarch64")]
        {
            all.extend(Neon::<WORDS>::detect().map(Isa::Neon));
            all.extend(Neon::<DOTPROD>::detect().map(Isa::NeonDotprod));
            all.extend(Neon::<I8MM>::detect().map(Isa::NeonI8mm));
        }
        all
    }

    /// What tests run: everything that is [`available`](Self::available), and emulated tiles.
    #[cfg(feature = "testing")]
    pub fn tested() -> Vec<Isa> {
        let mut all = Isa::available();
        all.insert(1, Isa::EmulatedTiles(Portable));
        all
    }

    /// The best one.
    pub fn best() -> Isa {
        Isa::available().pop().unwrap_or(Isa::Portable(Portable))
    }

    /// The instruction set that `KVIST_ISA` names, else the best.
    pub fn from_env() -> Result<Isa, String> {
        match std::env::var("KVIST_ISA") {
            Ok(name) if !name.is_empty() => name.parse().map_err(|error| format!("KVIST_ISA: {error}")),
            Err(std::env::VarError::NotUnicode(_)) => Err("KVIST_ISA: not a text".into()),
            _ => Ok(Isa::best()),
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable(_) => "portable",
            #[cfg(feature = "testing")]
            Isa::EmulatedTiles(_) => "emulated-tiles",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2Vnni(_) => "avx2-vnni",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16(_) => "avx512-bf16",
            #[cfg(target_arch = "x86_64")]
            Isa::Amx(_) => "amx",
            #[cfg(target_arch = "aarch64")]
            Isa::Neon(_) => "neon",
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDotprod(_) => "neon-dotprod",
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm(_) => "neon-i8mm",
        }
    }

    /// Runs `kernel` on this instruction set.
    #[inline]
    pub fn run<K: Kernel>(self, kernel: K) -> K::Out {
        match self {
            Isa::Portable(s) => s.run(kernel),
            #[cfg(feature = "testing")]
            Isa::EmulatedTiles(s) => s.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(s) => s.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2Vnni(s) => s.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(s) => s.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16(s) => s.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Isa::Amx(amx) => amx.vectors().run(kernel),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon(s) => s.run(kernel),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDotprod(s) => s.run(kernel),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm(s) => s.run(kernel),
        }
    }

    /// Whether its vectors multiply pairs of bf16 faster than f32.
    pub fn multiplies_pairs(self) -> bool {
        self.run(Multiplies).0
    }

    /// Whether its vectors multiply pairs of words faster than f32 ([`Simd::WORD_PAIRS`]).
    pub fn multiplies_word_pairs(self) -> bool {
        self.run(Multiplies).3
    }

    /// Whether its vectors multiply bytes faster than anything else.
    pub fn multiplies_bytes(self) -> bool {
        self.run(Multiplies).1
    }

    /// Whether its vectors multiply units as words ([`Simd::WORD_DOTS`]), in kernels that declare products of bytes.
    pub fn multiplies_words(self) -> bool {
        self.run(Multiplies).2
    }

    /// The tiles, where there are any.
    pub fn tiles(self) -> Option<TileIsa> {
        match self {
            #[cfg(feature = "testing")]
            Isa::EmulatedTiles(s) => Some(TileIsa::Emulated(s)),
            #[cfg(target_arch = "x86_64")]
            Isa::Amx(amx) => Some(TileIsa::Amx(amx)),
            _ => None,
        }
    }
}

/// Asks an instruction set for its products of pairs, of bytes and of words.
struct Multiplies;

impl Kernel for Multiplies {
    type Out = (bool, bool, bool, bool);
    const USES: Uses = Uses::Pairs;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> (bool, bool, bool, bool) {
        (S::BF16_DOTS, S::BYTE_DOTS, S::WORD_DOTS, S::WORD_PAIRS)
    }
}

impl FromStr for Isa {
    type Err = String;
    fn from_str(name: &str) -> Result<Self, String> {
        let all = Isa::available();
        all.iter().copied().find(|isa| isa.name() == name).ok_or_else(|| {
            let names: Vec<_> = all.iter().map(|isa| isa.name()).collect();
            format!(
                "`{name}` is not an instruction set that this CPU has kernels for; it has {}",
                names.join(", ")
            )
        })
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
impl fmt::Debug for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
