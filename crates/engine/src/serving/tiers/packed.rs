//! A tier that stores f16 blocks in q8: as much memory has almost twice as many of them.
use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use kvist_store::{BlockKey, BlockStore, BoxFuture, Bytes, StoreError, StoreOver};
use std::time::Duration;

/// Numbers that share a scale.
const GROUP: usize = 32;

/// Bytes of a group: an f16 scale and a byte per number.
const GROUP_BYTES: usize = 2 + GROUP;

/// Stores blocks of f16 numbers packed: 34 bytes for 32 numbers, as in q8. What comes back is rounded, so a text can differ
/// from one that was computed: a [fingerprint](super::TierConfig::fingerprint) must say that there is such a tier.
pub struct PackedStore<S> {
    store: S,
}

impl<S: BlockStore> PackedStore<S> {
    pub fn new(store: S) -> Self {
        PackedStore { store }
    }
}

impl<S: BlockStore> StoreOver for PackedStore<S> {
    fn below(&self) -> &dyn BlockStore {
        &self.store
    }
    fn get<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        Box::pin(async move { Ok(self.store.get(key).await?.map(|bytes| Bytes::from(unpack(&bytes)))) })
    }
    fn put<'a>(
        &'a self,
        key: BlockKey,
        bytes: Bytes,
        ttl: Option<Duration>,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move { self.store.put(key, Bytes::from(pack(&bytes)), ttl).await })
    }
}

/// Little-endian f16 numbers, group by group, then the bytes that fill no group, and their count.
fn pack(bytes: &[u8]) -> Vec<u8> {
    let groups = bytes.chunks_exact(2 * GROUP);
    let rest = groups.remainder();
    let mut packed = Vec::with_capacity(groups.len() * GROUP_BYTES + rest.len() + 1);
    let (mut halves, mut values) = ([0u16; GROUP], [0f32; GROUP]);
    for group in groups {
        let pairs = group.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
        halves.iter_mut().zip(pairs).for_each(|(half, bits)| *half = bits);
        halves.reinterpret_cast::<f16>().convert_to_f32_slice(&mut values);
        let largest = values.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        // As in the cache's own q8: one number that is none makes its whole group NaN, so that it stays visible.
        let is_finite = values.iter().all(|value| value.is_finite());
        let scale = if is_finite { f16::from_f32(largest / 127.0) } else { f16::NAN };
        // Numbers whose scale would be zero come back as zeros.
        let inverse = if scale == f16::ZERO { 0.0 } else { 1.0 / scale.to_f32() };
        packed.extend(scale.to_le_bytes());
        let code = |value: &f32| (value * inverse).round_ties_even().clamp(-127.0, 127.0) as i8 as u8;
        packed.extend(values.iter().map(code));
    }
    packed.extend(rest);
    packed.push(rest.len() as u8); // less than a group's 64
    packed
}

fn unpack(packed: &[u8]) -> Vec<u8> {
    let Some((&n_rest, packed)) = packed.split_last() else { return Vec::new() };
    let (groups, rest) = packed.split_at(packed.len().saturating_sub(n_rest.into()));
    let groups = groups.chunks_exact(GROUP_BYTES);
    let mut bytes = Vec::with_capacity(groups.len() * 2 * GROUP + rest.len());
    let (mut halves, mut values) = ([f16::ZERO; GROUP], [0f32; GROUP]);
    for group in groups {
        let scale = f16::from_le_bytes([group[0], group[1]]).to_f32();
        let codes = values.iter_mut().zip(&group[2..]);
        codes.for_each(|(value, &code)| *value = f32::from(code as i8) * scale);
        halves.convert_from_f32_slice(&values);
        halves.iter().for_each(|half| bytes.extend(half.to_le_bytes()));
    }
    bytes.extend(rest);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_within_half_a_step() {
        let value = |i: usize| ((i * 37 % 101) as f32 - 50.0) * 0.03 * (1 + i / GROUP % 7) as f32;
        for n in [0, 1, 31, 32, 33, 64, 1000, 4096] {
            let values: Vec<f16> = (0..n).map(|i| f16::from_f32(value(i))).collect();
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let packed = pack(&bytes);
            assert_eq!(packed.len(), n / GROUP * GROUP_BYTES + n % GROUP * 2 + 1);
            let back = unpack(&packed);
            assert_eq!(back.len(), bytes.len());
            let back = back.chunks_exact(2).map(|pair| f16::from_le_bytes([pair[0], pair[1]]).to_f32());
            for (i, (back, value)) in back.zip(&values).enumerate() {
                let group = &values[i / GROUP * GROUP..((i / GROUP + 1) * GROUP).min(n)];
                let largest = group.iter().map(|value| value.to_f32().abs()).fold(0.0, f32::max);
                // Half a step, and the rounding of scale and result to f16.
                let allowed = if group.len() < GROUP { 0.0 } else { largest * (0.5 / 127.0 + 0.0015) };
                assert!((back - value.to_f32()).abs() <= allowed, "{i} of {n}: {value} became {back}");
            }
        }
        assert_eq!(unpack(&[]), [0u8; 0]);
        // An odd byte, zeros, and numbers that are too small for a scale.
        assert_eq!(unpack(&pack(&[7])), [7]);
        assert_eq!(unpack(&pack(&[0; 65])), [0; 65]);
        assert_eq!(unpack(&pack(&[1, 0].repeat(32))), [0; 64]);
    }

    #[test]
    fn the_store_below_tells_what_it_has() {
        let store = PackedStore::new(kvist_store::Ram::new(1 << 20));
        assert!(BlockStore::watch(&store, Box::new(|_, _| {})));
    }

    /// NaN became 0.
    #[test]
    fn what_is_not_finite_stays_visible() {
        for hidden in [f16::NAN, f16::INFINITY, f16::NEG_INFINITY] {
            let mut values = [f16::from_f32(0.5); 3 * GROUP];
            values[GROUP + 5] = hidden;
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let back = unpack(&pack(&bytes));
            for (i, pair) in back.chunks_exact(2).enumerate() {
                let value = f16::from_le_bytes([pair[0], pair[1]]);
                assert_eq!(value.is_nan(), i / GROUP == 1, "{hidden}: {i} became {value}");
            }
        }
    }
}
