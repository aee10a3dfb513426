//! AMX: tiles with products of i8 and bf16 (Sapphire Rapids and later), beside the vectors of AVX-512. The compiler's
//! intrinsics are not stable, so the instructions are written as inline assembly; the compiler itself never uses tiles.
use super::avx512::Avx512;
use super::tiles::{InUse, Shapes, TileElement, TileKernel, Tiles, check_dot, check_rows, check_tile};
use super::{Kernel, Simd, Uses};
use std::arch::asm;
use std::marker::PhantomData;
use std::sync::OnceLock;

/// Proof that the CPU has AMX and that the system lets this process use it; created only by [`detect`](Self::detect).
/// Its vectors are those of AVX-512 without bf16 products: on Sapphire Rapids these are slower than multiplying f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Amx {
    vectors: Avx512<false>,
}

impl Amx {
    pub fn detect() -> Option<Self> {
        static USABLE: OnceLock<bool> = OnceLock::new();
        let vectors = Avx512::<false>::detect()?;
        let usable = USABLE.get_or_init(|| cpu_has_tiles() && request_permission());
        usable.then_some(Amx { vectors })
    }

    /// The vectors.
    pub fn vectors(self) -> Avx512<false> {
        self.vectors
    }

    /// Runs `kernel` with tiles of its shapes.
    #[inline]
    pub(super) fn run_tiles<K: TileKernel>(self, kernel: K, in_use: &InUse) -> K::Out {
        let mut tiles = Configured::new(self, in_use);
        self.vectors.run(WithTiles { kernel, tiles: &mut tiles })
    }
}

/// CPUID leaf 7 lists tiles, bf16 and i8 products, and the system saves both parts of the tile state.
fn cpu_has_tiles() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
    #[target_feature(enable = "xsave")]
    fn saved_state() -> u64 {
        // SAFETY: the caller found `xsave` and its use by the system.
        unsafe { _xgetbv(0) }
    }
    if !is_x86_feature_detected!("xsave") {
        return false;
    }
    #[allow(unused_unsafe)] // safe in newer compilers
    // SAFETY: every x86-64 CPU has `cpuid`, and leaves above the highest are not asked for.
    let has = unsafe {
        let osxsave = __cpuid(1).ecx >> 27 & 1 == 1;
        let features = if __cpuid(0).eax >= 7 { __cpuid_count(7, 0).edx } else { 0 };
        osxsave && [22, 24, 25].iter().all(|bit| features >> bit & 1 == 1)
    };
    // Bits 17 and 18: the configuration and the tiles.
    // SAFETY: `xsave` was found, and the system enabled it (`osxsave`).
    has && unsafe { saved_state() } >> 17 & 3 == 3
}

/// Linux gives a process the 8 KiB of tile state per thread on request. Threads inherit the permission.
#[cfg(target_os = "linux")]
fn request_permission() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const TILE_DATA: i64 = 18;
    let result: i64;
    // SAFETY: the system call takes two numbers and touches no memory; it clobbers rcx and r11, as every one.
    unsafe {
        asm!("syscall", inlateout("rax") ARCH_PRCTL => result, in("rdi") ARCH_REQ_XCOMP_PERM, in("rsi") TILE_DATA,
            out("rcx") _, out("r11") _, options(nostack));
    }
    result == 0
}
#[cfg(not(target_os = "linux"))]
fn request_permission() -> bool {
    false
}

/// The operand of `ldtilecfg`: palette 1, then bytes per row and rows of the tiles.
#[repr(C, align(64))]
struct Config([u8; 64]);

impl Config {
    const fn of<Sh: Shapes>() -> Self {
        let mut config = [0; 64];
        config[0] = 1;
        let mut t = 0;
        while t < 8 {
            config[16 + 2 * t] = Sh::BYTES[t] as u8;
            config[48 + t] = Sh::ROWS[t] as u8;
            t += 1;
        }
        Config(config)
    }
}

/// The tiles of this thread, configured for `Sh` until dropped.
struct Configured<'u, Sh> {
    shapes: PhantomData<(&'u InUse, Sh)>,
}

impl<'u, Sh: Shapes> Configured<'u, Sh> {
    #[inline(always)]
    fn new(_: Amx, _: &'u InUse) -> Self {
        let config = const { &Config::of::<Sh>() };
        // SAFETY: an `Amx` exists, so the CPU has tiles and the process may use them; the shapes were checked.
        unsafe { asm!("ldtilecfg [{}]", in(reg) config, options(nostack, readonly, preserves_flags)) };
        Configured { shapes: PhantomData }
    }
}

impl<Sh> Drop for Configured<'_, Sh> {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: only an `Amx` creates a `Configured`.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}

struct WithTiles<'t, 'u, K: TileKernel> {
    kernel: K,
    tiles: &'t mut Configured<'u, K::Shapes>,
}

impl<K: TileKernel> Kernel for WithTiles<'_, '_, K> {
    type Out = K::Out;
    const USES: Uses = Uses::Pairs;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> K::Out {
        self.kernel.run(s, self.tiles)
    }
}

impl<Sh: Shapes> Tiles<Sh> for Configured<'_, Sh> {
    #[inline(always)]
    fn load<const T: usize, E: TileElement>(&mut self, from: &[E], stride: usize) {
        check_rows::<Sh, T, E>(from.len(), stride);
        // SAFETY: the tile is configured, and its rows lie inside the slice.
        unsafe {
            asm!("tileloadd tmm{t}, [{p} + {s}*1]", t = const T, p = in(reg) from.as_ptr(),
                s = in(reg) stride * size_of::<E>(), options(nostack, readonly, preserves_flags));
        }
    }
    #[inline(always)]
    fn zero<const T: usize>(&mut self) {
        const { check_tile::<Sh>(T) }
        // SAFETY: the tile is configured.
        unsafe { asm!("tilezero tmm{t}", t = const T, options(nostack, nomem, preserves_flags)) };
    }
    #[inline(always)]
    fn store<const T: usize, E: TileElement>(&mut self, to: &mut [E], stride: usize) {
        check_rows::<Sh, T, E>(to.len(), stride);
        // SAFETY: the tile is configured, its rows lie inside the slice, and any bits are a valid element.
        unsafe {
            asm!("tilestored [{p} + {s}*1], tmm{t}", t = const T, p = in(reg) to.as_mut_ptr(),
                s = in(reg) stride * size_of::<E>(), options(nostack, preserves_flags));
        }
    }
    #[inline(always)]
    fn dot_i8<const C: usize, const A: usize, const B: usize>(&mut self) {
        const { check_dot::<Sh>(C, A, B) }
        // SAFETY: the tiles are configured, and their shapes agree.
        unsafe {
            asm!("tdpbssd tmm{c}, tmm{a}, tmm{b}", c = const C, a = const A, b = const B,
                options(nostack, nomem, preserves_flags));
        }
    }
    #[inline(always)]
    fn dot_u8_i8<const C: usize, const A: usize, const B: usize>(&mut self) {
        const { check_dot::<Sh>(C, A, B) }
        // SAFETY: the tiles are configured, and their shapes agree.
        unsafe {
            asm!("tdpbusd tmm{c}, tmm{a}, tmm{b}", c = const C, a = const A, b = const B,
                options(nostack, nomem, preserves_flags));
        }
    }
    #[inline(always)]
    fn dot_bf16<const C: usize, const A: usize, const B: usize>(&mut self) {
        const { check_dot::<Sh>(C, A, B) }
        // SAFETY: the tiles are configured, and their shapes agree.
        unsafe {
            asm!("tdpbf16ps tmm{c}, tmm{a}, tmm{b}", c = const C, a = const A, b = const B,
                options(nostack, nomem, preserves_flags));
        }
    }
}
