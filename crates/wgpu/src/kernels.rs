//! The WGSL of the kernels. Every file begins with what it computes.
use kvist_gpu::{ATTEND_ROWS, Form, Kernel, RecentForm, Routed, RowsOp};
use std::borrow::Cow;

const MATH: &str = include_str!("kernels/math.wgsl");
const BYTES: &str = include_str!("kernels/bytes.wgsl");
const WEIGHTS: &str = include_str!("kernels/weights.wgsl");
const PRODUCT: &str = include_str!("kernels/product.wgsl");
const SINKS: &str = include_str!("kernels/sinks.wgsl");
const LEVELS: &str = include_str!("kernels/levels.wgsl");
const TURN: &str = include_str!("kernels/turn.wgsl");
const CELLS: &str = include_str!("kernels/cells.wgsl");

fn flag(name: &str, is: bool) -> String {
    format!("const {name}: bool = {is};\n")
}
fn number(name: &str, n: u32) -> String {
    format!("const {name}: u32 = {n}u;\n")
}

/// The constants of a form, with a prefix.
fn form(prefix: &str, form: Form, dim: u32) -> String {
    form.constants(dim).into_iter().map(|(name, n)| number(&format!("{prefix}{name}"), n)).collect()
}

/// `cells.wgsl` for one side.
fn cells(lower: &str, upper: &str) -> Cow<'static, str> {
    CELLS.replace("side_", lower).replace("SIDE_", upper).into()
}

/// The whole source: constants, shared functions, the kernel.
pub fn source(kernel: &Kernel) -> String {
    let (constants, parts): (String, Vec<Cow<'static, str>>) = match kernel {
        Kernel::Embed { encoding } => (
            number("ENCODING", *encoding),
            [MATH, BYTES, WEIGHTS, include_str!("kernels/embed.wgsl")].map(Cow::from).to_vec(),
        ),
        Kernel::Matmul { encoding, tokens, routed } => (
            number("ENCODING", *encoding)
                + &number("TOKENS", *tokens)
                + &flag("ROUTED", *routed != Routed::No)
                + &flag("ADDED", *routed == Routed::Added),
            [MATH, BYTES, WEIGHTS, PRODUCT, include_str!("kernels/matmul.wgsl")].map(Cow::from).to_vec(),
        ),
        Kernel::Gemm { encoding, routed } => (
            number("ENCODING", *encoding)
                + &flag("ROUTED", *routed != Routed::No)
                + &flag("ADDED", *routed == Routed::Added),
            [MATH, BYTES, WEIGHTS, PRODUCT, include_str!("kernels/gemm.wgsl")].map(Cow::from).to_vec(),
        ),
        Kernel::Norm { in_place } => {
            (flag("IN_PLACE", *in_place), vec![include_str!("kernels/norm.wgsl").into()])
        }
        Kernel::Rope => (String::new(), vec![include_str!("kernels/rope.wgsl").into()]),
        Kernel::Gated => (String::new(), vec![MATH.into(), include_str!("kernels/gated.wgsl").into()]),
        Kernel::Add => (String::new(), vec![include_str!("kernels/add.wgsl").into()]),
        Kernel::Rows(op) => (
            flag("GATHER", *op == RowsOp::Gather) + &flag("ZERO", *op == RowsOp::Zero),
            vec![include_str!("kernels/rows.wgsl").into()],
        ),
        Kernel::Route => (String::new(), vec![MATH.into(), include_str!("kernels/route.wgsl").into()]),
        Kernel::Top => (String::new(), vec![MATH.into(), include_str!("kernels/top.wgsl").into()]),
        Kernel::Store { form: stored, dim, recent } => (
            number("DIM", *dim)
                + &form("", *stored, *dim)
                + &flag("RECENT", *recent != RecentForm::No)
                + &flag("PLAIN_RECENT", *recent == RecentForm::Plain),
            [MATH, BYTES, LEVELS, TURN, include_str!("kernels/store.wgsl")].map(Cow::from).to_vec(),
        ),
        Kernel::Copy { within } => (flag("WITHIN", *within), vec![include_str!("kernels/copy.wgsl").into()]),
        Kernel::Attend { k, v, dim, recent } => (
            number("DIM", *dim)
                + &form("K_", *k, *dim)
                + &form("V_", *v, *dim)
                + &flag("K_RECENT", *recent && k.is_packed())
                + &flag("V_RECENT", *recent && v.is_packed())
                + &number("PLAIN_ROWS", if k.needs_plain_queries(*recent) { ATTEND_ROWS } else { 1 }),
            vec![
                MATH.into(),
                BYTES.into(),
                LEVELS.into(),
                TURN.into(),
                SINKS.into(),
                cells("k_", "K_"),
                cells("v_", "V_"),
                include_str!("kernels/attend.wgsl").into(),
            ],
        ),
        Kernel::Merge { v, dim } => (
            number("DIM", *dim) + &form("V_", *v, *dim),
            [MATH, TURN, SINKS, include_str!("kernels/merge.wgsl")].map(Cow::from).to_vec(),
        ),
        Kernel::Scatter => (String::new(), vec![include_str!("kernels/scatter.wgsl").into()]),
        Kernel::Gather => (String::new(), vec![include_str!("kernels/gather.wgsl").into()]),
    };
    parts.iter().fold(constants, |source, part| source + part + "\n")
}
