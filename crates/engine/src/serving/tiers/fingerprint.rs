//! What the bytes of a block depend on, besides its tokens.
use crate::Error;
use crate::saved::Origin;

/// What computes K and V to the last bit: this version, on this [device](kvist_device::Footprint::numerics) with its kernels of this number
/// ([`kvist_cpu::NUMERICS`], [`kvist_gpu::NUMERICS`]).
pub(crate) fn maker(numerics: &str) -> String {
    format!("kvist {}, {numerics}", env!("CARGO_PKG_VERSION"))
}

/// For [`TierConfig::fingerprint`](super::TierConfig::fingerprint): everything that K and V depend on to the last bit, besides the
/// tokens and the salt. `numerics` is the [device's](kvist_device::Footprint::numerics). Two engines that differ in any of this find
/// none of each other's blocks, so a text is never continued from K and V that this engine would not have computed.
///
/// # Errors
/// The origin cannot be written as JSON, which would be a defect.
pub fn fingerprint(origin: &Origin, block_tokens: u32, numerics: &str) -> Result<Vec<u8>, Error> {
    let origin = serde_json::to_string(origin).map_err(|error| Error::Usage(format!("tiers: {error}")))?;
    let parts = [maker(numerics), origin, block_tokens.to_string()];
    let mut bytes = Vec::new();
    for part in parts {
        bytes.extend((part.len() as u64).to_le_bytes());
        bytes.extend(part.into_bytes());
    }
    Ok(bytes)
}
