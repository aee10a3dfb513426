//! The fast kernels of linear layers for a few tokens, and how many rows and threads a block of each has.
use kvist_device::weights::Encoding;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FastMatmul {
    /// matmul_floats.cu
    Floats,
    /// matmul_blocks.cu
    Blocks { tokens: u32 },
    /// matmul_bytes.cu and several.cu
    Bytes { encoding: Encoding },
}

impl FastMatmul {
    /// Output rows of a block.
    pub fn rows(self) -> u32 {
        use Encoding::*;
        match self {
            FastMatmul::Floats => 4,
            FastMatmul::Blocks { tokens: 1 } => 16,
            FastMatmul::Blocks { .. } => 32,
            // As many as a thread has registers for.
            FastMatmul::Bytes { encoding: Q8_0 | Int8 | Q4_0 | Q4_1 } => 8,
            FastMatmul::Bytes { .. } => 4,
        }
    }

    /// Of a block. With units.cu a row of 4,096 inputs is one unit for each thread.
    pub fn warps(self) -> u32 {
        use Encoding::*;
        match self {
            FastMatmul::Floats | FastMatmul::Blocks { .. } => 8,
            FastMatmul::Bytes { encoding: Q8_0 | Int8 } => 8,
            FastMatmul::Bytes { .. } => 4,
        }
    }

    /// Blocks that a multiprocessor is to have at the same time: so many registers a thread can have.
    pub fn blocks(self) -> u32 {
        16 / self.warps()
    }

    /// Whether units.cu computes one token with this encoding. q4_K and q5_K had a place there too, and took 19.8 and 21.9 us where tensor
    /// cores take 17.7 and 20.9 (4,096 x 14,336 on an H100).
    pub fn is_of_bytes(encoding: Encoding) -> bool {
        use Encoding::*;
        matches!(encoding, Q8_0 | Int8 | Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q6K)
    }

    /// Of dynamic shared memory, in matmul_blocks.cu: every warp has a tile of every token, and every pair of warps has two, in the words that
    /// it says.
    pub fn shared_bytes(self) -> u32 {
        const TOKEN_WORDS: u32 = 8 * 36 + 16 + 4;
        match self {
            FastMatmul::Blocks { tokens } => 4 * self.warps() * tokens * TOKEN_WORDS,
            FastMatmul::Floats | FastMatmul::Bytes { .. } => 0,
        }
    }
}
