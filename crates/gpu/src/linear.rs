//! Linear layers, and copies of rows.
use crate::driver::{Args, Driver};
use crate::kernels::{GemmTile, Kernel, MAX_GROUPS, Routed, RowsOp, halves_bytes};
use crate::weights::Linear;
use kvist_device::DeviceError;

/// Workgroups for so many elements, in two dimensions. `each`: elements of a workgroup.
pub fn groups(elements: u64, each: u32) -> Option<[u32; 3]> {
    let groups = elements.div_ceil(each.max(1).into());
    let most = u64::from(MAX_GROUPS);
    let (x, y) = (groups.min(most), groups.div_ceil(most));
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

/// Which experts tokens use: what [`Kernel::Route`] and [`Kernel::Sort`] have written.
pub struct Routes<'a, D: Driver> {
    pub table: &'a D::Buffer,
    pub n_experts: u32,
    /// Routed rows of a token.
    pub used: u32,
    /// Routed rows with the same row of `x`, one behind the other.
    pub share: u32,
}

impl<D: Driver> Clone for Routes<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<D: Driver> Copy for Routes<'_, D> {}

impl<D: Driver> Routes<'_, D> {
    /// Rows that an expert has on average, of `n` rows, which not more than `n` experts share.
    fn rows_of_expert(&self, n: u32) -> u32 {
        n / self.n_experts.min(n).max(1)
    }

    /// How many tokens of one layer `n` rows are worth in the choice between tiles and rows one by one. One by one, an expert's weights are
    /// decoded anew for each of its rows, while tokens of one layer share them: so tiles pay for fewer rows. The factor is not measured.
    fn as_tokens(&self, n: u32) -> u32 {
        3 * self.rows_of_expert(n).saturating_sub(1)
    }
}

/// The tile in which a layer is computed for `n` rows of its output, of which those of experts have to be sorted; `None`: a few rows at a time.
/// `halves`: whether inputs can be written as [`Kernel::Halves`] writes them.
pub fn tile_of<D: Driver>(
    gpu: &D,
    layer: &Linear<D>,
    n: u32,
    routes: Option<Routes<'_, D>>,
    halves: bool,
) -> Option<GemmTile> {
    let (tokens, tile) = match routes {
        None => (n, gpu.gemm_tile(layer.encoding, Routed::No, n, layer.outputs)),
        Some(routes) => {
            // Some experts have more rows than others, and all of them have blocks.
            let rows = routes.rows_of_expert(n);
            let outputs = layer.outputs.saturating_mul(routes.n_experts.min(n));
            (routes.as_tokens(n), gpu.gemm_tile(layer.encoding, Routed::Experts, rows + rows / 2, outputs))
        }
    };
    match tile.halves && halves && tokens >= TENSOR_TOKENS {
        true => Some(tile),
        false => (tokens >= MANY_TOKENS).then_some(GemmTile::USUAL),
    }
}

/// A linear layer over `n` rows of `x`.
pub struct Product<'a, D: Driver> {
    pub x: &'a D::Buffer,
    pub layer: &'a Linear<D>,
    pub out: &'a D::Buffer,
    pub n: u32,
    pub cap: Option<f32>,
    /// If `layer` is that of all experts: the routed rows, `n` of them.
    pub routes: Option<Routes<'a, D>>,
    /// Whether the result is added to what is in `out`.
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

    /// Writes `n` rows of `x` for these layers, if one of them wants them and they fit. `routes`: as in [`Product`].
    pub fn write<'a>(
        halves: Option<&'a Self>,
        gpu: &D,
        recorder: &mut D::Recorder,
        (x, n): (&D::Buffer, u32),
        layers: &[&Linear<D>],
        routes: Option<Routes<'_, D>>,
    ) -> Option<&'a D::Buffer> {
        let Halves { data, bytes } = halves?;
        let inputs = layers.first()?.inputs;
        let rows = routes.map_or(n, |routes| n * routes.share);
        let wanted =
            |layer: &&Linear<D>| tile_of(gpu, layer, rows, routes, true).is_some_and(|tile| tile.halves);
        let fits = halves_bytes(n as usize, inputs as usize).is_some_and(|needed| needed <= *bytes);
        if n > MAX_GROUPS || !fits || !layers.iter().any(wanted) {
            return None;
        }
        gpu.record(recorder, &Kernel::Halves, &[Some(x), Some(data)], Args::new(&[inputs]), [n, 1, 1]);
        Some(data)
    }
}

impl<D: Driver> Product<'_, D> {
    pub fn record(&self, gpu: &D, recorder: &mut D::Recorder) {
        let Product { layer, n, routes, .. } = *self;
        let (routed, tokens) = match routes {
            None if self.added => (Routed::Sum, tokens_at_once(n)),
            None => (Routed::No, tokens_at_once(n)),
            // Rows behind each other have different experts.
            Some(_) => (Routed::Experts, 1),
        };
        let encoding = layer.encoding;
        let kernel = match tile_of(gpu, layer, n, routes, self.halves.is_some()) {
            Some(tile) => Kernel::Gemm { encoding, routed, tile },
            None => Kernel::Matmul { encoding, tokens, routed },
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
        // An expert can have all tokens.
        let groups = |rows: u32| match (self.routes, kernel) {
            (Some(routes), Kernel::Gemm { .. }) => {
                [rows.div_ceil(outputs), (n / routes.used.max(1)).div_ceil(tokens), routes.n_experts]
            }
            _ => [rows.div_ceil(outputs), n.div_ceil(tokens), 1],
        };
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
                .u32(self.routes.map_or(0, |routes| routes.n_experts))
                .u32(self.routes.map_or(1, |routes| routes.share))
                .f32(layer.scale);
            let buffers = [
                Some(&part.buffer),
                x,
                layer.bias.as_ref(),
                Some(self.out),
                self.routes.map(|routes| routes.table),
            ];
            gpu.record(recorder, kernel, &buffers, args, groups(part.rows.min(layer.outputs)));
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
