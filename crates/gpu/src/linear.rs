//! Linear layers, and copies of rows.
use crate::driver::{Args, Driver};
use crate::kernels::{GemmTile, Kernel, Routed, RowsOp, halves_bytes};
use crate::weights::Linear;
use kvist_device::DeviceError;

/// Workgroups for so many elements, in two dimensions. `each`: elements of a workgroup.
pub fn groups(elements: u64, each: u32) -> Option<[u32; 3]> {
    let groups = elements.div_ceil(each.max(1).into());
    let (x, y) = (groups.min(65_535), groups.div_ceil(65_535));
    Some([x as u32, u32::try_from(y).ok()?, 1])
}

/// With as many tokens as this, a linear layer is computed in tiles of tokens.
pub const MANY_TOKENS: u32 = 12;
/// The same on tensor cores, which compute a tile of 16 tokens in less time than other kernels take for five (measured on an H100).
const TENSOR_TOKENS: u32 = 5;

/// Tokens that share a decoded weight, for so many rows.
pub fn tokens_at_once(n: u32) -> u32 {
    match n {
        0 | 1 => 1,
        2..=4 => 4,
        _ => 8,
    }
}

/// A linear layer over `n` rows of `x`.
pub struct Product<'a, D: Driver> {
    pub x: &'a D::Buffer,
    pub layer: &'a Linear<D>,
    pub out: &'a D::Buffer,
    pub n: u32,
    pub cap: Option<f32>,
    /// For the layer of an expert: routes, number of the expert, number of experts.
    pub expert: Option<(&'a D::Buffer, u32, u32)>,
    /// Whether the result is added to what is in `out`, for an expert with its weight.
    pub added: bool,
    /// `x` as [`Kernel::Halves`] writes it.
    pub halves: Option<&'a D::Buffer>,
}

/// Memory for rows of [`Kernel::Halves`].
#[derive(Debug)]
pub struct Halves<D: Driver> {
    data: D::Buffer,
    bytes: u64,
}

impl<D: Driver> Halves<D> {
    /// `None` for no bytes.
    pub fn new(gpu: &D, bytes: u64) -> Result<Option<Self>, DeviceError> {
        let data = (bytes > 0).then(|| gpu.buffer("inputs of linear layers", bytes)).transpose()?;
        Ok(data.map(|data| Halves::of(data, bytes)))
    }

    /// A buffer of so many bytes.
    pub fn of(data: D::Buffer, bytes: u64) -> Self {
        Halves { data, bytes }
    }

    /// Writes `n` rows of `x` for these layers, if one of them wants them and they fit. `expert`: as in [`Product`].
    pub fn write<'a>(
        halves: Option<&'a Self>,
        gpu: &D,
        recorder: &mut D::Recorder,
        (x, n): (&D::Buffer, u32),
        layers: &[&Linear<D>],
        expert: Option<(&D::Buffer, u32, u32)>,
    ) -> Option<&'a D::Buffer> {
        let Halves { data, bytes } = halves?;
        let inputs = layers.first()?.inputs;
        let routed = if expert.is_some() { Routed::Only } else { Routed::No };
        let wanted = |layer: &&Linear<D>| gpu.gemm_tile(layer.encoding, routed, n, layer.outputs).halves;
        let fits = halves_bytes(n as usize, inputs as usize).is_some_and(|needed| needed <= *bytes);
        if n < TENSOR_TOKENS || !fits || !layers.iter().any(wanted) {
            return None;
        }
        let args =
            Args::new(&[inputs, expert.map_or(0, |expert| expert.1), expert.map_or(0, |expert| expert.2)]);
        let buffers = [Some(x), Some(data), expert.map(|expert| expert.0)];
        gpu.record(recorder, &Kernel::Halves, &buffers, args, [n, 1, 1]);
        Some(data)
    }
}

impl<D: Driver> Product<'_, D> {
    pub fn record(&self, gpu: &D, recorder: &mut D::Recorder) {
        let Product { layer, n, .. } = *self;
        let tokens = tokens_at_once(n);
        let routed = match (self.expert, self.added) {
            (None, false) => Routed::No,
            (None, true) => Routed::Sum,
            (Some(_), false) => Routed::Only,
            (Some(_), true) => Routed::Added,
        };
        let encoding = layer.encoding;
        let tile = gpu.gemm_tile(encoding, routed, n, layer.outputs);
        let kernel = match tile.halves && self.halves.is_some() {
            true => Kernel::Gemm { encoding, routed, tile },
            false if n >= MANY_TOKENS => Kernel::Gemm { encoding, routed, tile: GemmTile::USUAL },
            false => Kernel::Matmul { encoding, tokens, routed },
        };
        self.record_as(gpu, recorder, &kernel);
    }

    /// Records a kernel for it, [`Kernel::Matmul`] or [`Kernel::Gemm`].
    pub fn record_as(&self, gpu: &D, recorder: &mut D::Recorder, kernel: &Kernel) {
        let Product { layer, n, .. } = *self;
        let x = match kernel {
            Kernel::Gemm { tile, .. } if tile.halves => self.halves,
            _ => Some(self.x),
        };
        let (outputs, tokens) = gpu.product_tile(kernel);
        for part in &layer.parts {
            let args = Args::new(&[part.layout.quads, part.layout.b, part.layout.s])
                .u32(layer.inputs)
                .u32(part.rows)
                .u32(part.first)
                .u32(layer.outputs)
                .u32(n)
                .f32(layer.factor)
                .f32(self.cap.unwrap_or(0.0))
                .u32(u32::from(layer.bias.is_some()))
                .u32(self.expert.map_or(0, |expert| expert.1))
                .u32(self.expert.map_or(0, |expert| expert.2))
                .f32(layer.scale);
            let buffers = [
                Some(&part.buffer),
                x,
                layer.bias.as_ref(),
                Some(self.out),
                self.expert.map(|expert| expert.0),
            ];
            let groups = [part.rows.div_ceil(outputs), n.div_ceil(tokens), 1];
            gpu.record(recorder, kernel, &buffers, args, groups);
        }
    }
}

/// Copies `n` rows of `x` to columns of `out` from `column` on.
pub fn copy_rows<D: Driver>(
    gpu: &D,
    recorder: &mut D::Recorder,
    (op, index): (RowsOp, Option<&D::Buffer>),
    (x, width): (Option<&D::Buffer>, u32),
    (out, out_width, column): (&D::Buffer, u32, u32),
    n: u32,
) {
    let args = Args::new(&[width, out_width, column, 0]);
    let buffers = [x, Some(out), index];
    gpu.record(recorder, &Kernel::Rows(op), &buffers, args, [width.div_ceil(64), n, 1]);
}
