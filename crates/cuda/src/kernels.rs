//! The kernels' sources in CUDA C++, and how each is launched.
//!
//! A kernel's constants are `#define`s in front of its source, so that the compiler unrolls loops over them. Its
//! arguments are the buffers, in the order of [`Kernel::writes`], and a struct with the words of `Args`.
pub mod gemm;
mod matmul;

use crate::tiles::{MmaTile, RECENT_STAGES, Tile};
use gemm::{Plan, WarpgroupPlan};
use kvist_device::{Storage, weights::Encoding};
use kvist_gpu::{ATTEND_ROWS, Constant, Form, GemmTile, Kernel, RecentForm, Routed, RowsOp};
use matmul::FastMatmul;

/// Threads of a block of `attend`.
const ATTEND_THREADS: u32 = 128;
/// Its query rows.
pub const ROWS: u32 = ATTEND_ROWS[0];

/// Threads of a block of `norm`: one row, or a warp for each of several rows of up to `NARROW_NORM` elements.
const NORM_THREADS: u32 = 512;
const NARROW_NORM: u32 = 512;

/// Rows of a block of `norm`.
pub fn norm_rows(width: u32) -> u32 {
    if width <= NARROW_NORM { NORM_THREADS / 32 } else { 1 }
}

/// Threads of a block of `gated` and `add`, and its elements: four for each thread.
const ELEMENT_THREADS: u32 = 256;
pub const ELEMENTS: u32 = 4 * ELEMENT_THREADS;

/// Threads of a block of `scatter` and `gather`.
const MOVE_THREADS: u32 = 256;

/// Blocks of `scatter` and `gather` for so many words: a thread has sixteen bytes, or where these do not lie at a multiple of sixteen, its
/// words one after the other.
pub fn move_groups(words: u64) -> [u32; 3] {
    let groups = words.div_ceil(4 * u64::from(MOVE_THREADS));
    [u32::try_from(groups).unwrap_or(u32::MAX).clamp(1, i32::MAX as u32), 1, 1]
}

/// What kernels are compiled for.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Bytes of shared memory that a block can have.
    pub max_shared_bytes: u32,
    /// Whether a row's last bits may depend on its batch: kernels of their own, mostly on tensor cores, where they are faster.
    pub fast: bool,
    /// Whether the GPU has the tensor cores of warpgroups, and the compiler their instructions.
    pub warpgroups: bool,
}

impl Target {
    /// Whether the kernel is one of those that [`fast`](Self::fast) allows. The others are the same either way.
    pub fn is_fast(&self, kernel: &Kernel) -> bool {
        match kernel {
            Kernel::Gemm { tile, .. } => tile.halves, // see `gemm_tile`
            Kernel::Attend { .. } => self.mma_tile(kernel).is_some(),
            Kernel::Matmul { .. } => self.fast,
            _ => false,
        }
    }

    /// What a block of [`Kernel::Gemm`] computes. f32 stays exact.
    pub fn gemm_tile(&self, encoding: u32, routed: Routed, tokens: u32, outputs: u32) -> GemmTile {
        let is_exact = Encoding::RESIDENT.get(encoding as usize) == Some(&Encoding::F32);
        let found = (self.fast && !is_exact)
            .then(|| gemm::tile((self.max_shared_bytes, self.warpgroups), routed, tokens, outputs));
        found.flatten().unwrap_or(GemmTile::USUAL)
    }

    /// Whether the kernel is one that warpgroups compute.
    pub fn uses_warpgroups(&self, kernel: &Kernel) -> bool {
        self.warpgroup_plan(kernel).is_some()
    }

    /// How they do.
    fn warpgroup_plan(&self, kernel: &Kernel) -> Option<WarpgroupPlan> {
        match *kernel {
            Kernel::Gemm { tile, routed, .. } if self.warpgroups => {
                WarpgroupPlan::new(tile, routed, self.max_shared_bytes)
            }
            _ => None,
        }
    }

    /// Output rows and tokens of a block of a linear layer.
    pub fn product_tile(&self, kernel: &Kernel) -> (u32, u32) {
        match (kernel, self.fast_matmul(kernel)) {
            (Kernel::Matmul { tokens, .. }, Some(fast)) => (fast.rows(), *tokens),
            (Kernel::Several { .. }, Some(fast)) => (fast.rows(), 1),
            _ => kvist_gpu::product_tile(kernel),
        }
    }

    /// Whether [`Kernel::Several`] computes layers with such weights.
    pub fn has_several(&self, encoding: u32) -> bool {
        self.fast && Encoding::RESIDENT.get(encoding as usize).is_some_and(|e| FastMatmul::is_of_bytes(*e))
    }

    fn fast_matmul(&self, kernel: &Kernel) -> Option<FastMatmul> {
        let of_bytes = |encoding| FastMatmul::Bytes { encoding };
        match *kernel {
            Kernel::Matmul { encoding, tokens, .. } if self.is_fast(kernel) => {
                let encoding = *Encoding::RESIDENT.get(encoding as usize)?;
                Some(match encoding {
                    encoding if encoding.is_float() => FastMatmul::Floats,
                    encoding if tokens == 1 && FastMatmul::is_of_bytes(encoding) => of_bytes(encoding),
                    _ => FastMatmul::Blocks { tokens },
                })
            }
            Kernel::Several { encoding, .. } => {
                Encoding::RESIDENT.get(encoding as usize).copied().map(of_bytes)
            }
            _ => None,
        }
    }

    /// Threads of a block.
    pub fn threads(&self, kernel: &Kernel) -> u32 {
        if let Some(fast) = self.fast_matmul(kernel) {
            return 32 * fast.warps();
        }
        match kernel {
            Kernel::Matmul { .. } | Kernel::Merge { .. } | Kernel::Route => 128,
            Kernel::Attend { .. } => ATTEND_THREADS,
            Kernel::Gemm { .. } | Kernel::Halves | Kernel::Sort => 256,
            Kernel::Top => 512,
            Kernel::Norm { .. } => NORM_THREADS,
            Kernel::Scatter | Kernel::Gather => MOVE_THREADS,
            Kernel::Gated | Kernel::Add => ELEMENT_THREADS,
            _ => 64,
        }
    }

    /// Query rows of a block of attention for tiles of `wanted` rows.
    pub fn attend_rows(&self, wanted: u32, (k, v): (Form, Form), dim: u32, recent: bool) -> u32 {
        let fits = |rows: &u32| {
            self.fast && MmaTile::new((k, v), dim, *rows, recent, self.max_shared_bytes).is_some()
        };
        let fitting = || ATTEND_ROWS.into_iter().filter(fits);
        fitting().find(|rows| *rows >= wanted).or_else(|| fitting().max()).unwrap_or(ROWS)
    }

    /// Blocks of attention that share a multiprocessor.
    pub fn attend_blocks(&self, forms: (Form, Form), dim: u32, rows: u32, recent: bool) -> u32 {
        /// Of the kernel without tensor cores: more cost more merges than they gain.
        const OTHERS: u32 = 2;
        MmaTile::new(forms, dim, rows, recent, self.max_shared_bytes).map_or(OTHERS, |tile| tile.blocks)
    }

    /// How attention on tensor cores goes through cells, if it computes this kernel.
    fn mma_tile(&self, kernel: &Kernel) -> Option<MmaTile> {
        match *kernel {
            Kernel::Attend { k, v, dim, rows, recent } if self.fast => {
                MmaTile::new((k, v), dim, rows, recent, self.max_shared_bytes)
            }
            _ => None,
        }
    }

    /// Bytes of dynamic shared memory. `None` if the device has not so many.
    pub fn shared_bytes(&self, kernel: &Kernel) -> Option<u32> {
        if let Some(tile) = self.mma_tile(kernel) {
            return Some(tile.bytes);
        }
        if let Some(plan) = self.warpgroup_plan(kernel) {
            return Some(plan.bytes);
        }
        match *kernel {
            Kernel::Attend { k, v, dim, recent, .. } => {
                Tile::new(k, v, dim, recent, self.max_shared_bytes).map(|tile| tile.bytes)
            }
            Kernel::Gemm { tile, .. } if self.is_fast(kernel) => {
                Plan::new(tile, self.max_shared_bytes).map(|plan| plan.bytes)
            }
            _ => Some(self.fast_matmul(kernel).map_or(0, |fast| fast.shared_bytes())),
        }
    }

    /// The whole source: constants, shared functions, the kernel.
    pub fn source(&self, kernel: &Kernel) -> String {
        let mut source = String::new();
        let mut define = |name: &str, n: u32| source += &format!("#define {name} {n}\n");
        for (name, value) in kernel.constants() {
            match value {
                Constant::Flag(is) => define(&name, u32::from(is)),
                Constant::Number(n) => define(&name, n),
            }
        }
        if let Kernel::Norm { .. } = kernel {
            define("NARROW", NARROW_NORM);
        }
        if let Some(tile) = self.mma_tile(kernel) {
            define("STAGES", tile.stages);
            define("RECENT_STAGES", RECENT_STAGES);
            define("BLOCKS_PER_SM", tile.blocks);
        } else if let Kernel::Attend { k, v, dim, recent, .. } = *kernel {
            // Without a tile the kernel is refused before it is compiled.
            let smallest = Tile { cells: 8, stages: 1, bytes: 0 };
            let tile = Tile::new(k, v, dim, recent, self.max_shared_bytes).unwrap_or(smallest);
            define("CELLS", tile.cells);
            define("STAGES", tile.stages);
        }
        if let Some(plan) = self.warpgroup_plan(kernel) {
            plan.constants().into_iter().for_each(|(name, n)| define(name, n));
        } else if let Kernel::Gemm { tile, .. } = *kernel
            && self.is_fast(kernel)
        {
            // As above.
            let plan = Plan::new(tile, self.max_shared_bytes).unwrap_or(Plan::smallest(tile));
            plan.constants().into_iter().for_each(|(name, n)| define(name, n));
        }
        if let Some(fast) = self.fast_matmul(kernel) {
            define("ROWS", fast.rows());
            define("WARPS", fast.warps());
            define("BLOCKS", fast.blocks());
        }
        source += include_str!("kernels/prelude.cu");
        let source = self.parts(kernel).iter().fold(source, |source, part| source + part + "\n");
        begun(&source)
    }

    /// The files of a kernel, in order.
    fn parts(&self, kernel: &Kernel) -> &'static [&'static str] {
        match kernel {
            Kernel::Embed { .. } => &[MATH, BYTES, WEIGHTS, include_str!("kernels/embed.cu")],
            Kernel::Matmul { .. } if self.is_fast(kernel) => match self.fast_matmul(kernel) {
                Some(FastMatmul::Bytes { .. }) => {
                    const ONE: &str = include_str!("kernels/matmul_bytes.cu");
                    &[MATH, BYTES, WEIGHTS, LANES, PRODUCT, MMA, PAIRS, LOADS, UNITS, ONE]
                }
                Some(FastMatmul::Blocks { .. }) => {
                    const BLOCKS: &str = include_str!("kernels/matmul_blocks.cu");
                    const SEGMENTS: &str = include_str!("kernels/segments.cu");
                    &[MATH, BYTES, WEIGHTS, LANES, INPUTS, PRODUCT, MMA, PAIRS, LOADS, SEGMENTS, BLOCKS]
                }
                _ => {
                    const FLOATS: &str = include_str!("kernels/matmul_floats.cu");
                    &[MATH, BYTES, WEIGHTS, LANES, INPUTS, PRODUCT, MMA, PAIRS, LOADS, FLOATS]
                }
            },
            Kernel::Matmul { .. } => {
                &[MATH, BYTES, WEIGHTS, LANES, INPUTS, PRODUCT, include_str!("kernels/matmul.cu")]
            }
            Kernel::Several { .. } => {
                const SEVERAL: &str = include_str!("kernels/several.cu");
                &[MATH, GATE, BYTES, WEIGHTS, LANES, PRODUCT, MMA, PAIRS, LOADS, UNITS, SEVERAL]
            }
            Kernel::Gemm { .. } if self.uses_warpgroups(kernel) => {
                const WARPGROUPS: &str = include_str!("kernels/warpgroups.cu");
                const GEMM: &str = include_str!("kernels/gemm_warpgroups.cu");
                &[MATH, BYTES, WEIGHTS, LANES, PRODUCT, MMA, PAIRS, ASYNC, BLOCKS, WARPGROUPS, GEMM]
            }
            Kernel::Gemm { .. } if self.is_fast(kernel) => {
                const GEMM: &str = include_str!("kernels/gemm_fast.cu");
                &[MATH, BYTES, WEIGHTS, LANES, PRODUCT, MMA, PAIRS, ASYNC, BLOCKS, GEMM]
            }
            Kernel::Gemm { .. } => {
                &[MATH, BYTES, WEIGHTS, LANES, INPUTS, PRODUCT, include_str!("kernels/gemm.cu")]
            }
            Kernel::Halves => &[MATH, INPUTS, MMA, include_str!("kernels/halves.cu")],
            Kernel::Norm { .. } => &[include_str!("kernels/norm.cu")],
            Kernel::Rope => &[ROTATION, include_str!("kernels/rope.cu")],
            Kernel::Gated => &[MATH, GATE, ELEMENTS_OF_THREADS, include_str!("kernels/gated.cu")],
            Kernel::Add => &[ELEMENTS_OF_THREADS, include_str!("kernels/add.cu")],
            Kernel::Rows(_) => &[include_str!("kernels/rows.cu")],
            Kernel::Route => &[MATH, ROUTES, include_str!("kernels/route.cu")],
            Kernel::Sort => &[ROUTES, include_str!("kernels/sort.cu")],
            Kernel::Combine => &[ROUTES, include_str!("kernels/combine.cu")],
            Kernel::Top => &[MATH, include_str!("kernels/top.cu")],
            Kernel::Store { .. } => {
                &[MATH, BYTES, LEVELS, TURN, STORE_ROWS, include_str!("kernels/store.cu")]
            }
            Kernel::StoreBoth { .. } => {
                const BOTH: &str = include_str!("kernels/store_both.cu");
                &[MATH, BYTES, LEVELS, TURN, ROTATION, STORE_ROWS, BOTH]
            }
            Kernel::Copy { .. } => &[include_str!("kernels/copy.cu")],
            Kernel::Attend { .. } if self.is_fast(kernel) => {
                const SIDES: &str = include_str!("kernels/attend_sides.cu");
                const GROUPS: &str = include_str!("kernels/attend_groups.cu");
                const QUERIES: &str = include_str!("kernels/attend_queries.cu");
                const ATTEND: &str = include_str!("kernels/attend_mma.cu");
                &[MATH, MMA, PAIRS, ASYNC, TURN, SINKS, SIDES, GROUPS, QUERIES, ATTEND]
            }
            Kernel::Attend { .. } => {
                &[MATH, BYTES, LEVELS, LANES, ASYNC, TURN, SINKS, CELLS, include_str!("kernels/attend.cu")]
            }
            Kernel::Merge { .. } => &[MATH, ASYNC, TURN, SINKS, include_str!("kernels/merge.cu")],
            Kernel::Scatter => &[include_str!("kernels/scatter.cu")],
            Kernel::Gather => &[include_str!("kernels/gather.cu")],
        }
    }
}

/// The source with a wait for the kernel before as the function's first statement, so that no kernel lacks it. A kernel that
/// first reads what no kernel writes has the wait itself, behind that.
fn begun(source: &str) -> String {
    let (before, function) = source.split_once(FUNCTION).unwrap_or((source, ""));
    if function.contains(WAIT) {
        return source.into();
    }
    match function.split_once(") {") {
        Some((head, body)) => format!("{before}{FUNCTION}{head}) {{\n    {WAIT}{body}"),
        None => source.into(),
    }
}

/// The name of a kernel's function. NVRTC has functions of its own, `norm` among them.
pub fn function(kernel: &Kernel) -> &'static str {
    match kernel {
        Kernel::Norm { .. } => "rms_norm",
        other => other.name(),
    }
}

/// What the function of a kernel begins with.
const FUNCTION: &str = "extern \"C\" __global__ void";

/// Waits for the kernel before.
const WAIT: &str = "after_the_kernel_before();";

const MATH: &str = include_str!("kernels/math.cu");
const BYTES: &str = include_str!("kernels/bytes.cu");
const WEIGHTS: &str = include_str!("kernels/weights.cu");
const LANES: &str = include_str!("kernels/lanes.cu");
const INPUTS: &str = include_str!("kernels/inputs.cu");
const MMA: &str = include_str!("kernels/mma.cu");
const ASYNC: &str = include_str!("kernels/async.cu");
const BLOCKS: &str = include_str!("kernels/blocks.cu");
const ROUTES: &str = include_str!("kernels/routes.cu");
const PRODUCT: &str = concat!(include_str!("kernels/routes.cu"), include_str!("kernels/product.cu"));
const LOADS: &str = include_str!("kernels/loads.cu");
const UNITS: &str = include_str!("kernels/units.cu");
const ELEMENTS_OF_THREADS: &str = include_str!("kernels/elements.cu");
const GATE: &str = include_str!("kernels/gate.cu");
const LEVELS: &str = include_str!("kernels/levels.cu");
const TURN: &str = include_str!("kernels/turn.cu");
const ROTATION: &str = include_str!("kernels/rotation.cu");
const STORE_ROWS: &str = include_str!("kernels/store_rows.cu");
const CELLS: &str = include_str!("kernels/cells.cu");
const PAIRS: &str = include_str!("kernels/pairs.cu");
const SINKS: &str = include_str!("kernels/sinks.cu");

/// Every storage of K, in an order in which neighbours differ.
pub(crate) const STORAGES: [&str; 16] = [
    "f32",
    "q8",
    "f16",
    "q4-rot",
    "bf16",
    "t4-o",
    "q8-64",
    "f32-rot",
    "q4",
    "f16-rot",
    "t4",
    "bf16-rot",
    "q4-64",
    "q8-rot",
    "q8-64-rot",
    "q4-64-rot",
];

/// Attention and its stores for heads of `dim`: every storage on either side with itself and with another one, with recent rows
/// and without. Not every pair: there are hundreds.
fn attention(dim: u32) -> Vec<Kernel> {
    let storages: Vec<Storage> = STORAGES.iter().filter_map(|text| text.parse().ok()).collect();
    debug_assert_eq!(storages.len(), STORAGES.len());
    let mut all = Vec::new();
    for (i, k) in storages.iter().enumerate() {
        let Ok(k_form) = Form::new(*k, dim) else { continue };
        for v in [*k, storages[(i + 1) % storages.len()]] {
            let Ok(v_form) = Form::new(v.for_values(), dim) else { continue };
            let packed = k_form.is_packed() || v_form.is_packed();
            for recent in [false, true] {
                // Without tensor cores a block has `ROWS`, whatever the tile.
                if packed || !recent {
                    all.push(Kernel::StoreBoth { k: k_form, v: v_form, dim, recent });
                }
                for rows in ATTEND_ROWS.into_iter().filter(|_| packed || !recent) {
                    all.push(Kernel::Attend { k: k_form, v: v_form, dim, rows, recent });
                }
            }
            all.push(Kernel::Merge { v: v_form, dim });
            all.push(Kernel::Store { form: v_form, dim, recent: RecentForm::No });
            if v_form.is_packed() {
                all.push(Kernel::Store { form: v_form, dim, recent: RecentForm::Turned });
            }
        }
        all.push(Kernel::Store { form: k_form, dim, recent: RecentForm::No });
        if k_form.is_packed() {
            all.push(Kernel::Store { form: k_form, dim, recent: RecentForm::Plain });
        }
    }
    all
}

/// Every kernel that the engine can ask for, except that of attention not every pair of storages is there: for heads of the
/// sizes `dims` every storage, for those of `others` f16 alone.
pub fn all(dims: &[u32], others: &[u32]) -> Vec<Kernel> {
    let mut all = vec![
        Kernel::Rope,
        Kernel::Gated,
        Kernel::Add,
        Kernel::Route,
        Kernel::Sort,
        Kernel::Combine,
        Kernel::Top,
        Kernel::Halves,
        Kernel::Scatter,
        Kernel::Gather,
    ];
    all.extend([false, true].map(|in_place| Kernel::Norm { in_place }));
    all.extend([false, true].map(|within| Kernel::Copy { within }));
    all.extend([RowsOp::Copy, RowsOp::Gather, RowsOp::Zero].map(Kernel::Rows));
    for encoding in 0..Encoding::RESIDENT.len() as u32 {
        all.push(Kernel::Embed { encoding });
        if FastMatmul::is_of_bytes(Encoding::RESIDENT[encoding as usize]) {
            let several = |gated, normed, routed| Kernel::Several { encoding, gated, normed, routed };
            for gated in [false, true] {
                all.extend([false, true].map(|normed| several(gated, normed, false)));
            }
            all.push(several(true, false, true));
        }
        for routed in [Routed::No, Routed::Sum] {
            all.extend([1, 4, 8].map(|tokens| Kernel::Matmul { encoding, tokens, routed }));
        }
        all.push(Kernel::Matmul { encoding, tokens: 1, routed: Routed::Experts });
        for routed in [Routed::No, Routed::Sum, Routed::Experts] {
            all.push(Kernel::Gemm { encoding, routed, tile: GemmTile::USUAL });
        }
        let fast = |outputs, tokens, routed| {
            let tile = GemmTile { outputs, tokens, halves: true };
            Kernel::Gemm { encoding, routed, tile }
        };
        match Encoding::RESIDENT[encoding as usize] {
            Encoding::F32 => {}
            Encoding::Q8_0 => {
                all.extend(gemm::TILES.map(|(outputs, tokens)| fast(outputs, tokens, Routed::No)));
                all.extend(
                    [(64, 64), (128, 256)].map(|(outputs, tokens)| fast(outputs, tokens, Routed::Experts)),
                );
                all.push(fast(128, 256, Routed::Sum));
            }
            _ => all.extend([
                fast(128, 256, Routed::No),
                fast(128, 128, Routed::Sum),
                fast(32, 16, Routed::No),
                fast(64, 64, Routed::Experts),
            ]),
        }
    }
    all.extend(dims.iter().flat_map(|dim| attention(*dim)));
    for dim in others {
        if let Ok(form) = Form::new(Storage::F16, *dim) {
            all.push(Kernel::Attend { k: form, v: form, dim: *dim, rows: ROWS, recent: false });
            all.push(Kernel::Merge { v: form, dim: *dim });
            all.push(Kernel::Store { form, dim: *dim, recent: RecentForm::No });
            all.push(Kernel::StoreBoth { k: form, v: form, dim: *dim, recent: false });
        }
    }
    let mut seen = std::collections::HashSet::new();
    all.retain(|kernel| seen.insert(kernel.clone()));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The parameters of a kernel's function, from its source: the pointers, and whether a struct follows.
    fn parameters(source: &str, name: &str) -> (usize, bool) {
        let function = source.split("extern \"C\" __global__ void").nth(1).unwrap();
        let list = function.split_once(&format!("{name}(")).unwrap().1;
        let list = list.split_once(") {").unwrap().0;
        let code: String = list.lines().map(|line| line.split("//").next().unwrap()).collect();
        (code.matches('*').count(), code.trim_end().ends_with("Args args"))
    }

    /// A launch passes as many addresses as a kernel binds, then the words of its arguments.
    #[test]
    fn kernels_take_what_a_launch_passes() {
        for kernel in all(&[33, 128], &[64]) {
            let target = |(fast, warpgroups)| Target { max_shared_bytes: 227 << 10, fast, warpgroups };
            for target in [(false, false), (true, false), (true, true)].map(target) {
                let source = target.source(&kernel);
                assert_eq!(
                    parameters(&source, function(&kernel)),
                    (kernel.writes().len(), true),
                    "{kernel:?}"
                );
                let function = source.split(FUNCTION).nth(1).unwrap();
                let body = function.split_once(") {").unwrap().1.trim_start();
                // These first read what no kernel writes.
                let own = match &kernel {
                    Kernel::Attend { .. } => target.is_fast(&kernel),
                    Kernel::Merge { .. } => true,
                    _ => matches!(target.fast_matmul(&kernel), Some(FastMatmul::Bytes { .. })),
                };
                assert!(body.starts_with(WAIT) || (own && body.contains(WAIT)), "{kernel:?}: {body}");
                assert!(!function.split_once(") {").unwrap().0.contains('{'), "{kernel:?}: another brace");
                assert!(kernel.writes().len() <= crate::ffi::MAX_BUFFERS, "{kernel:?}");
                let args = source.split("struct Args {").nth(1).unwrap().split_once("};").unwrap().0;
                let words = args.matches(';').count() + if args.contains("Form form;") { 2 } else { 0 };
                assert!(words <= kvist_gpu::IMMEDIATE_WORDS, "{kernel:?}: {words} words");
                assert_eq!(target.threads(&kernel) % 32, 0, "{kernel:?}: shuffles are of whole warps");
            }
        }
    }
}
