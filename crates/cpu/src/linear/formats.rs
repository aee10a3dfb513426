//! How the codes of each encoding lie in panels. The encodings themselves are those of `kvist_device::weights`.
//!
//! ```text
//!          bits per weight: in the file, here
//! q4_0     4.5    4.5      q2_K     2.63   3.25
//! q4_1     5      5        q3_K     3.44   3.56
//! q5_0     5.5    5.5      q4_K     4.5    4.63
//! q5_1     6      6        q5_K     5.5    5.63
//! q8_0     8.5    8.5      q6_K     6.56   6.56
//! iq4_nl   4.5    4.5      iq4_xs   4.25   4.31
//! mxfp4    4.25   4.5      few             4.63
//! ```
//!
//! Scales of super-blocks are kept unpacked, one byte each.
use super::blocks::PackedBlock;
use super::codes::{Planes, Sixes};
use super::super_blocks::PackedSuperBlock;
use kvist_device::weights::{blocks, super_blocks};

macro_rules! packed {
    ($Packed:ident: $($encoding:path => $Codes:ty),+ $(,)?) => {
        $(impl $Packed for $encoding {
            type Codes = $Codes;
        })+
    };
}

packed!(PackedBlock:
    blocks::Q4_0 => Planes<4, 0>,
    blocks::Q4_1 => Planes<4, 0>,
    blocks::Q5_0 => Planes<4, 1>,
    blocks::Q5_1 => Planes<4, 1>,
    blocks::Q8_0 => Planes<8, 0>,
    blocks::Iq4Nl => Planes<4, 0>,
    blocks::Mxfp4 => Planes<4, 0>,
);
packed!(PackedSuperBlock:
    super_blocks::Q2K => Planes<2, 0>,
    super_blocks::Q3K => Planes<2, 1>,
    super_blocks::Q4K => Planes<4, 0>,
    super_blocks::Q5K => Planes<4, 1>,
    super_blocks::Q6K => Sixes,
    super_blocks::Iq4Xs => Planes<4, 0>,
    super_blocks::Table16 => Planes<4, 0>,
);
