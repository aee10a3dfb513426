//! The WGSL of the kernels. Every file begins with what it computes.
use kvist_gpu::{Constant, Kernel};
use std::borrow::Cow;

const MATH: &str = include_str!("kernels/math.wgsl");
const BYTES: &str = include_str!("kernels/bytes.wgsl");
const WEIGHTS: &str = include_str!("kernels/weights.wgsl");
const PRODUCT: &str = include_str!("kernels/product.wgsl");
const LANES: &str = include_str!("kernels/lanes.wgsl");
const LANES_OF_SUBGROUPS: &str = include_str!("kernels/lanes_of_subgroups.wgsl");
const SINKS: &str = include_str!("kernels/sinks.wgsl");
const LEVELS: &str = include_str!("kernels/levels.wgsl");
const TURN: &str = include_str!("kernels/turn.wgsl");
const CELLS: &str = include_str!("kernels/cells.wgsl");

fn constant(name: &str, value: Constant) -> String {
    match value {
        Constant::Flag(is) => format!("const {name}: bool = {is};\n"),
        Constant::Number(n) => format!("const {name}: u32 = {n}u;\n"),
    }
}

/// `cells.wgsl` for one side.
fn cells(lower: &str, upper: &str) -> Cow<'static, str> {
    CELLS.replace("side_", lower).replace("SIDE_", upper).into()
}

/// The files of a kernel, in order. `lanes` has the exchange of values between lanes.
fn parts(kernel: &Kernel, lanes: &'static str) -> Vec<Cow<'static, str>> {
    let parts: &[&'static str] = match kernel {
        Kernel::Embed { .. } => &[MATH, BYTES, WEIGHTS, include_str!("kernels/embed.wgsl")],
        Kernel::Matmul { .. } => &[MATH, BYTES, WEIGHTS, PRODUCT, lanes, include_str!("kernels/matmul.wgsl")],
        Kernel::Gemm { .. } => &[MATH, BYTES, WEIGHTS, PRODUCT, include_str!("kernels/gemm.wgsl")],
        // Only drivers that say so are asked for them.
        Kernel::Halves | Kernel::Several { .. } | Kernel::StoreBoth { .. } => &[],
        Kernel::Norm { .. } => &[lanes, include_str!("kernels/norm.wgsl")],
        Kernel::Rope => &[include_str!("kernels/rope.wgsl")],
        Kernel::Gated => &[MATH, include_str!("kernels/gated.wgsl")],
        Kernel::Add => &[include_str!("kernels/add.wgsl")],
        Kernel::Rows(_) => &[include_str!("kernels/rows.wgsl")],
        Kernel::Route => &[MATH, include_str!("kernels/route.wgsl")],
        Kernel::Top => &[MATH, lanes, include_str!("kernels/top.wgsl")],
        Kernel::Store { .. } => &[MATH, BYTES, LEVELS, TURN, include_str!("kernels/store.wgsl")],
        Kernel::Copy { .. } => &[include_str!("kernels/copy.wgsl")],
        Kernel::Attend { .. } => {
            let shared = [MATH, BYTES, LEVELS, TURN, SINKS, lanes].map(Cow::from);
            let own = [cells("k_", "K_"), cells("v_", "V_"), include_str!("kernels/attend.wgsl").into()];
            return shared.into_iter().chain(own).collect();
        }
        Kernel::Merge { .. } => &[MATH, TURN, SINKS, include_str!("kernels/merge.wgsl")],
        Kernel::Scatter => &[include_str!("kernels/scatter.wgsl")],
        Kernel::Gather => &[include_str!("kernels/gather.wgsl")],
    };
    parts.iter().map(|part| (*part).into()).collect()
}

/// The whole source: constants, shared functions, the kernel. With `subgroups`, lanes exchange values within them.
pub fn source(kernel: &Kernel, subgroups: bool) -> String {
    let constants = kernel.constants().iter().map(|(name, value)| constant(name, *value)).collect();
    let lanes = if subgroups { LANES_OF_SUBGROUPS } else { LANES };
    parts(kernel, lanes).iter().fold(constants, |source: String, part| source + part + "\n")
}
